"""Paths as text, and patterns over them."""

import jax
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.trees import Affine


def leaves_of(text):
    """A tree of dicts with the leaf "x" at a path, whose keys are separated by spaces."""
    tree = "x"
    for key in reversed(text.split()):
        tree = {key: tree, "other": 0}
    return tree


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("a", "a"),
        ("a.b", "a b"),
        ("layers[2].weight", "layers 2 weight"),
        ("layers.2.weight", "layers 2 weight"),
        ("layers/2/weight", "layers 2 weight"),
        ("a/b.c[0]/d", "a b c 0 d"),
        ("x['key'].*", "x key y"),
        ('x["a/b"].w', "x a/b w"),
        ("['a.b']", "a.b"),
        # Of a node above the leaf.
        ("a", "a b"),
        ("*", "a b"),
        ("*.b", "a b"),
        ("**.b", "b"),
        ("**.b", "x y b z"),
        ("a.**.b", "a b"),
        ("a.**.b", "a x y b"),
        ("**.w?", "a w1"),
        ("lay*.?", "layers 1"),
    ],
)
def test_patterns_match_a_path_or_a_node_above_it(pattern, path):
    """Dots, slashes and brackets mean the same; quotes keep a key whole; `**` is any number."""
    picked = pm.filter(leaves_of(path), pm.select.path(pattern) & str)
    assert jax.tree.leaves(picked) == ["x"]


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("a.b", "a"),
        ("*.b", "b"),
        ("a.**.b", "c x b"),
        ("lay*.?", "layers 12"),
        ("Layers", "layers"),
        ("a.b", "a.b"),
        # No patterns: an empty key would match nothing, an open bracket something else.
        *[(text, "a") for text in ("", ".", "a..b", "a.", "a[", "a[0", "['a'", "a./b", ".a")],
        ("a" * 60 + "[", "a"),
    ],
)
def test_patterns_that_match_something_else(pattern, path):
    """`*` is one key, `?` one character, and case counts."""
    with pytest.raises(SpecError, match=r"select\.path"):
        pm.filter(leaves_of(path), pm.select.path(pattern) & str)


def test_patterns_name_nodes_exactly():
    """Where nodes are selected, the outermost that match are named; configuration, too."""
    tree = {"layers": [Affine(1, [2]), Affine(3, 4)], "none": None}

    for pattern, expected in [
        ("layers.*", {"layers": [0, 0], "none": None}),
        ("layers", {"layers": 0, "none": None}),
        ("**.weight", {"layers": [Affine(0, [2]), Affine(0, 4)], "none": None}),
        ("layers[0].**", {"layers": [0, Affine(3, 4)], "none": None}),
        ("none", {"layers": tree["layers"], "none": 0}),
    ]:
        assert pm.tree_at(pattern, tree, replace_fn=lambda _: 0) == expected
