"""Prefix trees: a value, or a rule, for every leaf of a tree.

Wherever a transform takes one value for each leaf (an axis, a spec, a bool), it takes a *prefix*.
That is one value for all leaves, or a tree of values that each apply to a subtree. A rule
[`by`][pytreemod.by] may be anywhere inside it, and so may a Module that has values instead of data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytreemod.errors import SpecError, describe
from pytreemod.tree.differences import side_text
from pytreemod.tree.instances import reading_stored
from pytreemod.tree.nodes import Location, children_of, locations, own_class, record_of
from pytreemod.tree.paths import path_text, pattern_text
from pytreemod.tree.selecting import (
    Locations,
    Rule,
    Selector,
    as_bool,
    as_selector,
    ask,
    refuse_unmatched,
)
from pytreemod.typing import FilterSpec, IsLeaf, PyTree, class_of, jtu

Resolve = Callable[[Any, PyTree, tuple[Any, ...]], list[Any]]


class By(Rule):
    """A rule that gives each leaf the value of the first selector that picks it.

    Made by [`by`][pytreemod.by]; accepted wherever a prefix tree is. Called on a tree, it returns a
    tree of values, as optax's labels and masks are.
    """

    __slots__ = ("items",)

    def __init__(self, items: Sequence[tuple[Selector, Any]]):
        self.items = tuple(items)

    def __call__(self, tree: PyTree) -> PyTree:
        """Return the tree with each leaf replaced by its value.

        Args:
            tree: any tree.

        Returns:
            A tree of the structure of `tree`, if no value is a container.

        Raises:
            SpecError: if no selector picks some leaf, a path in the rule matches nothing, or an
                entry decides nothing.

        Examples:
            >>> import pytreemod as pm
            >>> pm.by({"a": "slow", ...: "fast"})({"a": [1, None], "b": 2.0})
            {'a': ['slow', None], 'b': 'fast'}
        """
        return jtu.tree_structure(tree).unflatten(self.values(tree))

    def values(
        self, tree: PyTree, is_leaf: IsLeaf = None, root: str = "", strict: bool = True
    ) -> list[Any]:
        """Return the value for each leaf of `tree`, in JAX's order.

        With `strict=False`, a path may match nothing: it may be meant for another tree that the
        rule applies to. `check` checks the rule against all of them.

        Raises:
            SpecError: if no selector picks some leaf, a path in the rule matches nothing, or an
                entry decides nothing.
        """
        if strict:
            refuse_unmatched(self.selectors, [tree], is_leaf)
        locs = Locations(locations(tree, is_leaf))
        picks = [selector.pick(locs, tree, is_leaf) for selector in self.selectors]
        entries, shadowed = decide(picks, len(locs))
        if strict and shadowed:
            refuse_shadowed(repr(self), self.items, entries, shadowed, locs)
        values = [None if entry is None else self.items[entry][1] for entry in entries]
        lost = [
            path_text(loc.path, root) if root else pattern_text(loc.path)
            for loc, entry in zip(locs, entries, strict=True)
            if entry is None
        ]
        if lost:
            raise SpecError(
                repr(self),
                "a value for every leaf",
                f"none for {len(lost)} of {len(locs)}",
                at=lost,
                hint=["add a default:", "pm.by({..., ...: default})"],
            )
        return values

    def check(self, trees: Sequence[PyTree]) -> None:
        """Check the rule against several trees: an entry has to fit one of them.

        Raises:
            SpecError: if a path in the rule matches nothing, or an entry decides nothing.
        """
        refuse_unmatched(self.selectors, trees)
        # The first entry is never shadowed, nor is the default.
        if self.selectors[1:] not in ([], [_DEFAULT]):
            groups = [Locations(locations(tree)) for tree in trees]
            pairs = list(zip(groups, trees, strict=True))
            picks = [
                [hit for locs, tree in pairs for hit in selector.pick(locs, tree, None)]
                for selector in self.selectors
            ]
            every = [loc for locs in groups for loc in locs]
            entries, shadowed = decide(picks, len(every))
            refuse_shadowed(repr(self), self.items, entries, shadowed, every)

    def naming(self) -> By:
        """A rule that is true of the leaves that this one names by anything but its default."""
        return By([(selector, selector != _DEFAULT) for selector in self.selectors])

    @property
    def selectors(self) -> list[Selector]:
        """The selectors, in order."""
        return [selector for selector, _ in self.items]

    def __repr__(self) -> str:
        return f"by({{{', '.join(f'{s!r}: {v!r}' for s, v in self.items)}}})"

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # As in `tree.printing`.

        names = ["..." if s == _DEFAULT else repr(s) for s in self.selectors]
        values = [wl.pdoc(value, **kwargs) for _, value in self.items]
        docs = [wl.TextDoc(f"{name}: ") + value for name, value in zip(names, values, strict=True)]
        begin, end = wl.TextDoc("by({"), wl.TextDoc("})")
        return wl.bracketed(begin=begin, docs=docs, sep=wl.comma, end=end, indent=kwargs["indent"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, By) and self.items == other.items

    def __hash__(self) -> int:
        return hash(self.items)


_DEFAULT = as_selector(...)


def decide(
    picks: Sequence[Sequence[bool]], count: int
) -> tuple[list[int | None], list[tuple[int, list[int]]]]:
    """Return which entry of a rule decides each leaf: the first that picks it.

    Args:
        picks: for each entry, which leaves it picks.
        count: how many leaves there are.

    Returns:
        For each leaf the index of its entry, or None; and each entry whose leaves are all decided
        by earlier entries, with those leaves.
    """
    entries: list[int | None] = [None] * count
    shadowed: list[tuple[int, list[int]]] = []
    for index, picked in enumerate(picks):
        hits = [i for i, hit in enumerate(picked) if hit]
        is_used = False
        for i in hits:
            if entries[i] is None:
                entries[i], is_used = index, True
        if hits and not is_used:
            shadowed.append((index, hits))
    return entries, shadowed


def refuse_shadowed(
    where: str,
    items: Sequence[tuple[Selector, Any]],
    entries: Sequence[int | None],
    shadowed: Sequence[tuple[int, list[int]]],
    locs: Sequence[Location],
) -> None:
    """Refuse an entry that decides nothing, because earlier entries pick all of its leaves.

    Some entries may decide nothing:

    - one that picks nothing, by class or role, because a model need not have everything that a rule
      for many models names;
    - a last one that picks everything: it is the default;
    - one that looks at arrays, which may change;
    - one with the same value as those before it.

    Args:
        where: the name of the rule in errors.
        items: its entries.
        entries: as `decide` returns them.
        shadowed: the same.
        locs: the locations of the leaves.

    Raises:
        SpecError: if there is such an entry.
    """
    for index, hits in shadowed:
        selector, value = items[index]
        before = [items[entry] for i in hits if (entry := entries[i]) is not None]
        is_default = index == len(items) - 1 and len(hits) == len(locs)
        is_same = all(_are_same(other, value) for _, other in before)
        if is_default or is_same or not selector.is_structural():
            continue
        raise SpecError(
            f"{where}: {selector!r} never applies, because earlier entries match its leaves",
            at=[
                f"{pattern_text(locs[i].path)}: by {other!r}"
                for i, (other, _) in zip(hits, before, strict=True)
            ],
        )


def _are_same(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except Exception:
        # For instance, arrays.
        return False


def by(rules: dict[Any, Any]) -> By:
    """Return a prefix tree as a rule: `pm.by({selector: value, ..., ...: default})`.

    The rule is resolved against the tree that it is given for: the first selector that picks a leaf
    gives its value, and a leaf that nothing picks raises an error that names it. Selectors are
    written as everywhere: `select.path(...)` or a string, a class for `select.type`, a predicate.
    The key `...` is the default, wherever it is written. Called on a tree, the rule returns the
    tree of values, so that it can be passed to optax as labels or masks.

    Write special entries before general ones: an entry whose leaves are all decided by earlier
    entries is an error.

    Args:
        rules: a dict from selectors to values.

    Returns:
        A value to pass as `in_axes`, `out_axes`, or any other prefix; it may be anywhere
        inside a prefix tree.

    Raises:
        SpecError: if `rules` is not a dict, or is empty.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> axes = pm.by({"x": 0, ...: None})
        >>> f = pm.filter_vmap(lambda d: d["x"] * d["y"], in_axes=(axes,))
        >>> f({"x": jnp.arange(3.0), "y": jnp.asarray(2.0)})
        Array([0., 2., 4.], dtype=float32)
    """
    if not isinstance(rules, dict) or not rules:  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise SpecError(
            "by(rules)",
            "a dict from selectors to values",
            describe(rules),
            hint=["for example:", "pm.by({pm.nn.BatchNorm: 0, ...: None})"],
        )
    ordered = [item for item in rules.items() if item[0] is not ...]
    # The default goes last, wherever it is written.
    if ... in rules:
        ordered.append((..., rules[...]))
    return By([(as_selector(key), value) for key, value in ordered])


def spread(
    spec: Any,
    tree: PyTree,
    *,
    resolve: Resolve,
    stops: Callable[[Any], bool],
    where: str,
    path: tuple[Any, ...] = (),
    root: str = "",
) -> list[Any]:
    """Return the value that `spec`, a prefix of `tree`, has for each leaf.

    Args:
        spec: the prefix.
        tree: the tree.
        resolve: maps a leaf of the prefix, the subtree that it applies to and that subtree's
            path to a list with one value for each leaf of the subtree.
        stops: which nodes of `spec` are its leaves.
        where: the name of the prefix in errors.
        path: the location of `tree` in the root.
        root: the name of the root in errors.

    Returns:
        One value for each leaf.

    Raises:
        SpecError: if `spec` is not a prefix of `tree`; the error names the path.
    """
    inner = None if stops(spec) else children_of(spec)
    if inner is None:
        return resolve(spec, tree, path)
    children = children_of(tree)
    if children is None or not _alike(spec, tree):
        _refuse_mismatch(spec, tree, where, path_text(path, root))
        return []
    if record_of(tree) is not None:
        # By name: the fields of a spec, with other values, may divide differently.
        with reading_stored():
            parts = [getattr(spec, key.name, None) for key, _ in children]
    else:
        # The same keys: a part must not apply to another's child.
        if [key for key, _ in inner] != [key for key, _ in children]:
            _refuse_mismatch(spec, tree, where, path_text(path, root))
        parts = [part for _, part in inner]
    values: list[Any] = []
    for part, (key, child) in zip(parts, children, strict=True):
        values += spread(
            part, child, resolve=resolve, stops=stops, where=where, path=(*path, key), root=root
        )
    return values


def _alike(spec: Any, tree: Any) -> bool:
    return class_of(spec) is class_of(tree) or own_class(spec) is own_class(tree)


def _refuse_mismatch(spec: Any, tree: Any, where: str, path: str) -> None:
    raise SpecError(
        where,
        "a prefix of the tree",
        "another structure",
        at=[f"{path}: {side_text(spec)} where the tree has {side_text(tree)}"],
        hint=_several(spec),
    )


def _several(spec: Any) -> list[str]:
    """Return a hint for a list of names, or of classes, instead of one selector."""
    items: list[Any] = [*spec] if class_of(spec) in (list, tuple) else []
    if items and all(isinstance(item, str) for item in items):
        text = " | ".join(f"pm.select.path({item!r})" for item in items)
    elif items and all(isinstance(item, type) for item in items):
        text = f"pm.select.type({', '.join(item.__qualname__ for item in items)})"
    else:
        return []
    return ["to combine selectors, write", text]


def _is_filter_leaf(spec: Any) -> bool:
    return isinstance(spec, (Rule, str, type, bool)) or spec is ...


def mask_of(
    spec: FilterSpec,
    tree: PyTree,
    is_leaf: IsLeaf = None,
    *,
    where: str,
    root: str = "",
    leaves: list[Any] | None = None,
) -> list[bool]:
    """Return one bool for each leaf of `tree`, from any filter spec.

    Args:
        spec: a selector or a value that converts to one, `by` with bools, or a prefix tree.
        tree: the tree.
        is_leaf: where to stop descending.
        where: the name of `spec` in errors.
        root: the name of `tree` in errors.
        leaves: `jax.tree.leaves(tree, is_leaf)`, if the caller has it.

    Returns:
        A list as long as `jax.tree.leaves(tree, is_leaf)`.

    Raises:
        SpecError: if the spec is not a prefix, or returns something other than bools.
    """
    if callable(spec) and not isinstance(spec, (Rule, type)) and children_of(spec) is None:
        found = jtu.tree_leaves(tree, is_leaf=is_leaf) if leaves is None else leaves
        picked = ask(spec, found)
        # Nearly always bools, which need no further check.
        return picked if {*map(type, picked)} <= {bool} else [as_bool(v, where) for v in picked]
    if isinstance(spec, Selector):
        return spec.mask(tree, is_leaf)

    def resolve(value: Any, subtree: PyTree, path: tuple[Any, ...]) -> list[bool]:
        if isinstance(value, By):
            picked = value.values(subtree, is_leaf, path_text(path, root) if path else root)
            return [as_bool(v, where) for v in picked]
        if isinstance(value, bool):
            return [value] * len(jtu.tree_leaves(subtree, is_leaf=is_leaf))
        # A traced bool, or an array of one, is reported as such.
        if not _is_filter_leaf(value) and not callable(value):
            as_bool(value, where)
        return as_selector(value).mask(subtree, is_leaf)

    return spread(spec, tree, resolve=resolve, stops=_is_filter_leaf, where=where, root=root)
