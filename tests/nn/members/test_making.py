"""How members are made: as one."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.nn.members.checks import STACK
from pytreemod.nn.members.making import make_members
from tests.goldens import refusals


class Scale(pm.Module):
    """A layer with one number, drawn if there is a key."""

    by: jax.Array

    def __init__(self, start=1.0, key=None):
        self.by = jnp.asarray(start) if key is None else jax.random.uniform(key)

    def __call__(self, x):
        return self.by * x


def test_every_layer_has_a_key_of_its_own():
    """And is made as one alone would be with that key."""
    key = jax.random.key(0)
    layer = make_members(STACK, Scale, 3, key)

    assert layer.by.tolist() == [float(jax.random.uniform(k)) for k in jax.random.split(key, 3)]


def test_keys_are_taken_from_init_keys():
    """As many as there are layers, without a split."""
    layer = make_members(STACK, Scale, 3, pm.init_keys(jax.random.key(0)))
    taken = pm.init_keys(jax.random.key(0)).take(3)

    assert layer.by.tolist() == [float(jax.random.uniform(key)) for key in taken]


@pytest.mark.parametrize("make", [Scale, lambda: Scale(), ft.partial(Scale, 1.0)])
def test_without_a_key_the_layers_are_alike(make):
    """They are mapped, so the array has the leading axis."""
    assert make_members(STACK, make, 3, None).by.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("key", [None, jax.random.key(0)])
def test_a_function_that_takes_no_key_is_not_given_one(key):
    """Also if the Stack has one."""
    assert make_members(STACK, lambda: Scale(2.0), 2, key).by.tolist() == [2.0, 2.0]


def test_keywords_take_a_key():
    """Whatever they are called."""
    layer = make_members(STACK, lambda **options: Scale(**options), 2, jax.random.key(0))

    assert layer.by[0] != layer.by[1]


test_refusals = refusals(globals())
