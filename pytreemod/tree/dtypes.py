"""The dtype that JAX uses for a requested one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import warn


def available_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype that JAX uses for a requested one: without 64 bits, float64 is float32.

    `float` and `complex`, the classes of Python, are JAX's default dtypes.

    Args:
        where: the name of the argument in the warning.
        dtype: anything that `jnp.dtype` accepts.

    Warns:
        UserWarning: 64 bits were requested, and JAX does not have them enabled.

    Examples:
        >>> available_dtype("Linear(dtype)", jnp.bfloat16).name
        'bfloat16'
    """
    asked = jnp.dtype(dtype)
    found = jax.dtypes.canonicalize_dtype(asked)
    # Compare by identity: for NumPy, float64 equals the class.
    if found != asked and dtype is not float and dtype is not complex:
        hint = ("Enable 64 bits in JAX, before you create arrays:", _HINT)
        expected, got = "a dtype that JAX supports", f"{asked.name}, which becomes {found.name}"
        warn(UserWarning, where, expected, got, hint=hint)
    return found


_HINT = 'jax.config.update("jax_enable_x64", True)'
