"""`Dropout`."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def test_in_training_entries_are_dropped(key):
    """Half of the ones become zero, the others two."""
    out = nn.Dropout()(jnp.ones(1000), key=key)

    assert set(out.tolist()) == {0.0, 2.0}
    assert 400 < int((out == 0).sum()) < 600


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.Dropout(0), {}),
        (nn.Dropout(0.9, inference=True), {}),
        (nn.Dropout(0.9), {"inference": True}),
    ],
    ids=["p=0", "by field", "by argument"],
)
def test_without_dropping_no_key_is_needed(layer, options):
    """p = 0 and inference are the identity."""
    x = jnp.asarray(wave(4))

    assert_close(layer(x, **options), x)


def test_the_argument_overrides_the_field(key):
    """inference=False trains even a layer that was switched to inference."""
    layer = nn.Dropout(1.0, inference=True)

    assert layer(jnp.ones(3), key=key, inference=False).tolist() == [0, 0, 0]


def test_p_and_inference_are_configuration():
    """A Dropout has no leaves, and two of them with one p are one structure."""
    assert jax.tree.leaves(nn.Dropout(0.3)) == []
    assert jax.tree.structure(nn.Dropout(0.3)) == jax.tree.structure(nn.Dropout(0.3))
    assert jax.tree.structure(nn.Dropout(0.3)) != jax.tree.structure(nn.Dropout(0.4))


def test_training_without_a_key_is_refused():
    """As a RuntimeError, with both ways out."""
    text = (
        r"^Dropout\(p=0\.5\): expected a random key when training, got none\.(.|\n)*"
        r"layer\(x, key=jax\.random\.key\(0\)\)\n      layer = nn\.inference_mode\(layer\)$"
    )

    with pytest.raises(RngError, match=text) as caught:
        nn.Dropout(0.5)(jnp.ones(3))
    assert isinstance(caught.value, RuntimeError)


def test_what_is_no_key_is_refused():
    """A number in the key's place."""
    with pytest.raises(RngError, match=r"^Dropout\(p=0\.5\): expected a random key, got 0"):
        nn.Dropout(0.5)(jnp.ones(3), key=0)


@pytest.mark.parametrize("p", [-0.1, 1.1, "half", None, True, jnp.ones(2), float("nan")], ids=label)
def test_what_is_no_probability_is_refused(p):
    """p is a number from 0 to 1."""
    with pytest.raises(ArgumentError, match=r"^Dropout\(p\): expected a number from 0 to 1, got"):
        nn.Dropout(p)


def test_an_array_as_p_becomes_a_number():
    """A known scalar is accepted; the leaves stay arrays only."""
    layer = nn.Dropout(jnp.array(0.5))

    assert layer.p == 0.5
    assert type(layer.p) is float
