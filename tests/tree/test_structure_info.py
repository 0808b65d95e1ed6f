"""Facts that all trees of one structure share."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.module.reading import is_computed
from pytreemod.tree.effects import states_in
from pytreemod.tree.nodes import locations, record_of
from pytreemod.tree.structure_info import StructureInfo, info_of
from tests.helpers.computing import Generated, Scaled
from tests.helpers.trees import every_tree, ramp


class Counting(pm.Module):
    """Arrays of three roles, and a token."""

    weight: jax.Array
    mean: jax.Array = pm.buffer()
    scale: jax.Array = pm.field(role="scale")
    count: pm.StateIndex = pm.field(default_factory=lambda: pm.StateIndex(jnp.zeros(())))


def counting():
    """A model, and the State of its token."""
    return pm.make_with_state(Counting)(ramp(2), ramp(2), ramp(2))


def nodes_below(tree, is_leaf):
    """The nodes of a kind, wherever they are."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_leaf) if is_leaf(node)]


@every_tree
def test_traits_are_what_a_look_at_the_tree_itself_finds(make):
    """Roles in the order of the leaves; the rare nodes by themselves."""
    tree = make()

    assert info_of(jax.tree.structure(tree)) == StructureInfo(
        roles=tuple(place.role for place in locations(tree)),
        has_states=bool(states_in(tree)),
        has_computed=bool(nodes_below(tree, is_computed)),
        has_records=bool(nodes_below(tree, lambda node: record_of(node) is not None)),
    )


def test_roles():
    """As the class declares them, and as one model was given them."""
    model, _ = counting()
    other = pm.with_role(model, pm.select.path("weight"), "ema")

    assert info_of(jax.tree.structure([model, ramp(2)])).roles == (
        "param",
        "buffer",
        "scale",
        "param",
    )
    assert info_of(jax.tree.structure(other)).roles == ("ema", "buffer", "scale")


@pytest.mark.parametrize("around", [lambda x: x, lambda x: [1, {"a": x}], lambda x: (ramp(2), x)])
def test_rare_nodes_are_found_wherever_they_stand(around):
    """A State, and a computed leaf, inside of containers."""
    _, state = counting()
    computing = Generated(Scaled(ramp(2), ramp(2)), ramp(2))
    plain = Generated(ramp(2), ramp(2))

    found = [info_of(jax.tree.structure(around(x))) for x in (state, computing, plain)]
    assert [traits.has_states for traits in found] == [True, False, False]
    assert [traits.has_computed for traits in found] == [False, True, False]


def test_a_used_up_state_has_nothing_to_do_with_it():
    """A structure is that of every State with these tokens."""
    model, state = counting()
    structure = jax.tree.structure(state)
    state.set(model.count, jnp.ones(()))

    assert info_of(structure).has_states


def test_one_walk_for_each_structure():
    """Trees that differ in arrays alone have the same traits, as one object."""
    one, other = Generated(ramp(2), ramp(2)), Generated(ramp(3), ramp(3))

    assert info_of(jax.tree.structure(one)) is info_of(jax.tree.structure(other))
