"""Where each array of a model is in a PyTorch state dict: one walk over the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import StateError, StructureError, describe
from pytreemod.io.leaf_names import joined
from pytreemod.io.torch_layouts import (
    SUMMED,
    LayoutRule,
    Numbered,
    Packed,
    Relaid,
    Summed,
    layout_of,
)
from pytreemod.state.tokens import RngStream, is_moved, is_token
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import plain_name, step_names
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu


@dataclass(frozen=True)
class TensorPlace:
    """An array of a model or its State, and the names of what PyTorch has in its place."""

    leaf: Any
    own: str
    """Its name here."""

    names: tuple[str, ...]
    """One, or one for each member if layers that PyTorch has in a list are one here; several for
    each that PyTorch has as several."""

    lead: tuple[int, ...]
    """The leading axes on which the members are."""

    form: Relaid | Summed | Packed | None
    """How PyTorch has it, if in another form."""

    def names_by_member(self) -> list[tuple[str, ...]]:
        """Its names, those of each member together."""
        count = len(self.form.names) if isinstance(self.form, SUMMED) else 1
        starts = range(0, len(self.names), count)
        return [self.names[start : start + count] for start in starts]


LeafPlaces = list["TensorPlace | None"]
"""For each leaf of a tree its place; None for what PyTorch has not."""


@dataclass(frozen=True)
class _Prefixes:
    """How the names below a node begin: several, if there are several members."""

    texts: tuple[str, ...] = ("",)
    lead: tuple[int, ...] = ()

    def below(self, name: str) -> _Prefixes:
        return _Prefixes(tuple(joined(text, name) for text in self.texts), self.lead)

    def following(self, rule: LayoutRule) -> _Prefixes | None:
        """How they begin where a rule is followed; None where PyTorch has nothing."""
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
    """A rule of a node further up, whose place is still some steps away."""

    steps: tuple[str, ...]
    rule: LayoutRule
    base: _Prefixes


@dataclass
class TensorPlaces:
    """Where everything in a model, and in its State, is in a state dict."""

    where: str
    state: State | None
    arrays: list[TensorPlace] = field(default_factory=list[TensorPlace])
    """All of them, in the order of the model, those of a token where the token is."""

    leaves: LeafPlaces = field(default_factory=list["TensorPlace | None"])
    """For each leaf of the model."""

    values: list[tuple[Any, LeafPlaces]] = field(default_factory=list[tuple[Any, LeafPlaces]])
    """Each token whose value is in the State, and for each leaf of that."""

    unused: set[str] = field(default_factory=set[str])
    """Names that PyTorch has, of which nothing is needed here."""

    prefixes: dict[str, str] = field(default_factory=dict[str, str])
    """From the names of nodes here to how their names begin in PyTorch."""

    homeless: list[str] = field(default_factory=list[str])
    """Tokens whose values are in a State that was not given."""

    def visit(
        self,
        node: Any,
        own: str,
        prefixes: _Prefixes | None,
        form: Relaid | Summed | Packed | None = None,
        pending: Sequence[_Pending] = (),
    ) -> LeafPlaces:
        """Go through a node; what comes back is for each leaf of it, in JAX's order."""
        if prefixes is None:
            return [None] * len(jtu.tree_leaves(node))
        if not prefixes.lead:
            self.prefixes[own] = prefixes.texts[0]
        if is_token(node):
            return self._visit_token(node, own, prefixes, form, pending)
        children = children_of(node)
        if children is None:
            return [self._place(node, own, prefixes, form)]
        layout = layout_of(node)
        if layout is not None:
            further = [_Pending(*rule, prefixes) for rule in layout.rules_of(node)]
            pending = [*pending, *further]
            names = [prefixes.below(name).texts for name in layout.unused]
            self.unused.update(text for texts in names for text in texts)
        found: LeafPlaces = []
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
            # The outermost says what it is called, the innermost in which form it is.
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
    ) -> LeafPlaces:
        # PyTorch has its random numbers elsewhere.
        if isinstance(token, RngStream):
            return [None] * len(jtu.tree_leaves(token))
        if not is_moved(token):
            return self.visit(token.init, own, prefixes, form, pending)
        if self.state is None:
            self.homeless.append(own)
            return []
        spots = self.visit(self.state.get(token), own, prefixes, form, pending)
        self.values.append((token, spots))
        return []

    def _place(
        self, leaf: Any, own: str, prefixes: _Prefixes, form: Relaid | Summed | Packed | None
    ) -> TensorPlace | None:
        is_tensor = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        # Numbers of Python are attributes there, and keys unknown.
        if not is_tensor or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return None
        place = TensorPlace(leaf, own, prefixes.texts, prefixes.lead, form)
        self.arrays.append(place)
        return place


def tensor_places(where: str, model: Any, state: State | None) -> TensorPlaces:
    """Where each array of a model and its State is in a state dict.

    Args:
        where: whose errors they are.
        model: any tree.
        state: the State of its tokens; None if they still have their values, or there are none.

    Returns:
        The places.

    Raises:
        StateError: the values of tokens are in a State that was not given.
        StructureError: two arrays have one name, or there is no leading axis where one must be.
    """
    places = TensorPlaces(where, state)
    places.leaves = places.visit(model, "", _Prefixes())
    if places.homeless:
        call = where.replace(")", ", state=state)")
        raise StateError(
            where, "the State, too", "none", places=places.homeless, hint=["write", call]
        )
    _check_leads(where, places.arrays)
    _check_names(where, places.arrays)
    _check_packs(where, places.arrays)
    return places


def _check_leads(where: str, spots: Sequence[TensorPlace]) -> None:
    wrong = [
        f"{place.own}: {describe(place.leaf)}, with {place.lead} first"
        for place in spots
        if place.leaf.shape[: len(place.lead)] != place.lead
    ]
    if wrong:
        expected = "an axis for the layers that PyTorch has in a list"
        raise StructureError(where, expected, "another", places=wrong)


def _check_names(where: str, spots: Sequence[TensorPlace]) -> None:
    # By name and part: what is packed has a name together with others.
    owners: dict[str, dict[int | None, str]] = {}
    twice: list[str] = []
    for place in spots:
        part = place.form.part if isinstance(place.form, Packed) else None
        for name in place.names:
            others = owners.setdefault(name, {})
            is_taken = part in others or (others and None in (part, *others))
            # Parts of several that are added up.
            if is_taken and not isinstance(place.form, Summed):
                other = others[part] if part in others else next(iter(others.values()))
                twice.append(f"{name}: {other} and {place.own}")
            others[part] = place.own
    if twice:
        expected, got = "names of their own for all arrays in PyTorch", "one for two"
        hint = "Registered layouts decide what they are called: see register_torch_layout."
        raise StructureError(where, expected, got, places=twice, hint=hint)


def _check_packs(where: str, spots: Sequence[TensorPlace]) -> None:
    """Require all parts of what PyTorch has as one."""
    parts: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    for place in spots:
        if isinstance(place.form, Packed):
            for name in place.names:
                parts.setdefault(name, set()).add(place.form.part)
                counts[name] = len(place.form.rows)
    wrong = [
        f"{name}: {len(found)} of {counts[name]} parts"
        for name, found in parts.items()
        if found != {*range(counts[name])}
    ]
    if wrong:
        expected = "all parts of each array that PyTorch has as one"
        raise StructureError(where, expected, "some of them", places=wrong)
