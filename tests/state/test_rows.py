"""The facts that a State knows about its values."""

import pickle

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod.state.rows import Row, Rows
from pytreemod.tree.paths import PathName


def rows_of(*names):
    """Rows that are recognized by their names."""
    return Rows(Row(name, PathName.parse(name), pm.StateIndex) for name in names)


def test_registers_of_equal_rows_are_equal():
    """In order, and whether their hashes were asked for or not."""
    first, second = rows_of("a", "b.c"), rows_of("a", "b.c")
    same = first

    assert first == second
    assert first == same
    assert hash(first) == hash(second)
    assert first != rows_of("b.c", "a")
    assert first != ("a", "b.c")


def test_register_finds_rows_by_marker():
    """Its name and its kind."""
    two = rows_of("a", "b.c")

    assert two["b.c"] == Row("b.c", PathName("b.c"), pm.StateIndex)
    assert two["b.c"].name.steps == ("b", "c")
    assert ("a" in two, "c" in two) == (True, False)
    assert [row.name for row in two.only({"b.c"})] == ["b.c"]
    assert (two.of_kind(pm.StateIndex), two.of_kind(pm.RngStream)) == (["a", "b.c"], [])
    assert repr(two) == "<tokens a, b.c>"


def test_registers_are_pickled_without_their_hashes():
    """For the hash of a string is another one in another process."""
    one = rows_of("layers[0].count")
    hash(one)
    back = pickle.loads(pickle.dumps(one))

    assert back == one
    assert back.hash is None
    assert back["layers[0].count"].name.steps == ("layers", "0", "count")


def test_the_ranks_of_a_value_belong_to_its_row():
    """A State of one member is another structure than one of all; that of a map is the same."""
    token = pm.StateIndex(jnp.zeros(()))
    one, many = (pm.make_with_state(lambda n=n: pm.StateIndex(jnp.zeros(n)))()[1] for n in ((), 3))
    form = jax.tree.structure(pm.State(token))
    mapped = jax.tree.map(lambda x: jnp.broadcast_to(x, 3), one)

    assert form.node_data()[1].rows[0].ranks == (0,)
    assert jax.tree.structure(one) == jax.tree.structure(mapped) != jax.tree.structure(many)


def test_states_that_follow_from_one_another_share_their_rows():
    """So that comparing their structures costs nothing."""
    index = pm.StateIndex(jnp.zeros(2))
    state = pm.State(index)
    before = jax.tree.structure(state)
    after = jax.tree.structure(jax.tree.map(jnp.copy, state).set(index, jnp.ones(2)))

    assert before.node_data()[1] is after.node_data()[1]
