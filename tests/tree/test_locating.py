"""The proxies that an access function gets, and the accesses that it may make."""

from collections import OrderedDict

import jax
import pytest

import pytreemod as pm
from pytreemod.tree.locating import locate
from pytreemod.tree.paths import path_text
from tests.goldens import refusals
from tests.helpers.trees import (
    Affine,
    Containers,
    Defaults,
    Holder,
    OwnGetattr,
    OwnGetattribute,
    OwnInit,
    Pair,
    Parent,
    Registered,
    Static,
    WithProperty,
    Wrapping,
    affine,
    double,
    ramp,
)


def named(where, tree, is_leaf=None):
    """The paths that `where` names."""
    found = locate(where, tree, is_leaf, "where")
    texts = [path_text(target.path) for target in found.targets]
    return texts[0] if found.single else texts


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
        """A method to be used as an access."""
        return self.parts[len(self.parts) // 2]

    @property
    def last(self):
        """A property to be used as an access."""
        return self.parts[-1]

    def __getitem__(self, i):
        return self.parts[i]

    def __iter__(self):
        return iter(self.parts)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (lambda t: t, "<root>"),
        (lambda t: t["layers"], "['layers']"),
        (lambda t: t["layers"][0], "['layers'][0]"),
        (lambda t: t["layers"][-1].act.bias, "['layers'][2].act.bias"),
        (lambda t: t["layers"][1].size, "['layers'][1].size"),
        (lambda t: t["layers"][2].name, "['layers'][2].name"),
        (lambda t: t["layers"][2].bias, "['layers'][2].bias"),
        (lambda t: t["pair"].second[0], "['pair'].second[0]"),
        (lambda t: t["pair"].second[1], "['pair'].second[1]"),
        (lambda t: t["ordered"]["a"][0], "['ordered']['a'][0]"),
        (lambda t: t["registered"].value[0], "['registered'].value[0]"),
        (lambda t: t["nothing"], "['nothing']"),
        (lambda t: [x.weight for x in t["layers"]], [f"['layers'][{i}].weight" for i in range(3)]),
        (lambda t: (t["pair"], t["nothing"]), ["['pair']", "['nothing']"]),
        (lambda t: [x for x in t["layers"] if isinstance(x, OwnInit)], ["['layers'][1]"]),
        (lambda t: t["layers"][1].bias if t["layers"][1].size == 2 else t, "['layers'][1].bias"),
        (lambda t: getattr(t["layers"][0], "weight"), "['layers'][0].weight"),  # noqa: B009
        (
            lambda t: [*t["layers"][:2], t["pair"].first],
            ["['layers'][0]", "['layers'][1]", "['pair'].first"],
        ),
        (lambda t: (), []),
        (lambda t: [(t["pair"].first,), [t["nothing"]]], ["['pair'].first", "['nothing']"]),
    ],
)
def test_access_is_recognized(where, expected):
    """Attributes, items, slices, loops, isinstance and configuration, alone and in sequences."""
    assert named(where, everything()) == expected


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (lambda m: m.middle(), "parts[1]"),
        (lambda m: m.last, "parts[2]"),
        (lambda m: m[0], "parts[0]"),
        (list, ["parts[0]", "parts[1]", "parts[2]"]),
        (Middle.middle, "parts[1]"),
    ],
)
def test_methods_and_properties_work_as_accesses(where, expected):
    """The class's own methods find nodes in the proxy as in the tree."""
    assert named(where, Middle([1, affine(), 3])) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnGetattr(ramp(2)),
        lambda: OwnGetattribute(ramp(2)),
        lambda: WithProperty(ramp(2)),
        lambda: Parent(2),
        lambda: Static(ramp(2), 3),
    ],
)
def test_classes_that_answer_for_themselves(make):
    """A class's own __getattr__, __getattribute__ or property does not get in the way."""
    assert named(lambda m: m.weight, make()) == "weight"
    if isinstance(make(), (OwnGetattr, OwnGetattribute)):
        assert locate(lambda m: [m.weight] if m.magic == 42 else m, make(), None, "w").targets


class Members(pm.Module):
    """Several layers as one, taken apart as users write it."""

    stacked: Affine
    mask: object = None

    def __getitem__(self, i):
        return jax.tree.map(lambda leaf: leaf[i] if pm.is_array(leaf) else leaf, self.stacked)

    @property
    def halved(self):
        """A copy with other arrays, and everything else unchanged."""
        return jax.tree.map(lambda leaf: leaf / 2 if isinstance(leaf, jax.Array) else leaf, self)

    @property
    def same(self):
        """A copy with the same arrays."""
        return jax.tree.map(lambda leaf: leaf, self)


def test_a_copy_that_holds_the_same_leaf_names_it():
    """It is the leaf that is named, whichever way it was reached."""
    assert named(lambda m: m.same.stacked.weight, Members(affine())) == "stacked.weight"
    assert named(jax.tree.leaves, Members(affine())) == ["stacked.weight", "stacked.bias"]


class Single:
    """A node without children, of which there is one object."""

    def __new__(cls):
        return ONLY


ONLY = object.__new__(Single)
jax.tree_util.register_pytree_node(Single, lambda _: ((), None), lambda *_: ONLY)


def test_a_node_that_is_one_object_in_two_places():
    """Its paths are distinguished."""
    tree = [ONLY, {"a": ONLY}, ONLY]

    assert [named(lambda t, i=i: t[i], tree) for i in (0, 2)] == ["[0]", "[2]"]
    assert named(lambda t: t[1]["a"], tree) == "[1]['a']"


EMPTY = Members(None)
"""Two Nones."""


@pytest.mark.parametrize(
    ("where", "tree", "expected"),
    [
        (lambda m: [x for x in (m.stacked, m.mask) if x is not None], EMPTY, []),
        (lambda m: [x for x in (m.stacked, m.mask) if x is not None], Members(None, ()), ["mask"]),
        (lambda m: [m.stacked, m.mask], EMPTY, ["stacked", "mask"]),
        (lambda m: [m.stacked, m.mask], Members((), 2), ["stacked", "mask"]),
        (lambda m: [m.stacked, m.mask], Members((), None), ["stacked", "mask"]),
        (lambda m: [m.stacked, m.mask], Members((), ()), ["stacked", "mask"]),
        (lambda m: (m.stacked,), Members(()), ["stacked"]),
        (lambda m: m.stacked, Members(()), "stacked"),
        (lambda m: [[x for x in [m.mask] if x], m.stacked], Members(()), ["stacked"]),
        (lambda m: [], EMPTY, []),
        (lambda m: (), EMPTY, []),
        (lambda m: ((), []), Members(()), []),
    ],
)
def test_an_empty_answer_names_nothing(where, tree, expected):
    """None and `()` are named where `where` returns them; no node is confused with another."""
    assert named(where, tree) == expected


def nested(depth):
    """A leaf in so many lists."""
    tree = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def innermost(tree):
    """The content of the nested lists."""
    while isinstance(tree, list):
        tree = tree[0]
    return tree


def test_a_deep_tree():
    """As deep as Python's recursion limit allows; beyond it, the error names the depth."""
    assert innermost(pm.tree_at(innermost, nested(700), 2)) == 2
    assert innermost(pm.tree_at(pm.select.type(int), nested(400), replace_fn=str)) == "1"


def test_equal_nodes_are_told_apart():
    """One array at two paths, equal numbers, equal Nones: the access decides."""
    x = ramp(2)
    tree = [x, Holder(x), 1, 1, None, None, (), ()]

    assert named(lambda t: t[0], tree) == "[0]"
    assert named(lambda t: t[1].content, tree) == "[1].content"
    assert [named(lambda t, i=i: t[i], tree) for i in (2, 3, 4, 5, 6, 7)] == [
        f"[{i}]" for i in (2, 3, 4, 5, 6, 7)
    ]


def test_the_cost_follows_the_access():
    """Only nodes that `where` reads are built: the sibling is not."""
    opened = []

    @jax.tree_util.register_pytree_node_class
    class Spy:
        def tree_flatten(self):
            opened.append(self)
            return (), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    tree = Affine(1, Holder(Spy()))
    opened.clear()

    assert named(lambda m: m.weight, tree) == "weight"
    assert opened == []


def test_is_leaf_makes_leaves():
    """A node that is_leaf stops at is one leaf, None included."""
    tree = {"a": [1, None]}

    assert named(lambda t: t["a"], tree, lambda x: isinstance(x, list)) == "['a']"
    assert named(lambda t: t["a"][1], tree, lambda x: x is None) == "['a'][1]"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.weight", [f"['layers'][{i}].weight" for i in range(3)]),
        ("layers[0]", "['layers'][0]"),
        ("**.size", "['layers'][1].size"),
        ("nothing", "['nothing']"),
        ("ordered", "['ordered']"),
        ("*.*.act", "['layers'][2].act"),
    ],
)
def test_patterns_find_nodes(pattern, expected):
    """A path pattern names nodes, the outermost that match; configuration, too."""
    assert named(pattern, everything()) == expected


def test_nodes_with_their_own_equality():
    """Nodes whose `==` builds an expression, or refuses, are found by identity."""

    class Expression(pm.Module):
        parts: object

        def __eq__(self, other):
            return Expression((self, other))

        __hash__ = None

    tree = {"x": Expression(1.0), "y": [Expression(Expression(2.0))]}
    assert named(lambda t: t["x"], tree) == "['x']"
    assert named(lambda t: t["y"][0].parts.parts, tree) == "['y'][0].parts.parts"


def test_a_where_that_goes_through_a_wrapper():
    """Wrappers of a Module are nodes like others."""
    assert named(lambda m: m.fn.weight, Wrapping(affine())) == "fn.weight"
    assert (
        named(lambda m: m.content.__self__.bias, Holder(affine().scaled)) == "content.__self__.bias"
    )
    assert named(lambda m: m.content.__wrapped__.bias, Holder(pm.filter_jit(affine()))) == (
        "content.__wrapped__.bias"
    )


def test_containers_in_the_stand_in_are_containers():
    """len, `in`, items and enumerate see lists, tuples and dicts of the same sizes."""
    tree = Containers([1, 2], {"a": 3, "b": 4}, (5, double))

    assert named(lambda m: m.items[len(m.items) - 1], tree) == "items[1]"
    assert named(lambda m: [v for k, v in m.table.items() if k == "b"], tree) == ["table['b']"]
    assert named(lambda m: [m.pair[i] for i, _ in enumerate(m.pair)], tree) == [
        "pair[0]",
        "pair[1]",
    ]


def test_a_dict_is_gone_through_in_its_own_order():
    """Whatever the order of its keys: the nodes are those that `where` meets, in that order."""
    tree = {"b": 1, "c": [2], "a": 3}
    found = locate(lambda t: [t[name] for name in t if name != "c"], tree, None, "where")

    assert [target.node for target in found.targets] == [1, 3]
    made = pm.tree_at(lambda t: list(t.values()), tree, replace=["first", "second", "third"])
    assert list(made.items()) == [("a", "third"), ("b", "first"), ("c", "second")]


test_refusals = refusals(globals())
