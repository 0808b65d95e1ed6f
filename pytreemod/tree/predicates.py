"""Predicates on leaves: whether they are arrays, and whether two static values are the same.

NumPy arrays and scalars count as arrays everywhere: they are traced, mapped and differentiated
as JAX arrays are.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.typing import Tracer, class_of

ARRAYS: tuple[type, ...] = (jax.Array, np.ndarray, np.generic)
_CARRIED: tuple[type, ...] = (*ARRAYS, Tracer)
# The types of Python's own numbers.
NUMBERS = (bool, int, float, complex)


def is_array(element: Any) -> bool:
    """Whether `element` is a JAX array, a tracer, a NumPy array or a NumPy scalar.

    Args:
        element: anything.

    Returns:
        True for arrays only.

    Examples:
        >>> is_array(jnp.ones(3)), is_array(np.float32(1)), is_array(1.0)
        (True, True, False)
    """
    return isinstance(element, ARRAYS)


def is_carried(element: Any) -> bool:
    """Whether `element` passes through a JAX transform: an array, or any other traced value.

    A tracer need not be of an array: there are `Ref`s, and values of registered types. A tracer
    is never configuration, or it would leak out of its trace.
    """
    return isinstance(element, _CARRIED)


def is_abstract(element: Any) -> bool:
    """Whether `element` is an array or a `jax.ShapeDtypeStruct`."""
    return isinstance(element, (*ARRAYS, jax.ShapeDtypeStruct))


def is_array_like(element: Any) -> bool:
    """Whether JAX could make an array of `element`: arrays, Python numbers, `__jax_array__`.

    Args:
        element: anything.

    Returns:
        True for arrays, bools, ints, floats, complex numbers, and objects with `__jax_array__`.

    Examples:
        >>> is_array_like(1.0), is_array_like("1.0")
        (True, False)
    """
    return isinstance(element, ARRAYS + NUMBERS) or _converts(element)


def _converts(element: Any) -> bool:
    # Tracers have the attribute, but it is None.
    return callable(getattr(element, "__jax_array__", None))


def is_inexact_array(element: Any) -> bool:
    """Whether `element` is an array of floating or complex numbers.

    Args:
        element: anything.

    Returns:
        True for floating and complex arrays, NumPy ones included.

    Examples:
        >>> is_inexact_array(jnp.ones(3)), is_inexact_array(jnp.arange(3))
        (True, False)
    """
    return isinstance(element, ARRAYS) and bool(jnp.issubdtype(element.dtype, jnp.inexact))


def is_inexact_array_like(element: Any) -> bool:
    """Whether JAX could make a floating or complex array of `element`.

    Args:
        element: anything.

    Returns:
        True for inexact arrays, floats, complex numbers, and objects whose `__jax_array__` gives
        an inexact array.

    Examples:
        >>> is_inexact_array_like(1.0), is_inexact_array_like(1)
        (True, False)
    """
    if not isinstance(element, ARRAYS) and _converts(element):
        element = element.__jax_array__()
    return is_inexact_array(element) or isinstance(element, (float, complex))


def same_static(a: Any, b: Any) -> bool:
    """Whether a program that was traced for one static value is valid for the other.

    It is if they have one type and are equal, inside tuples and lists, too: `1`, `1.0` and `True`
    are three programs. (`jax.jit` itself takes `(1,)` and `(1.0,)` for one.) If comparing raises,
    the two differ.

    Examples:
        >>> same_static((1, "a"), (1, "a")), same_static((1,), (1.0,)), same_static(1, True)
        (True, False, False)
    """
    kind = class_of(a)
    if a is b or kind is not class_of(b):
        return a is b
    if kind is tuple or kind is list:
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(same_static, a, b)))
    if isinstance(a, (np.ndarray, jax.Array)):
        is_known = not (isinstance(a, Tracer) or isinstance(b, Tracer))
        return is_known and (a.shape, a.dtype) == (b.shape, b.dtype) and bool((a == b).all())
    try:
        return bool(a == b)
    except Exception:
        return False
