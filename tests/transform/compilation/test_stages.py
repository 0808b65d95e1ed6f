"""Results of `lower` and `compile`: functions for calls like the lowered one."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import export

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import affine, ramp


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


# ---- exported

X = ramp(3)


def both(model, x):
    return model(x), {"model": model}


def test_an_exported_function_is_called_with_models():
    """`jax.export` stores the trees of a call: its result takes and returns Modules."""
    exported = export.export(pm.filter_jit(both))(affine(), X)
    out, rest = exported.call(affine(), X)

    assert_close(out, affine()(X))
    assert_same(rest["model"], affine())
    with pytest.raises(ValueError, match="same pytree structure"):
        exported.call(affine().replace(bias=None), X)


def test_stages_keep_no_arrays():
    """The result of lowering for a model does not hold its memory."""
    model = affine()
    alive = weakref.ref(model.weight)
    lowered = jitted_step.trace(model, X).lower()
    assert lowered.in_tree == jax.tree.structure(((model, X), {}))

    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ((affine(), 3.0), "x"),
        ((affine().replace(bias=None), X), r"model\.bias"),
        ((affine(),), "x"),
        ((affine(), ramp(4)), r"f32\[4\]"),
    ],
    ids=["number", "structure", "count", "shape"],
)
def test_a_compiled_function_takes_what_it_was_compiled_for(other, where):
    """With another static value it would compute with the old one."""
    compiled = jitted_step.lower(affine(), X).compile()

    with pytest.raises(ArgumentError, match=where):
        compiled(*other)


def test_another_static_value_is_refused_by_name():
    """It is part of the program."""
    compiled = pm.filter_jit(lambda x, power: x**power).lower(X, 2).compile()

    with pytest.raises(ArgumentError, match="power: 2 -> 3"):
        compiled(X, 3)
