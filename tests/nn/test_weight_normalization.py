"""`WeightNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=label)
@pytest.mark.slow
def test_at_first_it_is_the_layer(key, dtype):
    """Up to the rounding of a sum in float32: in narrow dtypes to the bit."""
    linear = nn.Linear(5, 4, dtype=dtype, key=key)
    layer, x = nn.WeightNorm(linear), jnp.asarray(wave(5), dtype)

    assert_close(layer(x).astype(float), linear(x).astype(float), rtol=1e-6, atol=1e-6)
    assert dtype == jnp.float32 or layer(x).tolist() == linear(x).tolist()
    assert layer.g.dtype == layer(x).dtype == dtype


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_the_program_is_the_hand_written_one():
    """Operations and costs of a call and of its gradient, as XLA compiles them."""
    programs = pytest.importorskip("benchmarks.programs", reason="compares with its programs")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (case,) = [
            c for c in programs.stateless_cases(jax.random.key(0)) if c.label == "WeightNorm"
        ]
        rows = list(programs.layer_rows(case))

    assert [(row.label, row.note) for row in rows if not row.met] == []


class Counting(nn.StatefulLayer):
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
    """A layer that is itself stateful, or random, stays so."""
    layer, state = nn.make_with_state(lambda: nn.WeightNorm(Counting()))()

    out, state = layer(jnp.ones(2), state, key=key)

    assert layer.is_stateful()
    assert_close(out, 2 + jax.random.normal(key, (2,)))
    assert float(state.get(layer.layer.count)) == 1


def test_a_weight_that_is_computed_or_tied_is_normalized_as_it_reads(key):
    """The arrays that the weight is computed from are trained, and none of them is lost."""
    linear = nn.Linear(3, 3, key=key)
    masked = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, jnp.tri(3)))

    class Twice(pm.Module):
        first: jax.Array
        weight: jax.Array

        def __call__(self, x):
            return self.weight @ self.first @ x

    twice = pm.tie(Twice(linear.weight, jnp.zeros((3, 3))), "weight", to="first")
    x = jnp.asarray(wave(3))

    for layer in (masked, twice):
        normed = nn.WeightNorm(layer)
        assert_close(normed(x), layer(x))
        assert_close(normed.g, jnp.linalg.norm(layer.weight, axis=1, keepdims=True))
    assert sorted(pm.named_leaves(nn.WeightNorm(masked)))[2:] == [
        "layer.weight.trees.0",
        "layer.weight.trees.1",
    ]
    doubled = pm.tree_at("g", nn.WeightNorm(twice), 2 * nn.WeightNorm(twice).g)
    assert_close(doubled(x), 2 * twice(x))


def by_hand(v, g, axis):
    """The formula in NumPy, in float64."""
    v = np.asarray(v, np.float64)
    others = tuple(i for i in range(v.ndim) if axis is None or i != axis % v.ndim)
    return np.asarray(g, np.float64) * v / np.sqrt((v**2).sum(others, keepdims=True))


@pytest.mark.parametrize("axis", [0, 1, -1, None], ids=label)
def test_it_is_the_formula(key, axis):
    """Beside NumPy, for each axis and for none."""
    layer = nn.WeightNorm(nn.Linear(3, 4, use_bias=False, key=key), axis=axis)
    layer = layer.replace(g=layer.g + 2)
    x = wave(3)

    assert_close(layer(jnp.asarray(x)), by_hand(layer.layer.weight, layer.g, axis) @ x)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=label)
def test_narrow_numbers_are_added_up_in_wide_ones(key, dtype):
    """300 squares of 15 are more than float16 has, and more than bfloat16 can add up."""
    linear = nn.Linear(300, 1, dtype=dtype, key=key)
    layer = nn.WeightNorm(linear.replace(weight=jnp.full((1, 300), 15, dtype)))

    assert layer.g.dtype == dtype
    assert_close(layer.g.astype(float), [[np.sqrt(300) * 15]], rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("g", [jnp.ones(4), jnp.ones((2, 4, 1)), None], ids=label)
def test_lengths_that_do_not_go_with_the_weight_are_refused(key, g):
    """Of another size, or of several layers as one; they would broadcast."""
    layer = nn.WeightNorm(nn.Linear(3, 4, key=key))

    with pytest.raises(ShapeError, match="WeightNorm"):
        layer.replace(g=g)(jnp.ones(3))


@pytest.mark.parametrize(("weight", "name"), [(np.eye(3, 2), "weight"), (np.ones((3, 2)), "w")])
def test_what_cannot_be_normalized_is_refused(key, weight, name):
    """A slice of zeros has no direction; a name that is not there."""
    linear = nn.Linear(2, 3, key=key).replace(weight=jnp.asarray(weight, jnp.float32))

    with pytest.raises(ArgumentError, match="WeightNorm"):
        nn.WeightNorm(linear, name)
