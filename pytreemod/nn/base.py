"""What every layer is made of: how it is called, its initial values, and the few checks.

A layer is a Module whose annotations say the shapes of its arrays, `Float[Array, "out in"]`, by the
names of its sizes. `layer_call` compares them before each call: several layers that a map has made
as one have an axis more, and would broadcast to a wrong result. Shapes are known while tracing, so
a compiled program contains none of the checks.
"""

from __future__ import annotations

import functools as ft
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, PRNGKeyArray, Shaped

from pytreemod.errors import ArgumentError, FieldWarning, ShapeError, StateError, describe, warn
from pytreemod.module.classes import Module
from pytreemod.module.naming_axes import array_texts, evaluated
from pytreemod.module.reading import computed_once
from pytreemod.nn.meshes import Features, call_on_mesh
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.tokens import RngStream
from pytreemod.state.values import State
from pytreemod.tree.instances import flat_of
from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.typing import class_of, is_instance, jtu, untyped_jax

_Call = TypeVar("_Call", bound=Callable[..., Any])

AnyArray: TypeAlias = Shaped[ArrayLike, "..."]
"""An array of any shape, JAX's or NumPy's, or a number."""

Initializer: TypeAlias = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
"""A function `(key, shape, dtype) -> array`, as in `jax.nn.initializers`."""


# ---- calls


def layer_call(features: Features = None) -> Callable[[_Call], _Call]:
    """Make the `__call__` of a layer: checks its arrays, names its operations, works on meshes.

    - An array of the layer must have the shape of its annotation, if that is given by static fields
      or properties of the class: `weight: Float[Array, "size"]`.
    - The operations are named after the class in profiles.
    - On a mesh with explicit axes, the compiler chooses shardings inside of the call. The result is
      split like x along the axes whose size is that of x.

    Args:
        features: `("weight", 0, -1)` says that axis -1 of the result is split like axis 0 of the
            layer's `weight`, instead of like x. The name of a property may stand for the -1.

    Returns:
        A decorator.

    Raises:
        ShapeError: in the call, if an array has another shape than its annotation says.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from jaxtyping import Array, Float
        >>> from pytreemod import nn
        >>> class Gain(pm.Module):
        ...     factor: Float[Array, "size"]
        ...     size: int = pm.field(static=True)
        ...     @nn.layer_call()
        ...     def __call__(self, x, *, key=None):
        ...         return self.factor * nn.check_shape(self, x, ..., self.size)
        >>> Gain(jnp.ones(3), 3)(jnp.ones(3)).shape
        (3,)
        >>> Gain(jnp.ones((5, 3)), 3)(jnp.ones(3))
        Traceback (most recent call last):
        pytreemod.errors.ShapeError: Gain(size=3): expected factor of shape (3,), got f32[5,3].
          Several layers as one are called by pm.filter_vmap, or in an nn.Ensemble
    """

    def decorate(call: Any) -> Any:
        @ft.wraps(call)
        def called(layer: Any, /, *args: Any, **kwargs: Any) -> Any:
            mesh = explicit_mesh(*jtu.tree_leaves(layer), *args, *kwargs.values())
            if mesh is not None:
                # This once more, where the axes of the mesh are automatic.
                return call_on_mesh(mesh, called, layer, args, kwargs, features)
            cls = class_of(layer)
            room = "pm.nn." if cls.__module__.startswith("pytreemod.") else ""
            with jax.named_scope(f"{room}{cls.__name__}"):
                return call(_with_own_arrays(layer), *args, **kwargs)

        return called

    return decorate


def _with_own_arrays(layer: Any) -> Any:
    """The layer, if its arrays have the declared shapes; computed ones are computed once."""
    arrays: dict[str, Any] = {}
    for name, axes in _declared_axes(class_of(layer)).items():
        value, shape = getattr(layer, name), _declared_shape(layer, axes)
        arrays[name] = value
        if getattr(value, "shape", shape) != shape:
            hint = "Several layers as one are called by pm.filter_vmap, or in an nn.Ensemble"
            expected = f"{name} of shape {shape}"
            raise ShapeError(title(layer), expected, describe(value), hint=hint)
    _, (split, notes, *_) = flat_of(layer)
    return computed_once(layer, arrays) if split.computed or notes.ties else layer


def _declared_shape(layer: Any, axes: Sequence[int | str]) -> tuple[int, ...]:
    """The shape that the annotation of an array says, by the sizes of a layer."""
    shape: tuple[int, ...] = ()
    for axis in axes:
        size: Any = getattr(layer, axis) if isinstance(axis, str) else axis
        # "scalar" is the word of layers for no axis; their arrays have one entry there.
        shape += size if is_instance(size, tuple) else (1 if size == "scalar" else size,)
    return shape


def check_shape(layer: Any, x: AnyArray, *shape: Any) -> Any:
    """Require an input of some shape.

    Args:
        layer: errors name it.
        x: the input.
        *shape: for each axis its size, or a name if any size is right; `...` is any number of axes.

    Returns:
        x, as a JAX array.

    Raises:
        ShapeError: if x has another shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.check_shape(nn.Identity(), jnp.ones((3, 4)), "channels", 5)
        Traceback (most recent call last):
        pytreemod.errors.ShapeError: Identity: expected x of shape (channels, 5), got f32[3,4].
    """
    x = jnp.asarray(x)
    rest = x.ndim - len(shape) + 1
    fits = ... in shape or rest == 1
    if ... in shape:
        dots = shape.index(...)
        wanted = (*shape[:dots], *["any"] * rest, *shape[dots + 1 :])
    else:
        wanted = shape
    if fits and rest >= 0 and all(map(_fits, wanted, x.shape)):
        return x
    text = ", ".join("..." if size is ... else str(size) for size in shape)
    text = f"({text},)" if len(shape) == 1 else f"({text})"
    raise ShapeError(title(layer), f"x of shape {text}", describe(x))


def _fits(wanted: Any, size: int) -> bool:
    return isinstance(wanted, str) or wanted == size


def title(layer: Any) -> str:
    """A layer as its errors name it: `Linear(in_features=3, out_features=4)`."""
    shown = [f"{name}={getattr(layer, name)!r}" for name in _size_names(type(layer))]
    return type(layer).__name__ + (f"({', '.join(shown)})" if shown else "")


# ---- the shapes of a layer's arrays, according to their annotations
#
# `weight: Float[Array, "out_size in_size"]` is a contract if these names are static fields, or
# properties, of the class.


def _size_names(cls: Any) -> list[str]:
    """Return the static fields of a Module class that shapes depend on."""
    used = {axis for axes in _declared_axes(cls).values() for axis in axes}
    return [name for name in cls.__module_schema__.fields if name in used]


# Cached for the process, because JAX never frees the classes of its pytrees.
@ft.cache
def _declared_axes(cls: Any) -> dict[str, list[int | str]]:
    """Return the axes of the arrays whose annotations name only sizes of the class.

    Returns:
        By the name of the field, for each axis a number or the name of a size; the value of that is
        a tuple for several axes.

    Warns:
        FieldWarning: if an annotation cannot be evaluated.
    """
    found: dict[str, list[int | str]] = {}
    static = cls.__module_schema__.static
    for name, field in cls.__module_schema__.fields.items():
        try:
            texts = array_texts(evaluated(cls, field))
        except Exception as error:
            fact = f"{cls.__qualname__}.{name}: its shape is not checked: {error}"
            warn(FieldWarning, fact, hint="import its names at the top of the module")
            continue
        axes = [token.removeprefix("*") for token in (texts[0].split() if texts else ["no array"])]
        names = [axis for axis in axes if not axis.isdigit()]
        if all(n in static or isinstance(getattr(cls, n, None), property) for n in names):
            found[name] = [int(axis) if axis.isdigit() else axis for axis in axes]
    return found


# ---- State and keys


class StatefulLayer(Module):
    """Base of layers that are called as `layer(x, state)` and return `(out, state)`.

    `Sequential`, `Stack` and `Ensemble` pass the State to a layer that is one, or whose `__call__`
    has a parameter named `state`. Only a layer that is sometimes called without needs this class.

    Examples:
        >>> from pytreemod import nn
        >>> nn.Sequential([nn.BatchNorm(3)]).is_stateful(), nn.Sequential([]).is_stateful()
        (True, False)
    """

    def is_stateful(self) -> bool:
        """Whether this layer is called with a State; True unless overridden."""
        return True


def takes_state(layer: Any) -> bool:
    """Whether a layer of any class is called with a State, if there is one."""
    if isinstance(layer, StatefulLayer):
        return layer.is_stateful()
    return "state" in _parameters(layer)


def takes_key(layer: Any) -> bool:
    """Whether a layer, or a function, can be called with `key=`."""
    parameters = _parameters(layer)
    return "key" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _parameters(layer: Any) -> Mapping[str, inspect.Parameter]:
    call = type(layer).__call__ if isinstance(layer, Module) else layer
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        return {}


def call_layer(
    layer: Any, inputs: Sequence[Any], state: Any, key: Any, **options: Any
) -> tuple[Any, Any]:
    """Call a layer with the State and the key, if it takes them.

    The State has the name `state`; if the layer has no such parameter, it comes after the inputs.

    Returns:
        Its output, and the State after the call: the same if it takes none.

    Raises:
        StateError: if a layer that got a State does not return its output and a State.
    """
    if key is not None and takes_key(layer):
        options["key"] = key
    if state is None or not takes_state(layer):
        return layer(*inputs, **options), state
    if "state" in _parameters(layer):
        return output_and_state(layer, layer(*inputs, **options, state=state))
    return output_and_state(layer, layer(*inputs, state, **options))


def output_and_state(layer: Any, result: Any) -> tuple[Any, State]:
    """The result of a layer that got a State.

    Raises:
        StateError: if it is something else than an output and a State.
    """
    # Not just unpacked: an array of two rows would pass for an output and a State.
    if is_instance(result, tuple) and len(result) == 2 and isinstance(result[1], State):
        return result[0], result[1]
    where = f"{type(layer).__name__}(x, state)"
    raise StateError(where, "(out, state) as the result", describe(result))


def key_for_call(layer: Any, stream: RngStream | None, key: Any, state: Any) -> tuple[Any, Any]:
    """The key of a call, and the State after it: a given key, or the next one of the stream.

    Raises:
        ArgumentError: if there is neither.
    """
    if key is not None:
        return one_key(key), state
    if stream is not None and state is not None:
        return state.next_key(stream)
    expected = "key=, or a State with its stream" if stream is not None else "key="
    raise ArgumentError(title(layer), f"{expected} in training", "neither" if stream else "none")


# ---- initial values


def split_key(key: KeyLike, n: int) -> Any:
    """Return keys for the arrays of a layer.

    Args:
        key: a random key, or the result of `init_keys`.
        n: number of keys.

    Returns:
        The key, split by `n`; or the next `n` keys of `init_keys`.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> len(nn.split_key(jax.random.key(0), 2))
        2
    """
    return [next(key) for _ in range(n)] if isinstance(key, InitKeys) else jax.random.split(key, n)


def one_key(key: Any) -> Any:
    """The key itself, or the next one of `init_keys`."""
    return next(key) if isinstance(key, InitKeys) else key


def divide_key(key: KeyLike, n: int) -> Any:
    """Keys for the layers of a layer; from `init_keys`, each takes as many as it needs."""
    return [key] * n if isinstance(key, InitKeys) else [*jax.random.split(key, n)]


def initial_weight(
    init: Initializer | None, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any
) -> Array:
    """Draw a weight of shape (out, in, *kernel).

    Args:
        init: called with the shape (*kernel, in, out), which `jax.nn.initializers` expect; the
            result is transposed. If None, U[-1/sqrt(fan_in), 1/sqrt(fan_in)], as in PyTorch.
        key: for the initializer.
        shape: of the weight.
        dtype: of the weight; JAX's default float if None.

    Returns:
        The weight.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> init, key = jax.nn.initializers.he_normal(), jax.random.key(0)
        >>> nn.initial_weight(init, key, (4, 3), None).shape
        (4, 3)
    """
    n_out, n_in, *kernel = shape
    if init is None:
        return uniform(key, shape, dtype, n_in * math.prod(kernel))
    values = init(key, (*kernel, n_in, n_out), float_dtype(dtype))
    return jnp.moveaxis(jnp.asarray(values), (-1, -2), (0, 1))


def initial_bias(
    init: Initializer | None, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, fan_in: int
) -> Array:
    """Draw a bias.

    Args:
        init: called as `init(key, shape, dtype)`; if None, U[-1/sqrt(fan_in), 1/sqrt(fan_in)].
        key: for the initializer.
        shape: of the bias.
        dtype: of the bias; JAX's default float if None.
        fan_in: number of inputs of each output.

    Returns:
        The bias.
    """
    if init is None:
        return uniform(key, shape, dtype, fan_in)
    return jnp.asarray(init(key, shape, float_dtype(dtype)))


def uniform(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, fan_in: int) -> Array:
    """Draw from U[-1/sqrt(fan_in), 1/sqrt(fan_in)]; of complex numbers, both parts."""
    limit, dtype = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0, float_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.uniform(key, shape, dtype, -limit, limit)
    # JAX draws no uniform complex numbers.
    real: Any = untyped_jax.numpy.finfo(dtype).dtype
    parts = [jax.random.uniform(k, shape, real, -limit, limit) for k in jax.random.split(key)]
    return lax.complex(*parts)


def float_dtype(dtype: Any) -> Any:
    """A dtype; JAX's default float if it is None, or Python's class."""
    return jnp.result_type(float) if dtype is None or dtype is float else jnp.dtype(dtype)


# ---- sums and squares, in half precision too


def wide_dtype(dtype: Any) -> Any:
    """The dtype for long sums: float32 for narrower floats. In bfloat16, 256 + 1 is 256."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    is_narrow = is_float and untyped_jax.numpy.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow else dtype


def as_wide(layer: Any, x: Array) -> Array:
    """Return x in the dtype for statistics; others than floats would be cut at the end."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ArgumentError(title(layer), "real floating-point numbers", describe(x))
    return as_dtype(x, wide_dtype(x.dtype))


def as_dtype(x: Array, dtype: Any) -> Array:
    """Return x in a dtype; JAX would trace a conversion to the one that it has, too."""
    return x if x.dtype == dtype else x.astype(dtype)


# Inside of `jit`, JAX traces a function with a rule once, and not at each use: 16 us, not 110.
@ft.partial(untyped_jax.jit, inline=True)
def square(x: Array) -> Array:
    """Compute `jnp.square`, for which JAX would store 2 * x as well for the backward pass."""
    return _squared(x)


@jax.custom_jvp
def _squared(x: Array) -> Array:
    return jnp.square(x)


@_squared.defjvp
def _(x: Any, tangent: Any) -> tuple[Array, Array]:
    return jnp.square(x[0]), 2 * (x[0] * tangent[0])


def add_shared(x: Array, values: Array | None) -> Array:
    """Add an array that all examples share, such as a bias, along the last axes of x.

    Its gradient is a sum over the examples, so this computes in the `wide_dtype`.
    """
    return x if values is None else _shared(_sum, x, values)


def scale_shared(x: Array, values: Array | None) -> Array:
    """Multiply by an array that all examples share, as `add_shared` adds it."""
    return x if values is None else _shared(_product, x, values)


def _shared(operation: Any, x: Array, values: Array) -> Array:
    dtype = jnp.result_type(x, values)
    wide = wide_dtype(dtype)
    return as_dtype(operation(as_dtype(x, wide), as_dtype(values, wide)), dtype)


def _sum(x: Array, values: Array) -> Array:
    # By `lax`, which is traced in half the time of `jnp.add`: nearly every layer has a bias.
    if values.shape != x.shape:
        values = lax.broadcast_in_dim(values, x.shape, range(x.ndim - values.ndim, x.ndim))
    return lax.add(x, values)


def _product(x: Array, values: Array) -> Array:
    # Not by `lax`, for which JAX would store the weight once for each example. Of the rank of x,
    # for jax_numpy_rank_promotion="raise".
    return jnp.multiply(x, lax.expand_dims(values, range(x.ndim - values.ndim)))
