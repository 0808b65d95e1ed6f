"""`filter_scan`, `filter_map` and `filter_associative_scan`."""

import functools as ft

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError, StateError, StructureError
from tests.helpers.cells import stacked
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.laws import law
from tests.helpers.trees import Affine, double, ramp

AXES = st.sampled_from([0, 1, -1, -2])
# An array of four members along an axis, by the axis.
FOUR = {0: (4, 2, 3), 1: (2, 4, 3), -2: (2, 4, 3), -1: (2, 3, 4), None: (2, 3)}


@settings(law, max_examples=8)
@given(AXES, st.one_of(AXES, st.none()), AXES, st.sampled_from([0, -2]), st.booleans())
def test_scan_is_the_loop(first, second, out, total, reverse):
    """filter_scan(f, init, xs) == for x in xs: init, y = f(init, x), for any axes in and out."""
    xs = {"a": ramp(*FOUR[first]), "b": [ramp(*FOUR[second]), "text"]}
    in_axes = {"a": first, "b": [second, None]}
    out_axes = pm.by({"total": total, ...: pm.if_array(out)})

    def step(carry, x):
        carry = carry * 0.5 + jnp.sum(x["b"][0]) + (1 if x["b"][1] == "text" else 0)
        return carry, {"y": carry + x["a"], "total": jnp.sum(x["a"])[None], "name": "y"}

    found = pm.filter_scan(step, ramp(2, 3), xs, None, reverse, in_axes=in_axes, out_axes=out_axes)
    carry, ys = ramp(2, 3), []
    for i in range(4)[:: -1 if reverse else 1]:
        b = xs["b"][0] if second is None else jnp.take(xs["b"][0], i, second)
        carry, y = step(carry, {"a": jnp.take(xs["a"], i, first), "b": [b, "text"]})
        ys.append(y)
    ys = ys[:: -1 if reverse else 1]
    assert found[1].pop("name") == "y"
    totals = jnp.stack([y["total"] for y in ys], total)
    assert_close(found, (carry, {"y": jnp.stack([y["y"] for y in ys], out), "total": totals}))


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("unroll", [1, 2, True])
@pytest.mark.sampled
def test_results_have_the_types_that_jax_gives_them(length, unroll):
    """Values, dtypes and weak types are those of jax.lax.scan, without `xs`, too."""
    for init in (1, 1.5, np.int16(2), jnp.float32(1)):
        found, expected = (
            scan(lambda c, x: (c * 2, (c, x)), init, None, length=length, unroll=unroll)
            for scan in (pm.filter_scan, jax.lax.scan)
        )
        assert_same(found, expected)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)


def test_what_is_no_array_in_xs_is_passed_as_it_is():
    """Numbers, strings and functions in xs reach every step unchanged."""

    def step(carry, x):
        assert (x["n"], x["s"]) == (2.5, "text")
        return carry + x["f"](x["a"]), None

    xs = {"a": ramp(3), "n": 2.5, "f": double, "s": "text"}
    assert float(pm.filter_scan(step, jnp.zeros(()), xs)[0]) == 12.0


def test_layers_are_scanned_by_module_by_rule_and_by_int():
    """A stacked Module is taken apart along its leading axis, or some of its arrays are."""
    layers, x = stacked(), ramp(2)
    found, _ = pm.filter_scan(lambda x, layer: (jnp.tanh(layer(x)), None), x, layers)
    for layer in pm.unstack(layers):
        x = jnp.tanh(layer(x))
    assert_close(found, x)

    layers, x = Affine(layers.weight, ramp(2)), ramp(2)
    run = ft.partial(pm.filter_scan, lambda x, layer: (layer(x), layer.bias), x, layers)
    by_rule = run(in_axes=pm.by({"weight": 0, ...: None}))
    for axes in (Affine(0, None), lambda leaf: 0 if leaf.ndim == 3 else None):
        assert_same(run(in_axes=axes), by_rule)
    for weight in layers.weight:
        x = weight @ x + layers.bias
    assert_close(by_rule, (x, jnp.stack([layers.bias] * 3)))


def test_an_old_state_is_refused_inside_a_step():
    """A step that uses the State that it was given twice would lose the first update."""
    index, state = pm.make_with_state(pm.StateIndex)(jnp.float32(0))

    def twice(state, x):
        return state.set(index, x), state.set(index, 2 * x)

    with pytest.raises(StateError, match="State"):
        pm.filter_scan(twice, state, ramp(3))


@pytest.mark.parametrize("batch_size", [None, 2, 3, 4])
@pytest.mark.sampled
def test_map_is_vmap(batch_size):
    """filter_map(f, xs) == filter_vmap(f)(xs), whatever the size of batches."""
    xs, axes, last = (stacked(), ramp(2, 3), "double"), (0, 1, None), pm.if_array(-1)

    def apply(x):
        layer, x, how = x
        return {"y": 2 * layer(x) if how == "double" else x, "layer": layer, "how": how}

    found = pm.filter_map(apply, xs, batch_size=batch_size, in_axes=axes, out_axes=last)
    expected = pm.filter_vmap(apply, in_axes=(axes,), out_axes=last)(xs)
    assert found.pop("how") == expected.pop("how") == "double"
    assert_close(found, expected)
    # With an axis a number is stacked, as in jax.lax.map; by default it is not.
    for out_axes, kind in ((0, jax.Array), (pm.if_array(0), float)):
        run = ft.partial(pm.filter_map, lambda x: 1.5, ramp(3), out_axes=out_axes)
        assert isinstance(run(batch_size=batch_size), kind)


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


# ---- mistakes

A = {"a": ramp(3), "b": [ramp(4)]}


def keep(c, x):
    return c, x


MISTAKES = {
    "sizes": (lambda: pm.filter_scan(keep, 0, A), ShapeError, r"(?s)xs\['a'\].*xs\['b'\]\[0\]"),
    "no array": (lambda: pm.filter_scan(keep, 0), ArgumentError, "length=n"),
    "in": (lambda: pm.filter_scan(keep, 0, A, in_axes={"z": 0}), SpecError, r"scan\(in_axes\)"),
    "out": (lambda: pm.filter_scan(keep, 0, A["a"], out_axes=None), SpecError, r"\(out_axes\)"),
    "kind": (lambda: pm.filter_scan(keep, 0, A["a"], kind="lux"), ArgumentError, "not 'lux'"),
    "no pair": (lambda: pm.filter_scan(lambda c, x: c, A, length=2), StructureError, "no pair"),
    "number": (
        lambda: pm.filter_associative_scan(lambda a, b: [a[0], 2], [ramp(2), 1]),
        StructureError,
        r"(?s)filter_associative_scan.*elems\[1\]: 1 -> 2",
    ),
}


@pytest.mark.parametrize(("call", "error", "where"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_shown_by_path(call, error, where):
    """What does not fit is named, with its size."""
    with pytest.raises(error, match=where):
        call()
