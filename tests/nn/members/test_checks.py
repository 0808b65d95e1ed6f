"""What is checked of members before they are called."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError
from pytreemod.nn.members.checks import STACK, check_keywords, check_leading, without_leading_axis


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
    """What is no array is the same for all layers."""
    assert without_leading_axis({"x": leaf}, 3) == text


def test_arrays_without_the_axis_are_named():
    """All of them; only for those of the layer is there a hint."""
    fits, other = jnp.ones((3, 2)), jnp.ones((2, 2))
    check_leading(STACK, "Stack", 3, {"layer": [fits, "relu"], "per_layer": {"mask": fits}})

    with pytest.raises(ShapeError, match=r"leading axis of 3, got 2 without(.|\n)*layer\[1\]: f32"):
        check_leading(STACK, "Stack", 3, {"layer": [fits, other], "per_layer": {"mask": other}})
    with pytest.raises(ShapeError, match=r"per_layer\['mask'\]: f32\[2,2\]$"):
        check_leading(STACK, "Stack", 3, {"layer": fits, "per_layer": {"mask": other}})


class Masked(pm.Module):
    """Takes something by name."""

    def __call__(self, x, state=None, *, mask=None, key=None):
        return x if mask is None else jnp.where(mask, x, 0)


@pytest.mark.parametrize("given", [{"msk": 1}, {"per_layer": {"msk": jnp.ones(2)}}], ids=str)
def test_a_wrong_keyword_is_refused_in_the_name_of_the_stack(given):
    """With what the layers do take, and the name that was probably meant."""
    text = (
        r"^Stack\(Masked, depth=2\): expected arguments of Masked \(mask\), got 'msk'\.\n"
        r"  did you mean 'mask'\?$"
    )
    with pytest.raises(ArgumentError, match=text):
        pm.nn.Stack(Masked, 2)(jnp.ones(3), **given)


def test_names_that_the_layers_take():
    """By name, by `**kwargs`; and a layer that does not say what it takes."""
    check_keywords("Stack", Masked(), ["mask"])
    check_keywords("Stack", lambda x, **options: x, ["anything"])
    with pytest.raises(
        ArgumentError, match=r"arguments of Identity \(it has no further ones\), got"
    ):
        check_keywords("Stack", pm.nn.Identity(), ["mask", "other"])
