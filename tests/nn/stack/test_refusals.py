"""What a `Stack` checks before it scans."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.nn.calling import ABSENT
from pytreemod.nn.stack.refusals import check_further, check_remat, check_second, check_unroll


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


def test_options_are_checked():
    """A policy is any function; a number of layers to write out is at least one."""
    assert [check_remat("remat", x) for x in (True, False, len)] == [True, False, len]
    assert [check_unroll("unroll", x) for x in (True, False, 2)] == [True, False, 2]
    with pytest.raises(ArgumentError, match=r"^remat: expected True, False or a policy, got 1"):
        check_remat("remat", 1)
    with pytest.raises(ArgumentError, match=r"^unroll: expected an integer of at least 1, got 0"):
        check_unroll("unroll", 0)
