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
    with pytest.raises(
        SpecError, match=r"(?s)4 of 6.*a\[1\]\.weight.*a\[1\]\.mean.*a\[1\]\.low_rank.*\bb\b"
    ):
        pm.by({Affine: 0}).values(TREE)
    with pytest.raises(SpecError, match=r"(?s)8 of 8.*\[4\]\n  and 3 more"):
        pm.by({str: 0}).values(list(range(8)))
    with pytest.raises(SpecError, match="weight"):
        pm.filter_vmap(lambda m: m.bias, in_axes=pm.by({"bias": 0}))(affine())


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        # A misspelt path, though a default catches everything.
        ({"a.*.wieght": 0, ...: 1}, r"a\.\*\.wieght"),
        # Entries after the one that has all their leaves.
        ({Affine: 0, "a.0": 1, ...: 2}, r"(?s)select\.path\('a\.0'\).*a\[0\]\.weight"),
        ({"**": 0, "b": 1}, r"select\.path\('b'\)"),
    ],
)
def test_an_entry_that_decides_nothing_is_an_error(rules, text):
    """What it says would be ignored in silence."""
    for use in (pm.by(rules), lambda tree: pm.partition(tree, pm.by(rules))):
        with pytest.raises(SpecError, match=text):
            use(TREE)


@pytest.mark.parametrize(
    "rules",
    [
        # A model may lack parts that a rule for many models names.
        {Affine: 0, Pair: 1, ...: 2},
        # It makes no difference.
        {Affine: None, "a.1": None, ...: 2},
        # Arrays may be others.
        {pm.is_array: 0, (lambda x: False): 2, ...: 2},
    ],
)
def test_entries_that_may_be_idle(rules):
    """Entries that would match in another tree, or agree with the match."""
    assert pm.by(rules)(TREE)["b"] in (0, 1, 2)


def test_rules_are_values():
    """Equal rules are equal, have equal hashes, and print as they were written."""
    first, second = (pm.by({"a.*": 0, Affine: None, ...: 1}) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)
    assert first != pm.by({"a.*": 0, ...: 1})
    assert repr(first) == "by({select.path('a.*'): 0, select.type(Affine): None, True: 1})"


def test_by_anywhere_inside_a_prefix():
    """A rule inside a prefix tree is resolved against its subtree."""
    prefix = {"a": [False, pm.by({"weight": True, ...: False})], "b": True}

    picked, _ = pm.partition(TREE, prefix)
    assert jax.tree.leaves(picked) == [3, 6]


def test_a_module_as_prefix_may_have_been_built_without_its_init():
    """tree_map and surgery can make a prefix that a custom __init__ would not make."""
    layer = OwnInit(2)
    prefix = pm.tree_at(lambda m: m.weight, jax.tree.map(lambda _: False, layer), True)

    assert len(jax.tree.leaves(pm.filter(layer, prefix))) == 1


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ({"a": True}, "<root>"),
        ({"a": True, "c": True}, "<root>"),
        ({"a": [True], "b": True}, r"\['a'\]"),
        ({"a": (True, True), "b": True}, r"\['a'\]"),
        ({"a": [Buffered(True, True, True), True], "b": True}, r"\['a'\]\[0\].*Buffered.*Affine"),
        ({"a": True, "b": {"c": True}}, r"\['b'\]"),
        ({"a": None, "b": True}, r"\['a'\]"),
        ([True, True], "<root>"),
    ],
)
def test_a_prefix_that_parts_from_the_tree_is_an_error(prefix, text):
    """Kind, length and keys must agree as far as the prefix goes; the path is named."""
    with pytest.raises(SpecError, match=text):
        pm.partition(TREE, prefix)


@pytest.mark.parametrize("rules", [{}, None, [(Affine, 0)], Affine, {3: 0}, {pm.by({...: 0}): 1}])
def test_rules_are_a_dict_of_selectors(rules):
    """Anything else has another meaning, or none."""
    with pytest.raises(SpecError, match=r"by|selector"):
        pm.by(rules)
