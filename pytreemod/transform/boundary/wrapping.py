"""The common part of all transformed functions.

A transformed function is a pytree: its child is the wrapped function, if that is a pytree. So you
can store it in a field and pass it through other transforms. It binds to instances as a function
does. It keeps the name, docstring and signature of the wrapped function.

JAX's errors say from which argument of which function a traced value is. But JAX traces one of our
functions, of flat lists of arrays. So this function presents itself as the user's, and positions in
the lists are replaced by the paths of arguments (`in_words_of`).
"""

from __future__ import annotations

import contextlib
import functools as ft
import inspect
import re
import sys
import types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.methods import BoundMethod
from pytreemod.module.references import is_by_value, referred, referring
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.selecting import Rule
from pytreemod.tree.snapshots import Structure
from pytreemod.typing import class_of, jtu

_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


class Transformed:
    """A function under a transform; the base of the results of all transforms."""

    __slots__ = ("__dict__", "__weakref__", "fn", "options")

    fn: Callable[..., Any]
    options: Any
    # The public name: `filter_jit`.
    transform_name: ClassVar[str]

    def __init_subclass__(cls, *, has_data: bool = False) -> None:
        # A class with data besides the function is registered where it is defined.
        if not has_data:
            jtu.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)

    def __init__(self, fn: Callable[..., Any], options: Any):
        self.fn = fn
        self.options = options
        for name in _COPIED:
            try:
                self.__dict__[name] = getattr(fn, name)
            # A partial, a Module or a user's callable has only some of them.
            except AttributeError:
                continue
        # JAX and errors need a name of every function.
        self.__dict__.setdefault("__name__", type(fn).__name__)
        self.__dict__.setdefault("__qualname__", type(fn).__qualname__)

    @abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function under the transform."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Transformed):
            return NotImplemented
        # Identity first: `==` of two Modules compares their arrays, and has no bool.
        same = self.fn is other.fn or bool(self.fn == other.fn)
        return same and self.options == other.options

    def __hash__(self) -> int:
        try:
            return hash((type(self), self.fn, self.options))
        except TypeError:
            # Axes by name are a dict, which has no hash; `==` distinguishes such functions.
            return hash((type(self), self.fn))

    def __reduce__(self) -> Any:
        # A pickle finds a decorated function by its name, as it finds any function.
        name, module = self.__dict__["__qualname__"], self.__dict__.get("__module__", "")
        found: Any = None if is_by_value(module) else sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_remake, (type(self), referring(self.fn), self.options))

    def __repr__(self) -> str:
        return f"<{self.transform_name} of {self.__dict__['__qualname__']}>"


def _remake(cls: type[Transformed], fn: Any, options: Any) -> Transformed:
    return cls(referred(fn), options)


class _OfFunction(tuple[Any, ...]):
    """The static part of a function under a transform, with the function itself.

    The latter is not compared. JAX gets it back when it assembles the tree, because making it again
    would take 4 us for `filter_jit`.
    """

    node: Transformed


def _flatten(node: Transformed) -> tuple[tuple[Any, ...], Any]:
    # The arrays of a Module are children, so JAX's transforms see them; a function is structure.
    if is_node(node.fn):
        return (node.fn,), (type(node), None, node.options)
    aux = _OfFunction((type(node), node.fn, node.options))
    aux.node = node
    return (), aux


def _flatten_with_keys(node: Transformed) -> tuple[tuple[Any, ...], Any]:
    children, aux = _flatten(node)
    return tuple((jtu.GetAttrKey("__wrapped__"), child) for child in children), aux


def _unflatten(aux: Any, children: Any) -> Transformed:
    cls, fn, options = aux
    if children:
        return cls(children[0], options)
    # Unless custom rules were defined meanwhile.
    return aux.node if aux.node.options is options else cls(fn, options)


def check_count(where: str, value: Any, least: int = 0) -> None:
    """Refuse a value that is not a count.

    Raises:
        ArgumentError: if `value` is not an int, or is less than `least`.
    """
    # A bool is an int in Python, but not a count.
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or value < least:
        expected = "a count" if least == 0 else f"an int from {least} on"
        raise ArgumentError(where, expected, describe(value))


def check_axis_name(where: str, name: Any) -> None:
    """Refuse a value that cannot be the name of an axis.

    Raises:
        ArgumentError: if `name` has no hash.
    """
    try:
        hash(name)
    except TypeError:
        expected = "a name, such as 'batch'"
        raise ArgumentError(f"{where}(axis_name)", expected, describe(name)) from None


def check_callable(where: str, fn: Any, argument: str = "fun") -> None:
    """Refuse a value that cannot be called.

    Raises:
        ArgumentError: if `fn` is not callable.
    """
    if not callable(fn) or isinstance(fn, Rule):
        raise ArgumentError(f"{where}({argument})", "something callable", describe(fn))


def explain_dtypes(named: Iterable[tuple[str, Any]], error: TypeError) -> None:
    """Raise a better error if an array has a dtype that JAX does not have.

    Args:
        named: the arguments with their names.
        error: the error that the call raised.

    Raises:
        ArgumentError: if there is one; the error names its path.
    """
    found: list[tuple[str, Any]] = [
        (path_text(path, name), leaf)
        for name, tree in named
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if isinstance(leaf, (np.ndarray, np.generic)) and _has_no_type(leaf)
    ]
    if found:
        raise ArgumentError(
            "argument",
            "arrays of numbers",
            f"{len(found)} of strings, dates or objects",
            at=[f"{place}: {describe(leaf)}" for place, leaf in found],
            hint=[
                "other values are static:",
                f"{found[0][0]}.tolist()",
            ],
        ) from error


def _has_no_type(array: Any) -> bool:
    # JAX's narrow floats have kind "V" in NumPy, too, but no fields.
    return array.dtype.kind in "OSUMm" or array.dtype.names is not None


def argument_name(names: tuple[str, ...], index: int) -> str:
    """Return the name in errors of the argument at a position."""
    return names[index] if index < len(names) else f"args[{index}]"


def function_name(fn: Any) -> str:
    """Return the name of a function in errors, or in a compiled program."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def in_words_of(
    fn: Any,
    run: Callable[..., Any],
    labels: Sequence[str],
    names: tuple[str, ...],
    structure: Structure,
) -> Callable[..., Any]:
    """`run`, for JAX to trace, so that JAX's errors fit the user's function.

    Args:
        fn: the user's function, which is not stored.
        run: a function of lists of arrays.
        labels: JAX's name for each array.
        names: the names of the function's positional arguments.
        structure: the static part of `(head, args, kwargs)` of the call.
    """
    source = _source_of(fn)

    @ft.wraps(run)
    def run_named(*lists: list[Any]) -> Any:
        try:
            return run(*lists)
        except Exception as error:
            if _is_about(error, run.__name__, source):
                # A node of a user's class may refuse to be assembled from other values. Then JAX's
                # error is unchanged.
                with contextlib.suppress(Exception):
                    paths = dict(zip(labels, _paths(names, structure), strict=True))
                    _name_arguments(error, paths)
            raise

    run_named.__signature__ = inspect.signature(run)  # pyright: ignore[reportAttributeAccessIssue]
    if source is None:
        del run_named.__wrapped__
    else:
        run_named.__wrapped__ = _stand_in(run.__name__, source)
    return run_named


def _source_of(fn: Any) -> types.CodeType | None:
    """Return the code of a function inside any wrappers; None if it is not written in Python."""
    while True:
        fn = inspect.unwrap(fn)
        if isinstance(fn, ft.partial):
            fn = fn.func
        elif isinstance(fn, types.MethodType):
            fn = fn.__func__
        else:
            break
    if isinstance(fn, type):
        fn = fn.__init__
    elif not isinstance(fn, types.FunctionType):
        fn = inspect.unwrap(class_of(fn).__call__)
    return getattr(fn, "__code__", None)


def _stand_in(name: str, source: types.CodeType) -> Any:
    """Return a function with this name and location, which is never called."""
    # It has nothing but code. The user's function would keep itself alive, because compiled
    # programs are cached as long as the function exists.
    cells = tuple(types.CellType() for _ in source.co_freevars)
    return types.FunctionType(source, {}, name, None, cells)


def _is_about(error: Exception, name: str, source: types.CodeType | None) -> bool:
    """Whether an error has a message of JAX about this function's arguments."""
    if not (error.args and isinstance(error.args[0], str)):
        return False
    where = name if source is None else f"{name} at {source.co_filename}:{source.co_firstlineno}"
    return f"function {where} for jit" in error.args[0]


def _paths(names: tuple[str, ...], structure: Structure) -> list[str]:
    """Return the path of each array of a call."""
    count = structure.count
    head, args, kwargs = structure.place(range(count), None)
    named = [(function_name(own), own) for own in head]
    named += [(argument_name(names, i), x) for i, x in enumerate(args)]
    found = [""] * count
    for root, tree in [*named, *kwargs.items()]:
        for path, leaf in jtu.tree_leaves_with_path(tree):
            found[leaf] = path_text(path, root)
    return found


def _name_arguments(error: Exception, paths: dict[str, str]) -> None:
    text: str = error.args[0]
    named = re.sub(r"\b\w+\[\d+\]", lambda found: paths.get(found[0], found[0]), text)
    error.args = (named, *error.args[1:])
