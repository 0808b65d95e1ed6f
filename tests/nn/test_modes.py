"""`inference_mode`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError
from pytreemod.module.classes import Module
from pytreemod.module.fields import field


class Block(Module):
    """Has a flag as data, one as configuration below it, and one of another name."""

    inner: Any
    inference: bool = False
    training: bool = field(static=True, default=True)


def model():
    """Flags at every depth, in every container."""
    return {
        "block": Block(nn.Dropout(0.5)),
        "rest": [nn.Sequential([nn.Dropout(0.1), nn.BatchNorm(2)]), (nn.Lambda(jnp.tanh), 3.0)],
    }


def flags(tree):
    """All the flags of `model()`."""
    sequential = tree["rest"][0]
    block = tree["block"]
    return [block.inference, block.inner.inference, *(layer.inference for layer in sequential)]


def test_every_field_named_inference_is_set():
    """As data or configuration, in layers and in Modules of one's own; the rest is untouched."""
    before = model()

    on = nn.inference_mode(before)
    off = nn.inference_mode(on, value=False)

    assert flags(before) == [False] * 4
    assert flags(on) == [True] * 4
    assert flags(off) == [False] * 4
    assert on["block"].training is True
    assert on["rest"][0][1].weight is before["rest"][0][1].weight
    assert jax.tree.structure(off) == jax.tree.structure(before)


def test_a_tree_without_flags_comes_back():
    """Nothing to set is no mistake."""
    tree = [jnp.ones(2), None, {"a": 1}]

    assert nn.inference_mode(tree) is tree


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_value_is_true_or_false(value):
    """Anything else would end up in every layer."""
    with pytest.raises(
        ArgumentError, match=r"^inference_mode\(value\): expected True or False, got"
    ):
        nn.inference_mode(nn.Dropout(), value)
