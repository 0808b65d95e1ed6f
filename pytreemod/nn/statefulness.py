"""What marks a layer that reads and writes State, and the mark for "no State given"."""

from enum import Enum
from typing import Literal, TypeAlias

from pytreemod.module.classes import Module


class Absence(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Absence.ABSENT
"""Stands for an argument that was not given, where None would be a value."""

Absent: TypeAlias = Literal[Absence.ABSENT]


class StatefulLayer(Module):
    """Base of layers that are called as `layer(x, state, *, key)` and return `(out, state)`.

    `Sequential` passes State to these, and to no others.

    Examples:
        >>> from pytreemod import nn
        >>> class Passing(nn.StatefulLayer):
        ...     def __call__(self, x, state, *, key=None):
        ...         return x, state
        >>> Passing().is_stateful()
        True
    """

    def is_stateful(self) -> bool:
        """Whether this instance needs State; a subclass may decide by what it holds.

        Returns:
            True, unless overridden.
        """
        return True
