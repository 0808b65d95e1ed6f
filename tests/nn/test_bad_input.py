"""Every layer of the catalogue over bad input: made of it, and called with it.

The arguments of a layer are read from its signature, so new layers and new arguments are tested,
too. An error must be one of ours, and name the layer and the argument.
"""

import functools as ft
import inspect
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import PytreemodError
from pytreemod.module.classes import Module
from pytreemod.tree.nodes import children_of
from tests.labels import label
from tests.nn.catalogue import CATALOGUE

# Six hundred cases, so they are slow. `test_arguments` also tests the most frequent mistakes.
pytestmark = pytest.mark.slow

KEY = jax.random.key(0)

# ---- arguments of constructors

SIZES = (-1, 1.5, "3", True, jnp.ones(2))
WINDOWS = (0, -1, 1.5, (1,) * 7, "22", True)
FLAGS = (1, None, "yes", jnp.asarray(True))
RATIOS = (-0.1, 1.1, math.nan, "0.5", None, 1j)
NUMBERS = (-1.0, math.nan, "x", None)
FUNCTIONS = (3, "relu")

BAD: list[tuple[str, tuple[Any, ...]]] = [
    (r"(\w+_)?(size|features|channels|depth|num_\w+)|out_\w+|in_\w+", SIZES),
    (r"groups|n", (0, 1.5, "2", True)),
    (r"kernel_size|stride|dilation", WINDOWS),
    (r"padding", (-1, 1.5, "nonsense", ((0,),))),
    (r"\w+_mode|mode", ("nonsense", 3, None)),
    (r"p|\w+_p|momentum", RATIOS),
    (r"eps|theta", NUMBERS),
    (r"use_\w+|\w+_affine|inference|scan", FLAGS),
    (r"dtype", (int, "nonsense", bool, 3.5)),
    (r"key", (3, "key", jnp.ones(2), jax.random.split(KEY, 2))),
    (r"\w+_init", (*FUNCTIONS, lambda key, shape, dtype: jnp.ones(7))),
    (r"operation|fn|\w*activation|make_layer|make", FUNCTIONS),
    (r"shared", (3, False, ..., ("weight",))),
]
"""Wrong values by the names of arguments. None is a default of some sizes."""

ANYTHING = {
    "args",
    "kwargs",
    "more",
    "axis_name",
    "activation",
    "final_activation",
    "elementwise_affine",
    "deterministic",
}
"""Arguments that accept any hashable value, function or tree; or are deprecated."""

PASSED_ON = {"weight_init", "bias_init"}
"""Arguments that are refused by the layers to which they are passed on."""

SAID_OF = {("SpectralNorm", "layer"): "weight_name", ("WeightNorm", "layer"): "weight_name"}
"""The argument that the error names instead, for a layer without a weight of that name."""

UNASKED = {(nn.Einsum, "bias_init")}
"""The entry in the catalogue has no such leaf, so nothing calls the initializer."""

MADE = [entry.build()[0] for entry in reversed(CATALOGUE)]
# A cell needs a carry in its call, so the catalogue has it in an RNN.
CELLS = {type(layer.cell): layer.cell for layer in MADE if isinstance(layer, nn.RNN)}
CLASSES = {type(layer): layer for layer in MADE} | CELLS


def good(cls):
    """Good arguments of a layer of the catalogue: the required ones, and all sizes and flags."""
    layer, made = CLASSES[cls], {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ANYTHING:
            continue
        if name == "key":
            made[name] = KEY
        elif re.fullmatch(r"use_\w*bias|channelwise_affine", name):
            made[name] = True  # Otherwise nothing calls its initializer.
        elif name == "num_spatial_dims" and isinstance(layer, nn.AdaptivePool):
            made[name] = len(layer.target_shape)
        elif name in ("make_layer", "make"):
            made[name] = ft.partial(nn.Linear, 3, 3)
        elif name == "shared":
            made[name] = "weight"
        elif parameter.default is parameter.empty or isinstance(
            getattr(layer, name, None), (int, tuple)
        ):
            made[name] = getattr(layer, name)
    return made


def bad(name):
    """Bad values for an argument of that name: any object, and values that are nearly good."""
    for pattern, values in BAD:
        if re.fullmatch(pattern, name):
            return [object(), *values]
    return [object()]


ARGUMENTS = [
    (cls, name)
    for cls in CLASSES
    for name in inspect.signature(cls).parameters
    if name not in ANYTHING and (cls, name) not in UNASKED
]


@pytest.mark.parametrize(("cls", "name"), ARGUMENTS, ids=label)
def test_every_argument_is_checked(cls, name):
    """The error names both; nearly good values are refused, too."""
    made = good(cls)
    cls(**made)
    named = {cls.__name__}
    if name in PASSED_ON:
        named |= parts(CLASSES[cls])
    for value in bad(name):
        if value == "scalar" or (value is None and is_default(cls, name)):
            continue
        with pytest.raises(PytreemodError, match=r"^\w+\(") as caught:
            cls(**{**made, name: value})
        text = str(caught.value)
        assert re.match(r"\w+", text).group() in named, text
        told = SAID_OF.get((cls.__name__, name), name)
        assert re.search(rf"\b{told}\b", text), text


def is_default(cls, name):
    """Whether None is a default."""
    return inspect.signature(cls).parameters[name].default is None


# ---- inputs of calls

ANY_SHAPE = {
    "Dropout",
    "Identity",
    "Lambda",
    "Embedding",
    "Linear from scalar",
    "PReLU",
}
"""Layers of each number for itself."""

ANY_INPUT = {"Identity", "Lambda"}
"""One returns its input, the other passes it to a function that is not ours."""

CALLED = [entry for entry in CATALOGUE if entry.axis_name is None]

every_layer = pytest.mark.parametrize("entry", CALLED, ids=lambda entry: entry.name)


def parts(layer):
    """The names of the classes of a layer, and of the layers in it."""
    inside = (child for _, child in children_of(layer) or ())
    own = {type(layer).__name__} if isinstance(layer, Module) else set()
    return own.union(*map(parts, inside))


def called(entry, layer, state, x):
    """The layer's output; unlike `entry.apply`, with None as an input, too."""
    options = {"key": jax.random.key(0)} if entry.keyed else {}
    if isinstance(layer, nn.StatefulLayer) and layer.is_stateful():
        return layer(x, state, **options)[0]
    return layer(x, **options)


def refused(entry, x):
    """Whether a layer refuses an input; other errors, or errors without a name, pass through."""
    layer, state = entry.build()
    try:
        jax.eval_shape(lambda: called(entry, layer, state, x))
    except PytreemodError as error:
        text = str(error)
        assert re.match(r"\w+", text).group() in parts(layer), text
        assert re.search(r"\b(x|query)\b", text), text
        return True
    return False


@every_layer
def test_what_is_no_array_is_refused(entry):
    """Text, lists, None, trees, objects, random keys."""
    if entry.name in ANY_INPUT:
        return
    keys = jax.random.split(KEY, jnp.shape(entry.x))
    wrong = ["text", [1.0, 2.0], None, object(), {"a": 1.0}, KEY, keys, np.array("text")]
    # A Stack is a scan, which takes any tree; JAX refuses non-arrays.
    for x in wrong[: -1 if entry.name == "Stack" else None]:
        assert refused(entry, x), x


@every_layer
def test_an_input_of_another_shape_is_refused_or_computed(entry):
    """One axis less, and each axis longer by one: all errors are ours."""
    shape = jnp.shape(entry.x)
    shapes = [shape[1:], ()]
    shapes += [(*shape[:i], shape[i] + 1, *shape[i + 1 :]) for i in range(len(shape))]
    dtype = jnp.asarray(entry.x).dtype

    refusals = [refused(entry, jnp.ones(other, dtype)) for other in shapes if other != shape]

    assert any(refusals) is (entry.name not in ANY_SHAPE)


@pytest.mark.parametrize("dtype", [bool, int, jnp.float16, complex])
@every_layer
def test_an_input_of_another_dtype_is_refused_or_computed(entry, dtype):
    """All errors are ours."""
    with jax.numpy_dtype_promotion("standard"):
        refused(entry, jnp.ones(jnp.shape(entry.x), dtype))


@pytest.mark.parametrize("place", ["input", "hidden"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: type(cell).__name__)
def test_a_cell_refuses_what_does_not_fit(cell, place):
    """An input or a carry that is not an array, or has another shape."""
    x = jnp.ones(cell.input_size)
    carry = cell.initialize_carry(x.shape)
    leaves, structure = jax.tree.flatten(carry)
    fits = x if place == "input" else leaves[-1]
    shapes = [(), (1,), (fits.size + 1,), (1, fits.size), (2, fits.size)]
    bad = ["text", None, object(), KEY, np.array("text"), {"a": fits}, *map(jnp.ones, shapes)]
    # With batch axes, an input has them before any others are known.
    bad = bad[:-2] if place == "input" else bad
    for value in bad:
        changed = jax.tree.unflatten(structure, [*leaves[:-1], value])
        given = (value, carry) if place == "input" else (x, changed)
        with pytest.raises(
            PytreemodError, match=rf"^{type(cell).__name__}\(.*: expected "
        ) as caught:
            cell(*given)
        assert re.search(r"expected (x|input|h|c|hidden)\b", str(caught.value)), str(caught.value)
