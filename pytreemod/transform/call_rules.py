"""Rules around the calls of chosen Modules: `capture`, `intervene` and `with_precision` are some.

There are no hooks. A Module with a rule around a method is of a subclass of its class, whose method
calls the rule. It is made once for the class and the methods. The rule is *data* of the instance, a
Module in one more field. So the arrays of a rule go wherever the Module goes: through every
transform, layer by layer through a Stack, into gradients. A Module without rules is of its own
class, and its calls cost nothing more.

Elsewhere a selector picks leaves. Here each Module that has the method is offered as if it were a
leaf: a path is that of the Module itself, and a class means its instances.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

from pytreemod.errors import SpecError, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.methods import BoundMethod, Method, as_method
from pytreemod.transform.wrapping import Transformed
from pytreemod.tree.instances import all_stored, flat_of, stored
from pytreemod.tree.nodes import (
    InheritedRole,
    Location,
    children_of,
    nearest_path,
    own_class,
    with_children,
)
from pytreemod.tree.paths import path_text, pattern_text, some_of
from pytreemod.tree.printing import noted, rich_doc
from pytreemod.tree.selecting import Locations, Selector
from pytreemod.typing import KeyPath, PyTree, class_of

_K = TypeVar("_K", bound="CallRule")

RULES = "__rules__"


class CallRule(Module):
    """What happens around a call of a Module; its arrays are data of the Module."""

    def around(
        self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make the call, or something else.

        Args:
            call: the next rule, or the method; takes the Module first.
            module: the Module.
            args: the positional arguments.
            kwargs: the arguments by keyword.

        Returns:
            The result for the caller.
        """
        raise NotImplementedError

    def shown(self) -> str:
        """Return the note printed after a Module that the rule belongs to; none by default."""
        return ""


class _Rules(Module):
    """The rules of an instance, outermost first."""

    rules: tuple[CallRule, ...]
    methods: tuple[str, ...] = field(static=True)


class _Ruled:
    """First base of a class whose instances have rules around methods."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the user's, which may record subclasses, or require more arguments.
        pass

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # Here, as in `tree.printing`.

        # Once, around everything it is true of.
        with noted(_shown(self)) as text:
            # As of its own class, because the printer has recorded this object already.
            return wl.pdoc(_with_pairs(self, ()), **kwargs) + wl.TextDoc(text)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        plain = _with_pairs(self, ())
        return rich_doc(plain, path, subtree_renderer, _shown(self).strip())

    def __reduce__(self) -> Any:
        return _with_pairs, (_with_pairs(self, ()), _pairs_of(self))


def _ruled(cls: Any, names: frozenset[str]) -> Any:
    """Return the subclass of a Module class that has rules around these methods."""
    # With the class itself, which a table of this module would keep alive.
    if "__ruled__" not in vars(cls):
        type.__setattr__(cls, "__ruled__", {})
    made: dict[frozenset[str], Any] = cls.__ruled__
    if names not in made:
        namespace = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")}
        namespace |= {"__passes_for__": cls, "__init__": cls.__init__}
        namespace |= {"__annotations__": {RULES: Any}, RULES: field(init=False, repr=False)}
        namespace |= {name: _asking(getattr(cls, name), name) for name in names}
        made[names] = class_of(cls)(cls.__name__, (_Ruled, cls), namespace)
        # It passes for the class: `dataclasses` finds no other fields.
        type.__setattr__(made[names], "__dataclass_fields__", cls.__dataclass_fields__)
    return made[names]


def _asking(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A method that asks the rules around it."""

    @ft.wraps(method)
    def asking(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = method
        for rule, of in reversed(_pairs_of(self)):
            if of == name:
                call = ft.partial(_ask, rule, call)
        return call(self, *args, **kwargs)

    return asking


def _ask(rule: CallRule, call: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return rule.around(call, module, args, kwargs)


def _shown(node: Any) -> str:
    return "".join(dict.fromkeys(rule.shown() for rule, _ in _pairs_of(node)))


_Pairs = Sequence[tuple[CallRule, str]]
"""Rules, each with the name of its method."""


def _pairs_of(node: Any) -> _Pairs:
    found = stored(node, RULES) if isinstance(node, _Ruled) else None
    return [] if found is None else list(zip(found.rules, found.methods, strict=True))


def _with_pairs(node: Any, pairs: _Pairs) -> Any:
    cls, values = own_class(node), all_stored(node)
    _, (split, notes, *_) = flat_of(node)
    values.pop(RULES, None)
    if pairs:
        names = tuple(name for _, name in pairs)
        values[RULES] = _Rules(tuple(rule for rule, _ in pairs), names)
        cls = _ruled(cls, frozenset(names))
    return cls.__module_schema__.make(values, split.config, notes)


def is_rules(node: Any) -> bool:
    """Whether a node is the rules of a Module, or one of them: no part of the model."""
    return isinstance(node, (_Rules, CallRule))


def rules_of(node: Any, kind: type[_K]) -> dict[str, _K]:
    """Return the rules of a kind around a Module, by the names of the methods."""
    return {name: rule for rule, name in _pairs_of(node) if isinstance(rule, kind)}


def with_rules(node: Any, kind: type[CallRule], rules: Mapping[str, CallRule]) -> Any:
    """Return a Module with these rules by method, around all others but those of their kind."""
    old = _pairs_of(node)
    kept = [(rule, name) for rule, name in old if not isinstance(rule, kind)]
    pairs = [*((rule, name) for name, rule in rules.items()), *kept]
    return _with_pairs(node, pairs) if pairs or old else node


def wrap_calls(
    where: str, trees: Sequence[PyTree], selector: Selector, rule_for: Callable[[str], CallRule]
) -> list[PyTree]:
    """Put a rule around the calls of the Modules in some trees that a selector picks.

    Args:
        where: the name of the caller, for errors.
        trees: the arguments of a call, with the function itself as the first.
        selector: picks Modules.
        rule_for: from the path of a Module to its rule; the new rule is outside of its others.

    Raises:
        SpecError: if none is picked, or a path matches none.
    """
    found = [offered(tree, has_method) for tree in trees]
    errors: list[SpecError] = []
    hits: list[list[bool]] = []
    for tree, places in zip(trees, found, strict=True):
        try:
            hits.append(selector.pick(places, path_unwrapped(tree)[1], None) if places else [])
        except SpecError as error:
            # An access that may fit another argument.
            errors.append(error)
            hits.append([False] * len(places))
    every = Locations(place for places in found for place in places)
    refuse_unmatched_modules(where, selector, every)
    if not any(map(any, hits)):
        raise errors[0] if errors else SpecError(explain_none(where, repr(selector), every))
    out: list[PyTree] = []
    for tree, places, picks in zip(trees, found, hits, strict=True):
        prefix, _ = path_unwrapped(tree)
        pairs = zip(places, picks, strict=True)
        names = {(*prefix, *p.path): path_text(p.path) for p, is_picked in pairs if is_picked}

        def change(node: Any, path: KeyPath, names: dict[KeyPath, str] = names) -> Any:
            if path not in names:
                return node
            return _with_pairs(node, [(rule_for(names[path]), "__call__"), *_pairs_of(node)])

        out.append(rebuilt(tree, change) if names else tree)
    return out


def unwrap_calls(tree: PyTree, goes: Callable[[CallRule], bool]) -> PyTree:
    """Return a tree without some rules; Modules without any are of their own classes again."""

    def change(node: Any, path: KeyPath) -> Any:
        old = _pairs_of(node)
        rest = [(rule, name) for rule, name in old if not goes(rule)]
        return node if len(rest) == len(old) else _with_pairs(node, rest)

    return rebuilt(tree, change)


# ---- the Modules of a tree


def has_method(node: Any, name: str = "__call__") -> bool:
    """Whether there is a method of that name that can have a rule."""
    # In the bases alone: the metaclass has a `__call__`, too, which makes instances.
    bases: Sequence[type] = class_of(node).__mro__
    found = next((vars(base)[name] for base in bases if name in vars(base)), None)
    # Methods that Python calls itself, on instances that are half built or broken, are excluded.
    is_bound = class_of(as_method(name, has_method)) is Method
    return is_bound and isinstance(found, (Method, Transformed, FunctionType))


def path_unwrapped(tree: PyTree) -> tuple[KeyPath, PyTree]:
    """Return the callable inside wrappers, and its path in them.

    Paths start at the model, however it is called: as a method, or under a transform.
    """
    path: KeyPath = ()
    while isinstance(tree, (BoundMethod, Transformed)):
        # The first child is the callable; others are its arguments.
        key, child = next(iter(children_of(tree) or [(None, None)]))
        path, tree = (*path, key), child
    return path, tree


def unwrapped(tree: PyTree) -> PyTree:
    """Return the model in a method of it, or under transforms."""
    return path_unwrapped(tree)[1]


def offered(tree: PyTree, is_offered: Callable[[Any], bool]) -> Locations:
    """Return the places of the Modules in a tree that are offered to selectors."""
    return Locations(_offered(unwrapped(tree), (), InheritedRole(), is_offered))


def _offered(
    node: Any, path: KeyPath, here: InheritedRole, is_offered: Callable[[Any], bool]
) -> Iterator[Location]:
    children = _children(node)
    if children is None:
        return
    if isinstance(node, Module) and is_offered(node):
        yield Location(path, node, (), here.role, is_node=True)
    for key, child in children:
        yield from _offered(child, (*path, key), here.of_child(node, key), is_offered)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    # A State contains the values of tokens, an optimizer those of parameters, and a rule its own.
    # None of these contains Modules that are called.
    kind = class_of(node)
    if hasattr(kind, "__token_types__") or hasattr(kind, "__holds_values__") or kind is _Rules:
        return None
    return children_of(node)


def rebuilt(tree: PyTree, change: Callable[[Any, KeyPath], Any], path: KeyPath = ()) -> PyTree:
    """Return a tree with its nodes changed, those below a node before the node itself.

    Args:
        tree: any tree.
        change: from a node and its path to the new node.
        path: the path of the tree itself.
    """
    if _children(tree) is None:
        return tree
    made = with_children(tree, lambda key, child: rebuilt(child, change, (*path, key)))
    if made is not tree and isinstance(made, BoundMethod):
        # The method of the new class: with the rules, or without.
        found = getattr(made.__self__, made.func.__name__, None)
        made = found if isinstance(found, BoundMethod) else made
    return change(made, path)


def refuse_unmatched_modules(where: str, selector: Selector, places: Locations) -> None:
    """Refuse a path that is that of no Module.

    Raises:
        SpecError: if there is one; the error lists the Modules.
    """
    for pattern in selector.paths():
        if not any(pattern.pick(places, None, None)):
            raise SpecError(explain_none(where, repr(pattern), places, pattern.steps))


def explain_none(
    where: str, what: str, places: Sequence[Location], steps: tuple[str, ...] = ()
) -> str:
    """Return the message for a selector that picks no Module."""
    shown = some_of([pattern_text(place.path) for place in places])
    hint = f"the arguments have: {shown}" if shown else "the model is an argument, not a closure"
    fact = f"{where}: {what} picks no Module that can be called{nearest_path(steps, places)}"
    return explain(fact, hint=hint)
