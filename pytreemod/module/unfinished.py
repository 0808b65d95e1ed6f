"""Sizes that follow: Modules that are made before one of their sizes is known.

    @sizes_follow(in_features=lambda x: x.shape[-1])
    def __init__(self, in_features, out_features, *, key): ...

    layer = Linear(None, 3, key=key)      an *unfinished* instance: what __init__ was given
    materialize(layer, x)                 Linear(x.shape[-1], 3, key=key)

An unfinished instance is of a subclass of its class, made once for the class, and a tree as any
other: the arrays that `__init__` was given (mostly a key) are its leaves, the rest is
configuration. So several of them can be made as one, stacked, held in containers and copied, and
`__init__` is called when the sizes are known: with what it would have been given then, which is why
the result is the same to the last bit.

Whether one is made is decided in `__new__`, which only classes with such an `__init__` get; all
others know nothing of it.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import (
    ArgumentError,
    PytreemodError,
    SpecError,
    UnfinishedError,
    describe,
    explain,
)
from pytreemod.module.classes import RULES, Module
from pytreemod.module.fields import field
from pytreemod.module.reading import ASKED
from pytreemod.module.records import make_record
from pytreemod.tree.nodes import record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import class_of, jtu

_F = TypeVar("_F", bound=Callable[..., Any])
# One for each number of arguments, so that a type checker knows those of a lambda.
SizeRule: TypeAlias = (
    Callable[[Any], Any] | Callable[[Any, Any], Any] | Callable[[Any, Any, Any], Any]
)
"""What gives a size: a function of arguments of `__call__`, by their names."""

# What stands for a size while nobody knows it, so that what `__init__` is given besides can be
# tried at once. Many numbers divide it: groups, heads. No array of such a size is ever made.
_TRIAL = 2_882_880
# Among the arrays that were given: one without a single value, which gets another axis wherever
# the others do, and so tells how often several instances were made one. Some are given no array.
_AXES = "<axes>"


# ---- which sizes follow


def sizes_follow(**rules: SizeRule) -> Callable[[_F], _F]:
    """Let sizes that a Module's `__init__` takes be None, and follow from what it is called with.

    Decorates an `__init__`. Made with None for one of these sizes, an instance is *unfinished*: it
    holds what `__init__` was given, and [`materialize`][pytreemod.materialize] calls `__init__`
    when it has seen the first call. For each size there is a rule: a function of some of the
    arguments of `__call__`, by their names; it may ask for other arguments of `__init__`, too.

    None must have no other meaning there. A subclass with an `__init__` of its own has rules of its
    own.

    **Laws.** `materialize(Layer(None, ...), x) == Layer(size, ...)`, to the last bit. What is given
    in full is made as ever.

    Args:
        **rules: by the name of the size; each gives a size, or what else `__init__` takes there.

    Returns:
        A decorator, which gives back the `__init__` itself.

    Raises:
        ArgumentError: a rule is no function, or `__init__` has no such argument.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Scale(pm.Module):
        ...     factor: jax.Array
        ...     @pm.sizes_follow(size=lambda x: x.shape[-1])
        ...     def __init__(self, size, start=1.0):
        ...         self.factor = start * jnp.ones(size)
        ...     def __call__(self, x):
        ...         return self.factor * x
        >>> unfinished = Scale(None, start=2.0)
        >>> unfinished
        Scale(size=None, start=2.0)
        >>> pm.materialize(unfinished, jnp.ones(3))
        Scale(factor=f32[3])

    Source:
        "Only specify the output dim", as layers of `flax.linen` do; `torch.nn.LazyLinear`.
    """
    for name, rule in rules.items():
        if not callable(rule):
            where = f"sizes_follow({name})"
            raise ArgumentError(where, "a function of the call's inputs", describe(rule))

    def mark(init: _F) -> _F:
        setattr(init, RULES, Rules(init, rules))
        return init

    return mark


class Rules:
    """What an `__init__` is marked with: which of its arguments may be None.

    Args:
        init: the `__init__`.
        rules: from the name of an argument to what gives its value.
    """

    __slots__ = ("_spots", "rules")

    def __init__(self, init: Callable[..., Any], rules: dict[str, Callable[..., Any]]):
        self.rules = rules
        parameters = inspect.signature(init).parameters
        unknown = sorted(rules.keys() - parameters.keys())
        if unknown:
            where = f"sizes_follow({unknown[0]})"
            expected = f"an argument of __init__ ({', '.join([*parameters][1:])})"
            raise ArgumentError(where, expected, repr(unknown[0]))
        # Where each stands in a call, without self. Looked at whenever an instance is made: to
        # bind a call costs as much as most `__init__`s.
        self._spots: list[tuple[str, int, Any]] = []
        for index, parameter in enumerate(parameters.values()):
            if parameter.name in rules:
                is_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
                spot = len(parameters) if is_only else index - 1
                self._spots.append((parameter.name, spot, parameter.default))

    def missing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """The names of the sizes for which None is given."""
        return tuple(
            name
            for name, spot, default in self._spots
            if (args[spot] if spot < len(args) else kwargs.get(name, default)) is None
        )

    def begin(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An unfinished instance, if a size is missing; None if `__init__` can run now.

        Args:
            cls: the class that is called.
            args: the arguments of the call.
            kwargs: the same, by name.
        """
        missing = self.missing(args, kwargs)
        if not missing:
            return None
        try:
            bound = inspect.signature(cls).bind(*args, **kwargs)
        except TypeError:
            # `__init__` says it better.
            return None
        bound.apply_defaults()
        return _unfinished(cls, bound.arguments, missing)


# ---- what is taken in turn


class AbstractSupply(ABC):
    """What an `__init__` takes things from, one after the other, such as keys.

    An unfinished instance sets aside what its `__init__` will take, so that whoever comes after it
    goes on where it would have ended.
    """

    __slots__ = ()

    @abstractmethod
    def probe(self) -> AbstractSupply:
        """One for trying out: what is taken of it is not taken of this."""

    @abstractmethod
    def taken(self) -> int:
        """How many were taken so far."""

    @abstractmethod
    def set_aside(self, n: int) -> AbstractReserve:
        """The next n, for later."""


class AbstractReserve(Module, is_abstract=True):
    """Things that were set aside from a supply."""

    @abstractmethod
    def open(self) -> AbstractSupply:
        """A supply that begins with them."""

    @abstractmethod
    def end(self) -> int:
        """How many were taken from that supply when all of these are."""


# ---- unfinished instances


class Deferral:
    """What an unfinished instance knows, beside arrays.

    Args:
        cls: the class that it will be of.
        told: the arguments of `__init__` that are configuration.
        missing: the names of the sizes.
        whom: who is asked at a call; None while nobody materializes.
    """

    __slots__ = ("cls", "missing", "told", "whom")

    def __init__(
        self,
        cls: Any,
        told: tuple[tuple[str, Any], ...],
        missing: tuple[str, ...],
        whom: Callable[..., Any] | None = None,
    ):
        self.cls, self.told, self.missing, self.whom = cls, told, missing, whom

    def _parts(self) -> tuple[Any, ...]:
        return self.cls, self.told, self.missing, self.whom

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deferral) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())


class Unfinished(Module, is_abstract=True):
    """Comes before the class of an unfinished instance.

    The names of its fields say in paths what it is.

    Fields:
        unfinished_arguments: the arguments of `__init__` that have arrays in them
        unfinished_sizes: the others, and what is missing
    """

    unfinished_arguments: dict[str, Any]
    unfinished_sizes: Deferral = field(static=True)

    __is_unfinished__: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any):
        # Python calls it after `__new__`; that of the class has to wait.
        del args, kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask who materializes: there is nobody else to answer."""
        whom = self.unfinished_sizes.whom
        if whom is None:
            raise UnfinishedError(_text_of_call(self))
        return whom(self, args, kwargs)

    def replace(self, /, **changes: Any) -> Any:
        """Refuse it: the fields are not there yet."""
        raise UnfinishedError(_text_of_replacing(self, changes))

    def __pdoc__(self, **kwargs: Any) -> Any:
        """As it was called, but for the arrays."""
        import wadler_lindig as wl

        deferral = self.unfinished_sizes
        shown: dict[str, Any] = dict.fromkeys(deferral.missing) | dict(deferral.told)
        parameters = inspect.signature(deferral.cls).parameters
        pairs = [
            (name, shown[name])
            for name, parameter in parameters.items()
            if name in deferral.missing or (name in shown and shown[name] is not parameter.default)
        ]
        return wl.bracketed(
            begin=wl.TextDoc(f"{deferral.cls.__name__}("),
            docs=wl.named_objs(pairs, **kwargs),
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )

    def __reduce__(self) -> Any:
        deferral = self.unfinished_sizes
        return restore_unfinished, (
            deferral.cls,
            self.unfinished_arguments,
            deferral.told,
            deferral.missing,
        )


def is_unfinished(node: object) -> bool:
    """Whether something is an instance that lacks a size."""
    return isinstance(node, Unfinished)


def asking(node: Any, whom: Callable[[Any, Any, Any], Any]) -> Any:
    """A copy of an unfinished instance that asks somebody at a call."""
    deferral = node.unfinished_sizes
    made = Deferral(deferral.cls, deferral.told, deferral.missing, whom)
    return _make(node.unfinished_arguments, made)


def with_given(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of an unfinished instance, of which the arguments with arrays were changed.

    Raises:
        UnfinishedError: more was done to the instance than to hold it, which would be lost.
    """
    _check_untouched(node)
    return _make(change(node.unfinished_arguments), node.unfinished_sizes)


def count_axes(node: Any) -> int:
    """How many axes the arrays of an unfinished instance have more than they were given with.

    So many times were several made as one.
    """
    return node.unfinished_arguments[_AXES].ndim - 1


def sizes_by_call(node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is missing, by the arguments of a call.

    Raises:
        SpecError: a rule asks for what is no argument.
        UnfinishedError: a rule fails, for an axis is not there.
        TypeError: the call does not fit `__call__`.
    """
    deferral = node.unfinished_sizes
    cls = deferral.cls
    call = inspect.signature(cls.__call__).bind(node, *args, **kwargs)
    call.apply_defaults()
    known = {**dict(deferral.told), **node.unfinished_arguments, **call.arguments}
    rules = getattr(cls.__init__, RULES).rules
    return {name: _apply(cls, name, rules[name], known) for name in deferral.missing}


def _apply(cls: Any, name: str, rule: Callable[..., Any], known: dict[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for parameter in inspect.signature(rule).parameters.values():
        if parameter.name in known:
            given[parameter.name] = known[parameter.name]
        elif parameter.default is inspect.Parameter.empty:
            where = f"{cls.__qualname__}: sizes_follow({name})"
            call = ", ".join([*inspect.signature(cls.__call__).parameters][1:])
            expected = f"a function of arguments of __call__ ({call}), by their names"
            raise SpecError(where, expected, f"one of {parameter.name!r}")
    try:
        return rule(**given)
    except (AttributeError, IndexError, TypeError) as error:
        # There is no such axis, or what is no array has none.
        where = f"{cls.__qualname__}({name}=None)"
        found = ", ".join(f"{key}={describe(value)}" for key, value in given.items())
        expected = "inputs of which it follows"
        raise UnfinishedError(where, expected, found) from error


def finish(node: Any, sizes: dict[str, Any]) -> Any:
    """Call `__init__` with what it was given, and the sizes.

    Args:
        node: an unfinished instance; a single one.
        sizes: what is missing, by name.

    Raises:
        UnfinishedError: `__init__` takes another number of keys than it took with another size.
    """
    deferral = node.unfinished_sizes
    arguments = {**dict(deferral.told), **node.unfinished_arguments, **sizes}
    opened = [(name, part) for name, part in arguments.items() if _is_reserve(part)]
    supplies = [reserve.open() for _, reserve in opened]
    arguments |= {name: supply for (name, _), supply in zip(opened, supplies, strict=True)}
    made = _build(deferral.cls, arguments)
    for (name, reserve), supply in zip(opened, supplies, strict=True):
        if supply.taken() != reserve.end():
            _refuse_supply(deferral.cls, name, "to take as many keys, whatever the size is")
    return made


def restore_unfinished(
    cls: Any, given: dict[str, Any], told: tuple[tuple[str, Any], ...], missing: tuple[str, ...]
) -> Any:
    """Put a pickled instance together again."""
    return _make(given, Deferral(cls, told, missing))


def _unfinished(cls: Any, arguments: dict[str, Any], missing: tuple[str, ...]) -> Any:
    """Keep what `__init__` was given until it can be called."""
    rest = {name: value for name, value in arguments.items() if name not in missing}
    rest = _set_aside(cls, rest, missing)
    told = {name: value for name, value in rest.items() if _is_told(value)}
    given = {name: value for name, value in rest.items() if name not in told}
    given[_AXES] = jnp.zeros(0, bool)
    return _make(given, Deferral(cls, tuple(told.items()), missing))


def _is_told(value: Any) -> bool:
    """Whether an argument is configuration."""
    if any(map(is_array, jtu.tree_leaves(value))):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _set_aside(cls: Any, arguments: dict[str, Any], missing: tuple[str, ...]) -> dict[str, Any]:
    """The arguments, with what `__init__` will take of supplies in the place of these.

    It is tried with a size of our own, which also shows right here what is wrong with the others.

    Raises:
        PytreemodError: `__init__` refuses another argument.
        UnfinishedError: it cannot be tried, and so nobody knows how much it takes.
    """
    supplies = {n: part for n, part in arguments.items() if isinstance(part, AbstractSupply)}
    counts: dict[str, int] = {}

    def failure(size: int) -> Exception | None:
        def trial() -> None:
            probes = {name: supply.probe() for name, supply in supplies.items()}
            _build(cls, arguments | probes | dict.fromkeys(missing, size))
            counts.update({name: probe.taken() for name, probe in probes.items()})

        try:
            jax.eval_shape(trial)
        except Exception as error:
            return error
        return None

    error = failure(_TRIAL)
    if error is not None:
        # What speaks of the size, or of what follows from it, is another text for another size.
        if isinstance(error, PytreemodError) and str(error) == str(failure(2 * _TRIAL)):
            raise error
        if supplies:
            _refuse_supply(cls, next(iter(supplies)), "to run with any size", error)
    return arguments | {name: part.set_aside(counts[name]) for name, part in supplies.items()}


def by_trial(tree: Any, read: Callable[[Any], Any]) -> Any:
    """What is read of a tree whose unfinished instances are made with a size of our own.

    Args:
        tree: any tree.
        read: called under a trace; what it gives is to hold no array.
    """
    found: list[Any] = []

    def make(node: Any) -> Any:
        if not is_unfinished(node):
            return node
        return finish(node, dict.fromkeys(node.unfinished_sizes.missing, _TRIAL))

    def trial(tree: Any) -> None:
        while any(map(is_unfinished, jtu.tree_leaves(tree, is_leaf=is_unfinished))):
            tree = jtu.tree_map(make, tree, is_leaf=is_unfinished)
        found.append(read(tree))

    jax.eval_shape(lambda: trial(tree))
    return found[0]


def _field_by_trial(node: Any, size: int, name: str) -> Any:
    """A field of what would be made with a size, taken apart; arrays as their shapes."""
    found: list[Any] = []

    def trial() -> None:
        sizes = dict.fromkeys(node.unfinished_sizes.missing, size)
        leaves, treedef = jtu.tree_flatten(getattr(finish(node, sizes), name))
        found.append(([_shape_of(leaf) for leaf in leaves], treedef))

    jax.eval_shape(trial)
    return found[0]


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


def _build(cls: Any, arguments: dict[str, Any]) -> Any:
    signature = inspect.signature(cls)
    ordered = {name: arguments[name] for name in signature.parameters if name in arguments}
    bound = inspect.BoundArguments(signature, ordered)  # pyright: ignore[reportArgumentType]
    return cls(*bound.args, **bound.kwargs)


def _make(given: dict[str, Any], deferral: Deferral) -> Any:
    made = _class_for(deferral.cls)
    values = {"unfinished_arguments": given, "unfinished_sizes": deferral}
    return made.__record__.finish(make_record(made, values))


def _class_for(cls: Any) -> Any:
    """The class of unfinished instances of a class."""
    # Two threads may come here at once.
    with _lock:
        if _OWN not in vars(cls):
            type.__setattr__(cls, _OWN, _make_class(cls))
        return getattr(cls, _OWN)


def _make_class(cls: Any) -> Any:
    kept: dict[str, Any] = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")}
    kept |= {"__init__": Unfinished.__init__}
    # Properties take the place of the class's own fields, which are none of this one then.
    kept |= {name: _later(name) for name in cls.__record__.fields}
    made: Any = class_of(cls)(cls.__name__, (Unfinished, cls), kept)
    # They are for finished instances.
    made.__record__.checks = ()
    return made


_OWN = "__unfinished__"
_lock = threading.Lock()


def _later(name: str) -> property:
    """What a field will be, if that does not depend on what is missing.

    So a container can ask whether a layer needs State, and a model how many features it gives. Of
    arrays, it is the shapes.
    """

    def read(self: Any) -> Any:
        try:
            once, again = (_field_by_trial(self, size, name) for size in (_TRIAL, 2 * _TRIAL))
            is_known = bool(once == again)
        except Exception as error:
            raise UnfinishedError(_text_of_reading(self, name)) from error
        if not is_known:
            raise UnfinishedError(_text_of_reading(self, name))
        leaves, treedef = once
        return treedef.unflatten(leaves)

    return property(read)


def _is_reserve(value: Any) -> bool:
    return isinstance(value, AbstractReserve)


# ---- refusals


def refuse_unfinished(where: str, tree: Any) -> None:
    """Refuse a tree with unfinished instances in it, where what is done to these would be lost.

    Args:
        where: what is called.
        tree: what it is given.

    Raises:
        UnfinishedError: there is one.
    """
    spots = jtu.tree_leaves_with_path(tree, is_leaf=is_unfinished)
    found = [(path, node) for path, node in spots if is_unfinished(node)]
    if found:
        raise UnfinishedError(
            where,
            "a finished model",
            f"{len(found)} Module{'s' if len(found) > 1 else ''} without a size",
            places=[f"{path_text(path)}: {node!r}" for path, node in found if path],
            hint=_HINT,
        )
    if any(map(_waits, jtu.tree_leaves(tree, is_leaf=_waits))):
        expected, got = "a finished model", "one whose ties wait for materialize"
        raise UnfinishedError(where, expected, got, hint=_HINT)


def _waits(node: Any) -> bool:
    """Whether a Module has ties that wait for sizes, which it may have been given by surgery."""
    return record_of(node) is not None and bool(stored(node, ASKED, ()))


_HINT = (
    "finish the whole model with an example of its input, before anything else:",
    "model = pm.materialize(model, x)",
)


def _text_of_call(node: Any) -> str:
    deferral = node.unfinished_sizes
    return explain(
        _title(deferral),
        f"{_list(deferral.missing)} to be known before it is called",
        "an unfinished Module",
        hint=_HINT,
    )


def _text_of_reading(node: Any, name: str) -> str:
    deferral = node.unfinished_sizes
    return explain(
        f"{deferral.cls.__qualname__}.{name}",
        f"{_list(deferral.missing)} to be known before it is read",
        "an unfinished Module",
        hint=_HINT,
    )


def _text_of_replacing(node: Any, changes: dict[str, Any]) -> str:
    deferral = node.unfinished_sizes
    return explain(
        f"{deferral.cls.__qualname__}.replace",
        f"{_list(deferral.missing)} to be known before fields are replaced",
        f"{', '.join(f'{name}={describe(new)}' for name, new in changes.items())} for an "
        "unfinished Module",
        hint=_HINT,
    )


def _check_untouched(node: Any) -> None:
    layout = class_of(node).__record__.split(node)
    is_other = class_of(node) is not _class_for(node.unfinished_sizes.cls)
    if is_other or {*layout.data, *layout.config} != {"unfinished_arguments", "unfinished_sizes"}:
        refuse_unfinished("what was done before materialize", node)


def _title(deferral: Deferral) -> str:
    return f"{deferral.cls.__qualname__}({', '.join(f'{n}=None' for n in deferral.missing)})"


def _list(names: tuple[str, ...]) -> str:
    return " and ".join(names)


def _refuse_supply(cls: Any, name: str, expected: str, error: Exception | None = None) -> NoReturn:
    raise UnfinishedError(
        f"{cls.__qualname__}(key)" if name == "key" else f"{cls.__qualname__}({name})",
        f"__init__ {expected}, so that those who take keys after it get theirs",
        "one that does not" if error is None else type(error).__name__,
        hint=["give it a key of its own:", f"{cls.__name__}(..., {name}=next(keys))"],
    ) from error
