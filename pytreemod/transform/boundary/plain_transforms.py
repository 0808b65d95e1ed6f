"""Which transform of plain JAX is running: to name it where values cannot come out of one.

JAX does not say of a trace what made it. The functions on Python's stack do: each transform of
JAX's calls the user's function from a function of its own.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

import jax


class PlainTransform(NamedTuple):
    """A transform of plain JAX.

    Attributes:
        name: as the user has written it.
        instead: what hands values out, and does the same.
    """

    name: str
    instead: str


_RULE = "check before the call of it, or after"
# By JAX's function that is on the stack.
_KNOWN = {
    "cache_miss": PlainTransform("jax.jit", "pm.filter_jit"),
    "vmap_f": PlainTransform("jax.vmap", "pm.filter_vmap"),
    "scan": PlainTransform("jax.lax.scan", "pm.filter_scan"),
    "map": PlainTransform("jax.lax.map", "pm.filter_map"),
    "while_loop": PlainTransform("jax.lax.while_loop", "pm.filter_while_loop"),
    "fori_loop": PlainTransform("jax.lax.fori_loop", "pm.filter_fori_loop"),
    "cond": PlainTransform("jax.lax.cond", "pm.filter_cond"),
    "switch": PlainTransform("jax.lax.switch", "pm.filter_switch"),
    "grad_f": PlainTransform("jax.grad", "pm.filter_grad"),
    "value_and_grad_f": PlainTransform("jax.value_and_grad", "pm.filter_value_and_grad"),
    "fun_remat": PlainTransform("jax.checkpoint", "pm.filter_checkpoint"),
    "jvp": PlainTransform("jax.jvp", "pm.filter_jvp"),
    "vjp": PlainTransform("jax.vjp", "pm.filter_vjp"),
    "linearize": PlainTransform("jax.linearize", "pm.filter_linearize"),
    "custom_jvp.__call__": PlainTransform("a function with a custom_jvp", _RULE),
    "custom_vjp.__call__": PlainTransform("a function with a custom_vjp", _RULE),
    "associative_scan": PlainTransform("associative_scan", _RULE),
}


def plain_transform() -> PlainTransform | None:
    """The innermost transform of plain JAX that runs in this thread; None if it is not known."""
    jax_folder = os.path.dirname(jax.__file__) + os.sep
    own_folder = os.path.dirname(__file__) + os.sep
    derivatives = os.path.join(os.path.dirname(own_folder[:-1]), "derivatives") + os.sep
    found: PlainTransform | None = None
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(jax_folder):
            name = code.co_qualname
            known = _KNOWN.get(name, _KNOWN.get(name.rpartition(".")[2]))
            # A loop is made of another, a gradient of others: the outermost of them was written.
            if known is not None and (found is None or code.co_name != "cache_miss"):
                found = known
        # A transform of ours that hands values out: what is around it is not to blame.
        elif code.co_filename.startswith(own_folder) and code.co_name.startswith("collect"):
            break
        elif found is not None:
            # In a backward pass, what our own derivatives are made of is still on the stack.
            if found.instead == _RULE or not code.co_filename.startswith(derivatives):
                break
            found = None
        frame = frame.f_back
    return found
