"""A pair is a tuple or a list of two; anything else is refused, with what there was."""

from typing import NamedTuple

import pytest

from pytreemod.errors import ArgumentError, DerivativeError
from pytreemod.transform.derivatives.results import pair_of


class Both(NamedTuple):
    """A pair with names."""

    loss: float
    aux: str


@pytest.mark.parametrize("result", [(1.0, "a"), [1.0, "a"], Both(1.0, "a")])
def test_two_values_are_a_pair(result):
    """Of whatever sequence."""
    assert pair_of(result, "f", "loss, aux") == (1.0, "a")


@pytest.mark.parametrize(
    ("result", "got"),
    [
        ((1.0,), "1 values"),
        ((), "0 values"),
        ([1, 2, 3], "3 values"),
        (1.0, "1.0"),
        (None, "None"),
        ({"loss": 1, "aux": 2}, "{'loss': 1, 'aux': 2}"),
        ("ab", "'ab'"),
    ],
)
def test_anything_else_is_refused(result, got):
    """The text says what there was, and what to return."""
    text = rf"^f: expected a pair \(loss, aux\), for has_aux, got {got}.*return loss, aux"
    with pytest.raises(ArgumentError, match=f"(?s){text}"):
        pair_of(result, "f", "loss, aux", reason=", for has_aux")


def test_rules_have_an_error_of_their_own():
    """The class of error is the caller's."""
    with pytest.raises(DerivativeError, match=r"^def_jvp: expected a pair \(out, tangent_out\)"):
        pair_of(None, "def_jvp", "out, tangent_out", error=DerivativeError)
