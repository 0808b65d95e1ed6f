"""How members are made: as one, by a mapped call of what makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from pytreemod.errors import ArgumentError, RngError, describe, explain
from pytreemod.nn.arguments import KEY_HINT, check_key
from pytreemod.nn.members.checks import Owner
from pytreemod.state.key_sources import InitKeys
from pytreemod.transform.maps.vmap import filter_vmap


def make_members(
    owner: Owner, make: Any, n: int, key: Any, look: Callable[[Any], object] | None = None
) -> Any:
    """`n` members as one, each made with a key of its own.

    Args:
        owner: whose members they are.
        make: makes one.
        n: how many.
        key: split between them; or what `init_keys` gave.
        look: called with a single member while it is made: its arrays have its own shapes.

    Returns:
        The members; every array has a leading axis.

    Raises:
        ArgumentError: `make` is no function that makes a member with no argument but `key`.
        RngError: it needs a key and none was given, or `key` is no random key.
    """
    where = f"{owner.name}({owner.make})"
    expected = f"a function that makes a {owner.member}"
    if not callable(make):
        raise ArgumentError(where, expected, describe(make))

    def make_one(**options: Any) -> Any:
        member = make(**options)
        if not callable(member) or isinstance(member, type):
            raise ArgumentError(where, expected, describe(member))
        if look is not None:
            # Inside of the map: the member is one, and its arrays have no leading axis yet.
            look(member)
        return member

    def make_with_key(key: Any) -> Any:
        return make_one(key=key)

    if _takes_key(owner, make, key):
        return filter_vmap(make_with_key)(_several(owner, key, n))
    # Mapped all the same: every array is to have the leading axis.
    return filter_vmap(lambda: make_one(), axis_size=n)()


def _several(owner: Owner, key: Any, n: int) -> Any:
    if isinstance(key, InitKeys):
        return key.take(n)
    return jax.random.split(check_key(f"{owner.name}(key)", key), n)


def _takes_key(owner: Owner, make: Any, key: Any) -> bool:
    """Whether a member is to be made with a key."""
    where = f"{owner.name}(key)"
    if key is not None and not isinstance(key, InitKeys):
        check_key(where, key)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        # A callable that does not say what it takes.
        return key is not None
    # Bound, not looked for by name: partials and `**kwargs` take a key, too.
    takes, needs = _binds(signature, key=None), not _binds(signature)
    if takes and (needs or key is not None):
        if key is None:
            expected = f"a random key, for {owner.make} needs one"
            raise RngError(where, expected, "none", hint=KEY_HINT)
        return True
    if needs:
        raise ArgumentError(_needs_more(owner, signature))
    return False


def _binds(signature: inspect.Signature, **arguments: Any) -> bool:
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


def _needs_more(owner: Owner, signature: inspect.Signature) -> str:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    hint = (
        "Give it all other arguments first:",
        f"{owner.make} = functools.partial(nn.Linear, 3, 3)",
        f"def {owner.make}(key): return nn.Linear(3, 3, key=key)",
    )
    expected = "a function that needs no argument but key"
    got = f"one that needs {', '.join(name for name in needed if name != 'key')}"
    return explain(f"{owner.name}({owner.make})", expected, got, hint=hint)
