"""Whether trees agree, and where they differ: arrays by type, all other values by being one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytreemod.tree.differences import (
    MISSING,
    Slot,
    aval_of,
    compare,
    is_number,
    is_value,
    varying_axes,
    walk,
)
from pytreemod.tree.paths import path_text
from tests.helpers.trees import Affine, affine, ramp


def same_shape(first, second):
    """Arrays agree by shape in these tests."""
    return aval_of(first).shape == aval_of(second).shape


def found(first, second, fits=same_shape):
    """Where two trees do not agree: paths and texts."""
    return [(jax.tree_util.keystr(d.path), *d.texts) for d in compare(first, second, fits)]


@pytest.mark.parametrize(
    ("leaf", "number", "value"),
    [
        (1, True, True),
        (True, True, True),
        (1j, True, True),
        (np.float32(1), False, True),
        (jnp.ones(2), False, True),
        ("1", False, False),
        (None, False, False),
    ],
)
def test_numbers_and_values(leaf, number, value):
    """Plain Python numbers are values, and so are arrays."""
    assert is_number(leaf) is number
    assert is_value(leaf) is value


def test_slots_stand_for_arrays():
    """A slot has the type of its array."""
    slot = Slot(jax.typeof(ramp(2)))
    assert aval_of(slot) == aval_of(ramp(2))
    assert found([slot], [ramp(2)]) == []
    assert found([slot], [ramp(3)]) == [("[0]", "f32[2]", "f32[3]")]


TREES = st.recursive(
    st.sampled_from([1, 1.0, True, "a", None]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.tuples(inner),
    ),
    max_leaves=6,
)


@given(TREES)
def test_a_tree_agrees_with_itself(tree):
    """Whatever it holds."""
    assert compare(tree, tree, same_shape) == []


@given(TREES, TREES)
def test_trees_agree_both_ways(first, second):
    """There is a difference one way exactly if there is one the other way."""
    forth = compare(first, second, same_shape)
    assert bool(forth) is bool(compare(second, first, same_shape))
    if jax.tree.structure(first) != jax.tree.structure(second):
        assert forth


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([ramp(2), "a"], [ramp(2), "b"], [("[1]", "'a'", "'b'")]),
        ({"a": 1}, {"a": 1, "b": 2}, [("['b']", "nothing", "2")]),
        ([1, 2], (1, 2), [("", "list of 2", "tuple of 2")]),
        ([1, 2], [1], [("[1]", "2", "nothing")]),
        ({"a": [1]}, {"a": ramp(2)}, [("['a']", "list of 1", "f32[2]")]),
        (affine(), Affine(ramp(1), None), [(".weight", "f32[2,3]", "f32[1]")]),
        ([None], [1], [("[0]", "None", "1")]),
    ],
)
def test_what_differs_is_found_by_path(first, second, expected):
    """As deep as both sides go."""
    assert found(first, second)[: len(expected)] == expected


@jax.tree_util.register_pytree_node_class
class Noted:
    """A node of a user's that keeps something beside its children."""

    def __init__(self, value, note):
        self.value, self.note = value, note

    def tree_flatten(self):
        return (self.value,), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        return cls(*children, note)


def test_nodes_that_agree_are_not_named():
    """Of two sibling nodes only the one that differs; its configuration, too, if that differs."""
    same, other = Noted(1, "a"), Noted(1, "b")

    assert [path for path, _, _ in found([same, [1], same], [same, [1], other])] == ["[2]"]
    assert [path for path, _, _ in found([same, [1], "a"], [same, [1], "b"])] == ["[2]"]
    assert [path for path, _, _ in found([same, [1], [same]], [same, [1], (same,)])] == ["[2]"]


def test_auxiliary_data_differ_item_by_item():
    """The item of the first tree comes first."""
    (entry,) = compare([Noted(1, ("a", 1))], [Noted(1, ("a", 2))])

    assert entry.line() == "[0] (auxiliary data): 1 -> 2"


def test_what_is_weak_is_told():
    """Two arrays of one dtype may differ in that alone."""
    ((_, weak, strong),) = found([jnp.asarray(1.0)], [jnp.ones(())], lambda a, b: False)

    assert (weak, strong) == ("f32[] (weak)", "f32[]")


def test_what_looks_alike_is_told_apart():
    """Two objects of one text are still two."""

    class Odd:
        def __repr__(self):
            return "odd"

    (entry,) = compare([Odd()], [Odd()])
    assert entry.line("x", "{} and {}") == "x[0]: odd and odd, not equal"


def test_what_a_difference_is_of():
    """Arrays or numbers on both sides; only dtypes; configuration."""
    ((dtypes,), (arrays,), (rest,)) = (
        compare([a], [b], lambda a, b: False)
        for a, b in [(ramp(2), jnp.arange(2)), (ramp(2), ramp(3)), ("a", ramp(2))]
    )
    assert (dtypes.of_arrays, dtypes.of_dtypes) == (True, True)
    assert (arrays.of_arrays, arrays.of_dtypes) == (True, False)
    assert (rest.of_arrays, rest.of_dtypes) == (False, False)
    (missing,) = compare({}, {"a": ramp(1)}, same_shape)
    assert missing.old is MISSING


def test_axes_over_which_an_array_varies():
    """None outside of a `shard_map`; its axes inside, where the array differs."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, seen = jax.sharding.PartitionSpec("data"), []

    def look(x):
        seen.append(varying_axes(jax.typeof(x)))
        return x

    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec))(ramp(2))
    assert seen == [{"data"}]
    assert varying_axes(aval_of(ramp(2))) == frozenset()


def test_a_pair_at_which_the_walk_stops_is_the_same():
    """Its children are not compared."""
    tree = {"a": [1, 2], "b": 3}
    pairs = walk(tree, {"a": None, "b": 4}, stops=lambda node: node is None)

    assert [(path_text(each.path), each.kind) for each in pairs] == [
        ("['a']", "same"),
        ("['b']", "value"),
    ]
