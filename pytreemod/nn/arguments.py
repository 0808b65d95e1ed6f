"""Checks that all layers share: sizes, keys, dtypes, inputs, State, their own arrays; with hints.

Owns: turning arguments into values that a layer can rely on, or into an error that names the layer
and the argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from pytreemod.errors import (
    ArgumentError,
    RngError,
    ShapeError,
    StateError,
    describe,
    explain,
    warn,
)
from pytreemod.module.array_shapes import read_arrays
from pytreemod.module.field_kinds import TRACED_HINT, is_traced
from pytreemod.module.fields import Accepts
from pytreemod.nn.calling import Absence, is_stateful
from pytreemod.nn.functional.promotion import countable
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.values import State
from pytreemod.transform.runtime_checks import error_if
from pytreemod.tree.dtypes import available_dtype
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array_like
from pytreemod.typing import Keys, Tracer, class_of, untyped_jax

KEY_HINT = ("Pass a random key:", "key=jax.random.key(0)")
STATE_HINT = ("Pass the State second, by position:", "x, state = layer(x, state)")
# A Module is callable, so it passes for a function where either is accepted. This shows only in the
# call: then the layer's arrays are labels, or the input is a whole tree.
TREE_HINT = (
    "If it is a tree of labels, or a mask, it was called as a function; wrap it:",
    "lambda _: labels",
)


class Title:
    """A layer as its errors name it; the string is only made if there is an error.

    Args:
        layer: a Module.
        names: the fields to show.

    Examples:
        >>> from types import SimpleNamespace
        >>> str(Title(SimpleNamespace(p=0.5, q=1), "p"))
        'SimpleNamespace(p=0.5)'
    """

    __slots__ = ("layer", "names")

    def __init__(self, layer: Any, *names: str):
        self.layer, self.names = layer, names

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self.layer, name)!r}" for name in self.names)
        return f"{type(self.layer).__name__}({shown})"


_DIVIDED_AT_ONCE = 16
"""The most parts of a key that one program takes out; its size grows with them."""

_NO_NUMBERS = "OSUMm"
"""Kinds of NumPy's dtypes that JAX does not have: objects, strings and times."""

TitleLike: TypeAlias = str | Title
"""The subject of an error: a string, or an object that makes one."""


def named(layer: Any, argument: str) -> str:
    """Name an argument of a layer's constructor as its errors do: `Linear(in_features)`."""
    return f"{type(layer).__name__}({argument})"


def in_inference(where: TitleLike, own: Any, given: Any) -> bool:
    """Whether a layer is in inference mode: the argument of the call decides, then the field.

    Args:
        where: the layer's title.
        own: the field.
        given: the argument of the call; None if there is none.

    Returns:
        True or False.

    Raises:
        ArgumentError: if the value is not known while tracing.

    Examples:
        >>> in_inference("Dropout(p=0.5)", True, None), in_inference("Dropout(p=0.5)", True, False)
        (True, False)
    """
    value = own if given is None else given
    if is_traced(value):
        expected = "inference to be known during tracing"
        raise ArgumentError(where, expected, describe(value), hint=TRACED_HINT)
    return bool(value)


def renamed(where: str, old: str, value: Any, *new: str) -> Any:
    """Accept the older name of an argument, with a warning, as Equinox does.

    Args:
        where: names the layer, or its call.
        old: the name that was used.
        value: the value that was passed.
        *new: the new name; several if the argument was split.

    Returns:
        The value.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     value = renamed("Dropout(...)", "deterministic", True, "inference")
        >>> print(caught[0].message)
        Dropout(...): expected inference=, got deterministic=, its older name.
          write
              inference=True
    """
    hint = ("write", ", ".join(f"{name}={describe(value)}" for name in new))
    expected = " and ".join(f"{name}=" for name in new)
    warn(UserWarning, where, expected, f"{old}=, its older name", hint=hint)
    return value


def function(expected: str = "a function", *hint: str) -> Accepts:
    """Make a check for fields that are callable: `field(accepts=function())`.

    Args:
        expected: the description of the value in errors.
        *hint: of these errors.

    Returns:
        A check for `field(accepts=...)`.

    Examples:
        >>> function()("Lambda(fn)", abs, None)
        <built-in function abs>
    """

    def accept(where: str, value: Any, node: Any) -> Any:
        del node
        if callable(value):
            return value
        raise ArgumentError(where, expected, describe(value), hint=hint)

    return accept


def instance(cls: type, expected: str, *hint: str) -> Accepts:
    """Make a check for fields of one class: `field(accepts=instance(RNN, "an RNN"))`.

    Args:
        cls: the class.
        expected: the description of the value in errors; if it mentions "None", None is accepted.
        *hint: of these errors.

    Returns:
        A check for `field(accepts=...)`.

    Examples:
        >>> instance(int, "an int or None")("Layer(size)", None, None) is None
        True
    """
    optional = "None" in expected

    def accept(where: str, value: Any, node: Any) -> Any:
        del node
        if isinstance(value, cls) or (optional and value is None):
            return value
        raise ArgumentError(where, expected, describe(value), hint=hint)

    return accept


def check_held_number(layer: Any, changes: Mapping[str, Any], name: str, holder: str) -> None:
    """Refuse a new number of layers that are stored as one, unless the layers change, too.

    Args:
        layer: has the layers.
        changes: the arguments of `replace`.
        name: the field with the number of layers.
        holder: the field with the layers.

    Raises:
        ArgumentError: if the number would not match the layers.

    Examples:
        >>> from types import SimpleNamespace
        >>> check_held_number(SimpleNamespace(n=3), {"n": 4, "member": None}, "n", "member")
    """
    old, new = getattr(layer, name), changes.get(name, getattr(layer, name))
    if new == old or holder in changes:
        return
    expected = f"{old}, the value for which its layers were made"
    hint = ("Make another layer:", f"{type(layer).__name__}(make_layer, {describe(new)}, key=key)")
    raise ArgumentError(named(layer, name), expected, describe(new), hint=hint)


def check_key(where: TitleLike, key: Any) -> PRNGKeyArray:
    """Accept one random key, new style or old, or take the next one of `init_keys`.

    Args:
        where: names the layer and the argument in the error.
        key: the user's value.

    Returns:
        The key.

    Raises:
        RngError: if it is not a key, or several keys.

    Examples:
        >>> check_key("Linear(key)", jax.random.key(0)).shape
        ()
    """
    # First: it has neither shape nor dtype, but is a key.
    if isinstance(key, InitKeys):
        return next(key)
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    if shape is None or dtype is None:
        hint = STATE_HINT if isinstance(key, State) else KEY_HINT
        raise RngError(where, "a random key", describe(key), hint=hint)
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # Old-style keys are uint32 words: two by default, four for the "rbg" generator.
    if (typed and shape == ()) or (dtype == jnp.uint32 and shape in ((2,), (4,))):
        return key
    raise RngError(
        where, "one random key", describe(key), hint="jax.vmap(f)(keys)" if typed else KEY_HINT
    )


def required_key(where: TitleLike, key: Any, call: str) -> PRNGKeyArray:
    """Return a random key, for a layer that cannot train without one.

    Args:
        where: names the layer in the error.
        key: the user's value; None if there is none.
        call: code that calls the layer with a key.

    Returns:
        The key.

    Raises:
        RngError: if there is no key, or the value is not a key.
    """
    if key is None:
        hint = f"{call}  # or pm.inference_mode(layer)"
        raise RngError(f"{where} needs a random key when training", hint=hint)
    return check_key(where, key)


def split_key(where: TitleLike, key: KeyLike, n: int) -> Sequence[PRNGKeyArray] | Keys:
    """Return several keys for a layer's own arrays.

    Args:
        where: names the layer and the argument in the error.
        key: the user's value.
        n: number of keys.

    Returns:
        A key split by `n`; or, without a split, the next `n` of `init_keys`.

    Raises:
        RngError: if it is not a key, or several keys.

    Examples:
        >>> len(split_key("Linear(key)", jax.random.key(0), 2))
        2
    """
    if isinstance(key, InitKeys):
        return [next(key) for _ in range(n)]
    key = check_key(where, key)
    return _divided(key, n) if n <= _DIVIDED_AT_ONCE else jax.random.split(key, n)


def _parts(key: PRNGKeyArray, n: int) -> tuple[PRNGKeyArray, ...]:
    return tuple(jax.random.split(key, n))


# One program takes a fifth of the time of separate calls that split a key and take out each part:
# 9 us instead of 40 to 60, for two. Inlining leaves no trace in other programs.
_divided: Callable[[PRNGKeyArray, int], tuple[PRNGKeyArray, ...]] = untyped_jax.jit(
    _parts, static_argnums=1, inline=True
)


def divide_key(where: TitleLike, key: KeyLike, n: int) -> Sequence[KeyLike] | Keys:
    """Return the keys for the `n` parts of a layer.

    Args:
        where: names the layer and the argument in the error.
        key: the user's value.
        n: number of parts.

    Returns:
        A key split by `n`; or `init_keys` itself for each: the parts take keys from it in turn.

    Raises:
        RngError: if it is not a key, or several keys.

    Examples:
        >>> len(divide_key("MLP(key)", jax.random.key(0), 2))
        2
    """
    return [key] * n if isinstance(key, InitKeys) else split_key(where, key, n)


def check_dtype(where: str, dtype: Any, *, real: bool = False) -> Any:
    """Return the dtype for a layer's arrays: a floating one, JAX's default float if None.

    Args:
        where: names the argument in the error.
        dtype: a dtype, its name, or None.
        real: whether complex dtypes are refused, too.

    Returns:
        A dtype.

    Raises:
        ArgumentError: if it is not a floating (or complex) dtype.

    Warns:
        UserWarning: it needs 64 bits, which JAX does not have by default.

    Examples:
        >>> check_dtype("Linear(dtype)", None).name
        'float32'
    """
    if dtype is None:
        return jnp.result_type(float)
    try:
        accepted = jnp.issubdtype(jnp.dtype(dtype), jnp.floating if real else jnp.inexact)
    except TypeError:
        accepted = False
    if not accepted:
        hint = ("for example:", "dtype=jnp.float32")
        raise ArgumentError(where, "a floating dtype", describe(dtype), hint=hint)
    return available_dtype(where, dtype)


def check_array(where: TitleLike, x: Any, argument: str = "x") -> Array:
    """Accept arrays and numbers, but no lists.

    Args:
        where: the layer's title.
        x: the user's value.
        argument: the layer's name for it.

    Returns:
        A JAX array or tracer.

    Raises:
        ArgumentError: if x is neither an array nor a number.

    Examples:
        >>> check_array("Linear(...)", np.ones(3, np.float32)).shape
        (3,)
    """
    if isinstance(x, jax.Array):
        # Only a random key has a dtype that is not NumPy's.
        if isinstance(x.dtype, np.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]  (JAX annotates none)
            return x
        called = f"layer({argument}, key=key)" if argument == "x" else "layer(..., key=key)"
        hint = ("Pass a random key by name:", called)
        expected = f"{argument} to be an array of numbers"
        raise ArgumentError(where, expected, describe(x), hint=hint)
    if is_array_like(x) and getattr(getattr(x, "dtype", None), "kind", "f") not in _NO_NUMBERS:
        return jnp.asarray(x)
    is_input = argument == "x"
    hint = (
        "Make it an array:",
        "layer(jnp.asarray(x))" if is_input else f"jnp.asarray({argument})",
    )
    if isinstance(x, State) and is_input:
        hint = ("Pass the input first, then the State:", "layer(x, state)")
    got = describe(x)
    pair: Any = x if class_of(x) is tuple else ()
    if len(pair) == 2 and isinstance(pair[1], State) and is_input:
        hint = ("Unpack what the layer before it returned:", "x, state = layer(x, state)")
        got = f"a pair of {describe(pair[0])} and a State"
    refuse_tree(where, x, argument)
    raise ArgumentError(where, f"{argument} to be an array", got, hint=hint)


def refuse_tree(where: TitleLike, x: Any, argument: str = "x") -> None:
    """Refuse a whole tree instead of an array; lists, and a State, are other mistakes.

    Raises:
        ArgumentError: if x is a tree.
    """
    if x is None or isinstance(x, (list, tuple, State)) or not is_node(x):
        return
    expected = f"{argument} to be an array"
    raise ArgumentError(where, expected, describe(x), hint=TREE_HINT)


def check_floating(where: TitleLike, x: Array) -> None:
    """Refuse integers, whose result would have to be rounded, and complex numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        hint: Sequence[str] = ("Convert it first:", "layer(x.astype(float))")
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            hint = ("Pass the real part and the imaginary part separately:", "layer(x.real)")
        raise ArgumentError(where, "x of a floating dtype", describe(x), hint=hint)


def own_arrays(where: Title, *names: str) -> tuple[Any, ...]:
    """Read and check the arrays of a layer, as every layer of `nn` does in a call.

    Every axis counts. Layers that a map has made as one have an extra axis. Called without a map,
    they would take it for one of the others, and broadcast to a wrong result. Shapes are known
    while tracing, so a compiled program does not contain the check.

    Args:
        where: the title of the layer; its annotations define the shapes.
        *names: the fields.

    Returns:
        The values of these fields, in that order.

    Raises:
        ShapeError: if a value has another shape, is missing, or should not exist.
        ArgumentError: if a value is not an array.

    Examples:
        >>> from pytreemod import nn
        >>> layer = nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
        >>> own_arrays(Title(layer, "in_features"), "weight")[0].shape
        (2, 3)
    """
    return read_arrays(where.layer, names, where, check_own)


def check_own(where: Title, name: str, shape: tuple[int, ...] | None, value: Any) -> None:
    """Refuse a value that does not have the shape of the layer's array of that name."""
    expected = f"{name} to be None" if shape is None else f"{name} of shape {shape}"
    refuse_label(where, expected, value)
    found = shape_of(value)
    if found == shape:
        return
    if shape is not None and found is not None and len(found) > len(shape):
        hint = mapped_hint(where.layer)
    elif shape and found == shape[1:]:
        call, arguments = _call_of(where.layer)
        axes = ", ".join(["None", *["0"] * len(arguments)])
        hint = (
            "One axis is missing. A map over a single layer leaves it unmapped:",
            f"pm.filter_vmap({call}, in_axes=({axes}))({', '.join(['layer', *arguments])})",
        )
    else:
        has_flag = shape is None or found is None
        flags = [
            flag for flag in (f"use_{name}", "channelwise_affine") if hasattr(where.layer, flag)
        ]
        names = flags if has_flag and flags else where.names
        changes = ", ".join([f"{name}={name}", *(f"{other}=..." for other in names)])
        hint = (
            "Replace the arrays and their configuration in one call:",
            f"layer = layer.replace({changes})",
        )
    raise ShapeError(where, expected, describe(value), hint=hint)


def refuse_label(where: Title, expected: str, value: Any) -> None:
    """Refuse a value that cannot be an array of a layer: a string, a class, True.

    Raises:
        ArgumentError: if the value is one of these.
    """
    # JAX would convert True to a number, and NumPy would try a string as the name of a dtype.
    is_label = isinstance(value, (bool, str))
    if not is_label:
        try:
            shape_of(value)
        except (TypeError, ValueError):
            is_label = True
    if is_label:
        raise ArgumentError(where, expected, describe(value), hint=TREE_HINT)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value that can be an array; None for None."""
    if value is None or hasattr(value, "shape"):
        return None if value is None else value.shape
    if isinstance(value, int | float | complex):
        return ()  # Without a trace, which takes ten times as long as the rest of a layer.
    # A computed value becomes an array only in a computation, which this avoids.
    return jax.eval_shape(lambda: jnp.asarray(value)).shape


def mapped_hint(layer: Any) -> Sequence[str]:
    """Return a hint on how to call layers that a map has made as one."""
    call, arguments = _call_of(layer)
    mapped = f"pm.filter_vmap({call})({', '.join(['layers', *arguments])})"
    return (mapped,)


def _call_of(layer: Any) -> tuple[str, list[str]]:
    """Return code of a function that calls a layer, and names of the arguments to map over.

    For a recurrent cell these include the carry.
    """
    parameters = [*inspect.signature(layer).parameters.values()]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    more = ["state"] if is_stateful(layer) else required[1:]
    taken = ", ".join(["x", *(name[0] for name in more)])
    return f"lambda m, {taken}: m({taken})", ["xs", *(f"{name}s" for name in more)]


def check_last_axis(where: TitleLike, x: Array, size: int, argument: str) -> None:
    """Require that the last axis of `x` has `size` entries.

    Args:
        where: the layer's title.
        x: the input.
        size: of the last axis.
        argument: the constructor's argument that set the size.

    Raises:
        ShapeError: if it has another size; the message shows which axis would fit.

    Examples:
        >>> check_last_axis("Linear(...)", jnp.ones((7, 3)), 3, "in_features")
    """
    # A slice: x may have no axes.
    if x.shape[-1:] != (size,):
        raise ShapeError(where, f"x of shape (..., {size})", describe(x))


def spatial_names(count: int) -> tuple[str, ...]:
    """Return names of the spatial axes, for the shapes in errors."""
    if count < len(SPATIAL_AXES):
        return SPATIAL_AXES[count]
    return tuple(f"d{axis}" for axis in range(count))


SPATIAL_AXES = ((), ("length",), ("height", "width"), ("depth", "height", "width"))


def check_channels(where: TitleLike, x: Array, channels: int | None, dims: int) -> None:
    """Require axes (..., channels, *spatial), with any number of channels where None.

    Args:
        where: the layer's title.
        x: the input.
        channels: the size of the channel axis, if the layer fixes it.
        dims: number of spatial axes.

    Raises:
        ShapeError: if an axis is missing, or the channel axis has another size.

    Examples:
        >>> check_channels("Conv2d(...)", jnp.ones((3, 8, 8)), 3, 2)
    """
    axis = -dims - 1
    if x.ndim > dims and channels in (None, x.shape[axis]):
        return
    axes = ("...", "channels" if channels is None else str(channels), *spatial_names(dims))
    raise ShapeError(where, f"x of shape ({', '.join(axes)})", describe(x))


def check_window(where: TitleLike, x: Array, window: Sequence[int], pads: Sequence[Any]) -> None:
    """Require that a window of the given extent fits into the padded spatial axes.

    JAX would return an empty array, which shows up later as a loss of NaN, far from its cause.

    Args:
        where: the layer's title.
        x: the input, spatial axes last.
        window: extent of the window on each spatial axis, dilation included.
        pads: (low, high) for each spatial axis.

    Raises:
        ShapeError: if the window is larger than the padded input.

    Examples:
        >>> check_window("MaxPool2d(...)", jnp.ones((1, 8, 8)), (2, 2), [(0, 0), (0, 0)])
    """
    sizes = x.shape[-len(window) :]
    padded = tuple(size + low + high for size, (low, high) in zip(sizes, pads, strict=True))
    if any(size < extent for size, extent in zip(padded, window, strict=True)):
        expected = f"padded spatial axes of at least {tuple(window)}"
        raise ShapeError(where, expected, f"{padded} from {describe(x)}")


def check_trailing(where: Title, x: Array, shape: tuple[int, ...]) -> None:
    """Require that x ends in `shape`.

    Args:
        where: the layer's title.
        x: the input.
        shape: of the last axes.

    Raises:
        ShapeError: if the last axes of x have other sizes.

    Examples:
        >>> from types import SimpleNamespace
        >>> check_trailing(Title(SimpleNamespace()), jnp.ones((7, 2, 3)), (2, 3))
    """
    count = len(shape)
    if x.ndim >= count and x.shape[x.ndim - count :] == shape:
        return
    if x.ndim >= count and x.shape[:count] == shape:
        ends = f"{tuple(range(count))}, {tuple(range(-count, 0))}"
        hint: Sequence[str] = (
            "The first axes fit; to make them the last ones:",
            f"layer(jnp.moveaxis(x, {ends}))",
        )
    elif x.ndim >= count:
        hint = (
            "For such arrays, create the layer with",
            f"{type(where.layer).__name__}({x.shape[x.ndim - count :]})",
        )
    else:
        hint = f"x has too few axes; the layer normalizes over the last {count}."
    wanted = ", ".join(["...", *map(str, shape)])
    raise ShapeError(where, f"x of shape ({wanted})", describe(x), hint=hint)


def check_spread(where: TitleLike, x: Array, shape: tuple[int, ...]) -> None:
    """Require that an array of `shape` can be broadcast to the last axes of x.

    Args:
        where: the layer's title.
        x: the input.
        shape: of the layer's array; 1 fits any size.

    Raises:
        ShapeError: if the array cannot be broadcast.

    Examples:
        >>> check_spread("PReLU(...)", jnp.ones((7, 3, 8)), (3, 1))
    """
    count = len(shape)
    sizes = x.shape[x.ndim - count :]
    if x.ndim >= count and all(own in (1, n) for own, n in zip(shape, sizes, strict=True)):
        return
    wanted = ", ".join(["...", *("any" if size == 1 else str(size) for size in shape)])
    hint: Sequence[str] = "Its axes must match the last axes of x, or have size 1."
    if x.ndim == count + 1 and count == 1 and x.shape[0] == shape[0]:
        hint = ("The first axis fits; to make it the last one:", "layer(jnp.moveaxis(x, 0, -1))")
    raise ShapeError(where, f"x of shape ({wanted})", describe(x), hint=hint)


def check_lengths(
    where: Title, name: str, lengths: Any, batch: tuple[int, ...], most: int, check: bool = False
) -> Array | None:
    """Accept an integer for each sequence, from 0 to `most`; or None.

    Args:
        where: the layer's title.
        name: the layer's name for them.
        lengths: the user's value.
        batch: the batch axes of the sequences.
        most: number of positions.
        check: whether compiled code raises an error if a length is wrong.

    Returns:
        Integers that can be subtracted; None for None.

    Raises:
        ArgumentError: if they are not integers, or one is wrong, if that is known.
        ShapeError: if there is not one for each sequence.
    """
    if lengths is None:
        return None
    lengths = check_array(where, lengths, name)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentError(where, f"{name} of integers", describe(lengths))
    if lengths.shape != batch:
        expected = f"{name} of shape {batch}, one for each sequence"
        raise ShapeError(where, expected, describe(lengths))
    lengths = countable(lengths)
    wrong = (lengths < 0) | (lengths > most)
    expected = f"{name} from 0 to {most}, the positions of the sequence"
    if isinstance(lengths, Tracer):
        text = explain(str(where), expected, "others")
        return error_if(lengths, wrong, text) if check else lengths
    if wrong.any():
        raise ArgumentError(where, expected, str(lengths.tolist()))
    return lengths


def check_state(where: Any, state: Any) -> None:
    """Refuse everything but a State, such as a key.

    Args:
        where: the call, as a string or an object that makes one.
        state: a State, or `ABSENT`.

    Raises:
        ArgumentError: if it is something else.

    Examples:
        >>> from pytreemod.nn.calling import ABSENT
        >>> check_state("Dropout(p=0.5)", ABSENT)
    """
    if isinstance(state, (State, Absence)):
        return
    raise ArgumentError(where, "a State", describe(state), hint=_state_hint(state, False))


def required_state(where: Any, state: Any) -> State:
    """Return the State, for a layer that requires one.

    Args:
        where: the call, as a string or an object that makes one.
        state: the user's value; `ABSENT` if there is none.

    Returns:
        The State.

    Raises:
        ArgumentError: if the value is not a State.
        StateError: if there is none.
    """
    if isinstance(state, Absence):
        raise StateError(f"{where} needs a State", hint="x, state = layer(x, state)")
    if isinstance(state, State):
        return state
    raise ArgumentError(where, "a State", describe(state), hint="x, state = layer(x, state)")


def _state_hint(given: Any, is_needed: bool) -> Sequence[str]:
    """Return a hint on how to pass a State, depending on the given value."""
    if given is None and is_needed:
        return (
            "Create the layer with its State, and pass the State to each call:",
            "layer, state = pm.make_with_state(Layer)(...)",
            "x, state = layer(x, state)",
        )
    dtype = getattr(given, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_needed or (dtype is not None and not is_key):
        return ("Pass the input first, then the State; a key by name:", "layer(x, state, key=key)")
    return ("The second argument is a State; a key is passed by name:", "layer(x, key=key)")
