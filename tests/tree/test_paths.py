"""Paths as text, patterns over them, and names of leaves."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.laws import law
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
    tree = leaves_of(path)
    picked = pm.filter(tree, pm.select.path(pattern) & str)

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


@pytest.mark.parametrize("pattern", ["", ".", "a..b", "a.", "a[", "a[0", "['a'", "a./b", ".a"])
def test_malformed_patterns_are_refused(pattern):
    """An empty key would match nothing, and an open bracket something else."""
    with pytest.raises(SpecError, match="position"):
        pm.select.path(pattern)


separators = st.sampled_from([".", "/", "::", "aa", "\\", " ", '"'])
# They cost nothing, and odd ones are rare.
many = settings(law, max_examples=100)
# Most of them made of characters with a meaning in a name.
words = st.text(st.sampled_from(list("ab01.:/'\"\\ \n[]\ud800é"))) | st.text()


@many
@given(st.lists(st.lists(words, min_size=1, max_size=3), min_size=1, max_size=3), separators)
def test_names_have_all_keys(paths, sep):
    """Trees go to names and back: no two paths have one name, whatever their keys are made of."""
    tree: dict = {}
    for number, path in enumerate(paths):
        # The index keeps a path from ending where another one goes on.
        node = tree.setdefault(str(number), {})
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = number
    named = pm.named_leaves(tree, sep=sep)

    assert len(named) == len(paths)
    assert pm.from_named(tree, named, sep=sep) == tree


@pytest.mark.parametrize(
    ("tree", "sep", "expected"),
    [
        ([0, [Affine(0, 0)]], ".", ["0", "1.0.weight", "1.0.bias"]),
        ({"a.b": {"c d": 0}}, ".", ["'a.b'.c d"]),
        ({"a.b": {"c/d": 0}}, "/", ["a.b/'c/d'"]),
        ({"": {"it's": {"'": 0}}}, ".", ["''.it's.'\\''"]),
        ({"a:": {"b": 0}}, "::", ["'a:'::b"]),
        ({"a\nb": 0}, ".", ["'a\\nb'"]),
    ],
)
def test_a_name_is_the_keys(tree, sep, expected):
    """Bare words with a separator; quoted if the bare word would be read differently."""
    assert list(pm.named_leaves(tree, sep=sep)) == expected


def test_states_are_named_by_the_paths_of_their_tokens():
    """A dict's key that is a path has its steps: patterns and names see them."""
    state = pm.make_with_state(pm.nn.BatchNorm)(2)[1]

    assert jax.tree.leaves(pm.select.path("s.state_index[0]")({"s": state})) == [True, False]
    assert all(name.startswith("s.state_index.") for name in pm.named_leaves({"s": state}))
