"""filter, partition and combine; their laws are in `tests/laws`."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.trees import Pair


def test_is_leaf_stops_the_descent():
    """Specs, replacement and combination all see the leaves that is_leaf makes."""
    stop = lambda x: isinstance(x, tuple) or x is None  # noqa: E731
    first, second = pm.partition([(1, 2), None, 3], lambda x: x is None, replace=0, is_leaf=stop)
    assert (first, second) == ([0, None, 0], [(1, 2), 0, 3])
    assert pm.combine([None, 1], [(2, 3), None], is_leaf=stop) == [(2, 3), 1]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ([True, False], ([(1, 2), None], [(None, None), 3])),
        ([(True, False), pm.is_array], ([(1, None), None], [(None, 2), 3])),
        ([pm.by({int: True}), False], ([(1, 2), None], [(None, None), 3])),
        ([pm.select.type(int), ...], ([(1, 2), 3], [(None, None), None])),
        ([(lambda x: x > 1), False], ([(None, 2), None], [(1, None), 3])),
    ],
)
def test_prefix_trees_of_specs(spec, expected):
    """A spec may be a tree whose leaves apply to subtrees; with None where the tree has it."""
    assert pm.partition([(1, 2), 3], spec) == expected
    with_none = ([half, None] for half in expected)
    assert pm.partition([[(1, 2), 3], None], [spec, None]) == (*with_none,)


def test_combine_takes_the_first_that_is_not_none():
    """At each path the first leaf that is not None; if all are None, None."""
    assert pm.combine([None, 1, None], [2, 3, None], [4, None, None]) == [2, 1, None]
    assert pm.combine(Pair(None, 0)) == Pair(None, 0)


@pytest.mark.parametrize("spec", [[1, True], ["no path", True], [jnp.ones(2), True], [True]])
def test_what_is_no_spec_of_the_tree_is_refused(spec):
    """A number or an array where a spec belongs; a prefix of another tree."""
    with pytest.raises(SpecError, match=r"selector|no path|prefix"):
        pm.filter([1, 2], spec)
