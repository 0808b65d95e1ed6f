"""filter_scan, filter_map and filter_associative_scan."""

import functools as ft

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError, StateError, StructureError
from tests.helpers.cells import counted, stacked
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.laws import law
from tests.helpers.meshes import EXPLICIT, on
from tests.helpers.trees import Affine, double, ramp

# ---- filter_scan is the loop


AXES = st.sampled_from([0, 1, -1, -2])


@settings(law, max_examples=8)
@given(AXES, st.one_of(AXES, st.none()), AXES, st.sampled_from([0, -2]), st.booleans())
def test_scan_is_the_loop(first, second, out, total, reverse):
    """filter_scan(f, init, xs) == for x in xs: init, y = f(init, x), for any axes in and out."""
    shape = [2, 3]
    full = [
        np.insert(shape, axis if axis is None or axis >= 0 else 3 + axis, 4) if axis is not None
        else shape
        for axis in (first, second)
    ]  # fmt: skip
    xs = {"a": ramp(*full[0]), "b": [ramp(*full[1]), "text"]}
    in_axes = {"a": first, "b": [second, None]}

    def step(carry, x):
        carry = carry * 0.5 + jnp.sum(x["b"][0]) + (1 if x["b"][1] == "text" else 0)
        return carry, {"y": carry + x["a"], "total": jnp.sum(x["a"])[None], "name": "y"}

    found = pm.filter_scan(
        step, ramp(2, 3), xs, reverse=reverse, in_axes=in_axes,
        out_axes=pm.by({"total": total, ...: pm.if_array(out)}),
    )  # fmt: skip
    carry, ys = ramp(2, 3), []
    for i in range(4)[:: -1 if reverse else 1]:
        a = jnp.take(xs["a"], i, first)
        b = xs["b"][0] if second is None else jnp.take(xs["b"][0], i, second)
        carry, y = step(carry, {"a": a, "b": [b, "text"]})
        ys.append(y)
    ys = ys[:: -1 if reverse else 1]
    assert found[1].pop("name") == "y"
    expected = {
        "y": jnp.stack([y["y"] for y in ys], out),
        "total": jnp.stack([y["total"] for y in ys], total),
    }
    assert_close(found, (carry, expected))


@pytest.mark.parametrize("init", [0, 0.0, 1j, np.int16(2), jnp.float32(1), ramp(2)])
@pytest.mark.parametrize(
    "step",
    [
        lambda c, x: (c, c),
        lambda c, x: (c + c, (c * 1, x)),
    ],
)
@pytest.mark.sampled
def test_arrays_and_numbers_are_treated_as_by_jax(init, step):
    """Values, dtypes and weak types are those of jax.lax.scan, for numbers in the carry, too."""
    found = pm.filter_scan(step, init, jnp.arange(3), length=3)
    expected = jax.lax.scan(step, init, jnp.arange(3), length=3)

    assert_same(found, expected)
    weak = [jax.typeof(x).weak_type for x in jax.tree.leaves(found)]
    assert weak == [jax.typeof(x).weak_type for x in jax.tree.leaves(expected)]


def test_a_weakly_typed_carry_takes_the_dtype_of_the_step():
    """As in jax.lax.scan, an initial number takes the dtype of the step's result."""
    total, _ = pm.filter_scan(lambda c, x: (c + x, None), 0, jnp.ones(3, jnp.bfloat16))

    assert (total.dtype, total.weak_type) == (jnp.bfloat16, False)


def test_what_is_no_array_in_xs_is_passed_as_it_is():
    """Numbers, strings and functions in xs reach every step unchanged."""
    seen = []

    def step(carry, x):
        seen.append((x["n"], x["f"], x["s"]))
        return carry + x["f"](x["a"]), None

    xs = {"a": ramp(3), "n": 2.5, "f": double, "s": "text"}
    assert float(pm.filter_scan(step, jnp.zeros(()), xs)[0]) == 12.0
    assert seen == [(2.5, double, "text")]


def test_scan_over_layers():
    """A stacked Module is taken apart along its leading axis: each step calls one layer."""
    layers, x = stacked(), ramp(2)

    found, _ = pm.filter_scan(lambda x, layer: (jnp.tanh(layer(x)), None), x, layers)
    for layer in pm.unstack(layers):
        x = jnp.tanh(layer(x))
    assert_close(found, x)


def test_by_and_modules_as_axes():
    """`by` and a Module of axes say which arrays are scanned and which every step gets unsliced."""
    layers = Affine(stacked().weight, ramp(2))
    run = ft.partial(pm.filter_scan, lambda x, layer: (layer(x), layer.bias), ramp(2), layers)

    by_rule = run(in_axes=pm.by({"weight": 0, ...: None}))
    assert_same(run(in_axes=Affine(0, None)), by_rule)
    assert by_rule[1].shape == (3, 2)
    x = ramp(2)
    for weight in layers.weight:
        x = weight @ x + layers.bias
    assert_close(by_rule[0], x)


def test_state_is_carried(key):
    """A State goes through the steps; the old one may not be used again inside a step."""
    norm, state = pm.make_with_state(nn.BatchNorm)(2)
    xs = jax.random.normal(key, (3, 4, 2))

    def step(state, x):
        out, state = norm(x, state)
        return state, out

    after, outs = pm.filter_scan(step, state, xs)
    _, state = pm.make_with_state(nn.BatchNorm)(2)
    for x, out in zip(xs, outs, strict=True):
        expected, state = norm(x, state)
        assert_close(out, expected, atol=1e-5)
    assert_close(jax.tree.leaves(after), jax.tree.leaves(state))

    with pytest.raises(StateError, match="State"):
        pm.filter_scan(lambda s, x: (s, norm(x, s)[0]), pm.make_with_state(nn.BatchNorm)(2)[1], xs)


# ---- traced once


def test_the_same_function_is_traced_once():
    """Calls outside jit find the first compiled program; another structure is another program."""
    step, traces = counted(lambda c, x: ({**c, "n": c["n"] + x["a"]}, None))

    for start in (0.0, 1.0):
        pm.filter_scan(step, {"n": jnp.float32(start), "s": "a"}, {"a": ramp(3)})
    assert len(traces) == 1
    pm.filter_scan(step, {"n": jnp.float32(0), "s": "b"}, {"a": ramp(3)})
    pm.filter_scan(step, {"n": jnp.float32(0), "s": "a"}, {"a": ramp(3)}, in_axes=pm.if_array(-1))
    assert len(traces) == 3


def test_a_method_is_traced_once_for_all_instances():
    """The arrays of a Module are inputs, those that each step gets whole as well."""
    traces = []

    class Scaled(pm.Module):
        scale: jax.Array

        def step(self, carry, x):
            traces.append(None)
            return carry * self.scale + x["a"] * x["b"], None

    def run(scale, b):
        xs = {"a": ramp(2), "b": jnp.float32(b)}
        return pm.filter_scan(
            Scaled(jnp.float32(scale)).step, jnp.float32(1), xs, in_axes={"a": 0, "b": None}
        )[0]

    assert [float(run(1, 1)), float(run(2, 1)), float(run(1, 3))] == [4.0, 8.0, 10.0]
    assert len(traces) == 1


# ---- filter_map, filter_associative_scan


@pytest.mark.parametrize("batch_size", [None, 2, 3, 4])
def test_map_is_vmap(batch_size):
    """filter_map(f, xs) == filter_vmap(f)(xs), whatever the size of batches."""
    layers = stacked()
    xs = (layers, ramp(2, 3), "double")

    def apply(x):
        layer, x, how = x
        return {"y": 2 * layer(x) if how == "double" else x, "layer": layer, "how": how}

    axes = (0, 1, None)
    found = pm.filter_map(apply, xs, batch_size=batch_size, in_axes=axes, out_axes=pm.if_array(-1))
    expected = pm.filter_vmap(apply, in_axes=(axes,), out_axes=pm.if_array(-1))(xs)
    assert found["how"] == expected["how"] == "double"
    assert_close(found["y"], expected["y"])
    assert_same(found["layer"], expected["layer"])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.sampled
def test_associative_scan_is_that_of_jax(axis, reverse):
    """On the arrays it is jax.lax.associative_scan; other leaves are unchanged."""
    elems = Affine(ramp(2, 2) * 0.5, [ramp(2), "text", 3])

    def combine(a, b):
        return Affine(a.weight * b.weight, [jnp.maximum(a.bias[0], b.bias[0]), *b.bias[1:]])

    found = pm.filter_associative_scan(combine, elems, reverse=reverse, axis=axis)
    # From the end, the axis is another one in each array.
    run = ft.partial(jax.lax.associative_scan, reverse=reverse)
    product = run(jnp.multiply, elems.weight, axis=axis % 2)
    assert_same(found, Affine(product, [run(jnp.maximum, elems.bias[0]), "text", 3]))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_number_with_an_axis_is_repeated_for_each_step(batch_size):
    """With `out_axes` a number is stacked, as in jax.lax.map; by default it is not."""
    xs = ramp(3)
    found = pm.filter_map(lambda x: (x, 1.5), xs, batch_size=batch_size, out_axes=0)

    assert_same(found, jax.lax.map(lambda x: (x, 1.5), xs))
    assert type(pm.filter_map(lambda x: (x, 1.5), xs, batch_size=batch_size)[1]) is float


def test_clear_caches_forgets_steps(monkeypatch):
    """After clear_caches a step is traced again, even if JAX has its trace still."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    step, traces = counted(lambda c, x: (c + x, None))

    for _ in range(2):
        pm.filter_scan(step, jnp.float32(0), ramp(2))
        pm.clear_caches()
    assert len(traces) == 2


@pytest.mark.parametrize(
    "step",
    [lambda c, x: c, lambda c, x: (c, c, c), lambda c, x: None],
    ids=["one", "three", "none"],
)
def test_a_step_returns_a_pair(step):
    """The carry, and something beside it."""
    with pytest.raises(StructureError, match="filter_scan"):
        pm.filter_scan(step, ramp(2), length=2)


def test_steps_are_not_split_over_a_mesh():
    """On each device a loop goes through the same elements."""
    xs = pm.filter_shard(ramp(8, 2), on("model", mesh=EXPLICIT))

    with pytest.raises(ShapeError, match="xs"):
        pm.filter_scan(lambda c, x: (c, x), None, xs)
