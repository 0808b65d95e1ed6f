"""Wrap the calls of chosen Modules: a *call rule*, put around a method.

There are no hooks. A Module with a rule around a method is of a variant of its class (see
[`variants`][pytreemod.module.variants]). The variant's method calls the rule. Rules are part of the
configuration of the instance. So they go through every transform with the Module, and a function is
compiled once for each choice of rules. A Module without rules is of its own class, and its calls
cost nothing more.

A rule gets its location: the path, the layer of a `Stack`, the number of the call. The number of
the layer is traced. While the step of the scan runs, it is data of the instance. So it goes as a
value into any transform that the layer uses. If the rule read it from outside the instance, it
would remain in JAX's caches.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeVar

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.module.construction import put_together, with_notes
from pytreemod.module.fields import field
from pytreemod.module.flattening import note_of
from pytreemod.module.methods import Method, as_method
from pytreemod.module.references import referred
from pytreemod.module.schema import CALL_RULES
from pytreemod.module.variants import Trait, Variant, Varying
from pytreemod.transform.boundary.signatures import passing_on
from pytreemod.transform.boundary.supplying import STEP, whole
from pytreemod.transform.boundary.wrapping import Transformed
from pytreemod.transform.interception.chosen_modules import Path, choose_modules, rebuilt
from pytreemod.tree.kinds import kind_of
from pytreemod.tree.printing import noted
from pytreemod.tree.rich_printing import rich_doc
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.stored_fields import stored
from pytreemod.tree.traces import current_trace, traced_apart
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu

_K = TypeVar("_K", bound="AbstractCallRule")


@dataclasses.dataclass(frozen=True)
class CallSite:
    """The location of a call.

    Attributes:
        path: the path of the Module in the argument in which it was chosen; `<root>` for the
            argument itself.
        method: the name of the method.
        call: the number of earlier calls of that method at that path. It is counted within the
            function that is `surrounding`, or else within the outermost method with a rule. Each
            transform counts from 0, because it is traced once and called often.
        layers: the numbers of the layers of the Stacks that contain the Module, outermost first;
            traced. Empty if no Stack runs, or the rule does not use them.
        members: the same for Ensembles.
    """

    path: str
    method: str
    call: int
    layers: tuple[Any, ...] = ()
    members: tuple[Any, ...] = ()

    @property
    def layer(self) -> Any:
        """The number of the layer in the innermost Stack; None without a Stack."""
        return self.layers[-1] if self.layers else None

    @property
    def member(self) -> Any:
        """The number of the member in the innermost Ensemble; None without an Ensemble."""
        return self.members[-1] if self.members else None

    @property
    def step(self) -> Any:
        """The number of the step of the innermost `filter_scan`, or of an RNN; None outside loops.

        It is known if steps are numbered: see `call_supplied`.

        Raises:
            CaptureError: if it belongs to a loop around a transform of plain JAX.
        """
        return whole(STEP)


class AbstractCallRule(Module):
    """A rule around calls. It is a Module: a value that can be pickled and compared.

    Rules are compared by value, so a function is compiled once for equal rules. They are
    configuration, and have no arrays.

    Attributes:
        uses_layer: whether the rule reads `where.layers` or `where.members`. If False, it does not
            get these numbers.
    """

    uses_layer: ClassVar[bool] = True

    def shown(self) -> str:
        """Return the note printed after a Module that the rule belongs to; none by default."""
        return ""

    def entering(self, module: Any) -> Any:
        """Return the Module whose method runs, instead of the one that was called.

        Args:
            module: the one that was called, or the result of an outer rule.

        Returns:
            A Module of the same class; by default, the same.
        """
        return module

    def leaving(self, called: Any, entered: Any, out: Any) -> Any:
        """Change the result of the method, before the rules around the call get it.

        Args:
            called: the argument of `entering`.
            entered: the result of `entering`.
            out: the result of the method, which may contain parts of `entered`.

        Returns:
            The new result; by default, the same.
        """
        return out

    @abstractmethod
    def around(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: CallSite,
    ) -> Any:
        """Make the call, or something else.

        Args:
            call: the next rule, or the method itself.
            args: the positional arguments.
            kwargs: the arguments by keyword.
            where: the location of the call.

        Returns:
            The result for the caller.
        """


def surround(
    tree: PyTree, selector: FilterSpec, rule: AbstractCallRule, method: str = "__call__"
) -> PyTree:
    """Put a rule around a method of chosen Modules.

    A later rule is outside of earlier ones, as with decorators.

    Args:
        tree: a model, or any tree that contains some.
        selector: chooses Modules.
        rule: the rule.
        method: the name of the method.

    Returns:
        The tree, in which the chosen Modules are of subclasses of their classes.

    Raises:
        SpecError: if `selector` is not a selector, or chooses no Module that has the method.
        ArgumentError: if `rule` is not a rule, or contains values that cannot be configuration.

    Examples:
        >>> from pytreemod import nn
        >>> class Twice(AbstractCallRule):
        ...     def around(self, call, args, kwargs, where):
        ...         return 2 * call(*args, **kwargs)
        >>> surround(nn.Lambda(abs), ..., Twice())(-3)
        6
    """
    (made,) = surround_all("surround", [tree], selector, rule, method)
    return made


def surround_all(
    where: str,
    trees: Sequence[PyTree],
    selector: FilterSpec,
    rule: AbstractCallRule,
    method: str = "__call__",
    level: int = 0,
) -> list[PyTree]:
    """Put a rule around a method of chosen Modules in the arguments of a call.

    Args:
        where: the name of the caller, for errors.
        trees: the arguments, with the function itself as the first.
        selector: chooses Modules.
        rule: the rule.
        method: the name of the method.
        level: the level of the `surrounding` call that the rule is for; 0 for a rule that remains.
            The rules of outer levels are outside.

    Returns:
        The arguments.

    Raises:
        SpecError: if `selector` is not a selector, or chooses no Module that has the method.
        ArgumentError: if `rule` is not a rule, or contains values that cannot be configuration.
    """
    _check_rule(where, rule)
    chosen = choose_modules(
        where, as_selector(selector), trees, ft.partial(has_method, name=method)
    )
    return put_around(trees, chosen, lambda name: rule, method, level)


def put_around(
    trees: Sequence[PyTree],
    chosen: Sequence[Mapping[Path, str]],
    rule_for: Callable[[str], AbstractCallRule],
    method: str = "__call__",
    level: int = 0,
) -> list[PyTree]:
    """Put a rule around a method of Modules that were chosen before.

    Args:
        trees: the arguments, with the function itself as the first.
        chosen: for each of them, the names of the Modules by their paths.
        rule_for: from the name of a Module to its rule.
        method: the name of the method.
        level: see `surround_all`.

    Returns:
        The arguments.
    """

    def add(tree: PyTree, names: Mapping[Path, str]) -> PyTree:
        def change(node: Any, path: Path) -> Any:
            if path not in names:
                return node
            rule = rule_for(names[path])
            new = _Ring(rule, kind_of(tuple(jtu.tree_leaves(rule))), names[path], method, level)
            return _with_wrappers(node, sorted([new, *_wrappers_of(node)], key=_Ring.order))

        # Most of a model is unchanged, and walking all of it takes as long as tracing a block.
        within = {path[:i] for path in names for i in range(len(path) + 1)}
        return rebuilt(tree, change, within=within) if names else tree

    return [add(tree, names) for tree, names in zip(trees, chosen, strict=True)]


def released(tree: PyTree, level: int | None = None) -> PyTree:
    """Return a tree without the rules of a level; Modules without any rules get their own classes.

    Args:
        tree: any tree.
        level: the level of a `surrounding` call; None for those of all such calls. Rules that
            remain with a Module (level 0) are unchanged.
    """

    def goes(wrapper: _Ring) -> bool:
        return wrapper.level > 0 if level is None else wrapper.level == level

    def change(node: Any, path: Path) -> Any:
        wrappers = _wrappers_of(node)
        rest = [wrapper for wrapper in wrappers if not goes(wrapper)]
        return node if len(rest) == len(wrappers) else _with_wrappers(node, rest)

    return rebuilt(tree, change)


def has_method(node: Any, name: str) -> bool:
    """Whether there is a method of that name that can have a rule."""
    found = _attribute(class_of(node).__mro__, name)
    # Methods that Python calls itself, on instances that are half built or broken, are excluded.
    is_bound = class_of(as_method(name, has_method)) is Method
    return is_bound and isinstance(found, (Method, Transformed, FunctionType))


def _attribute(bases: Iterable[type], name: str) -> Any:
    # In the bases alone: the metaclass has a `__call__`, too, which makes instances.
    return next((vars(base)[name] for base in bases if name in vars(base)), None)


# ---- rules of one kind, whose locations and paths do not matter


def own_rules(node: Any, kind: type[_K]) -> dict[str, _K]:
    """Return the rules of a kind that remain with a Module, by the names of the methods."""
    wrappers = [wrapper for wrapper in _wrappers_of(node) if _is_own(wrapper, kind)]
    return {wrapper.method: wrapper.rule for wrapper in wrappers if isinstance(wrapper.rule, kind)}


def with_own_rules(node: Any, kind: type[_K], rules: Mapping[str, _K]) -> Any:
    """Return a Module with these rules instead of all rules of their kind that remained with it.

    They get no path. So Modules at different paths with the same rules have one structure, as they
    have without rules.

    Args:
        node: a Module.
        kind: the class of the rules.
        rules: the rules by the names of the methods. Existing ones keep their position among other
            rules; new ones are outside of them.
    """
    old = _wrappers_of(node)
    remaining = [
        wrapper for wrapper in old if not _is_own(wrapper, kind) or wrapper.method in rules
    ]
    there = {wrapper.method for wrapper in remaining if _is_own(wrapper, kind)}
    wrappers = [_pathless(rules[name], name) for name in rules if name not in there]
    for wrapper in remaining:
        wrappers.append(
            _pathless(rules[wrapper.method], wrapper.method) if _is_own(wrapper, kind) else wrapper
        )
    new = tuple(sorted(wrappers, key=_Ring.order))
    return node if new == old else _with_wrappers(node, new)


def _pathless(rule: AbstractCallRule, method: str) -> _Ring:
    return _Ring(rule, kind_of(tuple(jtu.tree_leaves(rule))), "", method, 0)


def _is_own(wrapper: _Ring, kind: type) -> bool:
    return wrapper.level == 0 and isinstance(wrapper.rule, kind)


# ---- instances

# The attribute for the numbers of the layers around an instance. It is not an identifier, so no
# field can have this name.
_NUMBERS = "<numbers>"


class Numbers(NamedTuple):
    """The numbers of the layers, and of the members, around a Module; outermost first."""

    layers: tuple[Any, ...] = ()
    members: tuple[Any, ...] = ()

    def add(self, kind: str, number: Any) -> Numbers:
        """Return the numbers with one more, of a "layer" or of a "member"."""
        if kind == "layer":
            return self._replace(layers=(*self.layers, number))
        return self._replace(members=(*self.members, number))


_NONE = Numbers()


class _Ring(NamedTuple):
    """A rule around a method, as an instance stores it; named by pickles."""

    rule: AbstractCallRule
    # The kinds of the rule's values: `==` of Modules calls 1, 1.0 and True equal.
    kinds: Any
    path: str
    method: str
    level: int

    def order(self) -> tuple[bool, int]:
        """Sorts outermost first: outer levels before inner ones, and remaining rules last."""
        return self.level == 0, self.level


class _Rings(Varying, tuple[_Ring, ...]):
    """The rules of an instance, outermost first."""

    def traits(self) -> Iterator[Trait]:
        """Return the methods that call them."""
        return ((_Surrounded, wrapper.method) for wrapper in self)


class _Surrounded(Variant):
    """The variant for instances with rules around methods."""

    __slots__ = ()

    @staticmethod
    def __vary__(original: Any, name: str) -> dict[str, Any]:
        # The numbers are a field, because they are data; most instances have none.
        numbers = {"__annotations__": {_NUMBERS: Any}, _NUMBERS: field(init=False, repr=False)}
        return {**numbers, name: _asking(original, name)}

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # Here, as in `tree.printing`.

        rules = [wrapper.rule for wrapper in _wrappers_of(self) if wrapper.level == 0]
        # Once, around everything it is true of.
        with noted("".join(dict.fromkeys(rule.shown() for rule in rules))) as text:
            # As of its own class, because the printer has recorded this object already.
            return wl.pdoc(_with_wrappers(self, ()), **kwargs) + wl.TextDoc(text)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        rules = [wrapper.rule for wrapper in _wrappers_of(self) if wrapper.level == 0]
        note = "".join(dict.fromkeys(rule.shown() for rule in rules)).strip()
        return rich_doc(_with_wrappers(self, ()), path, subtree_renderer, note)

    __reduce__ = Module.__reduce__


def _restore(  # pyright: ignore[reportUnusedFunction]  (pickles of version 0.1 ask for it)
    cls: Any, values: dict[str, Any], config: tuple[str, ...]
) -> Any:
    values = referred(values)
    return put_together(cls, {**values, CALL_RULES: _Rings(values[CALL_RULES])}, config)


def _wrappers_of(node: Any) -> tuple[_Ring, ...]:
    return note_of(node, CALL_RULES) if isinstance(node, _Surrounded) else ()


def _with_wrappers(node: Any, wrappers: Iterable[_Ring]) -> Any:
    made = _Rings(wrappers)
    return with_notes(node, {CALL_RULES: made} if made else {CALL_RULES: None, _NUMBERS: None})


def _asking(cls: Any, name: str) -> Any:
    """Return a method that calls the rules around the method of a class."""

    @passing_on
    @ft.wraps(getattr(cls, name))
    def asking(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        wrappers = [wrapper for wrapper in _wrappers_of(self) if wrapper.method == name]
        module, steps = self, list[tuple[AbstractCallRule, Any, Any]]()
        for wrapper in wrappers:
            called, module = module, wrapper.rule.entering(module)
            steps.append((wrapper.rule, called, module))
        variant = class_of(module)
        call = _attribute(variant.__mro__[1:], name).__get__(module, variant)
        if not wrappers:
            return call(*args, **kwargs)
        call = ft.partial(_leave, call, steps)
        with _counted():
            numbers: Numbers = getattr(self, _NUMBERS, _NONE)
            counts = {wrapper.path: _count(wrapper.path, name) for wrapper in wrappers}
            for wrapper in reversed(wrappers):
                where = CallSite(wrapper.path, name, counts[wrapper.path], *numbers)
                call = ft.partial(_ask, wrapper.rule, call, where)
            return call(*args, **kwargs)

    return asking


def _leave(
    call: Callable[..., Any],
    steps: Sequence[tuple[AbstractCallRule, Any, Any]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    out = call(*args, **kwargs)
    for rule, called, entered in reversed(steps):
        out = rule.leaving(called, entered, out)
    return out


def _ask(
    rule: AbstractCallRule, call: Callable[..., Any], where: CallSite, /, *args: Any, **kwargs: Any
) -> Any:
    if not rule.uses_layer:
        where = dataclasses.replace(where, layers=(), members=())
    return rule.around(call, args, kwargs, where)


# ---- counting


class _Calls(threading.local):
    """The traces of each `surrounding` of this thread, with their counts of calls."""

    def __init__(self) -> None:
        self.stack: list[list[tuple[Any, dict[tuple[str, str], int]]]] = []


_calls = _Calls()


@contextmanager
def surrounding() -> Generator[int]:
    """Surround a function whose arguments have rules for this call alone.

    Returns:
        The level for these rules.
    """
    stack = _calls.stack
    stack.append([])
    try:
        # Traced apart from other calls, so that the counts belong to this one.
        with traced_apart("counted calls"):
            yield len(stack)
    finally:
        stack.pop()


@contextmanager
def _counted() -> Generator[None]:
    if _calls.stack:
        yield
    else:
        with surrounding():
            yield


def _count(path: str, method: str) -> int:
    traces, now = _calls.stack[-1], current_trace()
    # A trace that runs again has outlived those that began in it.
    while any(trace == now for trace, _ in traces) and traces[-1][0] != now:
        traces.pop()
    if not traces or traces[-1][0] != now:
        traces.append((now, {}))
    counts = traces[-1][1]
    count = counts.get((path, method), 0)
    counts[(path, method)] = count + 1
    return count


# ---- layers of a Stack, members of an Ensemble


def without_numbers(tree: PyTree) -> tuple[PyTree, Numbers | None]:
    """Remove the numbers of the layers and members that a tree is in.

    Returns:
        The tree, and the numbers; None for these if no rule in the tree uses them.
    """
    # Walking the tree is useless if no Module has a rule.
    nodes = jtu.tree_leaves(tree, is_leaf=_uses_numbers) if _Surrounded.__subclasses__() else ()
    found = [stored(node, _NUMBERS, _NONE) for node in nodes if _uses_numbers(node)]
    if not found:
        return tree, None
    return with_numbers(tree, _NONE) if any(found[0]) else tree, found[0]


def with_numbers(tree: PyTree, numbers: Numbers | None) -> PyTree:
    """Return a tree whose rules get these numbers; with None, the same tree."""

    def change(node: Any, path: Path) -> Any:
        return with_notes(node, {_NUMBERS: numbers}) if _uses_numbers(node) else node

    return tree if numbers is None else rebuilt(tree, change)


def _uses_numbers(node: Any) -> bool:
    return any(wrapper.rule.uses_layer for wrapper in _wrappers_of(node))


# ---- refusals


def _check_rule(where: str, rule: Any) -> None:
    if not isinstance(rule, AbstractCallRule):
        raise ArgumentError(f"{where}(rule)", "a call rule", describe(rule))
    try:
        hash(rule)
    except TypeError as error:
        expected = "a hashable rule, because it is configuration"
        got = f"{type(rule).__name__}, which contains an array or another value without a hash"
        hint = "pass arrays to the layer itself, in its arguments or its fields"
        raise ArgumentError(f"{where}(rule)", expected, got, hint=hint) from error


# Where pickles of version 0.1 look for it.
sys.modules["pytreemod.transform.boundary.surrounded_calls"] = sys.modules[__name__]
