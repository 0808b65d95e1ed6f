"""Control flow over models that are values: scenarios that libraries with references test.

What a reference would have been mutated to is returned here: carried if it changes from step to
step, scanned if each step has its own, whole if all steps share it. There is no marker for the
carry, so there is no way to misplace one; what can go wrong is in `test_carries` and
`test_branches`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import ramp

DEPTH = 3
STARTS = np.arange(DEPTH, dtype=np.float32) * np.float32(0.1)


class Counting(pm.Module):
    """A linear layer that counts its calls."""

    weight: jax.Array
    count: jax.Array = pm.buffer()

    def __call__(self, x):
        return x @ self.weight, self.replace(count=self.count + 1)


def counting(start=0.0):
    """A small layer."""
    return Counting(ramp(2, 2, start=np.float32(0)) * 0.1 + start, jnp.int32(0))


def stack_of(make=counting):
    """Layers in one."""
    return pm.filter_vmap(make)(STARTS)


def apply(x, layer):
    """One layer as the step of a scan; the layer as it is after the call is collected."""
    x, layer = layer(x)
    return jax.nn.gelu(x), layer


def loop(x, layers):
    """The scan of `apply` as a loop."""
    for layer in pm.unstack(layers):
        x, _ = apply(x, layer)
    return x


# ---- scan: what is carried, what is scanned, what is shared


def test_prefixes_and_nested_nones():
    """A prefix of the scanned tree gives axes to whole subtrees, None anywhere in it shares."""
    xs = (stack_of(), {"scale": jnp.float32(2), "shift": ramp(DEPTH, 2)}, None)
    run = lambda axes: pm.filter_scan(  # noqa: E731
        lambda x, of: (of[0](x)[0] * of[1]["scale"] + of[1]["shift"], None), ramp(2), xs,
        in_axes=axes,
    )[0]  # fmt: skip

    found = run((0, {"scale": None, "shift": 0}, None))
    assert_same(found, run((0, pm.by({"scale": None, ...: 0}), 0)))
    x = ramp(2)
    for layer, shift in zip(pm.unstack(stack_of()), ramp(DEPTH, 2)):
        x = layer(x)[0] * 2.0 + shift
    assert_close(found, x)


# ---- scan: axes


def test_results_on_other_axes():
    """Results are stacked on the axes 1 and 2, beside a carry that counts."""
    out_axes = pm.by({"y": 1, "z": 2})
    count, ys = pm.filter_scan(
        lambda n, x: (n + 1, {"y": x, "z": jnp.outer(x, x)}), 0, ramp(4, 2), out_axes=out_axes
    )

    assert (int(count), ys["y"].shape, ys["z"].shape) == (4, (2, 4), (2, 2, 4))
    assert_same(ys["y"], ramp(4, 2).T)


def test_axes_by_kind_of_leaf():
    """Each kind of leaf has its axis: weights along 1, counts along 0, the rest shared."""
    layers = Counting(jnp.moveaxis(stack_of().weight, 0, 1), stack_of().count)
    axes = pm.by({pm.select.role("buffer"): 0, pm.is_inexact_array: 1})

    x, after = pm.filter_scan(apply, ramp(2), layers, in_axes=axes, out_axes=axes)
    assert_close(x, loop(ramp(2), stack_of()))
    assert_same(after.weight, layers.weight)
    np.testing.assert_array_equal(after.count, [1, 1, 1])


# ---- scan: layers with State, keys and dropout


class Block(pm.Module):
    """Linear, BatchNorm and Dropout."""

    linear: nn.Linear
    norm: nn.BatchNorm
    dropout: nn.Dropout

    def __init__(self, *, key):
        self.linear = nn.Linear(2, 2, key=key)
        self.norm = nn.BatchNorm(2)
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.linear(x), state)
        return jax.nn.gelu(self.dropout(x, key=key)), state


def blocks(key):
    """A stack of blocks and of their States."""
    return pm.filter_vmap(lambda key: pm.make_with_state(Block)(key=key))(
        jax.random.split(key, DEPTH)
    )


def scan_blocks(x, models, states, keys, key_axis):
    """Apply the blocks; the number of those applied is carried beside `x`."""

    def step(carry, of):
        x, count = carry
        model, state, key = of
        x, state = model(x, state, key=key)
        return (x, count + 1), state

    axes = (0, 0, key_axis)
    return pm.filter_scan(step, (x, 0), (models, states, keys), in_axes=axes)


@pm.filter_jit
def call_block(model, x, state, key):
    """One block by itself."""
    return model(x, state, key=key)


@pytest.mark.parametrize(("inference", "key_axis"), [(False, 0), (False, None), (True, 0)])
def test_blocks_with_state_and_dropout(key, inference, key_axis):
    """Training and inference; a key for each layer, or one mask for all; State layer by layer."""
    (models, states), x = blocks(key), jax.random.normal(key, (4, 2))
    models = nn.inference_mode(models, inference)
    keys = key if key_axis is None else jax.random.split(key, DEPTH)

    (found, count), after = pm.filter_jit(scan_blocks)(x, models, states, keys, key_axis)
    assert int(count) == DEPTH
    members = [pm.unstack(models), pm.unstack(states), [key] * 3 if key_axis is None else keys]
    seen = []
    for model, state, own in zip(*members, strict=True):
        x, state = call_block(model, x, state, own)
        seen.append(state)
    assert_close(found, x, rtol=1e-4, atol=1e-5)
    assert_close(jax.tree.leaves(after), jax.tree.leaves(pm.stack(seen)), rtol=1e-4, atol=1e-5)


def test_recurrent_network_with_one_mask_for_all_steps(key):
    """A cell carried over time, with recurrent dropout: the mask is shared, the hidden carried."""
    cell, dropout = nn.Linear(5, 3, key=key), nn.Dropout(0.5)

    def step(hidden, x):
        hidden = dropout(jnp.tanh(cell(jnp.concatenate([hidden, x]))), key=key)
        return hidden, hidden

    last, seen = pm.filter_scan(step, jnp.zeros(3), ramp(4, 2))
    assert_same(seen[-1], last)
    dropped = np.asarray(seen == 0.0)
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[0], dropped.shape))


# ---- cond and switch


class Environment(pm.Module):
    """Two counters."""

    first: jax.Array
    second: jax.Array
    name: str = "environment"

    def bump_first(self):
        return self.replace(first=self.first + 1)

    def bump_second(self):
        return self.replace(second=self.second + 1)


def environment():
    """Counters at zero."""
    return Environment(jnp.int32(0), jnp.int32(0))


def test_cond_under_vmap_with_a_shared_part_untouched():
    """Mapped counters take their own branches; what is shared stays shared."""
    envs = Environment(jnp.arange(3), jnp.int32(7))
    axes = Environment(0, None)

    found = pm.filter_vmap(
        lambda env, pred: pm.filter_cond(pred, Environment.bump_first, lambda env: env, env),
        in_axes=(axes, 0), out_axes=axes,
    )(envs, jnp.asarray([True, False, True]))  # fmt: skip
    assert_same(found, Environment(jnp.asarray([1, 1, 3]), jnp.int32(7)))


# ---- while and fori


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit])
def test_while_over_a_model_that_counts(transform):
    """A layer is called until its input is large; it has counted how often."""

    @transform
    def run(layer, x):
        return pm.filter_while_loop(
            lambda of: jnp.sum(of[0]) < 10.0,
            lambda of: of[1](of[0] * 4),
            (x, layer),
        )

    x, layer = run(counting(), ramp(2))
    y, count = ramp(2), 0
    while float(jnp.sum(y)) < 10.0:
        y, count = 4 * y @ counting().weight, count + 1
    assert_close(x, y)
    assert int(layer.count) == count


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit])
def test_fori_over_models(transform):
    """Several models go through the loop; what is not touched comes out as it was."""

    @transform
    def run(models, x):
        def body(i, of):
            (a, b), x = of
            x, a = a(x)
            return (a, b), x + i

        return pm.filter_fori_loop(0, 3, body, (models, x))

    (a, b), x = run((counting(), counting(1.0)), ramp(2))
    y = ramp(2)
    for i in range(3):
        y = y @ counting().weight + i
    assert_close(x, y)
    assert_same((int(a.count), b), (3, counting(1.0)))


def test_gradients_accumulate_in_a_loop():
    """Gradients, which have the model's structure with None in it, are carried and summed."""
    xs, model = ramp(3, 2), counting()
    loss = lambda m, x: jnp.sum(m(x)[0] ** 2)  # noqa: E731
    zeros = jax.tree.map(jnp.zeros_like, pm.filter_grad(loss)(model, xs[0]))

    total = pm.filter_fori_loop(
        0, 3, lambda i, g: pm.apply_updates(g, pm.filter_grad(loss)(model, xs[i])), zeros
    )
    expected = pm.filter_grad(lambda m: sum(loss(m, x) for x in xs))(model)
    assert total.count is None
    assert_close(total, expected)
