"""What a tree was at one moment, whatever becomes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError, StateError
from pytreemod.io.snapshots import snapshot
from tests.helpers.comparing import assert_same
from tests.helpers.trees import every_tree


def mesh(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("d",), devices=jax.devices()[:count], axis_types=(kind,))


def given_away(tree):
    """A tree whose arrays were donated."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


@every_tree
def test_a_snapshot_is_the_tree(make):
    """snapshot(tree) == tree, of the same classes, with and without copies."""
    tree = make()
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        with pytest.raises(FileError, match="got shapes alone"):
            snapshot(tree, "snapshot")
        return

    assert_same(snapshot(tree, "snapshot"), tree)
    assert_same(snapshot(tree, "snapshot", copy=False), tree)


def test_what_the_loop_does_next_is_not_in_it():
    """Donated arrays, NumPy arrays that are written into, lists that grow, States that are used."""
    model, state = pm.make_with_state(nn.BatchNorm)(2)
    tree = {"x": jnp.arange(3.0), "n": np.arange(3.0), "l": [jnp.ones(2)], "state": state}
    expected = jax.tree.map(np.array, tree)
    leaves = jax.tree.leaves(tree)
    taken = snapshot(tree, "snapshot")

    model(jnp.ones((4, 2)), state)
    tree["n"][:] = 7
    tree["l"].append(1)
    given_away(leaves)

    jax.tree.map(np.testing.assert_array_equal, taken, expected)
    assert taken["state"].get(model.state_index)[0].shape == (2,)


def test_arrays_of_every_kind_stay_what_they_are():
    """Keys, weak types, four bits, no elements, half precision."""
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        keys,
        jnp.asarray(2.0) * 1,
        jnp.ones(3, jnp.int4),
        jnp.zeros((0, 2)),
        jnp.ones(2, jnp.bfloat16),
        jnp.ones(2, jnp.float8_e4m3fn),
    ]
    expected = [jax.typeof(x) for x in arrays]
    taken = snapshot(arrays, "snapshot")

    assert [jax.typeof(x) for x in taken] == expected
    assert expected[1].weak_type
    assert (jax.random.key_data(taken[0]) == jax.random.key_data(keys)).all()


def places():
    """Arrays on devices and in memories of many kinds."""
    auto, explicit, few = mesh(8), mesh(8, AxisType.Explicit), mesh(2)
    x = jnp.arange(8.0)
    device = x.sharding
    everywhere = [
        device,
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        device.with_memory_kind("pinned_host"),
        *[NamedSharding(m, PartitionSpec("d")) for m in (auto, explicit, few)],
        NamedSharding(auto, PartitionSpec()),
        NamedSharding(auto, PartitionSpec("d"), memory_kind="pinned_host"),
    ]
    return [jax.device_put(x, sharding) for sharding in everywhere]


@pytest.mark.parametrize("around", [None, mesh(8), mesh(2), mesh(8, AxisType.Explicit)])
def test_copies_are_where_the_arrays_are(around):
    """On all of their devices, whatever mesh the loop is in."""
    arrays = places()
    expected = [x.sharding for x in arrays]
    if around is None:
        taken = snapshot(arrays, "snapshot")
    else:
        with jax.set_mesh(around):
            taken = snapshot(arrays, "snapshot")
    given_away(arrays)

    assert [x.sharding for x in taken] == expected
    for x in taken:
        np.testing.assert_array_equal(x, np.arange(8.0))


def test_large_arrays_are_copied_before_they_are_given_away():
    """Though nobody waits for the copies: what overwrites the arrays comes after."""
    overwrite = jax.jit(lambda xs: [x * 2 + 1 for x in xs], donate_argnums=0)
    arrays = [jnp.full(300_000, float(i)) for i in range(4)]
    taken = []
    for _ in range(5):
        taken.append(snapshot(arrays, "snapshot"))
        arrays = overwrite(arrays)

    for i in range(4):
        expected = float(i)
        for step in taken:
            np.testing.assert_array_equal(step[i], np.full(300_000, expected))
            expected = 2 * expected + 1


def test_bad_numbers_are_values_too():
    """Who looks for NaN in a loop finds none in a copy, and waits for none."""
    with jax.debug_nans(True), jax.debug_infs(True):
        x = jax.device_put(np.array([np.nan, np.inf], np.float32))
        taken = snapshot(x, "snapshot")

    np.testing.assert_array_equal(taken, [np.nan, np.inf])


def test_arrays_of_one_device_are_copied_at_once():
    """There is one computation for all, and one compilation for all saves."""
    from pytreemod.io.snapshots import _copied_at_once

    before = _copied_at_once._cache_size()
    for value in range(3):
        snapshot({"a": jnp.full((3, 5), value), "b": [jnp.full(7, value)]}, "snapshot")

    assert _copied_at_once._cache_size() == before + 1


def test_without_copies_arrays_of_jax_are_the_same():
    """It takes no memory, which is why one asks for it; what is NumPy's is copied in any case."""
    x, y = jnp.ones(3), np.ones(3)
    taken = snapshot([x, y], "snapshot", copy=False)

    assert taken[0] is x
    assert not np.shares_memory(taken[1], y)


def test_masked_arrays_stay_masked():
    """So that who writes them can refuse them: a file has no masks."""
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    (taken,) = snapshot([masked], "snapshot")

    assert isinstance(taken, np.ma.MaskedArray)
    assert taken.mask.tolist() == [True, False]


def test_large_arrays_are_not_copied_with_small_ones():
    """On the CPU, who asks for a computation waits for it: these are asked for otherwise."""
    from pytreemod.io.snapshots import _LARGE, _can_be_copied_at_once, _groups

    small, large = jnp.ones(3), jnp.ones(_LARGE // 4)
    assert _groups([small, large, "text", jnp.ones(2)]) == [[0, 3], [1]]
    assert _can_be_copied_at_once(small)
    assert not _can_be_copied_at_once(large)
    there = jax.device_put(small, small.sharding.with_memory_kind("pinned_host"))
    assert not _can_be_copied_at_once(there)


def test_what_has_no_values_is_refused_by_name():
    """Traced arrays, donated ones, and whatever is copied inside of a trace."""
    x = jnp.ones(3)

    with pytest.raises(FileError, match=r"save: expected .* got one that is traced"):
        jax.jit(lambda x: snapshot({"a": x}, "save"))(x)
    with pytest.raises(FileError, match=r"got one that is traced\.\n  at a: f32\[3\]"):
        jax.jit(lambda y: snapshot({"a": x}, "save"))(x)
    x.delete()
    for copy in (True, False):
        with pytest.raises(FileError, match=r"got one that was donated\.\n  at a\.0: f32\[3\]"):
            snapshot({"a": [x], "b": 1}, "save", copy=copy)


def test_a_state_that_is_used_up_is_refused():
    """Its successor is to be saved."""
    model, state = pm.make_with_state(nn.BatchNorm)(2)
    model(jnp.ones((4, 2)), state)

    with pytest.raises(StateError, match="newest"):
        snapshot(state, "save")
