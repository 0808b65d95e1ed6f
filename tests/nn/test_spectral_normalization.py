"""`SpectralNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.nn.numbers_to_compare import assert_close, wave


def make_linear(key, **options):
    """A dense layer from 3 to 4, normalized."""
    return nn.SpectralNorm(nn.Linear(3, 4, key=key), "weight", key=key, **options)


def make_conv(key, **options):
    """A convolution from 2 channels to 3, normalized."""
    return nn.SpectralNorm(nn.Conv2d(2, 3, 3, key=key), "weight", key=key, **options)


CASES = {"linear": (make_linear, (5, 3)), "conv": (make_conv, (2, 2, 5, 5))}


def test_inference_leaves_the_vectors_alone(key):
    """By field or by argument, even where the weight has changed; the argument wins."""
    layer, state = nn.make_with_state(make_linear)(key)
    layer = pm.tree_at(lambda one: one.layer.weight, layer, jnp.asarray(wave(4, 3)))
    u, _ = state.get(layer.uv_index)
    x = jnp.ones(3)

    out, state = layer(x, state, inference=True)
    same, state = nn.inference_mode(layer)(x, state)
    assert_close(out, same)
    assert state.get(layer.uv_index)[0] is u
    other, state = nn.inference_mode(layer)(x, state, inference=False)
    assert not np.allclose(out, other)
    assert not np.allclose(state.get(layer.uv_index)[0], u)


def test_under_vmap_all_examples_share_one_state(key):
    """The State does not depend on the example, and so comes back without an axis."""
    layer, state = nn.make_with_state(make_linear)(key)
    x = jnp.asarray(wave(5, 3))
    expected, _ = layer(x, state.substate(layer))

    mapped = pm.filter_jit(pm.filter_vmap(layer, in_axes=(0, None), out_axes=(0, None)))
    out, after = mapped(x, state)

    assert_close(out, expected, atol=1e-4)
    assert after.get(layer.uv_index)[0].shape == (4,)


def test_an_ensemble_has_vectors_for_each_member(key):
    """Built and called under vmap."""
    layers, state = pm.filter_vmap(nn.make_with_state(make_linear))(jax.random.split(key, 2))
    out, state = pm.filter_vmap(lambda layer, state, x: layer(x, state), in_axes=(0, 0, None))(
        layers, state, jnp.ones(3)
    )

    assert out.shape == (2, 4)
    assert state.get(layers.uv_index)[0].shape == (2, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_the_program_is_the_hand_written_one():
    """Operations and costs of a step and of its gradient, as XLA compiles them."""
    programs = pytest.importorskip("benchmarks.programs", reason="compares with its programs")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (case,) = [c for c in programs.stateful_cases() if c.label == "SpectralNorm"]
        rows = list(programs.layer_rows(case))

    assert [(row.label, row.note) for row in rows if not row.met] == []
    assert len(rows) == 2


class Drifting(nn.StatefulLayer):
    """A stateful layer with a weight, which uses its key."""

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
    """A layer that is itself stateful, or random, stays so; in a Sequential, too."""
    layer, state = nn.make_with_state(
        lambda: nn.Sequential([nn.SpectralNorm(Drifting(), "weight", key=key)])
    )()

    quiet, state = layer(jnp.ones(2), state)
    noisy, state = layer(jnp.ones(2), state, key=key)

    assert_close(quiet, jnp.ones(2), atol=1e-3)
    drawn = jax.random.normal(jax.random.split(key, 1)[0], (2,))
    assert_close(noisy, quiet + drawn, atol=1e-3)
    assert float(state.get(layer[0].layer.count)) == 2


@pytest.mark.parametrize("case", ["linear", "conv"])
def test_after_many_iterations_it_is_divided_by_the_first_singular_value(key, case):
    """By NumPy's decomposition of the weight as a matrix with a row for each output."""
    make, shape = CASES[case]
    layer, state = nn.make_with_state(make)(key, num_power_iterations=50)
    weight = layer.layer.weight
    largest = np.linalg.svd(np.asarray(weight).reshape(len(weight), -1), compute_uv=False)[0]
    x = jnp.asarray(wave(*shape))

    _, state = layer(x, state)
    out, _ = layer(x, state, inference=True)

    plain = layer.layer.replace(weight=weight / largest)
    assert_close(out, plain(x), rtol=1e-3, atol=1e-3)


def test_the_gradient_sees_the_norm_but_not_the_iteration(key):
    """The vectors are constants; d(W / s)/dW has the part that comes from s = u W v."""
    layer, state = nn.make_with_state(make_linear)(key, inference=True)
    u, v = state.get(layer.uv_index)
    x, weight = jnp.asarray(wave(3)), layer.layer.weight

    grads = jax.grad(lambda layer: jnp.sum(jnp.sin(layer(x, state)[0])))(layer)

    def by_hand(weight):
        normed = weight / (u @ weight @ v)
        return jnp.sum(jnp.sin(normed @ x + layer.layer.bias))

    assert_close(grads.layer.weight, jax.grad(by_hand)(weight), rtol=1e-4, atol=1e-4)


def test_half_precision(key):
    """bfloat16 weights and outputs, float32 vectors."""
    linear = nn.Linear(3, 2, dtype=jnp.bfloat16, key=key)
    layer, state = nn.make_with_state(nn.SpectralNorm)(linear, "weight", key=key)

    out, state = layer(jnp.ones(3, jnp.bfloat16), state)

    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32"}


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3)])
def test_a_weight_that_is_not_that_of_the_vectors_is_refused(key, shape):
    """Of another size, or of several layers as one."""
    layer, state = nn.make_with_state(make_linear)(key)
    other = pm.tree_at(lambda m: m.layer.weight, layer, jnp.ones(shape))

    with pytest.raises(ShapeError, match="SpectralNorm"):
        other(jnp.ones(3), state)


@pytest.mark.parametrize("name", ["wieght", "zero", "wave"])
def test_what_cannot_be_normalized_is_refused(key, name):
    """A name that is not there, a weight of zeros, and complex numbers."""

    class Odd(pm.Module):
        zero: jax.Array
        wave: jax.Array

        def __call__(self, x):
            return x

    layer = Odd(jnp.zeros((2, 2)), jnp.ones((2, 2), jnp.complex64))
    with pytest.raises(ArgumentError, match="SpectralNorm"):
        nn.SpectralNorm(layer, name, key=key)
