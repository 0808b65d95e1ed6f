"""Checks of members before they are called."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.nn.members.checks import without_leading_axis
from tests.goldens import refusals


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.ones((3, 2)), []),
        (jnp.ones((2, 3)), ["x: f32[2,3]"]),
        (jnp.ones(()), ["x: f32[]"]),
        (7, []),
    ],
)
def test_an_array_has_the_leading_axis_or_not(leaf, text):
    """Leaves that are not arrays are the same for all layers."""
    assert without_leading_axis({"x": leaf}, 3) == text


class Masked(pm.Module):
    """Takes something by name."""

    def __call__(self, x, state=None, *, mask=None, key=None):
        return x if mask is None else jnp.where(mask, x, 0)


test_refusals = refusals(globals())
