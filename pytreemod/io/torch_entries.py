"""The names of a model's arrays in a PyTorch state dict, and renaming of these names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, StateError, StructureError, describe, nearest
from pytreemod.io.layout_rules import Packed, Relaid
from pytreemod.io.tables import joined
from pytreemod.io.torch_layouts import (
    SUMMED,
    LayoutRule,
    Numbered,
    Summed,
    layout_of,
)
from pytreemod.state.tokens import RngStream, is_moved, is_token
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import plain_name, some_of, step_names
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu


@dataclass(frozen=True)
class TensorEntry:
    """An array of a model or its State, and the names of its tensors in PyTorch."""

    leaf: Any
    own: str
    """Its name here."""

    names: tuple[str, ...]
    """One name; or one for each member, if PyTorch has a list of the layers that are stacked here;
    or several for each, if PyTorch has the array as several."""

    lead: tuple[int, ...]
    """The leading axes of members."""

    form: Relaid | Summed | Packed | None
    """The form in PyTorch, if it differs."""

    def names_by_member(self) -> list[tuple[str, ...]]:
        """Return its names, grouped by member."""
        count = len(self.form.names) if isinstance(self.form, SUMMED) else 1
        starts = range(0, len(self.names), count)
        return [self.names[start : start + count] for start in starts]


LeafEntries = list["TensorEntry | None"]
"""The entry of each leaf of a tree; None for a leaf that PyTorch lacks."""


@dataclass(frozen=True)
class _Prefixes:
    """The prefixes of the names below a node: several, if there are several members."""

    texts: tuple[str, ...] = ("",)
    lead: tuple[int, ...] = ()

    def below(self, name: str) -> _Prefixes:
        return _Prefixes(tuple(joined(text, name) for text in self.texts), self.lead)

    def following(self, rule: LayoutRule) -> _Prefixes | None:
        """Return the prefixes after a rule; None if PyTorch has nothing."""
        if rule is None:
            return None
        if isinstance(rule, SUMMED):
            texts = (joined(text, name) for text in self.texts for name in rule.names)
            return _Prefixes(tuple(texts), self.lead)
        named = self.below(rule if isinstance(rule, str) else rule.name)
        if not isinstance(rule, Numbered):
            return named
        numbers = range(rule.first, rule.first + rule.count)
        members = tuple(joined(text, str(i)) for text in named.texts for i in numbers)
        return _Prefixes(members, (*self.lead, rule.count))


@dataclass(frozen=True)
class _Pending:
    """A rule of an outer node, some components above its leaf."""

    steps: tuple[str, ...]
    rule: LayoutRule
    base: _Prefixes


@dataclass
class TensorEntries:
    """The names in a state dict of everything in a model and its State."""

    where: str
    state: State | None
    arrays: list[TensorEntry] = field(default_factory=list[TensorEntry])
    """All of them, in the order of the model, with the arrays of a token at the token."""

    leaves: LeafEntries = field(default_factory=list["TensorEntry | None"])
    """The entry of each leaf of the model."""

    values: list[tuple[Any, LeafEntries]] = field(default_factory=list[tuple[Any, LeafEntries]])
    """Each token whose value is in the State, with the entries of the leaves of that value."""

    unused: set[str] = field(default_factory=set[str])
    """Names in PyTorch that are not needed here."""

    prefixes: dict[str, str] = field(default_factory=dict[str, str])
    """From the names of nodes here to their prefixes in PyTorch."""

    without_state: list[str] = field(default_factory=list[str])
    """Tokens whose values are in a State that was not given."""

    def visit(
        self,
        node: Any,
        own: str,
        prefixes: _Prefixes | None,
        form: Relaid | Summed | Packed | None = None,
        pending: Sequence[_Pending] = (),
    ) -> LeafEntries:
        """Visit a node; return an entry for each leaf of it, in JAX's order."""
        if prefixes is None:
            return [None] * len(jtu.tree_leaves(node))
        if not prefixes.lead:
            self.prefixes[own] = prefixes.texts[0]
        if is_token(node):
            return self._visit_token(node, own, prefixes, form, pending)
        children = children_of(node)
        if children is None:
            return [self._entry(node, own, prefixes, form)]
        layout = layout_of(node)
        if layout is not None:
            further = [_Pending(*rule, prefixes) for rule in layout.rules_of(node)]
            pending = [*pending, *further]
            names = [prefixes.below(name).texts for name in layout.unused]
            self.unused.update(text for texts in names for text in texts)
        found: LeafEntries = []
        for key, child in children:
            name, steps = plain_name((key,)), step_names((key,))
            count = len(steps)
            below = [
                _Pending(rule.steps[count:], rule.rule, rule.base)
                for rule in pending
                if rule.steps[:count] == steps
            ]
            here = [rule for rule in below if not rule.steps]
            forms = [rule.rule for rule in here if isinstance(rule.rule, (Relaid, *SUMMED))]
            # The outermost rule determines the name, the innermost the form.
            naming = here[0] if here else None
            if here and forms and isinstance(forms[-1], SUMMED):
                naming = here[-1]
            at = naming.base.following(naming.rule) if naming else prefixes.below(name)
            further = [rule for rule in below if rule.steps]
            found += self.visit(child, joined(own, name), at, forms[-1] if forms else form, further)
        return found

    def _visit_token(
        self,
        token: Any,
        own: str,
        prefixes: _Prefixes,
        form: Relaid | Summed | Packed | None,
        pending: Sequence[_Pending],
    ) -> LeafEntries:
        # PyTorch stores its random numbers elsewhere.
        if isinstance(token, RngStream):
            return [None] * len(jtu.tree_leaves(token))
        if not is_moved(token):
            return self.visit(token.init, own, prefixes, form, pending)
        if self.state is None:
            self.without_state.append(own)
            return []
        entries = self.visit(self.state.get(token), own, prefixes, form, pending)
        self.values.append((token, entries))
        return []

    def _entry(
        self, leaf: Any, own: str, prefixes: _Prefixes, form: Relaid | Summed | Packed | None
    ) -> TensorEntry | None:
        is_tensor = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        # Python numbers are attributes there, and keys do not exist.
        if not is_tensor or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return None
        entry = TensorEntry(leaf, own, prefixes.texts, prefixes.lead, form)
        self.arrays.append(entry)
        return entry


def tensor_entries(where: str, model: Any, state: State | None) -> TensorEntries:
    """Return the names of each array of a model and its State in a state dict.

    Args:
        where: the call, for errors.
        model: any tree.
        state: the State of its tokens; None if they still have their values, or there are none.

    Returns:
        The names.

    Raises:
        StateError: if the values of tokens are in a State that was not given.
        StructureError: if two arrays have one name, or a required leading axis is missing.
    """
    entries = TensorEntries(where, state)
    entries.leaves = entries.visit(model, "", _Prefixes())
    if entries.without_state:
        call = where.replace(")", ", state=state)")
        raise StateError(
            where, "the State as well", "none", at=entries.without_state, hint=["write", call]
        )
    _check_leads(where, entries.arrays)
    _check_names(where, entries.arrays)
    _check_packs(where, entries.arrays)
    return entries


def _check_leads(where: str, entries: Sequence[TensorEntry]) -> None:
    wrong = [
        f"{entry.own}: {describe(entry.leaf)}, with {entry.lead} first"
        for entry in entries
        if entry.leaf.shape[: len(entry.lead)] != entry.lead
    ]
    if wrong:
        expected = "a leading axis for the layers that PyTorch has in a list"
        raise StructureError(where, expected, "other axes", at=wrong)


def _check_names(where: str, entries: Sequence[TensorEntry]) -> None:
    # By name and part: several packed arrays share a name.
    owners: dict[str, dict[int | None, str]] = {}
    twice: list[str] = []
    for entry in entries:
        part = entry.form.part if isinstance(entry.form, Packed) else None
        for name in entry.names:
            others = owners.setdefault(name, {})
            is_taken = part in others or (others and None in (part, *others))
            # Parts of several arrays that are added up.
            if is_taken and not isinstance(entry.form, Summed):
                other = others[part] if part in others else next(iter(others.values()))
                twice.append(f"{name}: {other} and {entry.own}")
            others[part] = entry.own
    if twice:
        expected, got = "a different name for each array in PyTorch", "the same name twice"
        raise StructureError(where, expected, got, at=twice)


def _check_packs(where: str, entries: Sequence[TensorEntry]) -> None:
    """Require all parts of an array that PyTorch has as one."""
    parts: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry.form, Packed):
            for name in entry.names:
                parts.setdefault(name, set()).add(entry.form.part or 0)
                counts[name] = len(entry.form.sizes or ())
    wrong = [
        f"{name}: {len(found)} of {counts[name]} parts"
        for name, found in parts.items()
        if found != {*range(counts[name])}
    ]
    if wrong:
        expected = "all parts of each array that PyTorch has as one"
        raise StructureError(where, expected, "only some parts", at=wrong)


Renaming: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None] | None
"""From names in a state dict, or their prefixes, to those in a model; None to skip a tensor."""


def sources_of(
    where: str, entries: TensorEntries, given: Sequence[str], mapping: Renaming
) -> dict[str, str]:
    """Return the name in the state dict of each tensor, by its new name.

    Args:
        where: the call, for errors.
        entries: the requirements of the model.
        given: the names in the state dict.
        mapping: the renaming.

    Returns:
        Names in the state dict by their new names, without unneeded ones.

    Raises:
        ArgumentError: if `mapping` is invalid, or renames missing tensors.
        StructureError: if two tensors get one name.
    """
    rename = _renamer(given, mapping)
    wanted = {name for entry in entries.arrays for name in entry.names}
    sources: dict[str, str] = {}
    twice: list[str] = []
    for source in given:
        renamed = rename(source)
        name = None if renamed is None else _as_pytorch_has_it(renamed, entries, wanted)
        if name is None or (name in entries.unused and name not in wanted):
            continue
        if name in sources:
            twice.append(f"{name}: {sources[name]!r} and {source!r}")
        sources[name] = source
    if twice:
        hint = "Map tensors that you do not need to None in mapping."
        expected = "a different name for each tensor"
        raise StructureError(where, expected, "the same name twice", at=twice, hint=hint)
    return sources


def _as_pytorch_has_it(name: str, entries: TensorEntries, wanted: set[str]) -> str:
    """Return a name in the model as PyTorch's, if it is not: `layers.0.weight` as `0.weight`."""
    if name in wanted or name in entries.unused:
        return name
    words = name.split(".")
    for count in range(len(words), 0, -1):
        start = ".".join(words[:count])
        if start in entries.prefixes:
            return joined(entries.prefixes[start], ".".join(words[count:]))
    return name


def _renamer(given: Sequence[str], mapping: Any) -> Callable[[str], str | None]:
    if mapping is None:
        return lambda name: name
    if isinstance(mapping, Mapping):
        starts = cast("Mapping[Any, Any]", mapping)
        _check_starts(given, starts)
        return lambda name: with_other_start(name, starts)
    if callable(mapping):
        return lambda name: _checked(mapping, mapping(name))
    expected = "names, or their prefixes, by those in the state dict; or a function"
    raise ArgumentError("from_torch(mapping)", expected, describe(mapping))


def with_other_start(name: str, starts: Mapping[str, str | None]) -> str | None:
    """Replace the longest of a name's prefixes that a dict contains.

    Args:
        name: components with dots between them.
        starts: from prefixes to others; None to drop the name.

    Returns:
        The new name.

    Examples:
        >>> starts = {"features": "trunk", "features.0": "stem", "head": None}
        >>> names = ["features.1.bias", "features.0.bias", "head.bias"]
        >>> [with_other_start(name, starts) for name in names]
        ['trunk.1.bias', 'stem.bias', None]
    """
    words = name.split(".")
    for count in range(len(words), -1, -1):
        start = ".".join(words[:count])
        if start in starts:
            target = starts[start]
            return None if target is None else joined(target, ".".join(words[count:]))
    return name


# ---- refusals


def _check_starts(given: Sequence[str], starts: Mapping[Any, Any]) -> None:
    """Require that each prefix is one of an existing name, and goes to a string or None."""
    words = [name.split(".") for name in given]
    there = {".".join(each[:count]) for each in words for count in range(len(each) + 1)}
    wrong = [
        f"{describe(start)}: {describe(target)}"
        for start, target in starts.items()
        if not (isinstance(start, str) and (target is None or isinstance(target, str)))
    ]
    if wrong:
        expected = "a string, or None to skip the tensor"
        raise ArgumentError("from_torch(mapping)", expected, "something else", at=wrong)
    absent = [start for start in starts if start not in there]
    if absent:
        lines = [repr(start) + nearest(start, there) for start in absent]
        expected = f"prefixes of names in the state dict ({some_of(given)})"
        got = f"{len(absent)} that no name begins with"
        raise ArgumentError("from_torch(mapping)", expected, got, at=lines)


def _checked(mapping: Any, result: Any) -> str | None:
    if result is None or isinstance(result, str):
        return result
    got = f"{describe(result)} of {describe(mapping)}"
    raise ArgumentError("from_torch(mapping)", "a name, or None", got)
