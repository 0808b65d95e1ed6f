"""Find the transform of plain JAX that is running, for errors about values that cannot leave it.

JAX does not report which transform made a trace. The functions on Python's stack do: each transform
of JAX calls the user's function from its own function.
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
        name: the name that users write.
        instead: the name of a transform that returns values, and does the same.
    """

    name: str
    instead: str


_RULE = "check before the call of it, or after"
# By the function of JAX on the stack.
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
            # A loop is made of other loops, a gradient of other transforms: users wrote the
            # outermost.
            if known is not None and (found is None or code.co_name != "cache_miss"):
                found = known
        # One of our transforms returns values, so those around it are not the problem.
        elif code.co_filename.startswith(own_folder) and code.co_name.startswith("collect"):
            break
        elif found is not None:
            # In a backward pass, the parts of our own derivatives are still on the stack.
            if found.instead == _RULE or not code.co_filename.startswith(derivatives):
                break
            found = None
        frame = frame.f_back
    return found
