"""What a State answers when it refuses: the errors, each naming the paths concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import RngError, StateError, TokenError, describe, explain
from pytreemod.state.entries import Entry, Register
from pytreemod.state.tokens import Unnamed
from pytreemod.tree.paths import path_text
from pytreemod.tree.printing import tree_pformat
from pytreemod.typing import class_of, jtu

MAX_LISTED = 5
MAKE = "model, state = pm.make_with_state(Model)(...)"
REMAKE = "model, state = pm.make_with_state(state.fill)(model)"


def used_up(by: str, user: str, places: Sequence[str]) -> StateError:
    """For a State that `user` has replaced."""
    # A transform meets the State alone, and cannot tell whether it is part of a net (`stateful`).
    net = ["out, net = net(x)"] if by == "use in a transform" else []
    return StateError(
        explain(
            f"State.{by}",
            "the newest State",
            f"Attempted to use old state: one that {user} has already replaced",
            places=places,
            cure=[
                "go on with what came back; using the old one would lose an update:",
                "x, state = layer1(x, state)",
                "x, state = layer2(x, state)",
                *net,
            ],
        )
    )


def moved(place: str) -> StateError:
    """For a token at `place` whose initial value is gone."""
    return StateError(
        explain(
            "State(model)",
            "tokens with their initial values",
            "one whose value was moved into another State",
            places=[place],
            cure=[
                "make both at once, and keep that State; or give the values back first:",
                MAKE,
                REMAKE,
            ],
        )
    )


def foreign(by: str, marker: Any, register: Register, places: Sequence[str] = ()) -> TokenError:
    """For a token that has no entry."""
    is_unnamed = isinstance(marker, Unnamed)
    name = "one without a name" if is_unnamed else repr(marker)
    cure = ["make model and State together:", MAKE]
    if is_unnamed:
        cure = ["make model and State together, also after adding a layer:", MAKE, REMAKE]
    return TokenError(
        explain(
            f"State.{by}",
            f"a token of the model that this State was made with ({_listing(register)})",
            f"a token of another model: {name}",
            places=places,
            cure=cure,
        )
    )


def _listing(register: Register) -> str:
    names = [entry.name for entry in register]
    more = ", ..." if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more or "it has none"


def ambiguous(entry: Entry, places: Sequence[str]) -> StateError:
    """For a model in which more tokens bear the name of one entry than once did."""
    return StateError(
        explain(
            "State.fill(model)",
            f"the token {entry.name} in as many places as in the model of this State "
            f"({entry.places})",
            f"it in {len(places)}",
            places=places,
            cure=[
                "if two models were put together, give each its values back first:",
                "model, state = pm.make_with_state(Pair)(state1.fill(model1), state2.fill(model2))",
            ],
        )
    )


def taken(by: str, name: str) -> StateError:
    """For a new entry whose name another entry has."""
    return StateError(
        explain(f"State.{by}", "new tokens", "one that is in the State already", places=[name])
    )


def unseeded(by: str, name: str) -> RngError:
    """For a stream that has no key yet."""
    return RngError(
        explain(
            f"State.{by}({name})",
            "a stream with a key",
            "one that was not seeded",
            cure=["once, after making the model:", "state = state.seed(jax.random.key(0))"],
        )
    )


def nothing_to_seed(select: Any) -> RngError:
    """For a selector that picks no stream."""
    expected = "a selector that picks a random stream"
    return RngError(explain("State.seed(select)", expected, f"{select!r}, which picks none"))


def split_stream(name: str, members: int) -> RngError:
    """For a stream that stands for one of each member."""
    return RngError(
        explain(
            f"State.next_key({name})",
            "one stream",
            f"{members} of them, for the State was split",
            cure=["map over them:", "in_axes=pm.by({pm.RngStream: 0, ...: None})"],
        )
    )


def check_fit(where: str, name: str, old: Any, new: Any) -> None:
    """Refuse a new value that differs from the old one in structure, shape or dtype.

    Raises:
        StateError: it does.
    """
    if jtu.tree_structure(old) != jtu.tree_structure(new):
        expected = f"a value of structure {tree_pformat(old)}"
        raise StateError(explain(f"{where} {name}", expected, tree_pformat(new)))
    for (path, was), now in zip(jtu.tree_leaves_with_path(old), jtu.tree_leaves(new), strict=True):
        if _kind(was) != _kind(now):
            raise StateError(
                explain(
                    f"{where} {path_text(path, name)}",
                    f"{describe(was)}, as before",
                    describe(now),
                    cure="shape and dtype of a value cannot change; cast or reshape the new one",
                )
            )


def _kind(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), leaf.dtype
    return class_of(leaf)
