"""What a `Stack` checks before it scans, and when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pytreemod.errors import ArgumentError, StateError, describe
from pytreemod.nn.arguments import check_size
from pytreemod.nn.calling import Absence, Absent
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State
from pytreemod.tree.paths import path_text
from pytreemod.typing import jtu


def check_remat(where: str, remat: Any) -> Any:
    """What may be recomputed, if that is what it is."""
    if isinstance(remat, bool) or (callable(remat) and not isinstance(remat, type)):
        return remat
    raise ArgumentError(where, "True, False or a policy", describe(remat))


def check_unroll(where: str, unroll: Any) -> int | bool:
    """How many layers to write out, if that is what it is."""
    return unroll if isinstance(unroll, bool) else check_size(where, unroll, 1)


def check_second(title: str, is_stateful: bool, state: Any) -> None:
    """Refuse what the layers would not get, and what would come back as if it were a State."""
    if isinstance(state, (State, Absence)):
        return
    given = "x, state" if is_stateful else "x"
    hint = (
        "Further arguments for the layers go by name, and so does a key:",
        f"stack({given}, mask=mask, key=key)",
    )
    raise ArgumentError(title, "a State", describe(state), hint=hint)


def check_further(title: str, per_layer: Any, same: dict[str, Any]) -> dict[str, Any]:
    """The arguments that differ from layer to layer; refused if a name is used twice."""
    if per_layer is None:
        return {}
    if not isinstance(per_layer, Mapping):
        expected = "per_layer to be a dict by name"
        raise ArgumentError(title, expected, describe(per_layer))
    extra = dict(cast("Mapping[str, Any]", per_layer))
    twice = sorted(extra.keys() & {"key", "state", *same})
    if twice:
        raise ArgumentError(title, "each argument once", f"{twice[0]} in per_layer, too")
    return extra


def given_state(title: str, layer: Any, state: State | Absent) -> State:
    """The State that layers need, refused if none was given."""
    if isinstance(state, State):
        return state
    hint = (
        "Make the model together with its State, and pass that along:",
        "model, state = pm.make_with_state(make_model)(...)",
        "out, state = model(x, state)",
    )
    places = [path_text((jtu.GetAttrKey("layer"), *path)) for path, _ in tokens_of(layer)]
    raise StateError(title, "a State", "none", places=places, hint=hint)
