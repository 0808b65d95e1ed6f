"""Decide whether two jaxprs are one program, so that their structures are equal.

Tracing a function twice gives two jaxprs, and JAX compares jaxprs by identity. A function that
is converted in both branches of a `cond`, or in each step of a loop, must have one structure. So
jaxprs are compared equation by equation: the same operations, with the same parameters, on
corresponding variables. Some values cannot be compared, such as the rule of a `custom_jvp` that
was not applied yet. These equal only themselves, because they may have captured something that
differs, such as a bound for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pytreemod.tree.kinds import are_one
from pytreemod.tree.snapshots import Structure
from pytreemod.typing import PyTree, class_of


class Program:
    """A jaxpr, equal to others that do the same."""

    __slots__ = ("hash", "jaxpr")

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.hash = hash(tuple(equation.primitive for equation in jaxpr.eqns))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return self.hash == other.hash and _is_one_jaxpr(self.jaxpr, other.jaxpr)

    def __repr__(self) -> str:
        return repr(self.jaxpr)


class Signature:
    """The structure of arguments or of a result, with shapes; compared by value."""

    __slots__ = ("structs", "structure")

    def __init__(self, structs: Iterable[Any], structure: Structure):
        self.structs = tuple(structs)
        self.structure = structure

    @property
    def tree(self) -> PyTree:
        """The tree, with the type of each array instead of the array."""
        return self.structure.assemble(self.structs)

    def __hash__(self) -> int:
        return hash(self.structs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature):
            return NotImplemented
        return self.structs == other.structs and self.structure.matches(other.structure)

    def __repr__(self) -> str:
        return repr(self.tree)


def _is_one_jaxpr(a: Any, b: Any) -> bool:
    if a is b:
        return True
    inputs = [(x.constvars, x.invars) for x in (a, b)]
    if [*map(len, inputs[0])] != [*map(len, inputs[1])] or len(a.eqns) != len(b.eqns):
        return False
    partner: dict[Any, Any] = {}
    return (
        all(map(_binder(partner), (*a.constvars, *a.invars), (*b.constvars, *b.invars)))
        and all(_is_one_equation(*pair, partner) for pair in zip(a.eqns, b.eqns, strict=True))
        and _are_one_operands(a.outvars, b.outvars, partner)
    )


def _is_one_equation(a: Any, b: Any, partner: dict[Any, Any]) -> bool:
    return (
        a.primitive is b.primitive
        and a.ctx == b.ctx
        and _are_one_operands(a.invars, b.invars, partner)
        and _is_one_parameter(a.params, b.params)
        and len(a.outvars) == len(b.outvars)
        and all(map(_binder(partner), a.outvars, b.outvars))
    )


def _binder(partner: dict[Any, Any]) -> Any:
    """Return a function that pairs two new variables and returns whether their types are equal."""

    def bind(a: Any, b: Any) -> bool:
        partner[a] = b
        return a.aval == b.aval

    return bind


def _are_one_operands(first: Any, second: Any, partner: dict[Any, Any]) -> bool:
    return len(first) == len(second) and all(
        _is_one_operand(a, b, partner) for a, b in zip(first, second, strict=True)
    )


def _is_one_operand(a: Any, b: Any, partner: dict[Any, Any]) -> bool:
    literal = hasattr(a, "val"), hasattr(b, "val")
    if not any(literal):
        return partner[a] is b
    return all(literal) and a.aval == b.aval and _bits(a.val) == _bits(b.val)


def _bits(value: Any) -> bytes:
    # Not by `==`: -0.0 equals 0.0, and NaN does not equal itself.
    return np.asarray(value).tobytes()


def _is_one_parameter(a: Any, b: Any) -> bool:
    if a is b:
        return True
    kind = class_of(a)
    if kind is not class_of(b):
        return False
    if kind is dict:
        return [*a] == [*b] and all(map(_is_one_parameter, a.values(), b.values()))
    if kind is tuple or kind is list:
        return len(a) == len(b) and all(map(_is_one_parameter, a, b))
    if hasattr(a, "eqns"):
        # A jaxpr, perhaps with constants. These may be traced, so they are compared by identity.
        constants = getattr(a, "consts", ()), getattr(b, "consts", ())
        return (
            len(constants[0]) == len(constants[1])
            and all(x is y for x, y in zip(*constants, strict=True))
            and _is_one_jaxpr(getattr(a, "jaxpr", a), getattr(b, "jaxpr", b))
        )
    return are_one(a, b)
