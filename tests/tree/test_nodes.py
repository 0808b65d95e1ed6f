"""Opening nodes one level at a time."""

from collections import OrderedDict, defaultdict

import jax
import jax.tree_util as jtu
import pytest

from pytreemod.errors import SpecError
from pytreemod.tree.nodes import children_of, is_node, is_plain_tuple, locations, record_of
from tests.helpers.trees import ALL_TREES, Affine, Buffered, Pair, Registered, every_tree
from tests.labels import label


def by_jax(node):
    """The children of a node with their keys, from JAX."""
    pairs, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0], child) for path, child in pairs]


CONTAINERS = [
    OrderedDict(b=1, a=2),
    defaultdict(list, b=[1], a=2),
    Pair(1, 2),
    Registered(1, "note"),
    jtu.Partial(max, 1, key=2),
    {2: 1, 1: 2},
    None,
    (),
]


@pytest.mark.parametrize("node", CONTAINERS, ids=label)
def test_children_are_what_jax_says(node):
    """children_of gives the keys and children that JAX gives, in its order."""
    children = children_of(node)

    assert [key for key, _ in children] == [key for key, _ in by_jax(node)]
    assert all(x is y for (_, x), (_, y) in zip(children, by_jax(node), strict=True))


@every_tree
def test_places_are_jax_leaves_with_their_paths(make):
    """locations(t) has the leaves and the paths of jax.tree_util.tree_leaves_with_path(t)."""
    tree = make()
    locs, expected = list(locations(tree)), jtu.tree_leaves_with_path(tree)

    assert [loc.path for loc in locs] == [path for path, _ in expected]
    assert all(s.leaf is leaf for s, (_, leaf) in zip(locs, expected, strict=True))
    assert all(len(loc.nodes) == len(loc.path) for loc in locs)


@every_tree
def test_a_leaf_is_no_node(make):
    """is_node agrees with JAX on every tree and on every leaf of it."""
    tree = make()

    assert is_node(tree) == (tree is None or not jtu.all_leaves([tree]))
    assert not any(map(is_node, jax.tree.leaves(tree)))
    assert all((children_of(x) is None) == (not is_node(x)) for x in [tree, *jax.tree.leaves(tree)])


def test_only_modules_carry_records():
    """record_of is None for all values but instances of Module classes."""
    assert record_of(Affine(1, 2)) is Affine.__record__
    carriers = {name for name, make in ALL_TREES.items() if record_of(make()) is not None}
    assert "affine" in carriers
    assert not carriers & {"array", "list", "dict", "None", "registered", "named tuple"}
    assert record_of(Affine) is None


class Below(Pair):
    """A named tuple that may have attributes."""


class Attributed(tuple):
    """A custom node: its child is in its attribute."""


class Renamed(Pair):
    """A named tuple that was registered in another way: attribute and items."""


jtu.register_pytree_node(Attributed, lambda t: ((t.inside,), None), lambda _, c: with_inside(*c))
jtu.register_pytree_node(
    Renamed,
    lambda t: ((*t, t.inside), None),
    lambda _, c: with_inside(c[2], Renamed, c[:2]),
)


def with_inside(inside, kind=Attributed, items=()):
    """A tuple with an attribute."""
    made = tuple.__new__(kind, items)
    made.inside = inside
    return made


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ((), True),
        ((1, [2]), True),
        (Pair(1, 2), True),
        (Below(1, 2), True),
        (with_inside(3, Below, (1, 2)), False),
        (with_inside(1), False),
        (with_inside(1, Renamed, (1, 1)), False),
        (Renamed(1, 1), False),
        (type("Leaf", (tuple,), {})((1,)), False),
        ([1], False),
        (None, False),
    ],
    ids=label,
)
def test_only_tuples_that_jax_takes_for_their_items_are_plain(node, expected):
    """Not those with other registrations or with attributes that may be data."""
    assert is_plain_tuple(node) is expected


def test_dict_keys_that_cannot_be_sorted_are_refused():
    """Keys of mixed types give an error, as they do in JAX."""
    with pytest.raises(SpecError, match=r"dict in a tree: expected keys that can be sorted, got"):
        children_of({1: 1, "a": 2})


def test_roles_are_inherited_from_the_field_above():
    """A leaf has the role of the innermost field that was given one explicitly."""
    tree = [Buffered(1, Affine(2, [3]), 4, Buffered(5, 6, 7))]

    assert [loc.role for loc in locations(tree)] == [
        "param", "buffer", "buffer", "lora", "lora", "buffer", "lora",
    ]  # fmt: skip
