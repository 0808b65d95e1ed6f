"""`capture`: look at the values inside a function, by submodule or by name.

There are no hooks. What calls a chosen Module sees one of a subclass of its class, made once for
the class, whose `__call__` shows what it returns (see `transform.sowing`) under a name that the
instance has as one more piece of configuration. So the choice goes through every transform with
the Module, and a compiled function is compiled once for each choice. The results have their own
classes again.
"""

from __future__ import annotations

import functools as ft
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from pytreemod.errors import SpecError, explain
from pytreemod.module.classes import Module, restore
from pytreemod.module.methods import BoundMethod
from pytreemod.state.values import State
from pytreemod.transform.boundary.sowing import SOWN, Frame, Label, capturing, note
from pytreemod.transform.boundary.wrapping import (
    Transformed,
    check_callable,
    function_name,
    passing_on,
)
from pytreemod.tree.nodes import DEFAULT_ROLE, Place, children_of, record_of, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.selecting import MAX_NAMED, Selector, as_selector
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu

_P = ParamSpec("_P")
_R = TypeVar("_R")

Path = tuple[Any, ...]


# ---- Modules that show what they return

# Where an instance keeps its labels. No identifier, so that no field can bear the name.
_TAPS = "<taps>"


class _Tapped:
    """Comes before the class of a chosen Module."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the user's, which may keep a list of subclasses, or ask for more arguments.
        pass


_tapped_classes: dict[type, type] = {}
_lock = threading.Lock()


def _tapped_class(cls: Any) -> Any:
    """The subclass of a class whose instances show what they return."""
    if issubclass(cls, _Tapped):
        return cls
    with _lock:
        if cls not in _tapped_classes:
            _tapped_classes[cls] = _make_tapped_class(cls)
        return _tapped_classes[cls]


def _make_tapped_class(cls: Any) -> Any:
    @passing_on
    @ft.wraps(cls.__call__)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        parent = cast("Any", super(made, self))
        out = parent.__call__(*args, **kwargs)
        for label in getattr(self, _TAPS):
            note(label, _without_state(out))
        return out

    names = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")}
    names |= {"__call__": __call__, "__passes_for__": cls}
    made: Any = class_of(cls)(cls.__name__, (_Tapped, cls), names)
    return made


def _without_state(out: Any) -> Any:
    """What a layer returned, without State: of `(out, state)`, `out`."""
    if class_of(out) is tuple and any(isinstance(x, State) for x in out):
        rest = tuple(x for x in out if not isinstance(x, State))
        return _without_state(rest[0] if len(rest) == 1 else rest)
    # Containers are copied, for the function may change them later on.
    return jtu.tree_map(_no_state, out, is_leaf=_is_state)


def _no_state(node: Any) -> Any:
    return None if _is_state(node) else node


def _is_state(node: Any) -> bool:
    return isinstance(node, State)


def _with_labels(node: Any, cls: Any, labels: tuple[Label, ...]) -> Any:
    layout = class_of(node).__record__.split(node)
    values = {name: getattr(node, name) for name in (*layout.data, *layout.config)}
    config = tuple(name for name in layout.config if name != _TAPS)
    values.pop(_TAPS, None)
    if labels:
        values[_TAPS] = labels
        config = (*config, _TAPS)
    return restore(cls, values, config)


def _labels_of(node: Any) -> tuple[Label, ...]:
    return getattr(node, _TAPS) if isinstance(node, _Tapped) else ()


def _tap(node: Any, label: Label) -> Any:
    return _with_labels(node, _tapped_class(type(node)), (*_labels_of(node), label))


def _untap(tree: PyTree, level: int) -> PyTree:
    """A tree in which no Module shows anything to the capture of a level any more."""

    def change(node: Any, path: Path) -> Any:
        labels = _labels_of(node)
        rest = tuple(label for label in labels if label.level != level)
        if rest == labels:
            return node
        kind = class_of(node)
        return _with_labels(node, kind if rest else kind.__passes_for__, rest)

    return _rebuilt(tree, change)


def _rebuilt(tree: PyTree, change: Callable[[Any, Path], Any], path: Path = ()) -> PyTree:
    """A tree with its nodes changed, those below a node before the node itself."""
    children = None if _is_state(tree) else children_of(tree)
    if children is None:
        return tree
    parts = [_rebuilt(child, change, (*path, key)) for key, child in children]
    if any(new is not old for new, (_, old) in zip(parts, children, strict=True)):
        record = record_of(tree)
        if record is not None:
            pairs = zip(children, parts, strict=True)
            tree = record.rebuild(tree, {key.name: part for (key, _), part in pairs})
        elif class_of(tree) is list:
            tree = parts
        else:
            tree = jtu.tree_structure(tree, is_leaf=stop_below(tree)).unflatten(parts)
    return change(tree, path)


# ---- which Modules are chosen


class _Spot(NamedTuple):
    """A node, how it is reached, and how many nodes of a library's own kind are above it."""

    path: Path
    node: Any
    depth: int
    role: str


def _spots(node: Any, path: Path, depth: int, role: str) -> Iterator[_Spot]:
    children = None if _is_state(node) else children_of(node)
    if children is None:
        return
    yield _Spot(path, node, depth, role)
    record = record_of(node)
    is_own = record is None and class_of(node) not in (tuple, list, dict)
    for key, child in children:
        own = DEFAULT_ROLE if record is None else record.role(key.name)
        below = role if own == DEFAULT_ROLE else own
        yield from _spots(child, (*path, key), depth + is_own, below)


def _can_be_chosen(node: Any) -> bool:
    return isinstance(node, Module) and callable(node)


class _Argument:
    """An argument of the captured function, or that function itself."""

    def __init__(self, tree: PyTree):
        # How it is wrapped is no part of a path: a method of a model, or a jitted model.
        path, inner = (), tree
        while isinstance(inner, (BoundMethod, Transformed)):
            ((key, child),) = children_of(inner) or [(None, None)]
            path, inner = (*path, key), child
        self.tree = tree
        self.inner = inner
        self.prefix: Path = path
        self.spots = list(_spots(inner, (), 0, DEFAULT_ROLE))
        self.names: dict[Path, str] = {}

    def candidates(self) -> list[Place]:
        return [
            Place(spot.path, spot.node, (), spot.role, is_node=True)
            for spot in self.spots
            if _can_be_chosen(spot.node)
        ]

    def choose(self, selector: Selector) -> None:
        candidates = self.candidates()
        if candidates:
            picked = selector.pick(candidates, self.inner, None)
            pairs = zip(candidates, picked, strict=True)
            self.names = {spot.path: path_text(spot.path) for spot, is_picked in pairs if is_picked}

    def tapped(self, level: int) -> PyTree:
        """The argument in which the chosen Modules show what they return."""
        labels = {(*self.prefix, *path): Label(level, name) for path, name in self.names.items()}
        if not labels:
            return self.tree

        def change(node: Any, path: Path) -> Any:
            return _tap(node, labels[path]) if path in labels else node

        return _rebuilt(self.tree, change)


def _choose(selector: Selector, arguments: Sequence[_Argument]) -> None:
    """Choose Modules in arguments.

    Raises:
        SpecError: none is chosen, or a path matches none.
    """
    errors: list[SpecError] = []
    for argument in arguments:
        try:
            argument.choose(selector)
        except SpecError as error:
            # An access that is meant for another argument.
            errors.append(error)
    places = [place for argument in arguments for place in argument.candidates()]
    for pattern in selector.paths():
        if not any(pattern.pick(places, None, None)):
            raise SpecError(_explain_none(repr(pattern), places))
    if not any(argument.names for argument in arguments):
        raise errors[0] if errors else SpecError(_explain_none(repr(selector), places))
    _align(arguments)


def _explain_none(what: str, places: Sequence[Place]) -> str:
    paths = [path_text(place.path) for place in places]
    shown = ", ".join(paths[:MAX_NAMED]) + (", ..." if len(paths) > MAX_NAMED else "")
    return explain(
        f"capture({what})",
        "a selector of at least one Module that can be called, in the arguments",
        "none",
        cure=f"they have: {shown}"
        if shown
        else "pass the model as an argument: one that fn has from elsewhere cannot be chosen",
    )


def _align(arguments: Sequence[_Argument]) -> None:
    """Name Modules in the state of an optimizer as those in the model that it is for.

    Nobody calls them, but `jax.tree.map` over model and moments needs trees of one structure. Such
    states are nodes of a library's own kinds, and what they hold is of the model's shape.
    """
    everywhere = [(argument, spot) for argument in arguments for spot in argument.spots]
    models = [
        (spot, names)
        for argument, spot in everywhere
        if (names := _names_below(argument.names, spot.path))
    ]
    done: list[tuple[_Argument, Path]] = []
    for argument, spot in everywhere:
        if any(argument is other and spot.path[: len(path)] == path for other, path in done):
            continue
        for model, names in models:
            if model.depth < spot.depth and _is_alike(model.node, spot.node):
                for path in _names_below(argument.names, spot.path):
                    del argument.names[(*spot.path, *path)]
                found = _names_alike(model.node, spot.node, names)
                argument.names.update({(*spot.path, *path): n for path, n in found.items()})
                done.append((argument, spot.path))
                break


def _names_below(names: dict[Path, str], start: Path) -> dict[Path, str]:
    return {p[len(start) :]: name for p, name in names.items() if p[: len(start)] == start}


def _is_alike(model: Any, other: Any) -> bool:
    """Whether what arrays there are in `other` are where `model` has arrays of their shapes."""
    if class_of(model) is not class_of(other):
        return False
    shapes, others = _shapes(model), _shapes(other)
    return bool(others) and all(shapes.get(path) == shape for path, shape in others.items())


def _shapes(node: Any) -> dict[Path, Any]:
    leaves = jtu.tree_leaves_with_path(node)
    return {path: leaf.shape for path, leaf in leaves if is_array(leaf)}


def _names_alike(model: Any, other: Any, names: dict[Path, str]) -> dict[Path, str]:
    return {p: name for p, name in names.items() if _classes(model, p) == _classes(other, p)}


def _classes(node: Any, path: Path) -> list[Any]:
    """The classes of the nodes along a path, as far as it goes."""
    classes = [class_of(node)]
    for key in path:
        below = dict(children_of(node) or ())
        if key not in below:
            break
        node = below[key]
        classes.append(class_of(node))
    return classes


# ---- capture


class _Captured(Transformed):
    """A function under `capture`."""

    __slots__ = ()

    @classmethod
    def transform_name(cls) -> str:
        """The transform as the reader knows it."""
        return "capture"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; returns what it returns, and what was captured."""
        with capturing() as frame:
            trees = [self.fn, *args, *kwargs.values()]
            if self.options is not None:
                arguments = [_Argument(tree) for tree in trees]
                _choose(self.options, arguments)
                trees = [argument.tapped(frame.level) for argument in arguments]
            fn, *rest = trees
            named = dict(zip(kwargs, rest[len(args) :], strict=True))
            try:
                out = fn(*rest[: len(args)], **named)
            except (TypeError, ValueError) as error:
                self._explain(error)
                raise
            out = _untap(out, frame.level)
            frame.values = [_untap(value, frame.level) for value in frame.values]
        return out, _seen(frame)

    def _explain(self, error: Exception) -> None:
        if self.options is not None and ("ustom node" in str(error) or "pytree" in str(error)):
            error.add_note(
                f"Inside capture of {function_name(self.fn)}, chosen Modules bear their names in "
                "their structure, so that models that have other names, or none, cannot be mapped "
                "together with them. Capture what calls the model, and not what updates it."
            )


def _seen(frame: Frame) -> dict[str, Any]:
    pairs = zip(frame.labels, frame.values, strict=True)
    found = [(label.name, value) for label, value in pairs if label.level in (SOWN, frame.level)]
    # The first value of a name has that name, whatever the others are called.
    taken = {name for name, _ in found}
    seen: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for name, value in found:
        count = counts.get(name, 0) + 1
        while count > 1 and f"{name}#{count}" in taken:
            count += 1
        shown = name if count == 1 else f"{name}#{count}"
        counts[name] = count
        taken.add(shown)
        seen[shown] = value
    return seen


def capture(
    fn: Callable[_P, _R], selector: FilterSpec | None = None
) -> Callable[_P, tuple[_R, dict[str, Any]]]:
    """Call a function, and see what chosen submodules return and what is sown on the way.

    Works through every filtered transform that hands results out, inside and outside of it. What
    is captured under [`filter_vmap`][pytreemod.filter_vmap] or in the steps of
    [`filter_scan`][pytreemod.filter_scan] is stacked along axis 0; in both branches of
    [`filter_cond`][pytreemod.filter_cond] there must be the same. From where nothing comes out (a
    transform of plain JAX, a while loop), capturing is an error.

    A compiled function is compiled a second time for its first capture, and for each other choice
    of submodules; without a capture it runs as before.

    Captures may be nested: each takes the submodules that it chose, and the outer one also sees
    what is sown inside the inner one.

    **Law.** `capture(fn, s)(*args)[0]` equals `fn(*args)`.

    Args:
        fn: the function, which may be a Module, or a method of one.
        selector: which Modules in the arguments (and in `fn`): a class (`nn.Linear`), a path
            (`"blocks.*.attention"`), `select.at(lambda m: m.head)`, a predicate on Modules, or a
            combination of these. None for what is sown alone. A path is that of the Module itself
            in its argument.

    Returns:
        A function of the same arguments that returns a pair: what `fn` returns, and a dict, in the
        order of the calls. Its keys are paths of submodules (`blocks[0].attention`; `<root>` for an
        argument itself) and the names given to [`sow`][pytreemod.sow]; for a second value it is
        `name#2`, and so on, unless that is itself a name that was sown. A State is left out: of a
        layer that returns `(out, state)`, the value is `out`. A submodule that was not called is
        not there.

    Raises:
        ArgumentError: `fn` is not callable.
        SpecError: `selector` is no selector, or chooses no Module in the arguments.
        CaptureError: a value cannot come out of the transform that it is in.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> out, seen = pm.capture(net, nn.Linear)(jax.numpy.ones(2))
        >>> jax.tree.map(jax.numpy.shape, seen)
        {'layers[0]': (8,), 'layers[1]': (1,)}
    """
    check_callable("capture", fn, "fn")
    return _Captured(fn, None if selector is None else as_selector(selector))
