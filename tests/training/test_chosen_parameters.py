"""Computed leaves instead of arrays, and selected ones."""

import functools as ft

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod import nn
from pytreemod.training.chosen_parameters import choose_parameters
from pytreemod.tree.paths import path_text
from pytreemod.tree.selecting import as_selector

KEY = jax.random.key(0)


def chosen(model, selector):
    """Paths, and how many axes are of layers."""
    return [
        (path_text(one.path), one.members)
        for one in choose_parameters(model, as_selector(selector))
    ]


def test_a_computed_leaf_is_one():
    """Whichever part of it is chosen; the outermost, where one is in another."""
    linear = nn.Linear(2, 2, key=KEY)
    half = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, jnp.ones((2, 2))))

    assert chosen(half, ...) == [("weight", 0), ("bias", 0)]
    assert chosen(half, "weight.trees[1]") == [("weight", 0)]
    assert chosen(pm.lora(half, "weight", 1, key=KEY), "weight.base") == [("weight", 0)]


def test_layers_that_are_held_as_one_are_counted():
    """For each stack, and for a network that scans; other leaves are not."""
    stack = nn.Stack(lambda key: nn.Stack(ft.partial(nn.Linear, 2, 2), 3, key=key), 2, key=KEY)
    beside = [stack, nn.Linear(2, 2, key=KEY)]
    scanning = nn.MLP(2, 2, 2, 3, scan=True, key=KEY)

    assert chosen(beside, "**.weight") == [("[0].layer.layer.weight", 2), ("[1].weight", 0)]
    assert [members for _, members in chosen(scanning, "**.weight")] == [0, 1, 0]
    assert [members for _, members in chosen(nn.MLP(2, 2, 2, 3, key=KEY), "**.weight")] == [0] * 4
    assert chosen(nn.MLP(2, 2, 2, 0, scan=True, key=KEY), "**.weight") == [("layers[0].weight", 0)]


def test_a_function_is_mapped_over_them():
    """It gets one layer's arrays."""
    stack = nn.Stack(ft.partial(nn.Linear, 2, 2), 4, key=KEY)
    (one,) = choose_parameters(stack, as_selector("layer.weight"))

    assert one.sizes() == (4,)
    assert one.each(lambda w: w[0])(one.node).shape == (4, 2)


def test_what_is_in_a_net_with_its_state_is_found():
    """Its parameters are below `model`."""
    net = pm.stateful(nn.BatchNorm(2))

    assert ("model.weight", 0) in chosen(net, ...)
