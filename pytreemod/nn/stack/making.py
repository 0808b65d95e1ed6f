"""How the layers of a `Stack` are made: as one, by a mapped call of `make_layer`."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from pytreemod.errors import ArgumentError, RngError, describe, explain
from pytreemod.nn.arguments import KEY_CURE, check_key, check_size
from pytreemod.state.key_sources import InitKeys
from pytreemod.transform.maps.vmap import filter_vmap


def make_layers(make_layer: Any, depth: int, key: Any) -> Any:
    """`depth` layers as one, each made with a key of its own."""
    where = "Stack(make_layer)"
    if not callable(make_layer):
        raise ArgumentError(explain(where, "a function that makes a layer", describe(make_layer)))

    def make_with_key(key: Any) -> Any:
        return make_layer(key=key)

    if _takes_key(make_layer, key):
        layer = filter_vmap(make_with_key)(_several(key, depth))
    else:
        # Mapped all the same: every array is to have the leading axis.
        layer = filter_vmap(lambda: make_layer(), axis_size=depth)()
    if not callable(layer) or isinstance(layer, type):
        raise ArgumentError(explain(where, "a function that makes a layer", describe(layer)))
    return layer


def _several(key: Any, depth: int) -> Any:
    if isinstance(key, InitKeys):
        return key.take(depth)
    return jax.random.split(check_key("Stack(key)", key), depth)


def _takes_key(make_layer: Any, key: Any) -> bool:
    """Whether a layer is to be made with a key."""
    if key is not None and not isinstance(key, InitKeys):
        check_key("Stack(key)", key)
    try:
        signature = inspect.signature(make_layer)
    except (TypeError, ValueError):
        # A callable that does not say what it takes.
        return key is not None
    # Bound, not looked for by name: partials and `**kwargs` take a key, too.
    takes, needs = _binds(signature, key=None), not _binds(signature)
    if takes and (needs or key is not None):
        if key is None:
            expected = "a random key, for make_layer needs one"
            raise RngError(explain("Stack(key)", expected, "none", cure=KEY_CURE))
        return True
    if needs:
        raise ArgumentError(_needs_more(signature))
    return False


def _binds(signature: inspect.Signature, **arguments: Any) -> bool:
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


# ---- refusals


def check_remat(where: str, remat: Any) -> Any:
    """What may be recomputed, if that is what it is."""
    if isinstance(remat, bool) or (callable(remat) and not isinstance(remat, type)):
        return remat
    raise ArgumentError(explain(where, "True, False or a policy", describe(remat)))


def check_unroll(where: str, unroll: Any) -> int | bool:
    """How many layers to write out, if that is what it is."""
    return unroll if isinstance(unroll, bool) else check_size(where, unroll, 1)


def _needs_more(signature: inspect.Signature) -> str:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    cure = (
        "Give it all other arguments first:",
        "make_layer = functools.partial(nn.Linear, 3, 3)",
        "def make_layer(key): return nn.Linear(3, 3, key=key)",
    )
    expected = "a function that needs no argument but key"
    got = f"one that needs {', '.join(name for name in needed if name != 'key')}"
    return explain("Stack(make_layer)", expected, got, cure=cure)
