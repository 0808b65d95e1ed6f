"""`by`, and prefix trees in general."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.tree.prefixes import By, mask_of
from tests.goldens import refusals
from tests.helpers.trees import Affine, Buffered, OwnInit, Pair, affine

TREE = {"a": [Affine(1, 2.0), Buffered(3, 4, 5)], "b": 6}
"""Six leaves: a[0].weight, a[0].bias, a[1].weight, a[1].mean, a[1].low_rank, b."""


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({...: 0}, [0, 0, 0, 0, 0, 0]),
        ({Affine: 1, ...: 0}, [1, 1, 0, 0, 0, 0]),
        ({...: 0, Affine: 1}, [1, 1, 0, 0, 0, 0]),
        ({"a.*.weight": "w", Affine: "A", ...: "-"}, ["w", "A", "w", "-", "-", "-"]),
        ({Affine: "A", "a.*.weight": "w", ...: "-"}, ["A", "A", "w", "-", "-", "-"]),
        ({pm.select.role("buffer"): None, int: 0, float: 1}, [0, 1, 0, None, 0, 0]),
        ({~pm.select.type(list): 1, list: 2}, [2, 2, 2, 2, 2, 1]),
        ({(lambda x: x > 3): "big", (lambda x: True): "small"}, ["small"] * 3 + ["big"] * 3),
        ({pm.select.at(lambda t: t["b"]): 1, True: 0}, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_first_selector_that_matches_gives_the_value(rules, expected):
    """The first match wins, in the order written; `...` is the default at any position."""
    assert pm.by(rules).values(TREE) == expected


@pytest.mark.parametrize(
    "rules",
    [
        # A model may lack parts that a rule for many models names.
        {Affine: 0, Pair: 1, ...: 2},
        # The default, however it is written.
        {"a": 0, "b": 1, ...: 2},
        {"a": 0, "b": 1, "**": 2},
        # It makes no difference.
        {Affine: None, "a.1": None, ...: 2},
        # Arrays may be others.
        {pm.is_array: 0, (lambda x: False): 2, (lambda x: x is TREE["b"]): 1, ...: 2},
        {"**.weight": 0, Affine: 1, "a": 2, ...: 3},
    ],
)
def test_entries_that_may_be_idle(rules):
    """Entries that would match in another tree, or agree with the match."""
    rule = pm.by(rules)

    rule(TREE)
    rule.check([TREE])


def test_rules_are_values():
    """Equal rules are equal, have equal hashes, and print as they were written."""
    first, second = (pm.by({"a.*": 0, Affine: None, ...: 1}) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)
    assert first != pm.by({"a.*": 0, ...: 1})
    assert repr(first) == "by({select.path('a.*'): 0, select.type(Affine): None, True: 1})"
    assert isinstance(first, By)


def test_by_anywhere_inside_a_prefix():
    """A rule inside a prefix tree is resolved against its subtree."""
    prefix = {"a": [False, pm.by({"weight": True, ...: False})], "b": True}

    assert mask_of(prefix, TREE, where="spec") == [False, False, True, False, False, True]


def test_by_in_vmap_axes():
    """The same rules give axes: one language for every transform."""
    tree = {"x": jnp.arange(6.0).reshape(2, 3), "shift": jnp.asarray(1.0), "net": affine()}
    axes = pm.by({"x": 1, pm.is_array: None})
    found = pm.filter_vmap(lambda t: jnp.sum(t["x"]) + t["shift"], in_axes=(axes,))(tree)

    np.testing.assert_array_equal(found, [4.0, 6.0, 8.0])


def test_a_module_as_prefix_may_have_been_built_without_its_init():
    """tree_map and surgery can make a prefix that a custom __init__ would not make."""
    layer = OwnInit(2)
    prefix = pm.tree_at(lambda m: m.weight, jax.tree.map(lambda _: False, layer), True)
    assert mask_of(prefix, layer, where="spec") == [True, False]


test_refusals = refusals(globals())
