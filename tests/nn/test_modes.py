"""`inference_mode` and `with_mode`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
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


@pytest.mark.parametrize("value", [True, False])
def test_inference_mode_is_a_special_case(value):
    """Law: with_mode(m, inference=b) == inference_mode(m, b)."""
    before = model()

    assert nn.with_mode(before, inference=value) == nn.inference_mode(before, value)


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


def test_without_flags_the_tree_comes_back():
    """There is nothing to set."""
    tree = model()

    assert nn.with_mode(tree) is tree


def test_a_flag_that_was_traced_is_still_one():
    """Data that is True or False becomes an array under `jax.jit`, and is set nevertheless."""
    block = jax.jit(lambda block: block)(Block(None))

    assert isinstance(block.inference, jax.Array)
    assert nn.inference_mode(block).inference is True


def test_a_function_may_take_the_place_of_a_flag():
    """Where it is configuration; as data it would be no leaf for JAX."""
    policy = jax.checkpoint_policies.everything_saveable
    block = Block(None)

    assert nn.with_mode(block, training=policy).training is policy
    with pytest.raises(
        ArgumentError, match=r"^with_mode\(inference\): expected True or False, got"
    ):
        nn.with_mode(block, inference=policy)


def test_numpys_true_becomes_pythons():
    """So that the structure is that of any other model in this mode."""
    assert nn.with_mode(nn.Dropout(), inference=np.True_).inference is True


def test_only_a_part_is_set_by_tree_at():
    """The flags of one of the layers."""
    layers = [nn.Dropout(0.5), nn.Dropout(0.5)]

    quiet = pm.tree_at(lambda m: m[1], layers, replace_fn=lambda m: nn.with_mode(m, p=0.0))

    assert [layer.p for layer in quiet] == [0.5, 0.0]


class Rate(Module):
    """Converts what it is given, and checks it together with what is below."""

    rate: float = field(static=True, converter=float)
    below: Any = None

    def __check_init__(self):
        lowest = 0.0 if self.below is None else self.below.rate
        if lowest > self.rate:
            raise ValueError(f"{self.rate} is less than {lowest}")


def test_converters_and_checks_run():
    """As in `replace`; a check sees what was set further in, whatever the order."""
    rates = Rate(3.0, Rate(2.0))

    assert nn.with_mode(rates, rate="1").below.rate == 1.0
    with pytest.raises(ValueError, match=r"^could not convert"):
        nn.with_mode(rates, rate="three")
    with pytest.raises(ValueError, match=r"^-1\.0 is less than 0\.0$"):
        nn.with_mode(rates, rate=-1)


class Encoder(Module):
    """Uses the name of the flag for something else."""

    inference: Any


WRONG = {
    "unknown": (
        {"momentun": 0.5},
        ArgumentError,
        r"^with_mode\(momentun\): expected a field that the model has \(axis_name, .*, \.\.\.\), "
        r"got 'momentun', which occurs nowhere in it\.\n"
        r"  did you mean 'momentum'\?$",
    ),
    "nothing like it": (
        {"zzz": 1},
        ArgumentError,
        r"^with_mode\(zzz\): expected .* got 'zzz', which occurs nowhere in it\.$",
    ),
    "a place in State": (
        {"marker": "a"},
        ArgumentError,
        r"^with_mode\(marker\): expected a field that the model has",
    ),
    "array": (
        {"weight": jnp.ones(2)},
        ArgumentError,
        r"^with_mode\(weight\): expected a field that is configuration, or True or False, got one "
        r"that is other data: f32\[2\]\.\n"
        r"  at \['rest'\]\[0\]\.layers\[1\]\.weight\n"
        r"  set this one by its place, or declare it with pm\.field\(static=True\):\n"
        r"      model = pm\.tree_at\(\"\['rest'\]\[0\]\.layers\[1\]\.weight\", model, new\)$",
    ),
    "Module": (
        {"inner": None},
        ArgumentError,
        r"^with_mode\(inner\): .* got one that is other data: a Dropout\.",
    ),
    "flag": (
        {"inference": "yes"},
        ArgumentError,
        r"^with_mode\(inference\): expected True or False, got 'yes'\.\n  at ",
    ),
}


@pytest.mark.parametrize(("changes", "error", "text"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_set_is_refused(changes, error, text):
    """Names that occur nowhere, data, and values that would not fit."""
    with pytest.raises(error, match=text):
        nn.with_mode(model(), **changes)


def test_a_model_without_fields_says_so():
    """There is no list to choose from."""
    with pytest.raises(ArgumentError, match=r"\(it has none that can be set\), got 'p'"):
        nn.with_mode([jnp.ones(2)], p=0.1)


@pytest.mark.parametrize("inference", [nn.Dropout(), jnp.ones(2), None, jnp.zeros(2, bool)])
def test_data_that_is_called_inference_is_not_overwritten(inference):
    """An inference network is no flag."""
    with pytest.raises(
        ArgumentError, match=r"^inference_mode: expected a field that is configuration, or True"
    ):
        nn.inference_mode(Encoder(inference))


def test_a_traced_flag_is_explained():
    """A mode is structure; `filter_cond` chooses between two models."""
    dropout = nn.Dropout(0.5)

    def traced(flag):
        return nn.with_mode(dropout, inference=flag)(jnp.ones(2))

    def chosen(flag):
        on, off = (nn.with_mode(dropout, inference=mode) for mode in (True, False))
        return pm.filter_cond(flag, on, lambda x: off(x, key=jax.random.key(0)), jnp.ones(2))

    text = (
        r"True or False, got a traced array\.\n  at inference\n[^\n]*\n      y = pm\.filter_cond\("
    )
    with pytest.raises(ArgumentError, match=text):
        jax.jit(traced)(True)
    assert jax.jit(chosen)(True).tolist() == [1.0, 1.0]
