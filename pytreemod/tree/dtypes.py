"""The dtype that JAX makes of one that was asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import warn


def available_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """What JAX makes of a dtype: without 64 bits, float64 is float32, of which it warns.

    `float` and `complex`, the classes of Python, are whatever JAX has for them.

    Args:
        where: names the argument in the warning.
        dtype: what `jnp.dtype` takes.

    Warns:
        UserWarning: JAX has no 64 bits, and they were asked for.

    Examples:
        >>> available_dtype("Linear(dtype)", jnp.bfloat16).name
        'bfloat16'
    """
    asked = jnp.dtype(dtype)
    found = jax.dtypes.canonicalize_dtype(asked)
    # By identity: NumPy calls its float64 equal to the class.
    if found != asked and dtype is not float and dtype is not complex:
        hint = ("Let JAX have 64 bits, before there is any array:", _HINT)
        expected, got = "a dtype that JAX has", f"{asked.name}, which becomes {found.name}"
        warn(UserWarning, where, expected, got, hint=hint)
    return found


_HINT = 'jax.config.update("jax_enable_x64", True)'
