"""Analysis of a transformation's program: which values its results depend on.

An optax transformation consists of two functions, whose source says little. JAX records the
program. It shows whether each number is treated separately, whether each array is, and whether a
sum over all arrays is also a sum over layers.
"""

from __future__ import annotations

import functools as ft
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_EACH = frozenset(
    """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos cosh div
    eq erf exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt
    max min mul ne neg nextafter not or pow real rem round rsqrt select_n sign sin sinh sqrt
    square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905  (sixty lines else)
)
_WHOLE = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
_RANDOM = ("random_", "threefry", "rng_")


def inner_of(equation: Any) -> Any:
    """Return the program that an equation calls once with all of its inputs, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(name)
        found = getattr(found, "jaxpr", found)
        once = equation.primitive.name not in ("while", "scan", "shard_map", "pallas_call")
        if once and found is not None and len(found.invars) == len(equation.invars):
            return found
    return None


def _inside(equation: Any) -> list[Any]:
    """Return the programs that an equation calls: one with all of its inputs, or its branches."""
    inner = inner_of(equation)
    branches = equation.params.get("branches", ())
    return [branch.jaxpr for branch in branches] if inner is None else [inner]


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def is_random(jaxpr: Any) -> bool:
    """Whether a program draws numbers: these depend on the shapes and the order of arrays."""
    return any(
        equation.primitive.name.startswith(_RANDOM) or any(map(is_random, _inside(equation)))
        for equation in jaxpr.eqns
    )


# ---- marks that follow the values of a program


class Marks(NamedTuple):
    """The marks of the values of a program, from its inputs to its outputs.

    Attributes:
        none: the mark of a value that is the same for all.
        of: the mark of an equation's result, from the equation and the marks of its inputs.
        chosen: the mark of a branch's result, from the mark of the index and those of the branches.
        literal: the mark of a number that the program contains.
    """

    none: Any
    of: Callable[[Any, list[Any]], Any]
    chosen: Callable[[Any, Sequence[Any]], Any]
    literal: Callable[[Any], Any] | None = None

    def follow(self, jaxpr: Any, given: Sequence[Any]) -> list[Any]:
        """Return the mark of each output of a program.

        Args:
            jaxpr: the program.
            given: the marks of its inputs.
        """
        marks: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))

        def known(variable: Any) -> Any:
            if _is_literal(variable):
                return self.literal(variable.val) if self.literal else self.none
            return marks.get(variable, self.none)

        for equation in jaxpr.eqns:
            ins = [known(v) for v in equation.invars]
            inner, branches = inner_of(equation), equation.params.get("branches")
            if inner is not None:
                found = self.follow(inner, ins)
            elif branches is not None:
                each = [self.follow(branch.jaxpr, ins[1:]) for branch in branches]
                found = [self.chosen(ins[0], outs) for outs in zip(*each, strict=True)]
            else:
                found = [self.of(equation, ins)] * len(equation.outvars)
            marks.update(zip(equation.outvars, found, strict=True))
        return [known(v) for v in jaxpr.outvars]


def _union(_: Any, marks: Sequence[frozenset[Any]]) -> frozenset[Any]:
    return frozenset[Any]().union(*marks)


def _union_chosen(index: frozenset[Any], outs: Sequence[frozenset[Any]]) -> frozenset[Any]:
    return index.union(*outs)


DEPENDENCIES = Marks(frozenset[Any](), _union, _union_chosen)
"""Sets: an output has the union of the sets of the inputs that it depends on."""


def _spelled(value: object) -> frozenset[Any]:
    return frozenset([repr(value)])


LITERALS = DEPENDENCIES._replace(literal=_spelled)
"""The same, and each number of the program is an input: how many arrays there are, for example."""


# ---- whether two programs are the same, whatever the shapes


def are_alike(first: Any, second: Any, is_fit: Callable[[Any, Any], bool]) -> bool:
    """Whether two programs do the same, one equation after the other, to arrays of other shapes."""
    (mine, text), (others, other) = _written(first), _written(second)
    if text != other or not all(map(is_fit, mine, others)):
        return False
    pairs = [
        pair
        for one, two in zip(mine, others, strict=True)
        for pair in zip(_inside(one), _inside(two), strict=True)
    ]
    return all(are_alike(a, b, is_fit) for a, b in pairs)


def _written(jaxpr: Any) -> tuple[list[Any], Any]:
    """Return the equations of a program, and a key that is equal for equal equations."""
    names: dict[Any, Any] = {variable: ("in", n) for n, variable in enumerate(jaxpr.invars)}
    names.update({variable: ("const", n) for n, variable in enumerate(jaxpr.constvars)})

    def name(variable: Any) -> Any:
        is_literal = _is_literal(variable)
        return ("literal", repr(variable.val)) if is_literal else names.get(variable, variable)

    equations: list[Any] = []
    lines: list[Any] = []
    for equation in jaxpr.eqns:
        ins = [name(variable) for variable in equation.invars]
        kind = equation.primitive.name
        # A number broadcast to the shape of an array counts as the number.
        if kind == "broadcast_in_dim" and not equation.invars[0].aval.shape:
            names[equation.outvars[0]] = ins[0]
            continue
        made = enumerate(equation.outvars)
        names.update({variable: ("made", len(lines), i) for i, variable in made})
        lines.append((kind, ins, len(_inside(equation))))
        equations.append(equation)
    return equations, (len(jaxpr.invars), lines, [name(v) for v in jaxpr.outvars])


def is_by_number(one: Any, two: Any) -> bool:
    """Whether equations do the same to each number alone."""
    del two
    return bool(_inside(one)) or one.primitive.name in _EACH


def is_by_number_or_whole(one: Any, two: Any) -> bool:
    """Return the same, or reduce arrays to one number."""
    if one.primitive.name in _WHOLE:
        return all(len(e.params["axes"]) == len(e.invars[0].aval.shape) for e in (one, two))
    return is_by_number(one, two) or one.primitive.name == "broadcast_in_dim"


# ---- whether sums over all arrays are sums over layers


class Mark(NamedTuple):
    """The origin of a value, and the operation that reduced it to one number.

    Attributes:
        owners: pairs of a leaf and a layer, which is a number, 0 or 1, for each layer axis;
            none if the value is the same for all.
        op: the operation that joins numbers of several, once it is reduced.
    """

    owners: frozenset[Any] = frozenset()
    op: str | None = None


SHARED = Mark()


class Unfit(Exception):
    """A program that does something to a layer's array, or to a sum over some layers, alone."""


def is_complete(mark: Mark) -> bool:
    """Whether all layers of each leaf have contributed to it."""
    return all(
        (leaf, other) in mark.owners
        for leaf, layer in mark.owners
        for other in itertools.product(range(2), repeat=len(layer))
    )


def joined_marks(first: Mark, second: Mark) -> Mark:
    """Return the mark of a value that may have either mark.

    Raises:
        Unfit: if they do not fit together.
    """
    if first == second or second == SHARED:
        return first
    if first == SHARED:
        return second
    raise Unfit("it is of some layers")


def _chosen(index: Mark, outs: Sequence[Mark]) -> Mark:
    if _one([index]) != SHARED:
        raise Unfit("it is of some layers")
    return ft.reduce(joined_marks, outs)


def _mark_of(equation: Any, ins: list[Mark]) -> Mark:
    name = equation.primitive.name
    name = "add" if name == "add_any" else name
    if name in _WHOLE and len(equation.params["axes"]) == len(equation.invars[0].aval.shape):
        mark = _one(ins)
        return mark if mark == SHARED else Mark(mark.owners, _WHOLE[name])
    partial = [mark for mark in ins if mark.op is not None and not is_complete(mark)]
    live = [mark for mark in ins if mark != SHARED]
    if partial or (name in _WHOLE.values() and any(mark.op for mark in live)):
        return _mark_of_joined(equation, name, ins, live)
    mark = _one(ins)
    if mark == SHARED or name in _EACH:
        return mark
    raise Unfit("it is of some layers")


def _mark_of_joined(equation: Any, name: str, ins: list[Mark], live: list[Mark]) -> Mark:
    if name == "convert_element_type" or (name == "copy"):
        return ins[0]
    zero = all(
        mark != SHARED or (_is_literal(v) and v.val == 0)
        for mark, v in zip(ins, equation.invars, strict=True)
    )
    if all(mark.op == name for mark in live) and (zero or len(live) == len(ins)):
        return Mark(frozenset().union(*(mark.owners for mark in live)), name)
    # A sum times a number is the sum of the products.
    linear = name == "mul" or (name == "div" and ins[1] == SHARED)
    if linear and len(live) == 1 and live[0].op == "add":
        return live[0]
    return _one(ins)


def _one(ins: list[Mark]) -> Mark:
    """Return the mark of a value computed from values of one layer each, or of all layers."""
    found = {mark for mark in ins if mark != SHARED and not (mark.op and is_complete(mark))}
    if not found:
        return SHARED
    if len(found) == 1 and (mark := found.pop()).op is None:
        return mark
    raise Unfit("it is of some layers")


OWNERS = Marks(SHARED, _mark_of, _chosen)
"""A `Mark` for each value of a program whose inputs are two layers.

It raises `Unfit` for anything but reducing arrays, joining the results for all, and
computing number by number.
"""
