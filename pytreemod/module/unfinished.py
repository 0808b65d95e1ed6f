"""Sizes that follow: Modules that are made before one of their sizes is known.

    @sizes_follow(in_features=lambda x: x.shape[-1])
    def __init__(self, in_features, out_features, *, key): ...

    layer = Linear(None, 3, key=key)      an *unfinished* instance: the arguments of __init__
    materialize(layer, x)                 Linear(x.shape[-1], 3, key=key)

An unfinished instance is of a variant of its class (see [`variants`][pytreemod.module.variants]).
It is a tree like any other. The arrays among the arguments of `__init__` (mostly a key) are its
leaves, the others are configuration. So a map can make several, and they can be stacked, put into
containers and copied. `__init__` is called when the sizes are known, with all arguments: the result
is the same to the last bit as if they had been known from the start.

`__new__` decides whether to make one; only classes with such an `__init__` have it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, PytreemodError, SpecError, UnfinishedError, describe
from pytreemod.module.abstracts import AbstractVar
from pytreemod.module.classes import RULES, Module
from pytreemod.module.construction import put_together
from pytreemod.module.fields import field
from pytreemod.module.flattening import note_of
from pytreemod.module.reading import ASKED
from pytreemod.module.variants import Trait, Variant, Varying
from pytreemod.tree.nodes import found_in, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import class_of, jtu

_F = TypeVar("_F", bound=Callable[..., Any])
# One for each number of arguments, so that type checkers know the parameters of a lambda.
SizeRule: TypeAlias = (
    Callable[[Any], Any] | Callable[[Any, Any], Any] | Callable[[Any, Any, Any], Any]
)
"""Computes a size: a function of arguments of `__call__`, by their names."""

# `__init__` is traced with this size, and with twice as much: results that are the same in both
# do not depend on the size. Many numbers divide it (groups, heads). No array of this size is made.
_TRIAL = 2_882_880
# Among the arguments with arrays: an empty array, which gets an axis from each map that makes
# the instance, as the other arrays do. Some instances have no other.
_AXES = "<axes>"


# ---- which sizes follow


def sizes_follow(**rules: SizeRule) -> Callable[[_F], _F]:
    """Let sizes in a Module's `__init__` be None, and follow from the first call.

    Decorates an `__init__`. An instance made with None for one of these sizes is *unfinished*: it
    stores the arguments of `__init__`, and [`materialize`][pytreemod.materialize] calls `__init__`
    when it has seen the first call. Each size has a rule: a function of some of the
    arguments of `__call__`, by their names; it may use other arguments of `__init__`, too.

    None must have no other meaning there. A subclass with its own `__init__` needs its own rules.

    **Laws.** `materialize(Layer(None, ...), x) == Layer(size, ...)`, to the last bit. An instance
    made with all sizes is an ordinary one.

    Args:
        **rules: by the name of the size; each returns a size, or another value for the argument.

    Returns:
        A decorator, which returns the `__init__` itself.

    Raises:
        ArgumentError: if a rule is not a function, or `__init__` has no such argument.

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
    """The mark of an `__init__`: which of its arguments may be None.

    Args:
        init: the `__init__`.
        rules: from the name of an argument to the function that computes its value.
    """

    __slots__ = ("_positions", "rules")

    def __init__(self, init: Callable[..., Any], rules: dict[str, Callable[..., Any]]):
        self.rules = rules
        parameters = inspect.signature(init).parameters
        unknown = sorted(rules.keys() - parameters.keys())
        if unknown:
            where = f"sizes_follow({unknown[0]})"
            expected = f"an argument of __init__ ({', '.join([*parameters][1:])})"
            raise ArgumentError(where, expected, repr(unknown[0]))
        # Their positions in a call, without self. Read whenever an instance is made, because
        # binding a call costs as much as most `__init__`s.
        self._positions = [
            (name, len(parameters) if each.kind is each.KEYWORD_ONLY else i - 1, each.default)
            for i, (name, each) in enumerate(parameters.items())
            if name in rules
        ]

    def begin(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an unfinished instance, if a size is missing; None if `__init__` can run now.

        Args:
            cls: the class that is called.
            args: the arguments of the call.
            kwargs: the same, by name.
        """
        missing = tuple(
            name
            for name, i, default in self._positions
            if (args[i] if i < len(args) else kwargs.get(name, default)) is None
        )
        if not missing:
            return None
        try:
            bound = inspect.signature(cls).bind(*args, **kwargs)
        except TypeError:
            # `__init__` has a better error.
            return None
        bound.apply_defaults()
        return _defer(cls, bound.arguments, missing)


# ---- keys, which are taken one after the other


class AbstractKeys(ABC):
    """An iterator over keys, from which an `__init__` takes some.

    An unfinished instance reserves the keys that its `__init__` will take, so that everything built
    after it takes the same keys as if the sizes had been known.
    """

    __slots__ = ()

    @abstractmethod
    def taken(self) -> int:
        """Return the number of keys taken so far."""

    @abstractmethod
    def reserve(self, n: int) -> AbstractReservedKeys:
        """Reserve the next n keys for later."""


class AbstractReservedKeys(Module, is_abstract=True):
    """Keys that were reserved."""

    n: AbstractVar[int]

    @abstractmethod
    def open(self) -> AbstractKeys:
        """Return an iterator that begins with these keys."""


# ---- unfinished instances


@dataclasses.dataclass(frozen=True, repr=False)
class Deferral(Varying):
    """The data of an unfinished instance, beside arrays.

    Attributes:
        cls: the class of the finished instance.
        config: the arguments of `__init__` that are configuration.
        missing: the names of the sizes.
        on_call: a function that answers calls, while the model is materialized.
    """

    cls: Any
    config: tuple[tuple[str, Any], ...]
    missing: tuple[str, ...]
    on_call: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        import wadler_lindig as wl

        # On one line: it appears inside messages.
        return wl.pformat(self, width=sys.maxsize)

    def __pdoc__(self, **kwargs: Any) -> Any:
        """Print the call that made the instance, without arrays."""
        import wadler_lindig as wl

        shown: dict[str, Any] = dict.fromkeys(self.missing) | dict(self.config)
        parameters = inspect.signature(self.cls).parameters
        pairs = [
            (name, shown[name])
            for name, parameter in parameters.items()
            if name in self.missing or (name in shown and shown[name] is not parameter.default)
        ]
        return wl.bracketed(
            begin=wl.TextDoc(f"{self.cls.__name__}("),
            docs=wl.named_objs(pairs, **kwargs),
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs["indent"],
        )

    def traits(self) -> Iterable[Trait]:
        """Return the trait of unfinished instances."""
        return ((Unfinished, ""),)


class Unfinished(Variant, Module, is_abstract=True):
    """The trait of an instance that lacks a size.

    The names of its fields are descriptive, because they appear in paths.

    Fields:
        unfinished_arguments: the arguments of `__init__` that contain arrays
        unfinished_sizes: the other arguments, and the missing sizes
    """

    unfinished_arguments: dict[str, Any]
    unfinished_sizes: Deferral = field(static=True)

    __is_unfinished__: ClassVar[bool] = True

    @staticmethod
    def __vary__(original: Any, name: str) -> dict[str, Any]:
        del name
        # Python calls `__init__` after `__new__`; the class's own has to wait.
        return {name: _later(name) for name in original.__record__.fields} | {
            "__init__": _do_nothing
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as the finished layer would, while the model is materialized."""
        deferral = self.unfinished_sizes
        if deferral.on_call is None:
            sizes = ", ".join(f"{name}=None" for name in deferral.missing)
            _refuse_use(self, f"({sizes})", "it is called")
        return deferral.on_call(self, args, kwargs)

    def replace(self, /, **changes: Any) -> Any:
        """Refuse: the fields do not exist yet."""
        given = ", ".join(f"{name}={describe(new)}" for name, new in changes.items())
        _refuse_use(self, ".replace", "fields are replaced", f"{given} for an unfinished Module")

    def __pdoc__(self, **kwargs: Any) -> Any:
        """Print the call that made it, without arrays."""
        return self.unfinished_sizes.__pdoc__(**kwargs)

    __reduce__ = Module.__reduce__


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def is_unfinished(node: object) -> bool:
    """Whether an object is an instance that lacks a size."""
    return isinstance(node, Unfinished)


def answering(node: Any, on_call: Callable[[Any, Any, Any], Any]) -> Any:
    """Copy an unfinished instance, with a function that answers its calls."""
    deferral = dataclasses.replace(node.unfinished_sizes, on_call=on_call)
    return _make(node.unfinished_arguments, deferral)


def with_given(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Copy an unfinished instance with other arguments that contain arrays.

    Raises:
        UnfinishedError: if the instance has more than its arguments (roles, call rules), which
            would be lost.
    """
    layout = class_of(node).__record__.split(node)
    names = (*layout.data, *layout.config)
    if layout.notes or names != ("unfinished_arguments", "unfinished_sizes"):
        refuse_unfinished("the changes before materialize", node)
    return _make(change(node.unfinished_arguments), node.unfinished_sizes)


def count_axes(node: Any) -> int:
    """Return the number of axes that the arrays of an unfinished instance have gained.

    That is how often the instance was mapped or stacked.
    """
    return node.unfinished_arguments[_AXES].ndim - 1


def sizes_by_call(node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the missing sizes, from the arguments of a call.

    Raises:
        SpecError: if a rule uses a name that is not an argument.
        UnfinishedError: if a rule fails, because an axis is missing.
        TypeError: if the call does not fit `__call__`.
    """
    deferral = node.unfinished_sizes
    cls = deferral.cls
    call = inspect.signature(cls.__call__).bind(node, *args, **kwargs)
    call.apply_defaults()
    known = {**dict(deferral.config), **node.unfinished_arguments, **call.arguments}
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
        # There is no such axis, or an argument is not an array.
        where = f"{cls.__qualname__}({name}=None)"
        found = ", ".join(f"{key}={describe(value)}" for key, value in given.items())
        expected = "inputs that determine it"
        raise UnfinishedError(where, expected, found) from error


def finish(node: Any, sizes: dict[str, Any]) -> Any:
    """Call `__init__` with its arguments and the sizes.

    Args:
        node: a single unfinished instance.
        sizes: the missing sizes, by name.

    Raises:
        UnfinishedError: if `__init__` takes another number of keys than it took with another size.
    """
    deferral = node.unfinished_sizes
    arguments = {**dict(deferral.config), **node.unfinished_arguments, **sizes}
    reserved = {n: a for n, a in arguments.items() if isinstance(a, AbstractReservedKeys)}
    made, counts = _build(deferral.cls, arguments, reserved)
    for name, count in counts.items():
        if count != reserved[name].n:
            _refuse_keys(deferral.cls, name, "to take the same number of keys for every size")
    return made


def _build(cls: Any, arguments: dict[str, Any], reserved: dict[str, Any]) -> Any:
    """Return the instance for these arguments, and how many of the reserved keys it took."""
    opened = {name: keys.open() for name, keys in reserved.items()}
    start = {name: keys.taken() for name, keys in opened.items()}
    signature = inspect.signature(cls)
    arguments = {**arguments, **opened}
    ordered = {name: arguments[name] for name in signature.parameters if name in arguments}
    bound = inspect.BoundArguments(signature, ordered)  # pyright: ignore[reportArgumentType]
    made = cls(*bound.args, **bound.kwargs)
    return made, {name: keys.taken() - start[name] for name, keys in opened.items()}


def _defer(cls: Any, arguments: dict[str, Any], missing: tuple[str, ...]) -> Any:
    """Return the unfinished instance of a call.

    Raises:
        PytreemodError: if `__init__` refuses another argument.
        UnfinishedError: if a trial fails, so it is not known how many keys it takes.
    """
    rest = {name: value for name, value in arguments.items() if name not in missing}
    keys = {name: value for name, value in rest.items() if isinstance(value, AbstractKeys)}
    # Keys taken from these are not taken from the iterator.
    copies = {name: value.reserve(0) for name, value in keys.items()}

    def count(size: int) -> dict[str, int]:
        return _traced(lambda: _build(cls, rest | dict.fromkeys(missing, size), copies)[1])

    try:
        rest |= {name: keys[name].reserve(n) for name, n in count(_TRIAL).items()}
    except Exception as error:
        if isinstance(error, PytreemodError):
            # The message of an error that depends on the size is different then.
            try:
                count(2 * _TRIAL)
            except Exception as other:
                if str(other) == str(error):
                    raise error from None
        if keys:
            _refuse_keys(cls, next(iter(keys)), "to run with any size", error)
    config = tuple((name, value) for name, value in rest.items() if _is_config(value))
    given = {name: value for name, value in rest.items() if name not in dict(config)}
    return _make({**given, _AXES: jnp.zeros(0, bool)}, Deferral(cls, config, missing))


def _is_config(value: Any) -> bool:
    if any(map(is_array, jtu.tree_leaves(value))):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _make(given: dict[str, Any], deferral: Deferral) -> Any:
    values = {"unfinished_arguments": given, "unfinished_sizes": deferral}
    return put_together(deferral.cls, values, ("unfinished_sizes",))


# ---- trials


def _traced(read: Callable[[], Any]) -> Any:
    """Call a function under a trace, so that nothing is computed."""
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(read()))
    return found[0]


def by_trial(tree: Any, read: Callable[[Any], Any], size: int = _TRIAL) -> Any:
    """Read from a tree after finishing its unfinished instances with a trial size.

    Args:
        tree: any tree.
        read: called under a trace; its result contains no array.
        size: the trial size.
    """

    def make(node: Any) -> Any:
        if not is_unfinished(node):
            return node
        return finish(node, dict.fromkeys(node.unfinished_sizes.missing, size))

    def trial(tree: Any) -> Any:
        # One may be an argument of another.
        while found_in(tree, is_unfinished):
            tree = jtu.tree_map(make, tree, is_leaf=is_unfinished)
        return read(tree)

    return _traced(lambda: trial(tree))


def _later(name: str) -> property:
    """Return a property with the future value of a field, if that does not depend on missing sizes.

    So a container can check whether a layer needs State, and a model how many features it returns.
    For arrays, the values are shapes.
    """

    def read(self: Any) -> Any:
        def shapes(made: Any) -> Any:
            return jtu.tree_map(_shape_of, getattr(made, name))

        cause: Exception | None = None
        try:
            once, again = (by_trial(self, shapes, size) for size in (_TRIAL, 2 * _TRIAL))
            if jtu.tree_flatten(once) == jtu.tree_flatten(again):
                return once
        except Exception as error:
            cause = error
        _refuse_use(self, f".{name}", "it is read", cause=cause)

    return property(read)


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


# ---- refusals


def refuse_unfinished(where: str, tree: Any) -> None:
    """Refuse a tree with unfinished instances where an operation on them would be lost.

    Args:
        where: the function that is called.
        tree: its argument.

    Raises:
        UnfinishedError: if there is one.
    """
    refused: list[Any] = []

    # One walk, because every load and save makes it; the error looks for paths.
    def is_refused(node: Any) -> bool:
        if isinstance(node, Unfinished) or (record_of(node) is not None and _waits(node)):
            refused.append(node)
        return bool(refused)

    jtu.tree_leaves(tree, is_leaf=is_refused)
    if not refused:
        return
    leaves = jtu.tree_leaves_with_path(tree, is_leaf=is_unfinished)
    found = [(path, node) for path, node in leaves if is_unfinished(node)]
    if found:
        raise UnfinishedError(
            where,
            "a finished model",
            f"{len(found)} Module{'s' if len(found) > 1 else ''} without a size",
            at=[f"{path_text(path)}: {node!r}" for path, node in found if path],
            hint=_HINT,
        )
    expected, got = "a finished model", "a model whose ties wait for materialize"
    raise UnfinishedError(where, expected, got, hint=_HINT)


def _waits(node: Any) -> bool:
    """Whether a Module has ties that wait for sizes, which surgery may have added."""
    return bool(note_of(node, ASKED))


_HINT = (
    "materialize the complete model first, with an example of its input:",
    "model = pm.materialize(model, x)",
)


def _refuse_use(
    node: Any,
    where: str,
    when: str,
    got: str = "an unfinished Module",
    cause: Exception | None = None,
) -> NoReturn:
    deferral = node.unfinished_sizes
    expected = f"{' and '.join(deferral.missing)} to be known before {when}"
    where = f"{deferral.cls.__qualname__}{where}"
    raise UnfinishedError(where, expected, got, hint=_HINT) from cause


def _refuse_keys(cls: Any, name: str, expected: str, error: Exception | None = None) -> NoReturn:
    raise UnfinishedError(
        f"{cls.__qualname__}({name})",
        f"__init__ {expected}, so that later layers get the same keys",
        "a number that depends on the size" if error is None else type(error).__name__,
        hint=["pass it its own key:", f"{cls.__name__}(..., {name}=next(keys))"],
    ) from error
