"""Paths as text, and patterns over them."""

import copy
import pickle
from collections import OrderedDict

import jax.tree_util as jtu
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytreemod.errors import ArgumentError
from pytreemod.tree.paths import (
    PathName,
    matches,
    parse_name,
    parse_pattern,
    path_text,
    plain_name,
    step_names,
)
from tests.goldens import refusals
from tests.helpers.laws import law
from tests.helpers.trees import Affine, Pair, Registered
from tests.labels import label


def texts(tree, root=""):
    """The paths of all leaves."""
    return [path_text(path, root) for path, _ in jtu.tree_leaves_with_path(tree)]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (1, ["<root>"]),
        ([1, (2, 3)], ["[0]", "[1][0]", "[1][1]"]),
        ({"b": 1, "a c": 2}, ["['a c']", "['b']"]),
        ({1: 1}, ["[1]"]),
        (Affine(1, [2]), ["weight", "bias[0]"]),
        ({"m": Affine(1, 2)}, ["['m'].weight", "['m'].bias"]),
        (Pair(1, 2), ["first", "second"]),
        (OrderedDict(x=1), ["['x']"]),
        ([Registered(1, "")], ["[0].value"]),
    ],
    ids=label,
)
def test_a_path_reads_as_the_access(tree, expected):
    """A path is written as the reader would write the access."""
    assert texts(tree) == expected


def test_a_root_comes_first():
    """With a root the path starts from that name; a path without steps is the root itself."""
    assert texts(Affine(1, [2]), "model") == ["model.weight", "model.bias[0]"]
    assert texts([1], "batch") == ["batch[0]"]
    assert texts(1, "x") == ["x"]


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [
        ("a", ("a",)),
        ("a.b", ("a", "b")),
        ("layers[2].weight", ("layers", "2", "weight")),
        ("layers.2.weight", ("layers", "2", "weight")),
        ("x['key'].*", ("x", "key", "*")),
        ('x["a b"]', ("x", "a b")),
        ("**.w?", ("**", "w?")),
        ("[0][1]", ("0", "1")),
        ("['a.b']", ("a.b",)),
        ("layers/2/weight", ("layers", "2", "weight")),
        ("**/w?", ("**", "w?")),
        ("a/b.c[0]/d", ("a", "b", "c", "0", "d")),
        ("['a/b']/w", ("a/b", "w")),
        ('x["a/b"].w', ("x", "a/b", "w")),
    ],
)
def test_patterns_are_split_into_steps(pattern, steps):
    """Dots, slashes and brackets mean the same; quotes keep a key whole."""
    assert parse_pattern(pattern) == steps


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a", "a", True),
        ("a", "a.b", True),
        ("a.b", "a", False),
        ("*", "a.b", True),
        ("*.b", "a.b", True),
        ("*.b", "b", False),
        ("**.b", "b", True),
        ("**.b", "x.y.b.z", True),
        ("a.**.b", "a.b", True),
        ("a.**.b", "a.x.y.b", True),
        ("a.**.b", "c.x.b", False),
        ("lay*.?", "layers.1", True),
        ("lay*.?", "layers.12", False),
        ("**", "a", True),
        ("Layers", "layers", False),
    ],
)
def test_patterns_match_a_path_or_a_node_above_it(pattern, path, expected):
    """`*` is one step, `**` any number, and case counts."""
    assert matches(parse_pattern(pattern), parse_pattern(path)) is expected


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.weight", False),
        ("layers", "layers.0", False),
        ("**.weight", "layers.0.weight", True),
        ("layers.**", "layers.0.weight", True),
        ("layers.**", "layers", True),
    ],
)
def test_patterns_match_a_path_exactly(pattern, path, expected):
    """Where nodes are selected, the path of a node does not match its children."""
    assert matches(parse_pattern(pattern), parse_pattern(path), exactly=True) is expected


def test_a_path_that_serves_as_a_key_keeps_its_steps():
    """In a dict whose keys are paths, patterns see the steps; the text is that of any key."""
    inner = (jtu.GetAttrKey("layers"), jtu.SequenceKey(2), jtu.DictKey("a.b"))
    name = PathName.of(inner)
    path = (jtu.DictKey(name), jtu.GetAttrKey("count"))

    assert name == "layers[2]['a.b']"
    assert step_names(path) == ("layers", "2", "a.b", "count")
    assert path_text(path) == "[\"layers[2]['a.b']\"].count"
    assert step_names((jtu.DictKey("layers[2]"),)) == ("layers[2]",)


def test_a_path_name_is_read_and_copied():
    """From its text it has the same steps, and pickles and copies have them."""
    name = PathName.parse("layers[2]['a.b']")

    for made in (name, copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert made.steps == ("layers", "2", "a.b")
        assert made == "layers[2]['a.b']"
        assert hash(made) == hash("layers[2]['a.b']")


# ---- names

separators = st.sampled_from([".", "/", "::", "aa", "\\", " ", '"'])
# They cost nothing, and odd ones are rare.
many = settings(law, max_examples=100)
# Most of them made of characters with a meaning in a name.
words = st.text(st.sampled_from(list("ab01.:/'\"\\ \n[]\ud800é"))) | st.text()


def keys_of(steps):
    """A path of these steps."""
    return tuple(jtu.DictKey(step) for step in steps)


@many
@given(st.lists(words), separators)
def test_names_have_all_steps(steps, sep):
    """parse_name(plain_name(path)) gives the path's steps: no two sequences have one name."""
    assert parse_name(plain_name(keys_of(steps), sep), sep) == tuple(steps)


@many
@given(words | st.lists(words).map(".".join), separators)
def test_what_is_read_as_a_name_is_one(text, sep):
    """plain_name(parse_name(name)) == name: no leaf has a second name, and nothing else happens."""
    try:
        steps = parse_name(text, sep)
    except ArgumentError:
        return
    assert plain_name(keys_of(steps), sep) == text


@pytest.mark.parametrize(
    ("path", "sep", "expected"),
    [
        ((), ".", ""),
        (
            (jtu.GetAttrKey("layers"), jtu.SequenceKey(2), jtu.GetAttrKey("bias")),
            ".",
            "layers.2.bias",
        ),
        ((jtu.DictKey(3), jtu.FlattenedIndexKey(0)), ".", "3.0"),
        ((jtu.DictKey("a.b"), jtu.DictKey("c d")), ".", "'a.b'.c d"),
        ((jtu.DictKey("a.b"), jtu.DictKey("c/d")), "/", "a.b/'c/d'"),
        ((jtu.DictKey(""), jtu.DictKey("it's"), jtu.DictKey("'")), ".", "''.it's.'\\''"),
        ((jtu.DictKey("a:"), jtu.DictKey("b")), "::", "'a:'::b"),
        ((jtu.DictKey("a\nb"),), ".", "'a\\nb'"),
        ((jtu.DictKey(PathName.parse("a[0]['b.c']")), jtu.SequenceKey(1)), ".", "a.0.'b.c'.1"),
    ],
)
def test_a_name_is_the_steps(path, sep, expected):
    """Bare words with a separator; quoted if the bare word would be read differently."""
    assert plain_name(path, sep) == expected
    assert parse_name(expected, sep) == step_names(path)


test_refusals = refusals(globals())
