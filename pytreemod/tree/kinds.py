"""When two static values are one for a program that was traced with the first.

They are if they have one type and are equal, inside tuples and lists, too: `1`, `1.0` and `True`
are three programs. `jax.jit` itself takes `(1,)` and `(1.0,)` for one.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import jax
import numpy as np

from pytreemod.typing import Tracer, class_of


def same_static(a: Any, b: Any) -> bool:
    """Whether a program that was traced for one static value is valid for the other.

    If comparing raises, the two differ.

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
