"""The nodes that the access function of `tree_at` names.

The law: `where` gives the new nodes of the changed tree, and nothing else of it has changed.
"""

import functools as ft
from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.computing import Generated, Scaled, scaled
from tests.helpers.racing import race
from tests.helpers.trees import (
    Affine,
    Containers,
    Defaults,
    Holder,
    OwnGetattr,
    OwnInit,
    Pair,
    Registered,
    WithProperty,
    Wrapping,
    affine,
    double,
    ramp,
)

NEW = object()


def assert_names_its_nodes(where, tree):
    """The law above."""
    # A node of the tree is the same object each time; a sequence of nodes is made by `where`.
    is_single = where(tree) is where(tree)
    count = 1 if is_single else len(where(tree))
    changed = pm.tree_at(where, tree, replace_fn=lambda old: NEW)
    found = where(changed)

    assert ([found] if is_single else list(found)) == [NEW] * count
    # A node of the configuration is no leaf.
    assert sum(leaf is NEW for leaf in jax.tree.leaves(changed)) in (0, count)


def everything():
    """A tree of nodes of every kind."""
    return {
        "layers": [affine(), OwnInit(2), Defaults(ramp(1), act=affine())],
        "pair": Pair(1, (2, ())),
        "ordered": OrderedDict(z=1, a=[2]),
        "registered": Registered([1], "note"),
        "nothing": None,
    }


class Middle(pm.Module):
    """Finds its own parts."""

    parts: list

    def middle(self):
        return self.parts[len(self.parts) // 2]

    @property
    def last(self):
        return self.parts[-1]

    def __getitem__(self, i):
        return self.parts[i]

    def __iter__(self):
        return iter(self.parts)


@pytest.mark.parametrize(
    ("where", "make"),
    [
        (lambda t: t["layers"][-1].act.bias, everything),
        (lambda t: t["layers"][1].size, everything),
        (lambda t: t["ordered"]["a"][0], everything),
        (lambda t: t["nothing"], everything),
        (lambda t: [x.weight for x in t["layers"]], everything),
        (lambda t: [*t["layers"][:2], t["pair"].first], everything),
        (lambda t: t["layers"][1].bias if t["layers"][1].size == 2 else t, everything),
        (lambda m: m.middle(), lambda: Middle([1, affine(), 3])),
        (lambda m: m.last, lambda: Middle([1, affine(), 3])),
        (lambda m: list(m) if isinstance(m, Middle) else m, lambda: Middle([1, affine(), 3])),
        (lambda m: m.weight, lambda: OwnGetattr(ramp(2))),
        (lambda m: m.weight, lambda: WithProperty(ramp(2))),
        (lambda m: m.fn.weight, lambda: Wrapping(affine())),
        (lambda m: m.content.__self__.bias, lambda: Holder(affine().scaled)),
        (lambda m: m.items[len(m.items) - 1], lambda: Containers([1, 2], {}, (5, double))),
        (lambda m: [m.pair[i] for i, _ in enumerate(m.pair)], lambda: Containers([], {}, (5, 6))),
    ],
)
def test_accesses_of_every_kind(where, make):
    """Attributes, items, slices, loops, configuration, methods and properties; wrappers, too."""
    assert_names_its_nodes(where, make())


def test_equal_nodes_are_told_apart():
    """One array at two paths, equal numbers, Nones, empty tuples: the access decides."""
    x = ramp(2)
    tree = [x, Holder(x), 1, 1, None, None, (), ()]
    for i in range(len(tree)):
        changed = pm.tree_at(lambda t, i=i: t[i], tree, NEW)
        assert [node is NEW for node in changed] == [n == i for n in range(len(tree))]
    assert pm.tree_at(lambda t: t[1].content, tree, NEW)[0] is x


@pytest.mark.parametrize(
    ("where", "tree", "expected"),
    [
        (lambda m: [m.first, m.second], Pair((), None), Pair(0, 0)),
        (lambda m: [m.first, m.second], Pair((), ()), Pair(0, 0)),
        (lambda m: ((), []), Pair((), None), Pair((), None)),
    ],
)
def test_an_empty_answer_names_nothing(where, tree, expected):
    """None and `()` are named where `where` returns them; no node is confused with another."""
    assert pm.tree_at(where, tree, replace_fn=lambda _: 0) == expected


def test_a_deep_tree():
    """Python allows a thousand frames, of which a level takes two."""

    def innermost(tree):
        while isinstance(tree, list):
            tree = tree[0]
        return tree

    deep = [ft.reduce(lambda tree, _: [tree], range(n), 1) for n in (400, 400)]
    assert innermost(pm.tree_at(innermost, deep[0], 2)) == 2
    assert innermost(pm.tree_at(pm.select.type(int), deep[1], replace_fn=str)) == "1"


def test_is_leaf_makes_leaves():
    """A node that is_leaf stops at is one leaf, None included; nothing inside it can be named."""
    tree = {"a": [1, None]}
    is_list = lambda x: isinstance(x, list)  # noqa: E731
    assert pm.tree_at(lambda t: t["a"], tree, 0, is_leaf=is_list) == {"a": 0}
    assert pm.tree_at(lambda t: t["a"][1], tree, 0, is_leaf=lambda x: x is None) == {"a": [1, 0]}
    with pytest.raises(SpecError, match="only pick"):
        pm.tree_at(lambda t: t["a"][1], tree, 0, is_leaf=is_list)


def test_a_dict_keeps_its_own_order():
    """The nodes are those that `where` meets, in that order; the new dict has it, too."""
    tree = {"b": 1, "c": 2, "a": 3}
    made = pm.tree_at(lambda t: list(t.values()), tree, replace=["first", "second", "third"])
    assert list(made.items()) == [("b", "first"), ("c", "second"), ("a", "third")]


class Members(pm.Module):
    """Several layers as one, taken apart as users write it."""

    stacked: Affine
    axes: int = pm.field(static=True, default=3)

    def __getitem__(self, i):
        return jax.tree.map(lambda leaf: leaf[i] if pm.is_array(leaf) else leaf, self.stacked)


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        # A part of a leaf was taken for the leaf.
        (lambda m: m[0].weight, SpecError, r"f32\[3\].*at\[i\]"),
        (lambda m: (m.stacked.bias, m[0].weight), SpecError, r"no nodes"),
        (lambda m: m.stacked.weight.T, SpecError, r"only pick"),
        (lambda m: m.stacked(ramp(3)), SpecError, r"only pick"),
        (lambda m: jnp.sum(m.stacked.weight), SpecError, r"only pick"),
        (lambda m: m.stacked.bias if m.stacked.bias == 1 else m, SpecError, r"only pick"),
        (lambda m: m.stacked.bias if m.stacked.bias else m, SpecError, r"only pick"),
        (lambda m: [x for x in [m.stacked.bias] if pm.is_array(x)], SpecError, r"no nodes"),
        (lambda m: 3, SpecError, r"3"),
        (lambda m: len(m.stacked.weight.shape) + 1, SpecError, r"only pick"),
        (lambda m: m.axes + 1, SpecError, r"returns 4"),
        (lambda m: m.stacked.scaled, SpecError, r"Affine\.scaled"),
        (lambda m: [m.stacked.weight, 3], SpecError, r"3\]"),
        (lambda m: m.stacked.wieght, AttributeError, r"wieght"),
        ("stacked.wieght", SpecError, r"stacked\.wieght.*stacked\.weight"),
        (3, SpecError, r"\b3\b"),
        (pm.by({...: 0}), SpecError, r"by"),
        (lambda m: (m.stacked.weight, m.stacked.weight), SpecError, r"at stacked\.weight"),
        (lambda m: (m.stacked, m.stacked.bias), SpecError, r"at stacked\n.*at stacked\.bias"),
    ],
)
def test_what_names_no_node_is_an_error(where, error, text):
    """A computation, a choice by a value, a new object, a misspelt name, one node twice.

    Also in `select.at`, which takes the same functions.
    """
    with pytest.raises(error, match=f"(?s){text}") as caught:
        pm.tree_at(where, Members(affine(1)), replace_fn=lambda x: x)
    if "only pick" in str(caught.value):
        with pytest.raises(error, match=text):
            pm.filter(Members(affine(1)), pm.select.at(where))


def test_another_thread_computes_meanwhile():
    """`where` sees a computed leaf as stored; what others read at that time is computed."""
    made = Generated(scaled(), ramp(2))

    def read(i):
        if i % 2:
            return isinstance(made.weight, Scaled)
        return isinstance(pm.tree_at(lambda m: m.weight, made, replace_fn=lambda w: w).bias, Scaled)

    seen = []

    def where(model):
        seen.extend(race(read, 2))
        return model.weight.array

    assert pm.tree_at(where, made, ramp(2) + 1).weight.tolist() == [6.0, 9.0]
    assert not any(seen)
