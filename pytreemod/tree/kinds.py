"""When two static values are one: when a program that was traced for one serves for the other.

Python's `==` is not enough. `1`, `1.0` and `True` are equal, and so are `0.0` and `-0.0`, `{1}` and
`{1.0}`, or dicts with the same items in another order, but programs tell them apart. So every
comparison of static values, in a dispatch key and in the structure of a tree, asks here: the
values must be equal, and of one kind. (The spellings of a dtype are of one.) The fields of a
dataclass are looked into, unless its class wrote an `==` of its own, which is believed: where that
leaves something out, it says that programs do not look at it.
"""

from __future__ import annotations

import dataclasses
import types
from collections import defaultdict, deque
from collections.abc import Sequence
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.typing import Tracer, class_of

PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
"""Types whose values are told apart by type and `==`, but for the signs of zeros."""

_COMPLEX: tuple[Any, ...] = (complex, np.complexfloating)
_INEXACT: tuple[Any, ...] = (float, np.inexact, *_COMPLEX)
_MAPPINGS: tuple[Any, ...] = (dict, types.MappingProxyType)


PYTHON_SCALARS: frozenset[type] = frozenset({bool, int, float, complex})
"""Classes of Python that stand for a dtype, too."""

_SCALAR_KIND: Any = class_of(jnp.float32)
_DTYPES: dict[Any, np.dtype[Any]] = {
    kind: scalar.dtype
    for scalar in vars(jnp).values()
    if class_of(scalar) is _SCALAR_KIND
    for kind in (scalar, scalar.dtype.type)
}


def dtype_of(value: Any) -> Any:
    """What `value` is a spelling of: `jnp.float32`, `np.float32`, `np.dtype("float32")`.

    Args:
        value: anything.

    Returns:
        The dtype; None for anything else, such as `float` and `"float32"`.

    Examples:
        >>> dtype_of(np.float32) == dtype_of(jnp.float32) == np.dtype("float32")
        True
    """
    spelling: Any = value  # A checker narrows `value` to a dtype of it knows not what.
    if isinstance(value, np.dtype):
        return spelling
    is_scalar_type = class_of(value) is _SCALAR_KIND or class_of(value) is type
    return _DTYPES.get(value) if is_scalar_type else None


def kind_of(value: Any) -> Any:
    """What tells a static value apart from others that `==` calls equal.

    Args:
        value: anything; containers are looked into.

    Returns:
        Something hashable: for most values their type.

    Examples:
        >>> kind_of(1) == kind_of(True), kind_of({"a": 1, "b": 1}) == kind_of({"b": 1, "a": 1})
        (False, False)
    """
    kind = class_of(value)
    if kind in PLAIN and kind is not float:
        return kind
    if kind is type and value in PYTHON_SCALARS:
        # NumPy calls them equal to a dtype; but these promote weakly.
        return type, value
    if dtype_of(value) is not None:
        return type
    if issubclass(kind, _INEXACT):
        parts = (value.real, value.imag) if issubclass(kind, _COMPLEX) else (value,)
        # Zeros have a sign, of which only the text tells.
        return (kind, repr(value)) if 0.0 in parts else kind
    if issubclass(kind, (tuple, list)):
        return (kind, *map(kind_of, value))
    if issubclass(kind, _MAPPINGS):
        # What is iterated has an order, whatever `==` says of it.
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
        # One instant in two units is equal, and computes otherwise.
        return kind, value.dtype
    names = _compared_fields(kind)
    return kind if names is None else (kind, *(kind_of(getattr(value, name)) for name in names))


def _compared_fields(kind: Any) -> list[str] | None:
    """What the `==` looks at that `dataclasses` writes; None if a class has another."""
    # It is written from text, so it is in no file.
    code = getattr(kind.__eq__, "__code__", None)
    if not dataclasses.is_dataclass(kind) or getattr(code, "co_filename", None) != "<string>":
        return None
    return [field.name for field in dataclasses.fields(kind) if field.compare]


def are_one(a: Any, b: Any) -> bool:
    """Whether a program that was traced for one static value serves for the other.

    Args:
        a: anything.
        b: anything. What raises, or gives no plain bool, when it is compared is another.

    Returns:
        Whether they are the same object, or equal and of one kind. NaN is one for all.

    Examples:
        >>> are_one((1, "a"), (1, "a")), are_one({1}, {1.0}), are_one(0.0, -0.0)
        (True, False, False)
    """
    if a is b:
        return True
    kind = class_of(a)
    if kind is not class_of(b):
        dtype, other = dtype_of(a), dtype_of(b)
        # To NumPy, None is a dtype: that of float64.
        return dtype is not None and other is not None and dtype == other
    if kind is float or kind is complex:
        return repr(a) == repr(b)
    # The `==` of a scalar of NumPy's gives none of Python's bools.
    if issubclass(kind, (np.ndarray, np.generic, jax.Array)):
        return _are_same_arrays(a, b)
    if kind is list or kind is tuple:
        return are_pairwise_one(a, b)
    if kind is dict:
        return are_pairwise_one([*a, *a.values()], [*b, *b.values()])
    try:
        names = _compared_fields(kind)
        if names is not None:
            # One by one: `==` may give a bool of NumPy's, or say of NaN that it is another.
            return all(are_one(getattr(a, name), getattr(b, name)) for name in names)
        return (a == b) is True and kind_of(a) == kind_of(b)
    except Exception:
        return False


def _are_same_arrays(a: Any, b: Any) -> bool:
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False  # Their values are not known yet.
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if getattr(a, "weak_type", False) != getattr(b, "weak_type", False):
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        # A garbage collection may ask in the middle of a trace, which would have a part in it.
        with jax.ensure_compile_time_eval():
            a, b = jax.random.key_data(a), jax.random.key_data(b)
    # Bytes, for which NaN is NaN, and the signs of zeros differ.
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def are_pairwise_one(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether all values are one with those at the same indices of the other sequence."""
    # What static containers hold is mostly the same objects: small numbers, names, functions.
    return len(a) == len(b) and (all(map(is_, a, b)) or all(map(are_one, a, b)))
