"""Equality of static values: whether a program that was traced for one is valid for the other.

Python's `==` is not enough. `1`, `1.0` and `True` are equal, and so are `0.0` and `-0.0`, `{1}` and
`{1.0}`, or dicts with the same items in another order, but programs distinguish them. So every
comparison of static values, in a dispatch key or in the structure of a tree, is made here: the
values must be equal and of one kind. (All spellings of a dtype are of one kind.) Fields of a
dataclass are compared one by one, unless its class defines its own `==`, which is used instead: a
field that this ignores must not affect programs.
"""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.typing import Tracer, class_of

PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
"""Types for whose values type and `==` suffice, apart from the signs of zeros."""

_COMPLEX: tuple[Any, ...] = (complex, np.complexfloating)
_INEXACT: tuple[Any, ...] = (float, np.inexact, *_COMPLEX)
_MAPPINGS: tuple[Any, ...] = (dict, types.MappingProxyType)


PYTHON_SCALARS: frozenset[type] = frozenset({bool, int, float, complex})
"""Classes of Python that denote a dtype, too."""

_SCALAR_KIND: Any = class_of(jnp.float32)
_DTYPES: dict[Any, np.dtype[Any]] = {
    kind: scalar.dtype
    for scalar in vars(jnp).values()
    if class_of(scalar) is _SCALAR_KIND
    for kind in (scalar, scalar.dtype.type)
}


def dtype_of(value: Any) -> Any:
    """Return the dtype that `value` spells: `jnp.float32`, `np.float32`, `np.dtype("float32")`.

    Args:
        value: anything.

    Returns:
        The dtype; None for anything else, such as `float` and `"float32"`.

    Examples:
        >>> dtype_of(np.float32) == dtype_of(jnp.float32) == np.dtype("float32")
        True
    """
    spelling: Any = value  # Type checkers would narrow `value` to a dtype of an unknown type.
    if isinstance(value, np.dtype):
        return spelling
    is_scalar_type = class_of(value) is _SCALAR_KIND or class_of(value) is type
    return _DTYPES.get(value) if is_scalar_type else None


def kind_of(value: Any) -> Any:
    """Return a key that distinguishes a static value from others that `==` calls equal.

    Args:
        value: anything; containers are examined, too.

    Returns:
        A hashable object: for most values their type.

    Examples:
        >>> kind_of(1) == kind_of(True), kind_of({"a": 1, "b": 1}) == kind_of({"b": 1, "a": 1})
        (False, False)
    """
    kind = class_of(value)
    if kind in PLAIN and kind is not float:
        return kind
    if kind is type and value in PYTHON_SCALARS:
        # NumPy calls them equal to a dtype, but they promote weakly.
        return type, value
    if dtype_of(value) is not None:
        return type
    if issubclass(kind, _INEXACT):
        parts = (value.real, value.imag) if issubclass(kind, _COMPLEX) else (value,)
        # Only its `repr` shows the sign of a zero.
        return (kind, repr(value)) if 0.0 in parts else kind
    if issubclass(kind, (tuple, list)):
        return (kind, *map(kind_of, value))
    if issubclass(kind, _MAPPINGS):
        # Iteration has an order, even where `==` ignores it.
        makes = value.default_factory if issubclass(kind, defaultdict) else None
        return (kind, makes, *((key, kind_of(key), kind_of(item)) for key, item in value.items()))
    if issubclass(kind, (set, frozenset)):
        return kind, frozenset((item, kind_of(item)) for item in value)
    if issubclass(kind, deque):
        return (kind, value.maxlen, *map(kind_of, value))
    if kind is slice:
        return kind, kind_of(value.start), kind_of(value.stop), kind_of(value.step)
    if kind is range:
        return kind, value.start, value.stop, value.step
    if kind is types.SimpleNamespace:
        return kind, kind_of(vars(value))
    if issubclass(kind, (np.datetime64, np.timedelta64)):
        # The same instant in two units is equal, but computes differently.
        return kind, value.dtype
    names = _compared_fields(kind)
    return kind if names is None else (kind, *(kind_of(getattr(value, name)) for name in names))


# How containers are compared: items, after another value. By `__eq__`, because a subclass may
# define its own.
_PARTS: dict[Any, Callable[[Any], tuple[Any, Sequence[Any]]]] = {
    tuple.__eq__: lambda value: (None, value),
    list.__eq__: lambda value: (None, value),
    dict.__eq__: lambda value: (getattr(value, "default_factory", None), [*value, *value.values()]),
    OrderedDict.__eq__: lambda value: (None, [*value, *value.values()]),
    types.MappingProxyType.__eq__: lambda value: (None, [*value, *value.values()]),
    deque.__eq__: lambda value: (value.maxlen, value),
    slice.__eq__: lambda value: (None, (value.start, value.stop, value.step)),
    types.SimpleNamespace.__eq__: lambda value: (None, [vars(value)]),
}


def _compared_fields(kind: Any) -> list[str] | None:
    """The fields that a dataclass's generated `==` compares; None if the class defines its own."""
    # Generated code is in no file.
    code = getattr(kind.__eq__, "__code__", None)
    if not dataclasses.is_dataclass(kind) or getattr(code, "co_filename", None) != "<string>":
        return None
    return [field.name for field in dataclasses.fields(kind) if field.compare]


def are_one(a: Any, b: Any) -> bool:
    """Whether a program that was traced for one static value is valid for the other.

    Args:
        a: anything.
        b: anything. If comparing raises, or does not return a bool, the two differ.

    Returns:
        Whether they are the same object, or equal and of one kind. Any NaN equals any other.

    Examples:
        >>> are_one((1, "a"), (1, "a")), are_one({1}, {1.0}), are_one(0.0, -0.0)
        (True, False, False)
    """
    if a is b:
        return True
    kind = class_of(a)
    if kind is not class_of(b):
        dtype, other = dtype_of(a), dtype_of(b)
        # NumPy reads None as a dtype: that of float64.
        return dtype is not None and other is not None and dtype == other
    if kind is float or kind is complex:
        return repr(a) == repr(b)
    # The `==` of a NumPy scalar does not return a Python bool.
    if issubclass(kind, (np.ndarray, np.generic, jax.Array)):
        return _are_same_arrays(a, b)
    if kind is list or kind is tuple:
        return are_pairwise_one(a, b)
    try:
        # One by one: `==` may return a NumPy bool, or call NaN different from itself.
        parts = _PARTS.get(kind.__eq__)
        if parts is not None:
            (head, items), (other, others) = parts(a), parts(b)
            return are_one(head, other) and are_pairwise_one(items, others)
        names = _compared_fields(kind)
        if names is not None:
            return all(are_one(getattr(a, name), getattr(b, name)) for name in names)
        return (a == b) is True and kind_of(a) == kind_of(b)
    except Exception:
        return False


def _are_same_arrays(a: Any, b: Any) -> bool:
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False  # Their values are unknown.
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if getattr(a, "weak_type", False) != getattr(b, "weak_type", False):
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        # A garbage collection may compare in the middle of a trace, which must not record it.
        with jax.ensure_compile_time_eval():
            a, b = jax.random.key_data(a), jax.random.key_data(b)
    # As bytes, NaN equals NaN, and the signs of zeros differ.
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def are_pairwise_one(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether each value equals the one at the same index of the other sequence."""
    # Static containers mostly contain the same objects: small numbers, names, functions.
    return len(a) == len(b) and (all(map(is_, a, b)) or all(map(are_one, a, b)))
