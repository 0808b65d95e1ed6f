"""Tangents of trees: None means zero anywhere, and an error names a misfit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from pytreemod.transform.derivatives.tangents import beside, is_differentiable, is_zero
from tests.goldens import refusals
from tests.helpers.trees import affine, ramp

INTEGERS_ZERO = np.zeros(3, jax.dtypes.float0)


def fitted(tree, derivative, **options):
    """The derivative of each leaf."""
    return beside(tree, derivative, where="f", expected="a tangent", root="x", **options)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (jnp.ones(2), True),
        (np.ones(2), True),
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), True),
        (1j, True),
        (1.0, True),
        (jnp.arange(2), False),
        (True, False),
        (1, False),
        ("1.0", False),
        (None, False),
        (jax.random.key(0), False),
    ],
)
def test_what_is_differentiable(leaf, expected):
    """Leaves of a floating or complex dtype."""
    assert is_differentiable(leaf) is expected


def test_what_is_zero_by_its_type():
    """None, JAX's symbolic zero, those of integers; no array of zeros."""
    seen = []

    @jax.custom_jvp
    def look(x, y):
        return x

    def rule(primals, tangents):
        seen.extend(map(is_zero, tangents))
        return primals[0], tangents[0]

    look.defjvp(rule, symbolic_zeros=True)
    jax.jvp(lambda x: look(x, 2.0), (1.0,), (1.0,))

    assert seen == [False, True]
    assert is_zero(None)
    assert is_zero(INTEGERS_ZERO)
    assert not is_zero(jnp.zeros(3))
    assert not is_zero(0.0)


def test_none_stands_for_a_leaf_and_for_a_whole_node():
    """One entry for each leaf of the tree, whatever the derivative has."""
    tree = {"a": affine(), "b": [ramp(2), 1.0, "text"]}
    leaves = len(jax.tree.leaves(tree))

    assert fitted(tree, None) == [None] * leaves
    assert fitted(tree, {"a": None, "b": [None, 3.0, None]}) == [None] * (leaves - 2) + [3.0, None]


def test_numbers_take_the_type_of_their_array():
    """A Python number beside an array becomes one of its dtype, if it is of its kind."""
    (found,) = fitted(jnp.ones((), jnp.float16), 2)

    assert found.dtype == jnp.float16


def test_shapes_may_stand_for_arrays():
    """Only shape and dtype of the tree count."""
    (found,) = fitted(jax.ShapeDtypeStruct((2,), jnp.float32), ramp(2))
    np.testing.assert_array_equal(found, ramp(2))


class Unequal:
    """Configuration that cannot be compared."""

    def __eq__(self, other):
        raise ValueError("neither equal nor unequal")

    __hash__ = None


class Configured(pm.Module):
    """An array, and configuration."""

    weight: jax.Array
    config: object = pm.field(static=True)


def test_keys_that_cannot_be_sorted_are_told_in_our_words():
    """As everywhere; JAX has another error."""
    odd = {1: ramp(2), "a": ramp(2)}
    for tree, derivative in ((odd, odd), ({"a": ramp(2)}, odd)):
        with pytest.raises(SpecError, match="dict in a tree: expected keys that can be sorted"):
            fitted(tree, derivative)


@pytest.mark.parametrize("config", [(2, 3), (Unequal(), Unequal())])
def test_configuration_plays_no_part(config):
    """Two that differ in it, or cannot be compared, have the same leaves."""
    tree, derivative = (Configured(ramp(2), value) for value in config)

    assert fitted(tree, derivative) == [derivative.weight]


def test_what_stands_at_a_constant_may_be_passed_over():
    """Not strict: as for the gradients of a rule."""
    assert fitted([1, "a"], [1.0, "b"], strict=False) == [None, None]


def test_a_tuple_of_arguments_has_a_name_for_each():
    """They are asked for only in an error."""
    asked = []

    def names():
        asked.append(True)
        return ["model", "batch"]

    beside((ramp(2), ramp(2)), (ramp(2), None), where="f", expected="tangents", root=names)
    assert asked == []


test_refusals = refusals(globals())
