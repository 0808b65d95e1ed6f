"""The errors of a State; each names the paths concerned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytreemod.errors import ArgumentError, SpecError, StateError, describe
from pytreemod.state.rows import Rows
from pytreemod.state.tokens import AbstractToken, RngStream, Unnamed, tokens_of
from pytreemod.tree.paths import path_text, some_of

MAX_LISTED = 5
MAKE = "model, state = pm.make_with_state(Model)(...)"
REMAKE = "model, state = pm.make_with_state(state.fill)(model)"
TAKE = "layer, state = pm.make_with_state(lambda: state.fill(stack)[0])()  # one of a Stack"


def used_up(by: str, user: str, places: Sequence[str]) -> StateError:
    """Return the error for a State that `user` has replaced."""
    return StateError(
        # In Equinox's words, by which people know it.
        f"State.{by}: attempted to use old state, which {user} has replaced",
        at=places,
        hint="state = state.restored()  # if the new State is lost, or not wanted",
    )


def moved(path: str) -> StateError:
    """Return the error for a token at `path` whose initial value is gone."""
    return StateError(
        "State(model)",
        "tokens with their initial values",
        "a token whose value was moved into another State",
        at=[path],
        hint=[
            "create the model and its State together; or give the values back first:",
            MAKE,
            REMAKE,
            TAKE,
        ],
    )


def no_token(by: str, item: Any, kind: type) -> ArgumentError:
    """Return the error for an argument that is not a token, or is one of another kind."""
    got, hint = describe(item), ()
    if isinstance(item, AbstractToken):
        got = f"a token of another kind: {type(item).__name__}"
        hint = ("read its value with", _USES[isinstance(item, RngStream)])
    elif found := tokens_of(item):
        got = f"a {type(item).__name__}"
        places = [path_text(path) for path, _ in found]
        code = [
            f"state.{by}(layer{'' if place.startswith('[') else '.'}{place})" for place in places
        ]
        hint = ("pass a token in it:", *code[:MAX_LISTED])
    elif isinstance(item, str):
        hint = (
            "a value is identified by its token, not by its name:",
            "value = state.get(model.path.to.token)",
        )
    expected = "a token" if kind is AbstractToken else f"a {kind.__name__}"
    return ArgumentError(f"State.{by}(item)", expected, got, hint=hint)


# By whether the token is a stream.
_USES = {False: "value = state.get(token)", True: "key, state = state.next_key(stream)"}


def foreign(by: str, marker: Any, rows: Rows, places: Sequence[str] = ()) -> StateError:
    """Return the error for a token that has no value in this State."""
    is_unnamed = isinstance(marker, Unnamed)
    name = "a token without a name" if is_unnamed else repr(marker)
    known = some_of([row.name for row in rows]) or "none"
    return StateError(
        f"State.{by}: this State has no value for {name}, but for {known}", at=places, hint=MAKE
    )


def check_single(by: str, found: Mapping[Any, Sequence[str]], rows: Rows) -> None:
    """Refuse a model in which a named token is at several paths.

    The layers there, one layer at two paths or layers of two models, would share State values but
    no weights.

    Args:
        by: the method of State.
        found: the paths of each marker.
        rows: the State's.

    Raises:
        StateError: if there is such a token.
    """
    for marker, paths in found.items():
        if len(paths) > 1:
            raise StateError(
                f"State.{by}: the token {rows[marker].name} is at {len(paths)} paths",
                at=paths,
                hint="filled = state.fill(model)  # before a layer is copied",
            )


def doubled(places: Sequence[str]) -> StateError:
    """Return the error for a token at several paths of a model, given to `State(model)`."""
    return StateError(
        "State(model)",
        "each token at one path",
        f"a token at {len(places)}",
        at=places,
        hint=[
            "create a token for each path, as a layer has weights for each path:",
            "model, state = pm.make_with_state(lambda: model)()",
        ],
    )


def check_paths_differ(names: Sequence[str]) -> None:
    """Refuse equal paths.

    Raises:
        StateError: if two have one name.
    """
    if len(set(names)) == len(names):
        return
    twice = sorted({name for name in names if names.count(name) > 1})
    raise StateError(
        "make_with_state",
        "tokens whose paths differ",
        "several with the same path",
        at=twice,
        hint="Give their container keys that print differently, as in tree_flatten_with_path.",
    )


def changed_in_both(names: Iterable[str]) -> StateError:
    """Return the error for values that were changed both in a State and in its substate."""
    return StateError(
        "State.update(substate)",
        "values that the State has not changed since the substate was taken",
        "values that were changed in both",
        at=names,
        hint=[
            "update before you use the State for the same layer, or take the substate again:",
            "part = state.substate(layer)",
            "out, part = layer(x, part)",
            "state = state.update(part)",
        ],
    )


def changed_in_whole(names: Iterable[str]) -> StateError:
    """Return the error for an unchanged substate of a State that has changed."""
    return StateError(
        "State.update(substate)",
        "a substate that was changed",
        "an unchanged one, of a State that has changed since",
        at=names,
        hint=[
            "the State already has the newer values; to restore the older ones:",
            "state = state.set(token, substate.get(token))",
        ],
    )


def unseeded(by: str, name: str) -> StateError:
    """Return the error for a stream that has no key yet."""
    return StateError(
        f"State.{by}({name}): the stream was not seeded",
        hint="state = state.seed(jax.random.key(0))",
    )


def nothing_to_seed(select: Any) -> SpecError:
    """Return the error for a selector that picks no stream."""
    expected = "a selector that picks a random stream"
    return SpecError("State.seed(select)", expected, f"{select!r}, which picks none")


def split_stream(name: str, members: int, by: str = "next_key") -> StateError:
    """Return the error for a stream that was split for several members."""
    return StateError(
        f"State.{by}({name})",
        "one stream",
        f"{members} streams, because the State was split",
        hint=["map over them:", "in_axes=pm.by({pm.RngStream: 0, ...: None})"],
    )


def nothing_to_join() -> StateError:
    """Return the error for a State that was not split."""
    return StateError(
        "State.join",
        "a State whose streams were split",
        "a State without split streams",
        hint=["split it first:", "state = state.split(n)"],
    )
