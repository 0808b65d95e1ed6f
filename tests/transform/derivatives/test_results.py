"""A pair is a tuple or a list of two; other results are refused, and the error shows them."""

from typing import NamedTuple

import pytest

from pytreemod.transform.derivatives.results import pair_of
from tests.goldens import refusals


class Both(NamedTuple):
    """A pair with names."""

    loss: float
    aux: str


@pytest.mark.parametrize("result", [(1.0, "a"), [1.0, "a"], Both(1.0, "a")])
def test_two_values_are_a_pair(result):
    """Of whatever sequence."""
    assert pair_of(result, "f", "loss, aux") == (1.0, "a")


test_refusals = refusals(globals())
