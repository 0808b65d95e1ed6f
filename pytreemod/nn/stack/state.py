"""How a State goes through the layers of a `Stack`.

A value of which the token is inside of the layers has a leading axis: each layer gets its own part.
A random stream has none: it is divided between them. Values of tokens that come in by further
arguments are shared, and go from each layer to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

from pytreemod.errors import StateError, describe, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.calling import Absent
from pytreemod.nn.stack.refusals import has_leading_axis
from pytreemod.state import streams
from pytreemod.state.refusals import split_stream
from pytreemod.state.tokens import RngStream, tokens_of
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.typing import jtu


class LayerStates:
    """A State as the layers of a Stack take it: some values taken apart, others carried."""

    def __init__(self, title: str, layer: Any, depth: int, same: dict[str, Any], state: State):
        mine = {item.name for item in _items(state.substate(layer))}
        # Named twice among the arguments, a token is still one, which all layers share.
        tokens = {token.marker: token for _, token in tokens_of((layer, same))}
        part = state.substate(list(tokens.values()))
        items = _items(part)
        is_own = tuple(item.name in mine for item in items)
        is_value = tuple(item.kind is not RngStream for item in items)
        self.whole = state
        self.form = Form(_form_of(part), is_own, is_value)
        self.shared = tuple(e.value for e in items if e.name not in mine)
        opened = [_open(title, depth, item) for item in items if item.name in mine]
        self.own = tuple(given for given, _ in opened)
        self.later = tuple(later for _, later in opened)

    def after(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """The State after all layers; what `later` says is not for them to change."""
        values = iter(own)
        new = [next(values) if later is None else later for later in self.later]
        return self.whole.update(self.form.state(new, shared))


def _open(title: str, depth: int, item: _Item) -> tuple[Any, Any]:
    """What the layers get of a value, and what it is afterwards if that is known already."""
    name, kind, value = item
    if kind is not RngStream:
        _check_depth(title, depth, name, value)
        return value, None
    if value.key is None:
        # In inference mode nobody asks it for a key; where one is asked for, it says so itself.
        return value, value
    if value.count.ndim:
        raise split_stream(name, value.count.shape[0])
    # Each layer draws from one of its own; what was given goes on past all of them.
    return streams.fork(value, depth)


class Form(Module):
    """How the State of one layer is put together, and what a layer may have changed in it."""

    treedef: Any = field(static=True)
    is_own: tuple[bool, ...] = field(static=True)
    is_value: tuple[bool, ...] = field(static=True)

    def state(self, own: Sequence[Any], shared: Sequence[Any]) -> State:
        """From the values that each layer has for itself, and those that it shares."""
        mine, others = iter(own), iter(shared)
        return self.treedef.unflatten([next(mine if m else others) for m in self.is_own])

    def changed(self, title: str, result: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """What a layer returned: its output, its own values, and all values that it shares."""
        pair = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
        if len(pair) != 2 or not isinstance(pair[1], State):
            _refuse_result(title, describe(cast("Any", result)))
        out, state = pair
        if _form_of(state) != self.treedef:
            _refuse_result(title, "another State")
        rows = zip(_items(state), self.is_own, self.is_value, strict=True)
        changed = [(item.value, mine) for item, mine, is_value in rows if is_value or not mine]
        own = tuple(value for value, mine in changed if mine)
        return out, own, tuple(value for value, mine in changed if not mine)


class _Item(NamedTuple):
    """A value of a State, with the name and class of its token."""

    name: str
    kind: type
    value: Any


def _items(state: State) -> list[_Item]:
    children = children_of(state) or []
    rows = zip(children, state.__child_kinds__(), strict=True)
    return [_Item(key.key, kind, value) for (key, value), kind in rows]


def _form_of(state: State) -> Any:
    return jtu.tree_structure(state, is_leaf=stop_below(state))


# ---- refusals


def given_state(title: str, layer: Any, state: State | Absent) -> State:
    """The State that layers need, refused if none was given."""
    if isinstance(state, State):
        return state
    cure = (
        "Make the model together with its State, and pass that along:",
        "model, state = pm.make_with_state(make_model)(...)",
        "out, state = model(x, state)",
    )
    places = [path_text((jtu.GetAttrKey("layer"), *path)) for path, _ in tokens_of(layer)]
    raise StateError(explain(title, "a State", "none", places=places, cure=cure))


def _refuse_result(title: str, got: str) -> NoReturn:
    expected = "a layer that returns its output and the State that it was given, updated"
    cure = ("in the layer:", "return out, state")
    raise StateError(explain(title, expected, got, cure=cure))


def _check_depth(title: str, depth: int, name: str, value: Any) -> None:
    wrong = [
        f"{path_text(path, name)}: {describe(leaf)}"
        for path, leaf in jtu.tree_leaves_with_path(value)
        if not has_leading_axis(leaf, depth)
    ]
    if not wrong:
        return
    cure = (
        "A value that is the same for all layers has its token outside of them:",
        "stack(x, state, count=self.count)",
    )
    expected = f"values in State with a leading axis of {depth}"
    raise StateError(explain(title, expected, f"{len(wrong)} without", places=wrong, cure=cure))
