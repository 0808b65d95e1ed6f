"""Results of `lower` and `compile`: functions for calls like the lowered one."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.transform.compilation.stages import as_structs
from tests.goldens import refusals
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, OwnInit, affine, ramp  # noqa: F401


def model_step(model, x):
    """A step as one would write it: a number and a new model."""
    return jnp.sum(model(x)), jax.tree.map(lambda p: 0.9 * p, model)


jitted_step = pm.filter_jit(model_step)


def test_lower_and_compile():
    """lower(...).compile() returns a function for such arguments; structs count as arrays."""
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    skeleton = pm.filter_eval_shape(affine)
    for args in ((affine(), ramp(3)), (affine(), struct), (skeleton, struct)):
        compiled = jitted_step.lower(*args).compile()
        assert_close(compiled(affine(), ramp(3)), model_step(affine(), ramp(3)))
    assert jitted_step.lower(affine(), ramp(3)).compile().cost_analysis()["flops"] > 0
    assert "func" in jitted_step.lower(affine(), ramp(3)).as_text()


def test_compiled_takes_keywords_and_returns_anything():
    """A compiled function takes the arguments of the function, and returns its results."""

    @pm.filter_jit
    def fn(x, *, how):
        return {how: x * 2}, how

    compiled = fn.lower(ramp(2), how="twice").compile()
    assert_same(compiled(ramp(2), how="twice"), ({"twice": ramp(2) * 2}, "twice"))


@pytest.mark.slow
def test_compiled_functions_survive_clear_caches():
    """A compiled function remains compiled."""
    compiled = jitted_step.lower(affine(), ramp(3)).compile()
    pm.clear_caches()

    assert_close(compiled(affine(), ramp(3)), model_step(affine(), ramp(3)))
    assert_close(jitted_step(affine(), ramp(3)), model_step(affine(), ramp(3)))


# ---- exported

X = ramp(3)


def both(model, x):
    return model(x), {"model": model}


@pytest.mark.parametrize("given", [lambda tree: tree, as_structs], ids=["arrays", "shapes"])
def test_an_exported_function_is_called_with_models(given):
    """`jax.export` stores the trees of a call: its result takes and returns Modules."""
    exported = export.export(pm.filter_jit(both))(*given((affine(), X)))
    out, rest = exported.call(affine(), X)

    assert_close(out, affine()(X))
    assert_same(rest["model"], affine())
    with pytest.raises(ValueError, match="same pytree structure"):
        exported.call(affine().replace(bias=None), X)


def test_sizes_by_name():
    """Shapes of `jax.export.symbolic_shape` are passed on."""
    batch = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 3"), jnp.float32)
    exported = export.export(pm.filter_jit(lambda m, x: jax.vmap(m)(x)))(affine(), batch)

    assert exported.call(affine(), ramp(5, 3)).shape == (5, 2)


def minus(x, y):
    return x - y


@pytest.mark.parametrize("donate", ["none", "x"])
def test_arguments_of_an_exported_function_keep_their_order(donate):
    """By position and by keyword, sorted or not; donated from the front."""
    exported = export.export(pm.filter_jit(minus, donate=donate))(5 * X, y=X)

    assert_close(exported.call(5 * X, y=X), 4 * X)


def to_export(fn, *args, **kwargs):
    return lambda: export.export(fn)(*args, **kwargs)


REFUSED = {
    "a static value": (
        to_export(pm.filter_jit(lambda x, how: x), X, how="a"),
        "filter_jit(<lambda>), exported: expected only arrays as arguments, "
        "got 1 other.\n"
        "  at how: 'a'\n"
        "  close over the other values:\n"
        "      pm.filter_jit(lambda x: <lambda>(x, ...))",
    ),
    "static by name": (
        to_export(pm.filter_jit(minus, static="y"), X, np.ones(1, np.float32)),
        "filter_jit(minus), exported: expected only arrays as arguments, got 1 other.\n  at y: ",
    ),
    "a model that is called": (
        to_export(pm.filter_jit(affine()), X),
        "filter_jit(Affine), exported: expected only arrays as arguments, "
        "got 2 others.\n"
        "  at function.weight: f32[2,3]\n"
        "  at function.bias: f32[2]\n"
        "  close over the other values:\n"
        "      pm.filter_jit(lambda x: model(x, ...))",
    ),
    "a number in the result": (
        to_export(pm.filter_jit(lambda x: (x, 3)), X),
        "filter_jit(<lambda>), exported: expected a result of only arrays, in order, got 1 "
        "other.\n"
        "  at result[1]: 3",
    ),
    "donated from the back": (
        to_export(pm.filter_jit(minus, donate="y"), X, X),
        "filter_jit(minus), exported: expected arguments in the order of the program, "
        "got donated arguments after others.\n"
        "  donate none of them, or the first:\n"
        "      pm.filter_jit(minus)",
    ),
    "keywords in another order": (
        to_export(pm.filter_jit(lambda y, x: y - x), y=X, x=X),
        "filter_jit(<lambda>), exported: expected arguments in the order of the program, "
        "got keywords in another order.\n"
        "  pass them by position:\n"
        "      export(pm.filter_jit(<lambda>))(x, ...)",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_called_is_not_exported(call, text):
    """When it is exported, and not when it is deployed."""
    with pytest.raises(ArgumentError, match=rf"\A{re.escape(text)}"):
        call()


def test_stages_keep_no_arrays():
    """The result of lowering for a model does not hold its memory."""
    model = affine()
    alive = weakref.ref(model.weight)
    lowered = jitted_step.trace(model, X).lower()
    assert lowered.in_tree == jax.tree.structure(((model, X), {}))

    del model
    gc.collect()
    assert alive() is None


def test_an_error_that_has_no_better_text_is_raised():
    """A call that fails in another way than by its arguments gives nothing back."""
    compiled = pm.filter_jit(lambda x: x).lower(ramp(2)).compile()

    def fail(*_):
        raise TypeError("something else")

    compiled._made = fail
    with pytest.raises(TypeError, match="something else"):
        compiled(ramp(2))


test_refusals = refusals(globals())
