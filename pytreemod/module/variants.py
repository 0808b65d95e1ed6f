"""Variants: subclasses that are made for an instance, with attributes that its values require.

A field with a computed leaf is read differently, a method with a call rule is called
differently, a layer without a size has no fields yet. Python looks such attributes up in the class,
so such an instance is of a *variant* of its class: a subclass, made once for the class and the
traits in which the two differ. The values of an instance decide its traits, and so its class
(`Schema.for_values`); any traits can be combined. An instance without traits is of the class
itself, which knows nothing of variants.

A variant passes for its class: it has the name, the signature and the docstring, pickles and copies
are those of the class, and [`own_class`][pytreemod.tree.nodes.own_class] returns the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

from pytreemod.typing import class_of

Trait: TypeAlias = "tuple[type[Variant], str]"
"""A kind of difference, and the name of the attribute that differs."""


class Variant:
    """A kind of difference between a variant and its class; it precedes the class as a base."""

    __slots__ = ()

    __passes_for__: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the user's, which may record subclasses, or require more arguments.
        pass

    @staticmethod
    def __vary__(original: Any, name: str) -> dict[str, Any]:
        """Return the attributes that a variant of a class has under a trait.

        Args:
            original: the class.
            name: the attribute that differs.
        """
        raise NotImplementedError


class Varying:
    """Base of values that give an instance traits."""

    __slots__ = ()

    def traits(self) -> Iterable[Trait]:
        """Return the traits."""
        raise NotImplementedError


def make_variant(cls: Any, traits: Iterable[Trait]) -> Any:
    """Return a new subclass of a Module class that passes for it and has these traits."""
    copied = ("__module__", "__qualname__", "__doc__", "__init__")
    namespace: dict[str, Any] = {name: getattr(cls, name) for name in copied}
    ordered = sorted(traits, key=lambda trait: (trait[0].__qualname__, trait[1]))
    for kind, name in ordered:
        namespace |= kind.__vary__(cls, name)
    kinds = dict.fromkeys(kind for kind, _ in ordered)
    return class_of(cls)(cls.__name__, (*kinds, cls), {**namespace, "__passes_for__": cls})
