"""filter_eval_shape, filter_make_jaxpr, filter_closure_convert."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import (
    Holder,
    OwnInit,
    Static,
    affine,
    double,
    every_module,
    ramp,
)


def struct(*shape, dtype=jnp.float32):
    """A `ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(shape, dtype)


def types(tree):
    """The tree with shape and dtype for each array or struct."""
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)) if hasattr(x, "shape") else x, tree)


@every_module
@pytest.mark.sampled
def test_eval_shape_of_a_maker_gives_the_skeleton(make):
    """The Module that would be built, with structs for arrays."""
    skeleton, module = pm.filter_eval_shape(make), make()

    assert type(skeleton) is type(module)
    found, expected = jax.tree.leaves(skeleton), jax.tree.leaves(module)
    for x, y in zip(found, expected, strict=True):
        if pm.is_array(y):
            assert isinstance(x, jax.ShapeDtypeStruct)
            assert (x.shape, x.dtype) == (y.shape, jnp.asarray(y).dtype)
        else:
            assert type(x) is type(y)


def test_eval_shape_computes_nothing():
    """Arrays are never made, however large; structs are accepted as arguments."""
    huge = pm.filter_eval_shape(lambda n: {"x": jnp.ones((n, n)), "n": n, "f": double}, 10**9)
    assert huge["x"].shape == (10**9, 10**9)
    assert (huge["n"], huge["f"]) == (10**9, double)

    out = pm.filter_eval_shape(lambda m, x: m(x), pm.filter_eval_shape(affine), struct(3))
    assert types(out) == ((2,), "float32")
    assert pm.filter_eval_shape(affine(), struct(3)).shape == (2,)
    assert pm.filter_eval_shape(affine().scaled, struct(3), by=2.0).shape == (2,)
    assert pm.filter_eval_shape(OwnInit, 3, use_bias=False).bias is None


def test_make_jaxpr():
    """The jaxpr's inputs are the arrays of the arguments; the result comes in two halves."""
    model = Holder([affine(), "name", 2.0])
    jaxpr, dynamic, static = pm.filter_make_jaxpr(lambda m, x: (m.content[0](x), m.content[1:], m))(
        model, struct(3)
    )

    assert [a.shape for a in jaxpr.in_avals] == [(2, 3), (2,), (3,)]
    assert [a.shape for a in jaxpr.out_avals] == [(2,), (2, 3), (2,)]
    assert types(dynamic)[0] == ((2,), "float32")
    assert dynamic[1] == [None, None]
    assert static[0] is None
    assert static[1] == ["name", 2.0]
    assert static[2].content[0].weight is None
    both = pm.combine(dynamic, static)
    assert types(both) == types((affine()(ramp(3)), ["name", 2.0], model))


def test_make_jaxpr_traces_no_more_than_jax_does():
    """The program is that of jax.make_jaxpr on the arrays."""
    jaxpr, _, _ = pm.filter_make_jaxpr(lambda m, x: jnp.sin(m["w"]) * x)(
        {"w": ramp(2), "n": 1}, ramp(2)
    )

    assert str(jaxpr.jaxpr) == str(
        jax.make_jaxpr(lambda w, x: jnp.sin(w) * x)(ramp(2), ramp(2)).jaxpr
    )


def test_closure_convert_makes_captured_arrays_data():
    """Captured arrays become leaves; the function returns the same."""
    model, y = affine(), ramp(2)
    converted = pm.filter_closure_convert(lambda x, how: (model(x) * y, how), ramp(3), "text")

    assert len(jax.tree.leaves(converted)) == len(converted.consts) == 3
    assert_same(converted(ramp(3, start=2.0), "text"), (model(ramp(3, start=2.0)) * y, "text"))
    moved = jax.tree.map(lambda c: c * 0, converted)
    assert_close(moved(ramp(3), "text")[0], jnp.zeros(2))


def test_closure_convert_goes_through_transforms():
    """Converted functions are arguments: gradients reach their captured arrays."""
    y = ramp(2)
    converted = pm.filter_closure_convert(lambda x: jnp.sum(x * y), ramp(2))

    gradient = pm.filter_grad(lambda f: f(ramp(2, start=3.0)))(converted)
    assert_close(gradient.consts[0], ramp(2, start=3.0))
    assert_close(jax.jit(lambda f, x: f(x))(converted, ramp(2)), jnp.sum(y * y))
    assert_close(jax.vmap(converted)(ramp(3, 2)), jnp.sum(ramp(3, 2) * y[None], 1))


def test_configuration_in_examples():
    """Modules with configuration are arguments as any other."""
    converted = pm.filter_closure_convert(lambda m: m.weight * m.size, Static(ramp(2), 3))

    assert_close(converted(Static(ramp(2), 3)), ramp(2) * 3)
    with pytest.raises(StructureError, match=r"args\[0\]\.size"):
        converted(Static(ramp(2), 4))
    assert np.shape(converted(Static(np.ones(2, np.float32), 3))) == (2,)


def test_a_converted_function_may_return_a_struct():
    """It is returned unchanged, and is not an output of the program."""
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    converted = pm.filter_closure_convert(lambda x: (x, {"shape": shape}), ramp(2))

    assert converted.out_struct == (shape, {"shape": shape})
    assert_same(converted(ramp(2)), (ramp(2), {"shape": shape}))
    again = pm.filter_closure_convert(lambda x: (x, {"shape": shape}), ramp(2))
    assert len(again.jaxpr.outvars) == 1


@pytest.mark.parametrize(
    "other",
    [
        (ramp(4), 1),
        (ramp(3).astype(jnp.bfloat16), 1),
        (ramp(3), 2),
        (ramp(3), True),
        ([ramp(3)], 1),
        (ramp(3),),
    ],
    ids=["shape", "dtype", "number", "bool", "structure", "count"],
)
def test_a_converted_function_takes_what_it_was_converted_for(other):
    """With another static value it would compute with the old one."""
    converted = pm.filter_closure_convert(lambda x, n: x * n, ramp(3), 1)

    with pytest.raises(StructureError, match="closure-converted"):
        converted(*other)


def test_converted_functions_of_other_numbers_are_other_programs():
    """The same operations with another constant, or along another axis, are no equal function."""
    traces = []
    call = pm.filter_jit(lambda f, x: traces.append(1) or f(x))
    x, ways = ramp(2, 2), [(2.0, 0), (3.0, 0), (2.0, 1), (2.0, 0)]
    for n, axis in ways:
        fn = pm.filter_closure_convert(lambda x, n=n, axis=axis: jnp.sum(x * n, axis), x)
        assert_close(call(fn, x), jnp.sum(x * n, axis))

    assert len(traces) == 3


def test_a_function_that_is_converted_in_each_step_keeps_nothing():
    """Each conversion had left a plan and a program behind, which made the next one slower."""
    call = pm.filter_jit(lambda f, x: f(x))

    def step():
        y = ramp(2)
        converted = pm.filter_closure_convert(lambda x: jnp.sin(y * x), y)
        call(converted, y)
        jax.jit(lambda f, x: f(x))(converted, y)

    for _ in range(2):
        step()
    gc.collect()
    before = len(gc.get_objects()), len(jax.live_arrays())
    for _ in range(100):
        step()
    gc.collect()

    assert len(gc.get_objects()) < before[0] + 500
    assert len(jax.live_arrays()) == before[1]
