"""filter_eval_shape, filter_make_jaxpr, filter_closure_convert."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import MODULES, Holder, OwnInit, Static, affine, double, ramp

STRUCT = jax.ShapeDtypeStruct((3,), jnp.float32)


def types(tree):
    """The tree with shape and dtype for each array or struct."""
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)) if hasattr(x, "shape") else x, tree)


def test_eval_shape_of_a_maker_gives_the_skeleton():
    """The Module that would be built, with structs for arrays."""
    for name, make in MODULES.items():
        skeleton, module = pm.filter_eval_shape(make), make()
        assert type(skeleton) is type(module), name
        found, expected = jax.tree.leaves(skeleton), jax.tree.leaves(module)
        for x, y in zip(found, expected, strict=True):
            assert type(x) is jax.ShapeDtypeStruct if pm.is_array(y) else type(x) is type(y)
            assert not pm.is_array(y) or types(x) == types(jnp.asarray(y))


def test_eval_shape_computes_nothing():
    """Arrays are never made, however large; structs are accepted as arguments."""
    huge = pm.filter_eval_shape(lambda n: {"x": jnp.ones((n, n)), "n": n, "f": double}, 10**9)
    assert huge["x"].shape == (10**9, 10**9)
    assert (huge["n"], huge["f"]) == (10**9, double)

    out = pm.filter_eval_shape(lambda m, x: m(x), pm.filter_eval_shape(affine), STRUCT)
    assert types(out) == ((2,), "float32")
    assert pm.filter_eval_shape(affine(), STRUCT).shape == (2,)
    assert pm.filter_eval_shape(affine().scaled, STRUCT, by=2.0).shape == (2,)
    assert pm.filter_eval_shape(OwnInit, 3, use_bias=False).bias is None


def test_make_jaxpr():
    """The jaxpr's inputs are the arrays of the arguments; the result comes in two halves."""
    model = Holder([affine(), "name", 2.0])
    make = pm.filter_make_jaxpr(lambda m, x: (m.content[0](x), m.content[1:], m))
    jaxpr, dynamic, static = make(model, STRUCT)

    theirs = jax.make_jaxpr(lambda w, b, x: (affine().replace(weight=w, bias=b)(x), w, b))
    assert str(jaxpr) == str(theirs(*jax.tree.leaves(model)[:2], ramp(3)))
    assert static[:2] == (None, ["name", 2.0])
    expected = affine()(ramp(3)), ["name", 2.0], model
    assert types(pm.combine(dynamic, static)) == types(expected)


def test_closure_convert_makes_captured_arrays_data():
    """They become leaves, which transforms see; the function returns the same."""
    model, y = affine(), ramp(2)
    converted = pm.filter_closure_convert(lambda x, how: (model(x) * y, how), ramp(3), "text")

    assert len(jax.tree.leaves(pm.filter(converted, pm.is_array))) == len(converted.consts) == 3
    assert_same(converted(ramp(3, start=2.0), "text"), (model(ramp(3, start=2.0)) * y, "text"))

    scalar = pm.filter_closure_convert(lambda x: jnp.sum(x * y), y)
    gradient = pm.filter_grad(lambda f: f(ramp(2, start=3.0)))(scalar)
    assert_close(gradient.consts[0], ramp(2, start=3.0))
    assert_close(jax.vmap(scalar)(ramp(3, 2)), jnp.sum(ramp(3, 2) * y[None], 1))


def test_a_converted_function_may_return_a_struct():
    """It is returned unchanged, and is not an output of the program."""
    converted = pm.filter_closure_convert(lambda x: (x, {"shape": STRUCT}), STRUCT)

    assert converted.in_struct == ((STRUCT,), {})
    assert converted.out_struct == (STRUCT, {"shape": STRUCT})
    assert_same(converted(ramp(3)), (ramp(3), {"shape": STRUCT}))
    assert len(converted.jaxpr.outvars) == 1


MISFITS = {
    "shape": ((ramp(4), Static(1, 3)), r"\[0\]: f32\[3\] -> f32\[4\]"),
    "number": ((ramp(3), Static(2, 3)), r"\[1\]\.weight: 1 -> 2"),
    "bool": ((ramp(3), Static(True, 3)), r"\[1\]\.weight: 1 -> True"),
    "configuration": ((ramp(3), Static(1, 4)), r"\[1\]\.size: 3 -> 4"),
}


@pytest.mark.parametrize(("other", "where"), MISFITS.values(), ids=MISFITS)
def test_a_converted_function_takes_what_it_was_converted_for(other, where):
    """With another static value it would compute with the old one."""
    converted = pm.filter_closure_convert(lambda x, m: x * m.weight, ramp(3), Static(1, 3))

    assert_close(converted(ramp(3), Static(1, 3)), ramp(3))
    with pytest.raises(StructureError, match=where):
        converted(*other)


def test_each_conversion_is_a_program_of_its_own():
    """None is taken for another, and none outlives what has called it."""
    alive = []

    def run():
        call, x = pm.filter_jit(lambda f, x: f(x)), ramp(2, 2)
        for n, axis in [(2.0, 0), (3.0, 0), (2.0, 1), (2.0, 0)]:
            y = x * n
            fn = pm.filter_closure_convert(lambda x, y=y, axis=axis: jnp.sum(x * y, axis), x)
            assert_close(call(fn, x), jnp.sum(x * y, axis))
            alive.extend([weakref.ref(fn), weakref.ref(y)])

    run()
    gc.collect()

    assert [ref() for ref in alive] == [None] * 8
