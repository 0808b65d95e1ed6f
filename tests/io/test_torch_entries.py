"""Where each array of a model is in a state dict."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn, register_torch_layout, to_torch
from pytreemod.errors import StructureError
from tests.goldens import refusals
from tests.helpers.trees import affine


class Counter(pm.Module):
    """A layer with its own value, and a stream."""

    weight: jax.Array
    count: pm.StateIndex
    noise: pm.RngStream

    def __init__(self):
        self.weight = jnp.ones(2)
        self.count = pm.StateIndex({"n": jnp.asarray(0), "sums": [jnp.zeros(2)]})
        self.noise = pm.RngStream()


def names_in(model, state=None):
    """The names of a model's arrays in PyTorch."""
    return [*to_torch(model, state)]


def test_places_are_named_as_in_pytorch():
    """By path where nothing else is registered; lists of layers count all of them."""
    linear = nn.Linear(2, 2, key=jax.random.key(0))
    model = {"net": nn.Sequential([nn.Identity(), linear]), "parts": [affine(), 1.5, None]}

    assert names_in(model) == ["net.1.weight", "net.1.bias", "parts.0.weight", "parts.0.bias"]


def test_values_of_tokens_are_where_the_tokens_are():
    """A user's buffers are called by their path, whether their values are in a State yet or not."""
    model, state = pm.make_with_state(lambda: [Counter()])()
    names = ["0.weight", "0.count.n", "0.count.sums.0"]
    state = state.seed(jax.random.key(0))

    assert names_in(model, state) == names
    assert names_in(state.fill(model)) == names


def test_members_have_numbers():
    """One array here is several there, each with a name, in stacks of stacks, too."""
    make = ft.partial(nn.Stack, ft.partial(nn.Linear, 2, 2, use_bias=False), 2)
    names = names_in([nn.Stack(make, 3, key=jax.random.key(0))])

    assert names == [f"0.{i}.{j}.weight" for i in range(3) for j in range(2)]


class Flat(pm.Module):
    """Two layers without a name in PyTorch."""

    one: pm.Module
    two: pm.Module


def test_two_arrays_with_one_name_are_told():
    """An array in a nameless layer may have the name of a sibling."""
    register_torch_layout(Flat, {"one": "", "two": ""})
    with pytest.raises(StructureError, match="a different name for each array") as caught:
        to_torch(Flat(affine(), affine()))

    assert "at weight: one.weight and two.weight" in str(caught.value)


test_refusals = refusals(globals())
