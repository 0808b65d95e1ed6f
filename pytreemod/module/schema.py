"""What follows from the body of a class: its fields, and how an instance divides them.

Strings, classes and callables that are not pytrees can never be data for JAX, so a field with such
a value is configuration, and so is a field that is declared `static`. Everything else is data. The
types of the values decide, once for each combination of types; unflattening never decides again.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from pytreemod.errors import FieldError, FieldWarning, SpecError, describe, warn
from pytreemod.module.fields import AbstractConstraint
from pytreemod.module.reading import follow, is_computed, pass_through, ranks_of, read
from pytreemod.tree.instances import (
    MISSING,
    NO_NOTES,
    FieldSplit,
    Notes,
    all_stored,
    flat_of,
    is_derivative,
    is_finished,
    make,
    reading_stored,
    set_flat,
    set_split,
)
from pytreemod.tree.nodes import DEFAULT_ROLE, is_node
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.surgery import refuse_tied
from pytreemod.typing import class_of, jtu

_FUNCTIONS: tuple[type, ...] = (types.FunctionType, type(jax.jit(lambda: None)))
# Types of configuration that do not tell all that matters.
_TOLD_APART = frozenset({tuple, *_FUNCTIONS})


def is_configuration(value: Any) -> bool:
    """Whether a field that is not static is configuration because of its value's type."""
    return _is_word(value) or (callable(value) and not is_array(value) and not is_node(value))


def _is_word(value: Any) -> bool:
    return isinstance(value, (str, type))


class Schema:
    """What follows from the body of a class.

    Args:
        cls: the class, of which `dataclasses` has collected the fields.

    Attributes:
        build: makes an instance and calls `__init__`.
        refusal: why it has no instances; None if it has.
        is_marked: whether the metaclass itself makes, and marks, the instance for `__init__`.
        is_fast: whether dividing the fields, and checks, are all that is left after `__init__`.
    """

    build: Callable[..., Any]
    refusal: str | None = None
    is_marked = False

    def __init__(self, cls: Any):
        self.cls = cls
        self.fields = {f.name: f for f in dataclasses.fields(cls)}
        given = {name: f.metadata for name, f in self.fields.items()}
        self.static = frozenset(name for name, of in given.items() if of.get("static"))
        self.converters = {name: of["converter"] for name, of in given.items() if "converter" in of}
        self.roles = {name: of["role"] for name, of in given.items() if "role" in of}
        # By its class, because the word in the metadata may be another library's.
        found = ((name, of.get("constraint")) for name, of in given.items())
        self.constraints = {n: c for n, c in found if isinstance(c, AbstractConstraint)}
        self.computes: bool = getattr(cls, "__computes__", False)
        bases: Iterable[type] = cls.__mro__
        self.checks = [vars(b)["__check_init__"] for b in bases if "__check_init__" in vars(b)]
        self.is_fast = not (self.converters or self.computes)
        # Generated: Python has a fast instruction for `type(x)`; `map(type, ...)` takes five times.
        types = "".join(f"type(d[{name!r}]), " for name in self.fields)
        self.types_of: Callable[[dict[str, Any]], Any] = eval(f"lambda d: ({types})")
        # By the types of all values.
        self.splits: dict[Any, FieldSplit] = {}
        self._splits_by_names: dict[Any, FieldSplit] = {}

    def __reduce__(self) -> Any:
        # In a class that cloudpickle sends by value, which makes its own there.
        return str, ()

    # ---- asked by the room `tree`

    def role(self, name: str) -> str:
        """Return the role that a field declares."""
        return self.roles.get(name, DEFAULT_ROLE)

    read = staticmethod(read)

    def tied_value(self, node: Any, tie: Any) -> Any:
        """Return the value at a tied path."""
        return pass_through(tie, follow(node, tie.source))

    def flatten_unfinished(self, values: dict[str, Any]) -> Any:
        """Flatten an instance that is being built, or was built by hand, with what it has."""
        found = {name: getattr(self.cls, name, MISSING) for name in self.fields} | values
        values = {name: found[name] for name in self.fields if found[name] is not MISSING}
        config = [n for n in values if n in self.static or is_configuration(values[n])]
        split = self.split_with(values, config)
        return split.take_data(values), (split, NO_NOTES, *split.take_config(values))

    # ---- dividing fields

    def split_of(self, values: dict[str, Any]) -> FieldSplit:
        """Return the split of an instance with these values, when it is built."""
        types = self.types_of(values)
        split = self.splits.get(types)
        return split if split is not None and fits(split, values) else self._decide(values, types)

    def _decide(self, values: dict[str, Any], types: tuple[type, ...]) -> FieldSplit:
        names = self.fields
        config = frozenset(n for n in names if n in self.static or is_configuration(values[n]))
        self.warn_of_arrays({name: values[name] for name in config})
        self.splits[types] = split = self.split_with(values, config)
        return split

    def warn_of_arrays(self, config: dict[str, Any]) -> None:
        """Warn of arrays in configuration."""
        for name, value in config.items():
            where, hint = f"{self.cls.__qualname__}.{name}", f"{name}: jax.Array = pm.buffer()"
            if isinstance(value, (jax.Array, np.ndarray)):
                fact = f"{where} is static and holds an array, {describe(value)}, "
                warn(FieldWarning, f"{fact}which is compiled in as a constant", hint=hint)
            elif class_of(value) in _FUNCTIONS and _hides_arrays(value):
                fact = f"{where} is a function of JAX around a Module, and hides its arrays"
                warn(FieldWarning, fact, hint="pm.filter_vmap(module), pm.filter_jit(module)")

    def split_with(self, values: dict[str, Any], config: Iterable[str]) -> FieldSplit:
        """Return the one split with these fields as configuration.

        The types of these values are a part of it: 1, 1.0 and True are three programs, and so are
        (1,), (1.0,) and (True,).
        """
        config, names = set(config), [name for name in self.fields if name in values]
        data = tuple([n for n in names if n not in config])
        rest = tuple([n for n in names if n in config])
        computed = frozenset(n for n in data if is_computed(values[n]))
        asked = tuple([(n, _detail(values[n])) for n in rest if class_of(values[n]) in _TOLD_APART])
        key = data, rest, computed, asked, tuple([class_of(values[n]) for n in rest])
        split = self._splits_by_names.get(key)
        if split is None:
            name = self.cls.__qualname__
            split = FieldSplit(name, data, rest, (*names,), computed, asked)
        return self._splits_by_names.setdefault(key, split)

    # ---- the end of construction

    def finish(self, node: Any) -> Any:
        """Do what is left to do after `__init__`: defaults, converters, dividing, checks.

        Raises:
            FieldError: if a field has neither a value nor a default.
        """
        if is_finished(node):
            return node  # The class's own `__new__` returned it.
        values = node.__stored__
        self.fill_defaults(values)
        self.convert(values, [*self.fields])
        split = self.split_of(values)
        if split.computed or self.computes:
            data = split.take_data(values)
            notes = Notes(ranks=ranks_of(data)) if self.computes else NO_NOTES
            set_flat(node, (data, (split, notes, *split.take_config(values))))
            for name in split.computed:
                del values[name]
        set_split(node, split)
        for check in self.checks:
            check(node)
        return node

    def fill_defaults(self, values: dict[str, Any]) -> None:
        """Give the fields that are not set the values that the class has for them.

        Raises:
            FieldError: if it has none.
        """
        for name in [n for n in self.fields if n not in values]:
            factory: Any = self.fields[name].default_factory
            found = getattr(self.cls, name, MISSING) if factory is MISSING else factory()
            if found is MISSING:
                fact = f"{self.cls.__qualname__}: Field {name!r} was not initialized"
                raise FieldError(fact, hint=f"self.{name} = ...")
            values[name] = found

    def convert(self, values: dict[str, Any], names: Sequence[str]) -> None:
        """Run the converters of these fields in order; give constrained ones their stored form."""
        for name in filter(self.converters.__contains__, names):
            # A converter would replace a computed leaf by its value.
            if not is_computed(values[name]):
                values[name] = self.converters[name](values[name])
        for name in filter(self.constraints.__contains__, names):
            values[name] = self._constrained(name, values[name], None)

    def _constrained(self, name: str, value: Any, old: Any) -> Any:
        if value is None or is_computed(value):
            return value
        where = f"{self.cls.__qualname__}.{name}"
        value = float(value) if type(value) is int else value
        if type(value) is not float and not is_abstract(value):
            expected = f"an array for the constraint {self.constraints[name]!r}"
            raise FieldError(where, expected, describe(value))
        return self.constraints[name].constrain(value, where, old)

    # ---- other instances

    def make(
        self, values: dict[str, Any], config: Iterable[str] | None = None, notes: Notes = NO_NOTES
    ) -> Any:
        """Return a finished instance with these stored values; no code of the class runs.

        Args:
            values: of all fields.
            config: the fields that are configuration; by default, the types decide.
            notes: what the instance knows beside its fields.
        """
        split = self.split_of(values) if config is None else self.split_with(values, config)
        return make(self.cls, split, values, notes)

    def rebuild(
        self, node: Any, changes: dict[str, Any], is_given: bool = False, decide: bool = False
    ) -> Any:
        """Copy `node` with some fields replaced.

        Args:
            node: an instance.
            changes: new values by field.
            is_given: whether a user gives them: a constrained field takes its constrained value.
            decide: whether the types of the new values decide what is configuration. If not, a
                string instead of data is data: a tree of specs has the structure of a model.

        Raises:
            SpecError: if a path is changed that has its value from another one.
        """
        _, (split, notes, *_) = flat_of(node)
        for tie in notes.ties:
            _refuse_tied(tie, changes)
        values = all_stored(node)
        if is_given and self.constraints:
            changes = {
                n: self._given(node, n, values[n], new, decide) for n, new in changes.items()
            }
        values.update(changes)
        # Mostly arrays for arrays: they are never configuration, nor computed leaves.
        plain = [n for n, new in changes.items() if isinstance(new, jax.Array) and n in split.data]
        if len(plain) != len(changes) or not split.computed.isdisjoint(plain):
            decided = {n for n in changes.keys() - self.static if decide or not _is_word(values[n])}
            config = [n for n in split.config if n not in decided]
            config += [n for n in decided if is_configuration(values[n])]
            self.warn_of_arrays({n: new for n, new in changes.items() if n in config})
            split = self.split_with(values, config)
        return make(self.cls, split, values, notes)

    def _given(self, node: Any, name: str, old: Any, new: Any, decide: bool) -> Any:
        if name not in self.constraints or is_computed(new):
            return new
        # A tree of specs, or of axes, has the structure of a model, and is edited like one.
        leaves = jtu.tree_leaves(old)
        is_model = all(map(is_abstract, leaves))
        if is_computed(old) and not (leaves and is_model):
            return new
        is_number = class_of(new) is float or (class_of(new) is int and is_computed(old))
        is_value = is_model and (is_number or is_abstract(new))
        if is_value and (is_derivative(node) or (is_computed(old) and is_derivative(old))):
            where = f"{self.cls.__qualname__}.{name}"
            hint = f'pm.tree_at("{name}.unconstrained", grads, new)'
            raise SpecError(f"{where} is a derivative, which has no constrained value", hint=hint)
        return self._constrained(name, new, old) if is_value or decide else new


def fits(split: FieldSplit, values: dict[str, Any]) -> bool:
    """Whether a split that was found by types is right for what tuples and functions hold, too."""
    for name, detail in split.asked:
        value = values[name]
        # The two most common cases of `_detail`, because this runs for each new instance.
        is_plain = class_of(value) is not tuple and not hasattr(value, "__wrapped__")
        if (False if is_plain else _detail(value)) != detail:
            return False
    return True


def _detail(value: Any) -> Any:
    """What the type of a configuration value does not tell: `(1,)` and `(1.0,)` are two programs.

    Of a function, whether it hides arrays; so that it is told also after one that hides none.
    """
    if class_of(value) is not tuple:
        return _hides_arrays(value)
    kinds = tuple(map(class_of, value))
    if _TOLD_APART.isdisjoint(kinds):
        return kinds
    return kinds, tuple([_detail(x) for x in value if class_of(x) in _TOLD_APART])


def _hides_arrays(function: Any) -> bool:
    """Whether JAX has wrapped a function around a Module, as `jax.vmap(layer)`."""
    inside = getattr(function, "__wrapped__", None)
    while inside is not None and not is_node(inside):
        inside = getattr(inside, "__wrapped__", None)
    return inside is not None and any(map(is_array, jtu.tree_leaves(inside)))


def _refuse_tied(tie: Any, changes: dict[str, Any]) -> None:
    """Refuse changes that would put a value at a tied path.

    Raises:
        SpecError: if one does.
    """
    first, *below = tie.place
    found = None
    with reading_stored(), suppress(AttributeError, LookupError, TypeError):
        found = follow(changes.get(first.name), below, is_evaluated=False)
    if found is not None:
        refuse_tied(tie.place, tie.source)
