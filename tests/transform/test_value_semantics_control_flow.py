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
from pytreemod.errors import SpecError, StructureError
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


def test_layers_are_made_and_applied():
    """A stack made under a scan is applied by a scan; each layer has counted its call."""
    _, layers = pm.filter_scan(lambda _, start: (None, counting(start)), None, STARTS)
    assert_same(layers, stack_of())

    x, layers = pm.filter_scan(apply, ramp(2), layers)
    assert_close(x, loop(ramp(2), layers))
    np.testing.assert_array_equal(layers.count, [1, 1, 1])


def test_further_arguments_are_shared():
    """What is not scanned is the same for all steps: from outside, or with the axis None."""
    layers, b = stack_of(), jnp.float32(2)
    add = lambda x, of: (of[0](x)[0] + of[1], None)  # noqa: E731

    shared, _ = pm.filter_scan(add, ramp(2), (layers, b), in_axes=(0, None))
    captured, _ = pm.filter_scan(lambda x, layer: add(x, (layer, b)), ramp(2), layers)
    assert_same(shared, captured)


def test_without_a_carry():
    """No carry at all: everything is scanned, and None is carried."""
    carry, (ys, layers) = pm.filter_scan(
        lambda _, of: (None, of[0](of[1])), None, (stack_of(), ramp(DEPTH, 2))
    )

    assert carry is None
    assert_close(ys, jnp.stack([m(x)[0] for m, x in zip(pm.unstack(stack_of()), ramp(3, 2))]))
    np.testing.assert_array_equal(layers.count, [1, 1, 1])


def test_with_nothing_but_a_carry():
    """Everything is carried: one layer, applied over and over, has counted every call."""
    (x, layer), ys = pm.filter_scan(
        lambda c, _: (c[1](c[0]), None), (ramp(2), counting()), length=5
    )

    assert ys is None
    assert_close(x, ramp(2) @ jnp.linalg.matrix_power(counting().weight, 5))
    assert int(layer.count) == 5


def test_with_everything_shared():
    """Nothing is scanned: each step sees the whole, and `length` says how often."""
    xs = {"x": ramp(2), "layer": counting()}
    _, ys = pm.filter_scan(lambda _, of: (None, of["layer"](of["x"])[0]), None, xs, 3, in_axes=None)

    assert_close(ys, jnp.stack([ramp(2) @ counting().weight] * 3))


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


def test_carry_and_layer_in_any_container():
    """The carry may be a dict of arrays and Modules."""
    carry = {"x": ramp(2), "log": [jnp.zeros(()), counting()]}

    def step(carry, layer):
        x, _ = layer(carry["x"])
        total, counter = carry["log"]
        return {"x": x, "log": [total + jnp.sum(x), counter(x)[1]]}, None

    out, _ = pm.filter_scan(step, carry, stack_of())
    assert int(out["log"][1].count) == DEPTH


@pytest.mark.parametrize("reverse", [False, True])
def test_leaves_scanned_carried_and_shared(reverse):
    """Bare arrays, scanned, carried and shared; a counter that is carried ends at the length."""
    scanned, shared = ramp(5), jnp.float32(10)

    def step(carry, of):
        total, count = carry
        return (total + of["a"] * of["b"], count + 1), of["a"] - of["b"]

    (total, count), ys = pm.filter_scan(
        step, (jnp.float32(0), 0), {"a": scanned, "b": shared}, reverse=reverse,
        in_axes={"a": 0, "b": None},
    )  # fmt: skip
    assert (float(total), int(count)) == (150.0, 5)
    assert_close(ys, scanned - shared)


def test_state_that_changes_is_carried():
    """A counter shared by all steps is carried: ys are 1, 3, 5, 7, 9, and the count is 5."""

    def step(layer, x):
        layer = layer.replace(count=layer.count + 1)
        return layer, x + layer.count

    layer, ys = pm.filter_scan(step, counting(), jnp.arange(5))
    np.testing.assert_array_equal(ys, [1, 3, 5, 7, 9])
    assert int(layer.count) == 5


def test_what_is_shared_and_changes_is_a_carry():
    """A shared leaf that every step adds to goes from 1 to 4, as a carry; shared, it stays."""
    add = lambda c, x: (c + x, c)  # noqa: E731
    total, _ = pm.filter_scan(add, jnp.float32(1), jnp.ones(3))
    assert float(total) == 4.0

    _, ys = pm.filter_scan(
        lambda _, of: (None, of[0] + of[1]), None, (jnp.float32(1), jnp.ones(3)), in_axes=(None, 0)
    )
    np.testing.assert_array_equal(ys, [2, 2, 2])


def test_a_new_object_is_carried():
    """The carry may be a newly made Module each time: it has no identity to keep."""
    make = lambda m, x: (Counting(m.weight * x, m.count + 1), m)  # noqa: E731

    last, seen = pm.filter_scan(make, counting(), 2 * jnp.ones(3))
    assert_close(last.weight, 8 * counting().weight)
    np.testing.assert_array_equal(seen.count, [0, 1, 2])


def test_the_same_object_in_and_out():
    """A layer may be scanned, carried and returned at once: each is a value of its own."""
    layers = stack_of()

    (first, twice), same = pm.filter_scan(
        lambda c, of: ((of[0], of[1]), of[0]), (counting(), counting()), (layers, layers)
    )
    assert_same(same, layers)
    assert_same(first, pm.unstack(layers)[-1])
    assert_same(twice, first)


# ---- scan: axes


def test_results_on_other_axes():
    """Results are stacked on the axes 1 and 2, beside a carry that counts."""
    out_axes = pm.by({"y": 1, "z": 2})
    count, ys = pm.filter_scan(
        lambda n, x: (n + 1, {"y": x, "z": jnp.outer(x, x)}), 0, ramp(4, 2), out_axes=out_axes
    )

    assert (int(count), ys["y"].shape, ys["z"].shape) == (4, (2, 4), (2, 2, 4))
    assert_same(ys["y"], ramp(4, 2).T)


@pytest.mark.parametrize(("axis", "out"), [(1, 0), (-1, -1), (1, -2), (-2, 1)])
def test_axes_in_and_out(axis, out):
    """Axis 1, negative axes, and one axis in, another out."""
    found = pm.filter_scan(lambda _, x: (None, 2 * x), None, ramp(3, 2), in_axes=axis, out_axes=out)
    expected = jnp.moveaxis(2 * jnp.moveaxis(ramp(3, 2), axis, 0), 0, out)

    assert_same(found[1], expected)


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


def test_one_dropout_mask_in_every_layer(key):
    """A shared key drops the same units in each step; a key for each drops others."""
    dropout = nn.Dropout(0.5)
    mask = lambda _, key: (None, dropout(jnp.ones(20), key=key))  # noqa: E731

    _, same = pm.filter_scan(mask, None, key, DEPTH, in_axes=None)
    _, different = pm.filter_scan(mask, None, jax.random.split(key, DEPTH))
    assert_same(same[0], same[1])
    assert not np.array_equal(different[0], different[1])


def test_keys_differ_where_they_are_scanned(key):
    """Parameters made from scanned keys differ from layer to layer; what a shared key gave not."""

    def make(_, keys):
        params, dropout = keys
        return None, (nn.Linear(2, 2, key=params).weight, jax.random.key_data(dropout))

    keys = (jax.random.split(key, 2), key)
    _, (weights, dropout) = pm.filter_scan(make, None, keys, in_axes=(0, None))
    assert not np.allclose(weights[0], weights[1])
    assert_same(dropout[0], dropout[1])


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


def test_intermediates_are_collected():
    """What a layer gives beside its result is returned by the step, and comes out stacked."""

    def step(x, layer):
        x, _ = layer(x)
        return x, {"norm": jnp.linalg.norm(x), "input": x}

    x, seen = pm.filter_scan(step, ramp(2), stack_of())
    assert (seen["norm"].shape, seen["input"].shape) == ((DEPTH,), (DEPTH, 2))
    assert_same(seen["input"][-1], x)


def test_the_step_is_traced_once_over_two_calls():
    """A second call with other values of the same structure runs what the first one traced."""
    traces = []

    def step(x, layer):
        traces.append(None)
        return apply(x, layer)

    pm.filter_scan(step, ramp(2), stack_of())
    pm.filter_scan(step, 2 * ramp(2), jax.tree.map(lambda w: 2 * w, stack_of()))
    assert len(traces) == 1


def test_scan_of_checkpointed_layers():
    """Recomputing each layer changes no gradient."""
    loss = lambda step: lambda layers: jnp.sum(pm.filter_scan(step, ramp(2), layers)[0])  # noqa: E731

    found = pm.filter_grad(loss(pm.filter_checkpoint(apply)))(stack_of())
    assert_close(found, pm.filter_grad(lambda layers: jnp.sum(loop(ramp(2), layers)))(stack_of()))


# ---- scan: what is refused


def test_a_carry_of_another_structure_is_refused():
    """The carry that comes out has the structure of the one that went in."""
    with pytest.raises(StructureError, match=r"carry: f32\[2\] -> tuple of 2"):
        pm.filter_scan(lambda x, layer: (layer(x), None), ramp(2), stack_of())


def test_results_are_not_shared():
    """A result has an axis of its own: None is refused, for all of it or for a part."""
    for out_axes in (None, {"x": 0, "layer": None}, pm.by({"x": 0, ...: None})):
        with pytest.raises(SpecError, match=r"filter_scan\(out_axes\): expected an axis for each"):
            pm.filter_scan(
                lambda x, layer: (x, {"x": x, "layer": layer}),
                ramp(2),
                stack_of(),
                out_axes=out_axes,
            )


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


def test_branches_bump_different_counters():
    """Each branch changes one part and passes the other on."""

    @pm.filter_jit
    def step(env, pred):
        return pm.filter_cond(pred, Environment.bump_first, Environment.bump_second, env)

    env = environment()
    for pred in (True, False, True):
        env = step(env, pred)
    assert_same(env, Environment(jnp.int32(2), jnp.int32(1)))


def test_bare_leaves_in_branches():
    """An array by itself is an operand and a result."""
    for pred, expected in ((True, 2), (False, 0)):
        found = pm.filter_cond(pred, lambda n: n + 1, lambda n: n - 1, jnp.int32(1))
        assert int(found) == expected
    assert int(pm.filter_switch(2, [lambda n: n, lambda n: -n, lambda n: 3 * n], jnp.int32(2))) == 6


def test_cond_under_vmap_with_a_shared_part_untouched():
    """Mapped counters take their own branches; what is shared stays shared."""
    envs = Environment(jnp.arange(3), jnp.int32(7))
    axes = Environment(0, None)

    found = pm.filter_vmap(
        lambda env, pred: pm.filter_cond(pred, Environment.bump_first, lambda env: env, env),
        in_axes=(axes, 0), out_axes=axes,
    )(envs, jnp.asarray([True, False, True]))  # fmt: skip
    assert_same(found, Environment(jnp.asarray([1, 1, 3]), jnp.int32(7)))


def test_a_different_leaf_for_each_branch():
    """Branches over several models may change a different model each."""
    swap = lambda a, b: (a.bump_first(), b)  # noqa: E731
    keep = lambda a, b: (a, b.bump_second())  # noqa: E731

    a, b = pm.filter_cond(False, swap, keep, environment(), environment())
    assert (int(a.first), int(b.second)) == (0, 1)


def test_switch_over_changes():
    """Methods of a Module are branches of a switch."""
    branches = [Environment.bump_first, Environment.bump_second, lambda env: env]

    env = environment()
    for index in (0, 1, 1, 2):
        env = pm.filter_jit(lambda env, i: pm.filter_switch(i, branches, env))(env, index)
    assert_same(env, Environment(jnp.int32(1), jnp.int32(2)))


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


def test_while_over_several_and_nested_models():
    """The value may hold several models, one inside the other; one that is replaced is new."""
    value = {"a": [counting(), counting(1.0)], "b": (counting(),), "n": 0}

    def body(value):
        first, second = value["a"]
        return {"a": [second, first(ramp(2))[1]], "b": value["b"], "n": value["n"] + 1}

    found = pm.filter_while_loop(lambda value: value["n"] < 2, body, value)
    assert_same([m.count for m in found["a"]], [jnp.int32(1), jnp.int32(1)])
    assert_same(found["a"][1].weight, counting(1.0).weight)


def test_while_with_new_leaves():
    """New arrays, new Modules in each turn: the normal case."""
    body = lambda m: Counting(jnp.ones((2, 2)), m.count + 1)  # noqa: E731

    found = pm.filter_while_loop(lambda m: m.count < 3, body, counting())
    assert_same(found, Counting(jnp.ones((2, 2)), jnp.int32(3)))


def test_while_with_another_structure_is_refused():
    """The value keeps its structure; the path of what changed is named."""
    with pytest.raises(StructureError, match=r"val\[0\]\.weight: f32\[2,2\] -> tuple of 2"):
        pm.filter_while_loop(
            lambda of: True, lambda of: [of[0].replace(weight=(1, 2))], [counting()]
        )


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
