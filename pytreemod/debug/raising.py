"""`raise_errors`: wait for the checks of `filter_jit(checks="later")`."""

from __future__ import annotations

from pytreemod.transform.host.later_checks import raise_pending


def raise_errors() -> None:
    """Wait for all calls of functions under `filter_jit(checks="later")`, and raise their failures.

    For all functions and threads. Call it where the program waits anyway: at the end of an epoch,
    before a checkpoint is written, at the end of a test. Each failure is raised once.

    Raises:
        CheckError: if a check failed. Its notes name the line of the check, and the index in the
            batch if there is one. They also have the number of the call, counted from 1 for each
            function, and the number of other failures.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> @pm.filter_jit(checks="later")
        ... def root(x):
        ...     x = pm.error_if(x, x < 0, "x must not be negative")
        ...     return jnp.sqrt(x)
        >>> root(jnp.asarray(-4.0))
        Array(nan, dtype=float32, weak_type=True)
        >>> pm.debug.raise_errors()
        Traceback (most recent call last):
            ...
        pytreemod.errors.CheckError: x must not be negative
        checked at ...
        in call 1 of root
        >>> pm.debug.raise_errors()
    """
    raise_pending()
