"""What `lower` and `compile` give: a function for calls like the one that it was made for."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, OwnInit, affine, ramp


def model_step(model, x):
    """A step as one would write it: a number and a new model."""
    return jnp.sum(model(x)), jax.tree.map(lambda p: 0.9 * p, model)


jitted_step = pm.filter_jit(model_step)


def test_lower_and_compile():
    """lower(...).compile() gives a function for such arguments; structs may stand for arrays."""
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    skeleton = pm.filter_eval_shape(affine)
    for args in ((affine(), ramp(3)), (affine(), struct), (skeleton, struct)):
        compiled = jitted_step.lower(*args).compile()
        assert_close(compiled(affine(), ramp(3)), model_step(affine(), ramp(3)))
    assert jitted_step.lower(affine(), ramp(3)).compile().cost_analysis()["flops"] > 0
    assert "func" in jitted_step.lower(affine(), ramp(3)).as_text()


def test_compiled_takes_keywords_and_returns_anything():
    """A compiled function is called as the function is, and returns what it returns."""

    @pm.filter_jit
    def fn(x, *, how):
        return {how: x * 2}, how

    compiled = fn.lower(ramp(2), how="twice").compile()
    assert_same(compiled(ramp(2), how="twice"), ({"twice": ramp(2) * 2}, "twice"))


@pytest.mark.parametrize(
    "args",
    [
        (Affine(1, 2), ramp(3)),
        (affine(), 3.0),
        (OwnInit(3), ramp(3)),
        (affine(), None),
        (affine(),),
    ],
)
def test_compiled_refuses_other_calls(args):
    """Another structure or another static value is refused with the way out."""
    compiled = jitted_step.lower(affine(), ramp(3)).compile()
    with pytest.raises(
        ArgumentError,
        match=r"compiled model_step: expected arguments with the structure and static values "
        r"that it was "
        r"compiled for, got others\.\n  compile for these, too:\n"
        r"      pm\.filter_jit\(model_step\)\.lower\(\.\.\.\)\.compile\(\)",
    ):
        compiled(*args)


@pytest.mark.slow
def test_compiled_functions_survive_clear_caches():
    """What was compiled stays compiled."""
    compiled = jitted_step.lower(affine(), ramp(3)).compile()
    pm.clear_caches()

    assert_close(compiled(affine(), ramp(3)), model_step(affine(), ramp(3)))
    assert_close(jitted_step(affine(), ramp(3)), model_step(affine(), ramp(3)))
