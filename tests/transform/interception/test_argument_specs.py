"""Specs for the arguments of a call: one for all, one for each, or some by name."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from pytreemod.transform.interception.argument_specs import (
    Terms,
    assign,
    assign_arguments,
    named_arguments,
    specs_by_argument,
    values_in,
)
from pytreemod.tree.prefixes import By
from tests.goldens import refusals
from tests.helpers.trees import affine, ramp


def stops(spec):
    """Specs of these tests are ints, None and rules."""
    return spec is None or isinstance(spec, (int, By))


TERMS = Terms("f(in_axes)", stops, 0, "in_axes", "0", "is mapped over axis 0")


def specs(spec, every=("x", "y"), positional=2, known=(), trees=(1, 2)):
    """One spec for each argument."""
    return specs_by_argument(spec, every, positional, known, TERMS, trees)


def test_keywords_come_last_and_sorted():
    """As their arrays do, in JAX's order."""
    named = named_arguments(("x",), (1, 2), {"b": 3, "a": 4})
    assert [tuple(n) for n in named] == [("x", 1), ("args[1]", 2), ("a", 4), ("b", 3)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (1, [1, 1]),
        (None, [None, None]),
        ((1, None), [1, None]),
        ([1, None], [1, None]),
        ({"y": None}, [0, None]),
        ({}, [0, 0]),
    ],
)
def test_one_spec_for_each_argument(spec, expected):
    """An argument without a name has the default."""
    assert specs(spec) == expected


def test_a_tuple_is_for_the_positional_arguments():
    """A keyword argument has the default."""
    assert specs((1,), positional=1) == [1, 0]


def test_a_single_argument_need_not_be_wrapped():
    """The spec of one argument may be a tree, a dict or a tuple of another length."""
    assert specs({"a": 1, "b": 2}, ["x"], 1, (), [{"a": 0, "b": 0}]) == [{"a": 1, "b": 2}]
    assert specs([1, 2], ["x"], 1, (), [[0, 0]]) == [[1, 2]]


def test_names_of_parameters_that_were_not_given():
    """They may be in the dict, for another call has them."""
    assert specs({"z": 1}, known=("z",)) == [0, 0]


def test_assign_says_it_of_arrays_alone():
    """A prefix is spread over its subtree; numbers and names are skipped."""
    tree = {"a": [ramp(2), 3], "b": affine()}
    assigned = assign({"a": 1, "b": pm.by({"bias": None, ...: 0})}, tree, "x", TERMS)

    places = [(a.place, a.value) for a in assigned]
    assert places == [("x['a'][0]", 1), ("x['b'].weight", 0), ("x['b'].bias", None)]
    assert all(pm.is_array(a.array) for a in assigned)
    with pytest.raises(SpecError, match=r"f\(in_axes\)"):
        assign({"a": 1}, tree, "x", TERMS)


def test_a_rule_for_several_arguments_need_not_fit_each():
    """A path that matches in none of them is a mistake."""
    named = named_arguments(("model", "x"), (affine(), ramp(2)), {})
    rule = pm.by({"bias": 1, ...: 0})

    assert [a.value for a in assign_arguments(rule, named, 2, (), TERMS)] == [0, 1, 0]
    with pytest.raises(SpecError, match="scale"):
        assign_arguments(pm.by({"scale": 1, ...: 0}), named, 2, (), TERMS)


def test_values_in_a_spec_are_found_once():
    """Those that rules give included."""
    spec = {"a": 1, "b": [None, 1], "c": pm.by({"w": 2, ...: None})}
    assert values_in(spec, stops) == [1, None, 2]
    assert values_in(jax.tree.map(lambda _: 3, {"a": jnp.ones(1)}), stops) == [3]


test_refusals = refusals(globals())
