"""Predicates on leaves: whether they are arrays.

NumPy arrays and scalars count as arrays everywhere: they are traced, mapped and differentiated
as JAX arrays are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.typing import Tracer

ARRAYS: tuple[type, ...] = (jax.Array, np.ndarray, np.generic)
_CARRIED: tuple[type, ...] = (*ARRAYS, Tracer)
NUMBERS = (bool, int, float, complex)
"""The types of Python's own numbers."""


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
