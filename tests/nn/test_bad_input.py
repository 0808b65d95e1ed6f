"""Every layer of the catalogue over bad input: made of it, and called with it.

What a layer may be made of is read off its signature, so that a layer, or an argument, that is
added tomorrow is tried as well. An error must be one of ours, and name the layer and the argument.
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
from tests.goldens import refusals
from tests.labels import label
from tests.nn.catalogue import CATALOGUE

# Six hundred cases: in the slow run. What is wrong most often is tried in `test_arguments`, too.
pytestmark = pytest.mark.slow

KEY = jax.random.key(0)

# ---- what a layer is made of

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
"""By the names of arguments, what none of them can be. None is a default of some sizes."""

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
"""Arguments that take what is hashable, any function or tree; or are no longer to be used."""

PASSED_ON = {"weight_init", "bias_init"}
"""Arguments that are refused by the layers to which they are passed on."""

SAID_OF = {("SpectralNorm", "layer"): "weight_name", ("WeightNorm", "layer"): "weight_name"}
"""Of what a text speaks instead: what has no weight of that name may have another one."""

UNASKED = {(nn.Einsum, "bias_init")}
"""Of what the layer in the catalogue has not, nobody asks for the first values."""

MADE = [entry.build()[0] for entry in reversed(CATALOGUE)]
# A cell needs what was carried to be called, and is in the catalogue as it is run over time.
CELLS = {type(layer.cell): layer.cell for layer in MADE if isinstance(layer, nn.RNN)}
CLASSES = {type(layer): layer for layer in MADE} | CELLS


def good(cls):
    """What a layer of the catalogue was made of: what must be given, and all sizes and flags."""
    layer, made = CLASSES[cls], {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ANYTHING:
            continue
        if name == "key":
            made[name] = KEY
        elif re.fullmatch(r"use_\w*bias|channelwise_affine", name):
            made[name] = True  # Else nobody asks for its first values.
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
    """What an argument of that name cannot be: any object, and what looks nearly right."""
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
    """The text names both; nothing is made of what is nearly right."""
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
    """Whether None stands for something."""
    return inspect.signature(cls).parameters[name].default is None


# ---- what a layer is called with

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
"""One gives back what it gets, the other gives it to a function that is not ours."""

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
    """Whether a layer refuses an input; what else it raises is let through, and so is no name."""
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
    # A Stack is a scan, which takes any tree, and leaves it to JAX to say what no array may be.
    for x in wrong[: -1 if entry.name == "Stack" else None]:
        assert refused(entry, x), x


@every_layer
def test_an_input_of_another_shape_is_refused_or_computed(entry):
    """One axis less, and each axis longer by one: never an error that is not ours."""
    shape = jnp.shape(entry.x)
    shapes = [shape[1:], ()]
    shapes += [(*shape[:i], shape[i] + 1, *shape[i + 1 :]) for i in range(len(shape))]
    dtype = jnp.asarray(entry.x).dtype

    refusals = [refused(entry, jnp.ones(other, dtype)) for other in shapes if other != shape]

    assert any(refusals) is (entry.name not in ANY_SHAPE)


@pytest.mark.parametrize("dtype", [bool, int, jnp.float16, complex])
@every_layer
def test_an_input_of_another_dtype_is_refused_or_computed(entry, dtype):
    """Never an error that is not ours."""
    with jax.numpy_dtype_promotion("standard"):
        refused(entry, jnp.ones(jnp.shape(entry.x), dtype))


@pytest.mark.parametrize("place", ["input", "hidden"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: type(cell).__name__)
def test_a_cell_refuses_what_does_not_fit(cell, place):
    """Of its input and of what it carried: what is no array, and another shape."""
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


test_refusals = refusals(globals())
