import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.nn.numbers_to_compare import assert_close, wave


def make_linear(key, **options):
    return nn.SpectralNorm(nn.Linear(3, 4, key=key), "weight", key=key, **options)


def make_conv(key, **options):
    return nn.SpectralNorm(nn.Conv2d(2, 3, 3, key=key), "weight", key=key, **options)


@pytest.mark.parametrize(("make", "shape"), [(make_linear, (5, 3)), (make_conv, (2, 2, 5, 5))])
def test_after_many_iterations_it_is_divided_by_the_first_singular_value(key, make, shape):
    """By NumPy's decomposition of the weight as a matrix with a row for each output."""
    layer, state = nn.make_with_state(make)(key, num_power_iterations=50)
    weight = layer.layer.weight
    largest = np.linalg.svd(np.asarray(weight).reshape(len(weight), -1), compute_uv=False)[0]
    x = jnp.asarray(wave(*shape))

    _, state = layer(x, state)
    out, _ = layer(x, state, inference=True)

    plain = layer.layer.replace(weight=weight / largest)
    assert_close(out, plain(x), rtol=1e-3, atol=1e-3)


def test_inference_leaves_the_vectors_alone(key):
    """By field or by argument, even where the weight has changed; the argument wins."""
    layer, state = nn.make_with_state(make_linear)(key)
    layer = pm.tree_at("layer.weight", layer, jnp.asarray(wave(4, 3)))
    u, _ = state.get(layer.uv_index)
    x = jnp.ones(3)

    out, state = layer(x, state, inference=True)
    same, state = nn.inference_mode(layer)(x, state)
    assert_close(out, same)
    assert state.get(layer.uv_index)[0] is u
    other, state = nn.inference_mode(layer)(x, state, inference=False)
    assert not np.allclose(out, other)
    assert not np.allclose(state.get(layer.uv_index)[0], u)


class Drifting(nn.StatefulLayer):
    weight: jax.Array
    count: nn.StateIndex

    def __init__(self):
        self.weight = 2 * jnp.eye(2)
        self.count = nn.StateIndex(jnp.array(0.0))

    def __call__(self, x, state, *, key=None):
        count = state.get(self.count) + 1
        noise = 0.0 if key is None else jax.random.normal(key, x.shape)
        return self.weight @ x + noise, state.set(self.count, count)


def test_state_and_key_reach_the_layer_inside(key):
    layer, state = nn.make_with_state(lambda: nn.SpectralNorm(Drifting(), "weight", key=key))()

    quiet, state = layer(jnp.ones(2), state)
    noisy, state = layer(jnp.ones(2), state, key=key)

    assert_close(quiet, jnp.ones(2), atol=1e-3)
    assert_close(noisy, quiet + jax.random.normal(key, (2,)), atol=1e-3)
    assert float(state.get(layer.layer.count)) == 2


def test_the_gradient_sees_the_norm_but_not_the_iteration(key):
    """The vectors are constants; d(W / s)/dW has the part that comes from s = u W v."""
    layer, state = nn.make_with_state(make_linear)(key)
    # A new weight: at its singular vectors, the iteration would have no gradient anyway.
    x, weight = jnp.asarray(wave(3)), jnp.asarray(wave(4, 3))
    layer = pm.tree_at("layer.weight", layer, weight)

    def loss(layer):
        out, after = layer(x, state)
        return jnp.sum(jnp.sin(out)), after

    grads, after = jax.grad(loss, has_aux=True)(layer)
    u, v = after.get(layer.uv_index)

    def by_hand(weight):
        normed = weight / (u @ weight @ v)
        return jnp.sum(jnp.sin(normed @ x + layer.layer.bias))

    assert_close(grads.layer.weight, jax.grad(by_hand)(weight), rtol=1e-4, atol=1e-4)


class Pair(pm.Module):
    first: nn.Linear
    second: nn.Linear

    def __call__(self, x):
        return self.second(self.first(x))


def test_a_weight_that_is_computed_or_tied_is_normalized_as_it_reads(key):
    """The value is divided in the call, by any path; what it comes from stays."""
    linear, x = nn.Linear(3, 3, key=key), jnp.ones(3)
    masked = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, jnp.tri(3)))
    tied = pm.tie(Pair(linear, linear), "second.weight", to="first.weight")

    for inner in (Pair(linear, masked), tied):
        make = nn.make_with_state(nn.SpectralNorm)
        layer, state = make(inner, "second.weight", inference=True, key=key)
        u, v = state.get(layer.uv_index)
        weight = inner.second.weight
        plain = Pair(linear, linear.replace(weight=weight / (u @ weight @ v)))
        assert_close(layer(x, state)[0], plain(x))
        assert jax.tree.structure(layer.layer) == jax.tree.structure(inner)
