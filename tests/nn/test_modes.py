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
from tests.goldens import refusals
from tests.labels import label

KEY = jax.random.key(0)


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

    assert pm.tree_equal(nn.inference_mode(tree), tree)


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

    assert pm.tree_equal(nn.with_mode(tree), tree)


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


def test_a_traced_flag_is_explained():
    """A mode is structure; `filter_cond` chooses between two models."""
    dropout = nn.Dropout(0.5)

    def chosen(flag):
        on, off = (nn.with_mode(dropout, inference=mode) for mode in (True, False))
        return pm.filter_cond(flag, on, lambda x: off(x, key=jax.random.key(0)), jnp.ones(2))

    assert jax.jit(chosen)(True).tolist() == [1.0, 1.0]


LAYERS = {
    "linear": nn.Linear(3, 4, key=KEY),
    "conv": nn.Conv2d(4, 6, 3, key=KEY),
    "mlp": nn.MLP(3, 2, 4, 2, key=KEY),
    "scanned": nn.MLP(3, 2, 4, 3, scan=True, key=KEY),
    "stack": nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=KEY),
    "pool": nn.MaxPool2d(2),
    "norm": nn.LayerNorm(3),
    "batch norm": nn.BatchNorm(3),
    "dropout": nn.Dropout(0.5),
    "embedding": nn.Embedding(3, 2, key=KEY),
    "spectral": nn.SpectralNorm(nn.Linear(3, 4, key=KEY), "weight", key=KEY),
}


@pytest.mark.parametrize(
    ("name", "flags", "text"),
    [
        (
            "linear",
            {"in_features": -1},
            r"Linear\(in_features\): expected an integer of at least 0 ",
        ),
        ("linear", {"out_features": "x"}, r"Linear\(out_features\): .* or 'scalar', got 'x'\."),
        ("conv", {"groups": 3}, r"Conv2d\(groups\): expected a divisor of in_channels=4, got 3\.$"),
        ("conv", {"num_spatial_dims": 1}, r"Conv2d\(kernel_size\): .* of 1 of them, got \(3, 3\)"),
        ("conv", {"stride": 0}, r"Conv2d\(stride\): .*at least 1"),
        ("conv", {"dilation": "a"}, r"Conv2d\(dilation\): .*, got 'a'"),
        ("conv", {"padding_mode": "x"}, r"Conv2d\(padding_mode\): .*, got 'x'"),
        (
            "mlp",
            {"depth": 3},
            r"MLP\(depth\): expected 2, with which its layers were made, got 3\.\n  .*\n"
            r"      MLP\(\.\.\., depth=3, key=key\)$",
        ),
        (
            "scanned",
            {"depth": 2},
            r"MLP\(depth\): expected 3, with which its layers were made, got 2",
        ),
        ("mlp", {"width_size": 7}, r"MLP\(width_size\): expected 4, with"),
        ("mlp", {"in_size": 5}, r"MLP\(in_size\): expected 3, with"),
        (
            "mlp",
            {"out_size": "scalar"},
            r"MLP\(out_size\): expected 2, with which .*, got 'scalar'",
        ),
        ("mlp", {"activation": 3}, r"MLP\(activation\): expected a function or a Module, got 3"),
        ("mlp", {"scan": True}, r"MLP\(scan\): expected False, with which"),
        ("scanned", {"scan": False}, r"MLP\(scan\): expected True, with which"),
        ("stack", {"depth": -1}, r"Stack\(depth\): expected an integer of at least 0, got -1"),
        ("stack", {"unroll": 0}, r"Stack\(unroll\): expected an integer of at least 1, got 0"),
        ("pool", {"kernel_size": 0}, r"MaxPool2d\(kernel_size\): expected an integer of at"),
        ("pool", {"padding": 9}, r"MaxPool2d\(padding\): expected less than kernel_size="),
        ("batch norm", {"input_size": -1}, r"BatchNorm\(input_size\): expected an integer of at"),
        ("batch norm", {"axis_name": []}, r"BatchNorm\(axis_name\): expected the name of a"),
        ("embedding", {"embedding_size": 2.0}, r"Embedding\(embedding_size\): expected an integer"),
        ("spectral", {"weight_name": "w"}, r"SpectralNorm\(weight_name\): .*\n  It has: weight, b"),
        ("spectral", {"num_power_iterations": -1}, r"SpectralNorm\(num_power_iterations\): exp"),
    ],
    ids=label,
)
def test_a_layer_is_not_made_inconsistent(name, flags, text):
    """What is wrong in itself, or does not go with the layers, is refused where it is set."""
    for change in (nn.with_mode, lambda layer, **flags: layer.replace(**flags)):
        with pytest.raises(ArgumentError, match=f"^{text}"):
            change(LAYERS[name], **flags)


def test_a_field_takes_what_the_constructor_takes():
    """One number for all axes becomes one for each, and goes with what is checked beside it."""
    for change in (nn.with_mode, lambda layer, **flags: layer.replace(**flags)):
        pool = change(nn.MaxPool2d(2), kernel_size=3, stride=[1, 2], padding=1)
        assert pool == nn.MaxPool2d(3, [1, 2], 1)
        assert change(nn.AdaptiveMaxPool2d(2), target_shape=4) == nn.AdaptiveMaxPool2d(4)


test_refusals = refusals(globals())
