from typing import Any

import jax
import jax.numpy as jnp

from pytreemod import nn
from pytreemod.module.classes import Module
from pytreemod.module.fields import field


class Block(Module):
    """Has a flag as data, one as configuration below it, and one of another name."""

    inner: Any
    inference: bool = False
    training: bool = field(static=True, default=True)


def model():
    return {
        "block": Block(nn.Dropout(0.5)),
        "rest": [nn.Sequential([nn.Dropout(0.1), nn.BatchNorm(2)]), (nn.Lambda(jnp.tanh), 3.0)],
    }


def flags(tree):
    sequential = tree["rest"][0]
    block = tree["block"]
    return [block.inference, block.inner.inference, *(layer.inference for layer in sequential)]


def test_every_field_named_inference_is_set():
    """As data or configuration, in layers and in your own Modules; other fields are unchanged."""
    before = model()

    on = nn.inference_mode(before)
    off = nn.inference_mode(on, value=False)

    assert flags(before) == [False] * 4
    assert flags(on) == [True] * 4
    assert flags(off) == [False] * 4
    assert on["block"].training is True
    assert on["rest"][0][1].weight is before["rest"][0][1].weight
    assert jax.tree.structure(off) == jax.tree.structure(before)


def test_any_configuration_is_set_by_name():
    """Numbers, strings, functions; several at once, everywhere, and nothing else."""
    before = [model(), nn.MLP(2, 2, 3, 1, key=jax.random.key(0))]

    after = nn.with_mode(before, p=0.25, inference=True, activation=jnp.tanh)

    sequential = after[0]["rest"][0]
    assert after[0]["block"].inner.p == sequential[0].p == 0.25
    assert flags(after[0]) == [True] * 4
    assert after[1].activation is jnp.tanh
    assert flags(before[0]) == [False] * 4
    assert after[1].layers[0] is before[1].layers[0]


def test_a_flag_that_was_traced_is_still_one():
    """Data that is True or False becomes an array under `jax.jit`, and is set nevertheless."""
    block = jax.jit(lambda block: block)(Block(None))

    assert isinstance(block.inference, jax.Array)
    assert nn.inference_mode(block).inference is True


class Rate(Module):
    """Converts its argument, and checks it together with inner fields."""

    rate: float = field(static=True, converter=float)
    below: Any = None

    def __check_init__(self):
        lowest = 0.0 if self.below is None else self.below.rate
        if lowest > self.rate:
            raise ValueError(f"{self.rate} is less than {lowest}")


def test_converters_and_checks_run():
    """As in `replace`; a check sees inner fields already set, whatever the order."""
    rates = Rate(3.0, Rate(2.0))

    assert nn.with_mode(rates, rate="1").below.rate == 1.0
