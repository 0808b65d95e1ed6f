"""The checks that layers share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError
from pytreemod.nn.checking import (
    Title,
    as_integer,
    as_number,
    check_choice,
    check_number,
    check_size,
    check_sizes,
)
from tests.labels import label


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), jnp.array(3)], ids=label)
def test_whole_numbers_of_any_kind_are_sizes(value):
    """They become Python ints, so that configuration stays hashable."""
    size = check_size("f(n)", value)

    assert size == 3
    assert type(size) is int


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.bool_(True), jnp.ones(2, int), [3]])
def test_what_is_no_whole_number(value):
    """Fractions, text, booleans and several numbers are none."""
    assert as_integer(value) is None


def test_a_traced_number_is_no_size():
    """Shapes must be known; the error is ours and not one about concretization."""
    with pytest.raises(ArgumentError, match=r"^f\(n\): expected an integer of at least 0, got i32"):
        jax.jit(lambda n: check_size("f(n)", n))(3)


@pytest.mark.parametrize("given", [2, [2, 2], (np.int32(2), 2)], ids=label)
def test_one_size_or_one_for_each_axis(given):
    """Both give a tuple."""
    assert check_sizes("f(n)", given, 2) == (2, 2)


@pytest.mark.parametrize("given", [[2], [2, 2, 2], [2, -1], "22", {2, 3}, 2.0, None], ids=label)
def test_what_is_not_one_size_for_each_axis(given):
    """Wrong counts, negative entries, strings and sets are refused."""
    with pytest.raises(ArgumentError, match=r"^f\(n\): expected an integer of .* sequence of 2 of"):
        check_sizes("f(n)", given, 2)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), jnp.array(0.5)], ids=label)
def test_real_numbers_of_any_kind_are_numbers(value):
    """They become Python floats."""
    assert check_number("f(p)", value, 0.0, 1.0) == 0.5
    assert type(check_number("f(p)", value, 0.0, 1.0)) is float


@pytest.mark.parametrize("value", [1j, "1", None, True, jnp.ones(1)], ids=label)
def test_what_is_no_real_number(value):
    """Complex numbers, text, booleans and arrays with axes are none."""
    assert as_number(value) is None


def test_words_are_accepted_in_either_case():
    """And given back in upper case."""
    assert check_choice("f(mode)", "same", ("SAME", "VALID")) == "SAME"
    with pytest.raises(ArgumentError, match=r"^f\(mode\): expected one of 'SAME', 'VALID', got 1"):
        check_choice("f(mode)", 1, ("SAME", "VALID"))


def test_a_layer_is_called_by_its_class_and_the_fields_that_matter():
    """No arrays, one line."""
    layer = nn.Linear(3, 4, key=jax.random.key(0))

    assert str(Title(layer, "in_features")) == "Linear(in_features=3)"
