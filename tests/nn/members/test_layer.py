"""`Stack` and `Ensemble` as sequences."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.labels import label

make = ft.partial(nn.Linear, 2, 2)
STACK = nn.Stack(make, 3, key=jax.random.key(0))
ENSEMBLE = nn.Ensemble(make, 3, key=jax.random.key(0))
both = pytest.mark.parametrize("members", [STACK, ENSEMBLE], ids=label)


@both
def test_members_are_taken_by_number_and_slice(members):
    """As from a list of them."""
    listed = list(members)

    assert len(members) == len(listed) == 3
    assert pm.tree_equal(members.unstack(), listed)
    assert all(pm.tree_equal(members[i], listed[i]) for i in (-3, 0, 2))
    assert type(members[::-2]) is type(members)
    assert pm.tree_equal(list(members[::-2]), listed[::-2])


@both
def test_what_one_member_computes(members):
    """With its own arrays alone; a number that is out of range ends a loop."""
    x = jnp.ones(2)
    expected = [layer.weight @ x + layer.bias for layer in members]

    assert jnp.allclose(jnp.stack([layer(x) for layer in members]), jnp.stack(expected))
    with pytest.raises(IndexError, match=r"\[\.\.\.\]: expected an index of one of 3 .*s, got 3"):
        members[3]


@both
def test_their_number_is_that_of_the_arrays(members):
    """Another one comes with other members."""
    name = "depth" if members is STACK else "n"
    with pytest.raises(
        ArgumentError, match=rf"\({name}\): expected 3, the value for which its layers"
    ):
        members.replace(**{name: 4})
    with pytest.raises(ArgumentError, match=rf"\({name}\): expected an integer of at least"):
        members.replace(**{name: -1})
