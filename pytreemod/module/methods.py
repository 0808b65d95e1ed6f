"""Methods that, bound, are pytrees.

A function in a Module's class body is wrapped in a `Method`; one of a base that is not a Module
class, in an `InheritedMethod`. Reading it from an instance gives a `BoundMethod`, whose one
child is that instance, so that a bound method passes through every transform as the Module itself
does. This file knows no Module: any pytree can be bound.
"""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax

from pytreemod.module.references import referred, referring
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import own_class
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu

_STAGES = frozenset({"lower", "trace", "eval_shape"})


class _SignatureOfInstance:
    # A property of the instance, because its __getattr__ makes it look like the unbound
    # function. The class has none: `inspect` would reject a property there.

    def __get__(self, bound: Any, cls: Any) -> inspect.Signature | None:
        if bound is None:
            return None
        signature = inspect.signature(bound.func)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class BoundMethod(ft.partial):  # noqa: D101  # pyright: ignore[reportMissingTypeArgument]
    # A function bound to its first argument, as a pytree with that argument as its child. It
    # derives from `functools.partial` because a partial is made and called in C: reading and
    # calling a method costs a few times as much as in plain Python, not hundreds. Two are equal
    # if a program that was traced for one is valid for the other: the same function, bound to
    # equal values. (No docstring: an instance shows its function's.)

    __slots__ = ()

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.func.__doc__

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    __signature__ = _SignatureOfInstance()

    def __getattr__(self, name: str) -> Any:
        # As for Python's methods, the name, the docstring and so on are the function's. Not
        # __wrapped__, which would lead inspect.signature past the bound argument.
        if name == "__wrapped__":
            raise AttributeError(name)
        # A jitted method is staged for the instance that it is bound to, as a call would be.
        stage = getattr(self.func, "stage_bound", None) if name in _STAGES else None
        if stage is not None:
            return stage(name, self.args[0])
        return getattr(self.func, name)

    def __eq__(self, other: object) -> bool:
        if type(other) is not BoundMethod:
            return NotImplemented
        one, two = self.args[0], other.args[0]
        return self.func == other.func and (one is two or _are_one(one, two))

    def __hash__(self) -> int:
        leaves, treedef = jtu.tree_flatten(self.args[0])
        return hash((self.func, treedef, *map(_hash, leaves)))

    def __reduce__(self) -> Any:
        owner = self.args[0]
        if own_class(owner) is not type(owner):
            # A variant's function cannot be found by that name.
            return getattr, (owner, self.func.__name__)
        return bind, (referring(self.func), owner)

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl  # As in tree.printing.

        owner = wl.pdoc(self.args[0], **kwargs)
        return wl.TextDoc(f"<bound method {self.__qualname__} of ") + owner + wl.TextDoc(">")

    def __repr__(self) -> str:
        return f"<bound method {self.__qualname__} of {self.args[0]!r}>"


def _are_one(one: Any, two: Any) -> bool:
    leaves, treedef = jtu.tree_flatten(one)
    others, structure = jtu.tree_flatten(two)
    return treedef == structure and all(map(are_one, leaves, others))


def _hash(leaf: Any) -> int:
    # Arrays have no hash; a method that has some can be a key nevertheless, as Python's can.
    return hash((leaf.shape, leaf.dtype)) if is_array(leaf) else hash(leaf)


def bind(function: Callable[..., Any], owner: Any) -> BoundMethod:
    """`function` with `owner` as its first argument."""
    return BoundMethod(referred(function), owner)


def _flatten(method: BoundMethod) -> tuple[tuple[Any], Any]:
    return (method.args[0],), method.func


def _flatten_with_keys(method: BoundMethod) -> tuple[tuple[tuple[Any, Any]], Any]:
    return ((jtu.GetAttrKey("__self__"), method.args[0]),), method.func


def _unflatten(function: Any, children: Any) -> BoundMethod:
    return BoundMethod(function, children[0])


jtu.register_pytree_with_keys(BoundMethod, _flatten_with_keys, _unflatten, _flatten)


class Method:  # noqa: D101
    # Stores a function in a class so that reading it from an instance gives a `BoundMethod`. (No
    # docstring: readers of a class's dict, such as doctest, find the function's.)

    # Not by `__getattr__`, with which reading any attribute takes longer on Python 3.11.
    __slots__ = ("__name__", "__qualname__", "__wrapped__")

    def __init__(self, function: Callable[..., Any]):
        self.__wrapped__ = function
        # A jitted function that is being unpickled has neither yet.
        self.__name__ = getattr(function, "__name__", "")
        self.__qualname__ = getattr(function, "__qualname__", "")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.__wrapped__
        return BoundMethod(self.__wrapped__, instance)

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__wrapped__.__doc__

    @property
    def __module__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__wrapped__.__module__

    def __reduce__(self) -> Any:
        return Method, (self.__wrapped__,), (None, self._names())

    def _names(self) -> dict[str, str]:
        return {"__name__": self.__name__, "__qualname__": self.__qualname__}

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.__wrapped__, "__isabstractmethod__", False)


_above: Any = super


class InheritedMethod(Method):  # noqa: D101  # pyright: ignore[reportIncompatibleMethodOverride]
    # Represents in a Module class a function of a base that is not one: a plain mixin, an ABC.
    # Which function that is depends on the class of the instance, whose order of bases may have
    # another one in between: `super` knows.

    __slots__ = ("_cls", "_name")

    def __init__(self, cls: type, name: str, function: Callable[..., Any]):
        super().__init__(function)
        self._cls, self._name = cls, name

    def __reduce__(self) -> Any:
        arguments = self._cls, self._name, self.__wrapped__
        return InheritedMethod, arguments, (None, self._names())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return getattr(_above(self._cls, owner or self._cls), self._name)
        found = getattr(_above(self._cls, instance), self._name)
        # Anything but a method, or a value made by its own descriptor, is unchanged.
        return BoundMethod(found.__func__, instance) if type(found) is MethodType else found


# Python itself calls these, often on an instance that is half built, half copied or broken:
# bound the plain way.
_PLAIN_NAMES = (
    "__init__ __post_init__ __check_init__ __new__ __init_subclass__ __class_getitem__ __del__"
    " __getattr__ __getattribute__ __setattr__ __delattr__ __dir__ __get__ __set__ __delete__"
    " __set_name__ __repr__ __str__ __format__ __sizeof__ __hash__ __eq__ __ne__ __bool__"
    " __reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__"
    " __copy__ __deepcopy__ __replace__ __instancecheck__ __subclasscheck__ __subclasshook__"
    " __tree_flatten__ __pdoc__ __treescope_repr__"
)
_PLAIN = frozenset(_PLAIN_NAMES.split())

_FUNCTIONS: tuple[type, ...] = (type(lambda: None), type(jax.jit(lambda: None)))


def as_method(name: str, value: Any) -> Any:
    """Return the attribute to store in a class for `value`, found in its body under `name`."""
    return Method(value) if is_method(name, value) else value


def is_method(name: str, value: Any) -> bool:
    """Whether a function, found in a class under `name`, is bound as a tree."""
    return isinstance(value, _FUNCTIONS) and name not in _PLAIN
