"""How an instance of a Module is stored: a dict with its fields, and slots beside it.

    __flat__        (children, (split, notes, *configuration)): what flattening returns
    __split__       which fields are children; set once the dict has the fields
    __cached__      all arrays of the tree as one list, and its structure (see `snapshots`)
    __derivative__  whether `filter_grad` returned it: its computed leaves have no value then

| how it was made    | dict   | `__flat__`           | `__split__` | `__cached__`              |
| ------------------ | ------ | -------------------- | ----------- | ------------------------- |
| by `__init__`      | fields | at the first flatten | set         | at the first jitted call  |
| by JAX's unflatten | empty  | set                  | -           | -                         |
| by a jitted call   | empty  | -                    | -           | set                       |
| after a first read | fields | set                  | set         | dropped if it holds lists |

An instance is immutable, so it need not be complete before somebody looks: the dict is filled in
when a field is first read, or `vars(model)` is asked for. Most trees that JAX makes are never read.
A field that reads as something else (a computed leaf, a tie) is never put into the dict, so
that Python asks the class's `LazyField` at each read, and that computes.

Slots are read through their descriptors. `getattr` would ask the `__getattr__` of a class that has
one, and a wrapper may answer with the slot of the Module inside it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from pytreemod.typing import jtu

MISSING: Any = dataclasses.MISSING
_new: Any = object.__new__

# What is known of leaves below an instance: the names of the keys to each, and the value.
LeafNotes = tuple[tuple[tuple[str, ...], Any], ...]


class Notes(NamedTuple):
    """What an instance knows beside its fields; a part of its structure.

    Attributes:
        ties: of paths below it (see `module.reading`).
        roles: given to leaves of this instance.
        axes: names given to axes of its leaves.
        ranks: of the arrays of a computed leaf when it was made; None if it is no computed leaf.
    """

    ties: tuple[Any, ...] = ()
    roles: LeafNotes = ()
    axes: LeafNotes = ()
    ranks: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        # In JAX's print of a structure; mostly there are none.
        return ", ".join(f"{n}={v}" for n, v in zip(self._fields, self, strict=True) if v) or "-"


NO_NOTES = Notes()


@dataclasses.dataclass(eq=False, repr=False)
class FieldSplit:
    """One way in which the fields of a class divide; it is compared by identity.

    Args:
        name: of the class.
        data: the fields that are children, in order.
        config: those that are not.
        names: all of them, as the class declares them.
        computed: the children that are computed leaves.
        asked: configuration of which the types do not tell all, each with what they do not.
    """

    name: str
    data: tuple[str, ...]
    config: tuple[str, ...]
    names: tuple[str, ...]
    computed: frozenset[str] = frozenset()
    asked: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        self.keys = tuple([jtu.GetAttrKey(each) for each in self.data])
        self.take_data, self.take_config = _getter(self.data), _getter(self.config)
        # From the values of a flattened instance, in the class's order, which `vars` shows.
        both = (*self.data, *self.config)
        self.take_all = _getter([both.index(each) for each in self.names])

    def __repr__(self) -> str:
        return self.name


def _getter(keys: Iterable[Any]) -> Callable[[Any], tuple[Any, ...]]:
    keys = tuple(keys)
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return (lambda values: (values[keys[0]],)) if keys else (lambda values: ())


class _Slots:
    __slots__ = ("__cached__", "__derivative__", "__dict__", "__flat__", "__split__", "__weakref__")


_slots: dict[str, Any] = dict(vars(_Slots))
get_flat, set_flat = _slots["__flat__"].__get__, _slots["__flat__"].__set__
get_split, set_split = _slots["__split__"].__get__, _slots["__split__"].__set__
get_cached, set_cached = _slots["__cached__"].__get__, _slots["__cached__"].__set__

# The split of an instance while its `__init__` runs.
BUILDING = FieldSplit("being built", (), (), ())


class Stored(_Slots):
    """Base class of Module: what an instance stores."""

    __slots__ = ()
    # The schema of the class (see `module.schema`). No annotation: it would be a type hint of all.
    __module_schema__ = None
    __stored__ = _slots["__dict__"]

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # The dict itself, because `functools.cached_property` writes into it.
        fill_in(self)
        return self.__stored__

    @__dict__.setter
    def __dict__(self, values: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _slots["__dict__"].__set__(self, values)

    def __getstate__(self) -> dict[str, Any]:
        return all_stored(self)  # Python's own would return the slots.


def schema_of(node: object) -> Any:
    """Return the schema of a Module's class (see `module.schema`); None for anything else."""
    # Of the class: an instance may have any attribute, as mocks do.
    return getattr(type(node), "__module_schema__", None)


def is_module(node: object) -> bool:
    """Whether a node of a tree is a Module."""
    return getattr(type(node), "__module_schema__", None) is not None


class LazyField:
    """The class attribute of each field: Python asks it for what is not in an instance's dict."""

    __slots__ = ("default", "name")

    def __init__(self, name: str, default: Any = MISSING):
        self.name, self.default = name, default

    def __reduce__(self) -> Any:
        # The mark for no default is recognized by identity, which a pickle does not preserve.
        return LazyField, (self.name, *([] if self.default is MISSING else [self.default]))

    def __get__(self, node: Any, owner: Any = None) -> Any:
        if node is not None and fill_in(node) and self.name in get_split(node).names:
            read = stored if is_reading_stored() else schema_of(node).read
            return read(node, self.name)
        if self.default is not MISSING:
            return self.default
        what = f"type object {owner.__name__!r}" if node is None else f"{owner.__name__!r} object"
        text = f"{what} has no attribute {self.name!r}"
        raise AttributeError(text, name=self.name, obj=owner if node is None else node)


def flat_of(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the children of an instance, and `(split, notes, *configuration)`."""
    try:
        return get_flat(node)
    except AttributeError:
        pass
    split = _get(get_split, node)
    if split is None or split is BUILDING:
        cached = _get(get_cached, node)
        if cached is None:
            # Another thread may have just filled it in. If not, it was built by hand, and may have
            # other fields the next time.
            flat = _get(get_flat, node)
            return schema_of(node).flatten_unfinished(node.__stored__) if flat is None else flat
        flat = flat_of(cached.assemble())
    else:
        fields = node.__stored__
        flat = split.take_data(fields), (split, NO_NOTES, *split.take_config(fields))
    set_flat(node, flat)
    return flat


def _get(slot: Callable[[Any], Any], node: Any) -> Any:
    try:
        return slot(node)
    except AttributeError:
        return None


def fill_in(node: Any) -> bool:
    """Put the fields into the dict, but those that read as something else.

    Returns:
        Whether the instance is finished.
    """
    try:
        return get_split(node) is not BUILDING
    except AttributeError:
        if not is_finished(node):
            return False
    children, (split, notes, *config) = flat_of(node)
    hidden = split.computed.union(tie.place[0].name for tie in notes.ties)
    values = zip(split.names, split.take_all((*children, *config)), strict=True)
    node.__stored__.update([pair for pair in values if pair[0] not in hidden])
    set_split(node, split)
    cached = _get(get_cached, node)
    if cached is not None and cached.containers is None:
        # From now on somebody may edit its lists and dicts, which this snapshot does not know.
        set_cached(node, None)
    return True


def is_finished(node: Any) -> bool:
    """Whether an instance can no longer change."""
    split = _get(get_split, node)
    if split is not None:
        return split is not BUILDING
    return _get(get_flat, node) is not None or _get(get_cached, node) is not None


def stored(node: Any, name: str, *default: Any) -> Any:
    """Return the value of a field as it is stored: the computed leaf, not its array.

    Args:
        node: an instance.
        name: of the field.
        *default: the value to return if there is no such field.
    """
    values = node.__stored__
    if name not in values:
        values = all_stored(node)
    return values.get(name, *default) if default else values[name]


def all_stored(node: Any) -> dict[str, Any]:
    """Return all fields of an instance as they are stored, in the class's order."""
    children, (split, _, *config) = flat_of(node)
    return dict(zip(split.names, split.take_all((*children, *config)), strict=True))


def split_of(node: Any) -> FieldSplit:
    """Return how the fields of an instance divide."""
    return flat_of(node)[1][0]


def notes_of(node: Any) -> Notes:
    """Return what an instance knows beside its fields."""
    return flat_of(node)[1][1]


def make(cls: Any, split: FieldSplit, values: dict[str, Any], notes: Notes = NO_NOTES) -> Any:
    """Return a finished instance with these stored values; no code of the class runs."""
    node = _new(cls)
    set_flat(node, (split.take_data(values), (split, notes, *split.take_config(values))))
    return node


def with_notes(node: Any, **notes: Any) -> Any:
    """Return the same instance with other notes."""
    children, (split, old, *config) = flat_of(node)
    made = _new(type(node))
    set_flat(made, (children, (split, old._replace(**notes), *config)))
    return made


def mark_derivative(node: Any) -> None:
    """Note that an instance is a derivative; its copies are not marked."""
    _slots["__derivative__"].__set__(node, True)


def is_derivative(node: Any) -> bool:
    """Whether an instance is marked as a derivative."""
    return _get(_slots["__derivative__"].__get__, node) is not None


def register(cls: Any) -> None:
    """Tell JAX how instances of a class flatten."""
    # Python calls `object.__new__` with a tuple; this is always the same one.
    only = (cls,)

    def unflatten(aux: Any, children: Any) -> Any:
        node = _new(*only)
        set_flat(node, (children, aux))
        return node

    jtu.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, flat_of)


def _flatten_with_keys(node: Any) -> tuple[Iterable[Any], Any]:
    children, aux = flat_of(node)
    return zip(aux[0].keys, children, strict=True), aux


# Of this thread, or task: others read computed values meanwhile.
_stored_alone: ContextVar[bool] = ContextVar("_stored_alone", default=False)

# Whether attributes give the stored value.
is_reading_stored = _stored_alone.get


class reading_stored:
    """A context in which attributes give stored values: nothing is computed, no tie is followed.

    A class, because a generator would make surgery slower (1 us instead of 0.3).
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _stored_alone.set(True)

    def __exit__(self, *_: object) -> None:
        _stored_alone.reset(self._token)
