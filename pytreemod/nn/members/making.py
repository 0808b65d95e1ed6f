"""Makes members as one, by one call of their constructor under a map."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from pytreemod.errors import ArgumentError, RngError, describe
from pytreemod.nn.arguments import KEY_HINT, check_key
from pytreemod.nn.members.checks import Owner
from pytreemod.state.key_sources import InitKeys
from pytreemod.transform.vmap import filter_vmap


def make_members(
    owner: Owner, make: Any, n: int, key: Any, look: Callable[[Any], object] | None = None
) -> Any:
    """Make `n` members as one, each with its own key.

    Args:
        owner: the owner of the members.
        make: makes one member.
        n: number of members.
        key: split between the members; or the result of `init_keys`.
        look: called with a single member under the map, where its arrays have their own shapes.

    Returns:
        The members; every array has a leading axis.

    Raises:
        ArgumentError: if `make` is not a function that makes a member with no argument but `key`.
        RngError: if it needs a key and none was given, or `key` is not a random key.
    """
    where = f"{owner.name}({owner.make})"
    expected = f"a function that makes a {owner.member}"
    if not callable(make):
        raise ArgumentError(where, expected, describe(make))

    def make_one(key: Any) -> Any:
        member = make() if key is None else make(key=key)
        if not callable(member) or isinstance(member, type):
            raise ArgumentError(where, expected, describe(member))
        if look is not None:
            # Inside the map this is one member, whose arrays have no leading axis yet.
            look(member)
        return member

    keys = None
    if _takes_key(owner, make, key):
        keys = key.take(n) if isinstance(key, InitKeys) else jax.random.split(key, n)
    # Mapped even without keys, so that every array has the leading axis.
    return filter_vmap(make_one, axis_size=n)(keys)


def _takes_key(owner: Owner, make: Any, key: Any) -> bool:
    """Whether to make a member with a key."""
    where = f"{owner.name}(key)"
    if key is not None and not isinstance(key, InitKeys):
        check_key(where, key)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        # A callable without a signature.
        return key is not None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    if needed not in ([], ["key"]):
        hint = (
            "Bind all other arguments first:",
            f"{owner.make} = functools.partial(nn.Linear, 3, 3)",
            f"def {owner.make}(key): return nn.Linear(3, 3, key=key)",
        )
        expected = "a function that needs no argument but key"
        got = f"a function that needs {', '.join(name for name in needed if name != 'key')}"
        raise ArgumentError(f"{owner.name}({owner.make})", expected, got, hint=hint)
    if needed and key is None:
        expected = f"a random key, because {owner.make} needs one"
        raise RngError(where, expected, "none", hint=KEY_HINT)
    if key is None:
        return False
    try:
        # Bound, not looked up by name: partials and `**kwargs` take a key, too.
        signature.bind(key=None)
    except TypeError:
        return False
    return True
