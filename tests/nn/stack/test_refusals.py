"""What a `Stack` checks before it scans."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError
from pytreemod.nn.calling import ABSENT
from pytreemod.nn.stack.refusals import (
    check_further,
    check_keywords,
    check_leading,
    check_second,
    has_leading_axis,
)


def test_a_state_or_none_may_come_second():
    """Whether the layers use it or not."""
    state = pm.State(())

    for is_stateful in (True, False):
        for given in (state, ABSENT):
            check_second("Stack", is_stateful, given)


@pytest.mark.parametrize(
    ("is_stateful", "call"),
    [(True, r"stack\(x, state, mask=mask, key=key\)"), (False, r"stack\(x, mask=mask, key=key\)")],
)
def test_something_else_is_told_to_go_by_name(is_stateful, call):
    """A mask in the place of the State would not reach the layers."""
    with pytest.raises(
        ArgumentError, match=rf"^Stack: expected a State, got f32\[2\](.|\n)*{call}"
    ):
        check_second("Stack", is_stateful, jnp.ones(2))


def test_further_arguments_are_copied():
    """None stands for none; what is given stays as it is."""
    given = {"mask": 1}
    extra = check_further("Stack", given, {"scale": 2})

    assert extra == given
    assert extra is not given
    assert check_further("Stack", None, {}) == {}


@pytest.mark.parametrize(
    ("per_layer", "text"),
    [
        ([1, 2], r"expected per_layer to be a dict by name, got "),
        ({"mask": 1}, r"expected each argument once, got mask in per_layer, too"),
        ({"key": 1}, r"got key in per_layer, too"),
        ({"state": 1}, r"got state in per_layer, too"),
    ],
)
def test_an_argument_is_given_once(per_layer, text):
    """By one of the two ways; State and key have their own."""
    with pytest.raises(ArgumentError, match=text):
        check_further("Stack", per_layer, {"mask": 2})


@pytest.mark.parametrize(
    ("leaf", "has"),
    [(jnp.ones((3, 2)), True), (jnp.ones((2, 3)), False), (jnp.ones(()), False), (7, True)],
)
def test_an_array_has_the_leading_axis_or_not(leaf, has):
    """What is no array is the same for all layers."""
    assert has_leading_axis(leaf, 3) is has


def test_arrays_without_the_axis_are_named():
    """All of them; only for those of the layer is there a cure."""
    fits, other = jnp.ones((3, 2)), jnp.ones((2, 2))
    check_leading("Stack", 3, {"layer": [fits, "relu"], "per_layer": {"mask": fits}})

    with pytest.raises(ShapeError, match=r"leading axis of 3, got 2 without(.|\n)*layer\[1\]: f32"):
        check_leading("Stack", 3, {"layer": [fits, other], "per_layer": {"mask": other}})
    with pytest.raises(ShapeError, match=r"per_layer\['mask'\]: f32\[2,2\]$"):
        check_leading("Stack", 3, {"layer": fits, "per_layer": {"mask": other}})


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
