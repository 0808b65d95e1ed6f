"""`by`, and prefix trees in general."""

import jax
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
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


def test_a_leaf_without_a_rule_is_an_error():
    """The error has the path of each such leaf, at most five of them."""
    with pytest.raises(SpecError, match=r"(?s)4 of 6.*\[1\]\.weight.*mean.*low_rank.*\['b'\]"):
        pm.by({Affine: 0}).values(TREE)
    with pytest.raises(SpecError, match=r"(?s)8 of 8.*\[4\]\n  and 3 more"):
        pm.by({str: 0}).values(list(range(8)))
    with pytest.raises(SpecError, match="weight"):
        pm.filter_vmap(lambda m: m.bias, in_axes=pm.by({"bias": 0}))(affine())


def test_a_misspelt_path_is_an_error():
    """Though a default catches everything; a class or a role may pick nothing."""
    rules = pm.by({"a.*.wieght": 0, ...: 1})
    for use in (rules, lambda tree: pm.partition(tree, rules)):
        with pytest.raises(SpecError, match=r"a\.\*\.wieght"):
            use(TREE)
    assert pm.by({Pair: 1, pm.select.role("no"): 1, ...: 2})(TREE)["b"] == 2


def test_a_module_as_prefix_may_be_made_by_tree_map_and_surgery():
    layer = OwnInit(2)
    prefix = pm.tree_at(lambda m: m.weight, jax.tree.map(lambda _: False, layer), True)
    assert len(jax.tree.leaves(pm.filter(layer, prefix))) == 1
    # Also of the model without its precision, and the other way round.
    precise = pm.with_precision(layer, "bfloat16")
    assert len(jax.tree.leaves(pm.filter(precise, prefix))) == 1
    precise_prefix = jax.tree.map(lambda _: True, precise)
    assert len(jax.tree.leaves(pm.filter(layer, precise_prefix))) == 2


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ({"a": True}, r"\['b'\]"),
        ({"a": True, "c": True}, r"\['b'\]\n.*\['c'\]"),
        ({"a": [True], "b": True}, r"\['a'\]\[1\]"),
        ({"a": (True, True), "b": True}, r"\['a'\]"),
        ({"a": [Buffered(True, True, True), True], "b": True}, r"Buffered.*Affine\n.*\['a'\]\[0\]"),
        ({"a": True, "b": {"c": True}}, r"\['b'\]"),
        ({"a": None, "b": True}, r"\['a'\]"),
        ([True, True], "list of 2 is no prefix of dict of 2\n.*<root>"),
        # Several paths are no prefix.
        (["a", "b"], "<root>"),
    ],
)
def test_a_prefix_that_parts_from_the_tree_is_an_error(prefix, text):
    """Kind, length and keys must agree as far as the prefix goes; the path is named."""
    with pytest.raises(SpecError, match=f"(?s){text}"):
        pm.partition(TREE, prefix)
