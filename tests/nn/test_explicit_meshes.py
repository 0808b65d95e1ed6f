"""Every layer on an explicit mesh of eight devices, by how its batch and its weights are split.

`test_explicit_meshes.txt` shows, for each layer and each sharding, how the result is sharded. For
example, `(data, -, model)` is split over the mesh axis `data` on its first axis, and over `model`
on its last. A page of the documentation is made from it. With UPDATE_GOLDEN=1 a run updates it:
read the diff.
"""

import functools as ft
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from tests.nn.catalogue import CATALOGUE
from tests.nn.even_catalogue import EVEN_CATALOGUE, EvenEntry
from tests.nn.numbers_to_compare import assert_close

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
TABLE = Path(__file__).with_suffix(".txt")


class Way(NamedTuple):
    """A way to split the weights; the batch is split over `data` in all of them."""

    out: str | None = None  # the mesh axis of the weights' rows: of the features of the result
    into: str | None = None  # the sharding of the summed axis
    features: str | None = None  # that of the features of x
    on_mesh: bool = True  # whether weights and State are on the mesh


WAYS = {
    "on one device": Way(on_mesh=False),
    "whole": Way(),
    "out": Way(out="model"),
    "in": Way(into="model"),
    "in, and x": Way(into="model", features="model"),
    "out, by the batch's axis": Way(out="data"),
    "in, by the batch's axis": Way(into="data"),
}
"""Weights by the sharded axes. In `in, and x`, both operands of the sum are split alike."""


def table() -> dict[str, list[str]]:
    """The rows of the text file, by layer."""
    lines = [line.split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {name: cells for name, *cells in lines}


def split(array: jax.Array, axes: dict[int, str | None]) -> jax.Array:
    """The array on the mesh, split on those of the axes that it has, and that divide."""
    spec: list[str | None] = [None] * array.ndim
    for axis, name in axes.items():
        if name and -array.ndim <= axis < array.ndim and array.shape[axis] % MESH.shape[name] == 0:
            spec[axis] = name
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*spec)))


def laid_out(entry: EvenEntry, way: Way) -> tuple[Any, Any, Any]:
    """The layer, x and the State, as the way says."""
    layer, state = entry.build()
    x = split(jnp.asarray(entry.x), {entry.features: way.features, 0: "data"})

    def split_weight(path: Any, leaf: jax.Array) -> jax.Array:
        is_stacked = entry.stacked is not None and keystr(path).startswith(entry.stacked)
        return split(leaf, {entry.out + is_stacked: way.out, entry.into + is_stacked: way.into})

    if way.on_mesh:
        layer = jax.tree_util.tree_map_with_path(split_weight, layer)
        state = jax.tree.map(lambda leaf: split(leaf, {}), state)
    return layer, x, state


def step_of(entry: EvenEntry) -> Callable[..., Any]:
    """A function to compile: the result, the State, and the gradient of layer and input."""

    def loss(layer: Any, x: Any, state: Any) -> Any:
        out, state = entry.apply(layer, state, x)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), (out, state)

    argnums = (0, 1) if jnp.issubdtype(entry.x.dtype, jnp.inexact) else 0
    return jax.jit(jax.value_and_grad(loss, argnums, has_aux=True, allow_int=True))


def shown(array: Any) -> str:
    """How an array of that type lies: `(data, -)`."""
    names = ("+".join(a) if isinstance(a, tuple) else a for a in array.sharding.spec)
    return f"({', '.join(name or '-' for name in names)})"


def cell_of(entry: EvenEntry, way: Way) -> str:
    """A cell of the table: how the result is sharded, or the error."""
    try:
        with jax.set_mesh(MESH):
            traced = step_of(entry).trace(*laid_out(entry, way))
    except Exception as error:  # Of JAX's own there are many, and some are in no public module.
        return type(error).__name__
    # Of value and gradient, the value; of that, after the sum, the result.
    return shown(traced.jaxpr.out_avals[1])


def ways_of(entry: EvenEntry) -> list[Way]:
    """All ways; of a layer without weights one."""
    return list(WAYS.values())[: None if jax.tree.leaves(entry.build()[0]) else 1]


@pytest.mark.parametrize("entry", EVEN_CATALOGUE, ids=lambda entry: entry.name)
def test_how_results_lie(entry):
    """The result has the leading axes of x and the rows of the weight, as the table says."""
    found = [cell_of(entry, way) for way in ways_of(entry)]

    if found != table().get(entry.name) and os.environ.get("UPDATE_GOLDEN"):
        rows = {**table(), entry.name: found}
        ordered = [(each.name, rows[each.name]) for each in EVEN_CATALOGUE if each.name in rows]
        text = "\n".join(" | ".join([name, *cells]) for name, cells in ordered)
        TABLE.write_text(text + "\n", encoding="utf-8")
    else:
        assert found == table()[entry.name]


def numbers_to_check():
    """Every layer and way that works; for every run one of each class, each with another way."""
    met, found = set(), []
    for i, entry in enumerate(EVEN_CATALOGUE):
        cells = table().get(entry.name, [])
        kind = entry.name.split()[0].rstrip("123d")
        for j, (way, cell) in enumerate(zip(WAYS, cells, strict=False)):
            if cell.startswith("("):
                sampled = kind not in met and j == i % len(cells)
                marks = [] if sampled else [pytest.mark.slow]
                found.append(pytest.param(entry, way, id=f"{entry.name}, {way}", marks=marks))
        met.add(kind)
    return found


@ft.cache
def result_on_one_device(name: str) -> Any:
    """Result, State and gradients of the entry with that name, once for all ways."""
    entry = next(entry for entry in EVEN_CATALOGUE if entry.name == name)
    layer, state = entry.build()
    return step_of(entry)(layer, jnp.asarray(entry.x), state)


@pytest.mark.parametrize(("entry", "way"), numbers_to_check())
def test_numbers_are_those_of_one_device(entry, way):
    """Result, State and gradients. A gradient is sharded as its array, and so is the State.

    Without a mesh in context: the types of the arrays have all information.
    """
    layer, x, state = laid_out(entry, WAYS[way])
    found = step_of(entry)(layer, x, state)

    assert_trees_close(found, result_on_one_device(entry.name))
    ((_, (_, state_after)), gradients) = found
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for after, before in zip((state_after, *gradients), (state, layer, x), strict=False):
        jax.tree.map(assert_lies_alike, after, before)


def assert_lies_alike(after, before):
    """Each device has the same part of both arrays."""
    on_mesh = isinstance(before.sharding, NamedSharding)
    assert not on_mesh or after.sharding.is_equivalent_to(before.sharding, before.ndim)


def assert_trees_close(found, expected):
    """Same structure, same numbers."""
    jax.tree.map(lambda *leaves: assert_close(*map(as_numbers, leaves)), found, expected)


def as_numbers(leaf):
    """A random key as its bits, any other leaf unchanged."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_every_layer_of_the_catalogue_is_here():
    """By class: a new layer must be tested on a mesh, too."""
    classes = {entry.name.split()[0] for entry in CATALOGUE}

    assert {entry.name.split()[0] for entry in EVEN_CATALOGUE} == classes
    assert list(table()) == [entry.name for entry in EVEN_CATALOGUE]
