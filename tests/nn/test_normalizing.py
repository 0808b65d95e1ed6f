"""Tests for all layers that normalize each example."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

NORMS = {
    nn.LayerNorm: (4,),
    nn.RMSNorm: (4,),
    nn.GroupNorm: (2, 4),
    nn.InstanceNorm: (4, 1e-5, True),
}
each_norm = pytest.mark.parametrize(("norm", "args"), NORMS.items(), ids=label)
X = jnp.asarray(wave(4, 4))


@each_norm
def test_a_state_is_handed_back(norm, args):
    """Beside the result; without one, the result is alone. A key is ignored."""
    layer = norm(*args)
    state = nn.State(layer)

    out, after = layer(X, state, key=jax.random.key(0))

    assert after is state
    assert_close(out, layer(X))
    with pytest.raises(ArgumentError, match=rf"^{norm.__name__}\(.*: expected a State, got f32"):
        layer(X, X)


@each_norm
def test_weight_and_bias_start_as_the_initializers_give(norm, args, key):
    """With a separate key for each; without initializers no key is needed."""
    normal = jax.nn.initializers.normal()
    layer = norm(*args, weight_init=normal, bias_init=normal, key=key)

    for values, own_key in zip((layer.weight, layer.bias), jax.random.split(key), strict=True):
        assert_close(values, normal(own_key, (4,), jnp.float32))
    with pytest.raises(RngError, match=rf"^{norm.__name__}\(key\): expected a random key, got"):
        norm(*args, weight_init=normal)


@each_norm
def test_other_input_and_epsilons_are_refused(norm, args):
    """Integers, whose mean has no such dtype; and a negative epsilon, at any time."""
    with pytest.raises(ArgumentError, match=rf"^{norm.__name__}\(.*: expected .*float.*, got i32"):
        norm(*args)(jnp.ones((4, 4), int))
    with pytest.raises(ArgumentError, match=rf"^{norm.__name__}\(eps\): expected a number >= 0"):
        norm(*args).replace(eps=-1.0)


@each_norm
def test_its_operations_have_its_name(norm, args):
    """In profiles and in the program's text."""
    text = jax.jit(lambda x: norm(*args)(x)).lower(X).as_text(debug_info=True)

    assert f"pm.nn.{norm.__name__}" in text


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_size_is_stored_as_the_constructor_stores_it(norm):
    """Also by `replace` and by a mode."""
    assert norm(2).replace(shape=2) == norm(2)
    assert nn.with_mode(norm(2), shape=2).shape == (2,)
