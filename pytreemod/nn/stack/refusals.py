"""What a `Stack` checks before it scans."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pytreemod.errors import ArgumentError, ShapeError, describe, explain
from pytreemod.nn.calling import Absence
from pytreemod.state.values import State
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu


def check_second(title: str, is_stateful: bool, state: Any) -> None:
    """Refuse what the layers would not get, and what would come back as if it were a State."""
    if isinstance(state, (State, Absence)):
        return
    given = "x, state" if is_stateful else "x"
    cure = (
        "Further arguments for the layers go by name, and so does a key:",
        f"stack({given}, mask=mask, key=key)",
    )
    raise ArgumentError(explain(title, "a State", describe(state), cure=cure))


def check_further(title: str, per_layer: Any, same: dict[str, Any]) -> dict[str, Any]:
    """The arguments that differ from layer to layer; refused if a name is used twice."""
    if per_layer is None:
        return {}
    if not isinstance(per_layer, Mapping):
        expected = "per_layer to be a dict by name"
        raise ArgumentError(explain(title, expected, describe(per_layer)))
    extra = dict(cast("Mapping[str, Any]", per_layer))
    twice = sorted(extra.keys() & {"key", "state", *same})
    if twice:
        raise ArgumentError(explain(title, "each argument once", f"{twice[0]} in per_layer, too"))
    return extra


def check_keywords(title: str, layer: Any, names: Iterable[str]) -> None:
    """Refuse arguments that the layers do not take: before the scan, and in the Stack's name."""
    call = type(layer).__call__
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return  # A callable that does not say what it takes.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [parameter.name for parameter in parameters if parameter.kind in named][1:]
    unknown = [name for name in names if name not in taken]
    if not unknown:
        return
    further = [name for name in taken[1:] if name not in ("state", "key")]
    takes = ", ".join(further) or "it has no further ones"
    close = difflib.get_close_matches(unknown[0], further, n=1)
    raise ArgumentError(
        explain(
            title,
            f"arguments of {type(layer).__name__} ({takes})",
            ", ".join(map(repr, unknown)),
            cure=f"did you mean {close[0]!r}?" if close else (),
        )
    )


def check_leading(title: str, depth: int, trees: dict[str, Any]) -> None:
    """Refuse arrays that have not the leading axis."""
    # Paths cost more than the leaves, and are made only for an error.
    if all(has_leading_axis(leaf, depth) for leaf in jtu.tree_leaves(trees)):
        return
    leaves = [
        (path_text(path, root), leaf)
        for root, tree in trees.items()
        for path, leaf in jtu.tree_leaves_with_path(tree)
    ]
    wrong = [
        f"{place}: {describe(leaf)}" for place, leaf in leaves if not has_leading_axis(leaf, depth)
    ]
    raise ShapeError(
        explain(
            title,
            f"arrays with a leading axis of {depth}",
            f"{len(wrong)} without",
            places=wrong,
            cure=(
                "Several Stacks as one are called mapped:",
                "pm.filter_vmap(lambda s: s(x))(stacks)",
            )
            if any(place.startswith("layer") for place in wrong)
            else (),
        )
    )


def has_leading_axis(leaf: Any, depth: int) -> bool:
    """Whether a leaf has an entry for each layer, as far as it is an array."""
    return not is_array(leaf) or leaf.shape[:1] == (depth,)
