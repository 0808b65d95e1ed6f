"""What an optax transformation depends on, according to its recorded program."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.training.layered.lists import leaves_of, listed, owners
from pytreemod.training.layered.programs import (
    DEPENDENCIES,
    LITERALS,
    OWNERS,
    SHARED,
    Mark,
    Marks,
    Unfit,
    are_alike,
    is_by_number,
    is_by_number_or_whole,
    is_complete,
    is_random,
    joined_marks,
)
from pytreemod.tree.members import without_axes
from pytreemod.typing import KeyPath, PyTree, jtu


class UndecidedError(Exception):
    """A transformation could not be recorded without its extra arguments."""


class RuleProgram(NamedTuple):
    """The recorded program of a transformation.

    Attributes:
        start: makes the state.
        jaxpr: a step.
        state: its shapes.
        outs: the number of updates.
    """

    start: Any
    jaxpr: Any
    state: Any
    outs: int

    def followed(
        self, marks: Marks, each: Sequence[Any], join: Any, held: Sequence[bool] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Marks of the updates and of the state, after as many steps as change them.

        Args:
            marks: the kind of marks.
            each: the marks of gradients, and of parameters.
            join: joins two marks of one value.
            held: which parts of the state have the marks of the parameters from the start.
        """
        state = marks.follow(self.start, each)
        state = [each[0] if h else m for h, m in zip(held, state, strict=True)] if held else state
        more = [marks.none] * (len(self.jaxpr.invars) - 2 * len(each) - len(state))
        while True:
            outs = marks.follow(self.jaxpr, [*each, *each, *state, *more])
            after = [join(a, b) for a, b in zip(state, outs[self.outs :], strict=True)]
            if after == state:
                return outs[: self.outs], state
            state = after


def record(rule: Any, params: PyTree) -> RuleProgram:
    """Record a step of a transformation.

    Raises:
        UndecidedError: if it lacks an argument, or refuses the shapes.
    """
    leaves, structure = jtu.tree_flatten(params)
    count = len(leaves)
    first: Exception | None = None
    for extra in ({}, {"value": jax.ShapeDtypeStruct((), jnp.float32)}):
        try:
            state = jax.eval_shape(rule.init, params)
            values, form = jtu.tree_flatten(state)

            def run(*values: Any, form: Any = form, extra: Any = extra) -> Any:
                made, new = rule.update(
                    structure.unflatten(values[:count]),
                    form.unflatten(values[2 * count : len(values) - len(extra)]),
                    structure.unflatten(values[count : 2 * count]),
                    **dict(zip(extra, values[len(values) - len(extra) :], strict=True)),
                )
                news, after = jtu.tree_flatten(new)
                if after != form:
                    raise UndecidedError("a state of another structure after a step")
                return (*structure.flatten_up_to(made), *news)

            closed = jax.make_jaxpr(run)(*leaves, *leaves, *values, *extra.values())

            def make(*values: Any) -> Any:
                return jtu.tree_leaves(rule.init(structure.unflatten(values)))

            start = jax.make_jaxpr(make)(*leaves)
            return RuleProgram(start.jaxpr, closed.jaxpr, state, count)
        except Exception as error:
            # A user's transformation may raise anything; it is really called later.
            first = first or error
    raise UndecidedError from first


def record_two(rule: Any, params: PyTree) -> tuple[RuleProgram, PyTree, bool]:
    """Record a step on two layers in a list.

    Returns:
        The program; its input; whether that has a list for each leaf.

    Raises:
        UndecidedError: if a step cannot be recorded.
    """

    def recorded(by_leaf: bool) -> tuple[RuleProgram, PyTree, bool]:
        two = listed(params, copies=2, by_leaf=by_leaf)
        with without_axes("all"):
            return record(rule, two), two, by_leaf

    try:
        return recorded(by_leaf=False)
    except UndecidedError:
        # It may have a mask, or a function of the model, which fits no other tree.
        return recorded(by_leaf=True)


def record_same(rule: Any, params: PyTree, one: PyTree, is_fit: Any) -> RuleProgram | None:
    """The program of one layer, if a step does the same to all, equation by equation, or None."""
    try:
        first = record(rule, params)
        with without_axes("all"):
            second = record(rule, one)
    except UndecidedError:
        return None
    structures = [jtu.tree_structure(program.state) for program in (first, second)]
    is_same = (
        structures[0] == structures[1]
        and are_alike(first.start, second.start, is_by_number)
        and are_alike(first.jaxpr, second.jaxpr, is_fit)
    )
    return second if is_same else None


def have_same_literals(
    first: RuleProgram, tree: PyTree, second: RuleProgram, other: PyTree
) -> bool:
    """Whether two programs compute each array with the same numbers.

    A list of layers has more arrays than a Stack, and a program may contain their number.

    Args:
        first: a program.
        tree: its input.
        second: a program for the same arrays, or some of them; of several layers, or of one.
        other: its input.
    """
    found = [_literals_of(first, tree), _literals_of(second, other)]
    return all(found[0][path] == found[1][path] for path in found[0].keys() & found[1].keys())


def _literals_of(program: RuleProgram, tree: PyTree) -> dict[Any, set[Any]]:
    """The numbers behind each update, and each array of the state, of each layer."""
    each = [LITERALS.none] * program.outs
    made, state = program.followed(LITERALS, each, operator.or_)
    found: dict[Any, set[Any]] = {}
    for kind, of, marks in (("update", tree, made), ("state", program.state, state)):
        for (path, _), mark in zip(owners(of), marks, strict=True):
            found.setdefault((kind, path), set()).add(mark)
    return found


def is_whole(rule: Any, params: PyTree, one: PyTree) -> bool:
    """Whether a step reduces layers as a list of them, and otherwise goes number by number."""
    of_one = record_same(rule, params, one, is_by_number_or_whole)
    if of_one is None:
        return False
    try:
        program, two, _ = record_two(rule, params)
        each = [Mark(frozenset([owner])) for owner in owners(two)]
        made, _ = program.followed(OWNERS, each, _joined_settled)
        is_fit = all(_settled(m) in (own, SHARED) for m, own in zip(made, each, strict=True))
        return is_fit and have_same_literals(of_one, one, program, two)
    except (UndecidedError, Unfit):
        return False


def _joined_settled(first: Mark, second: Mark) -> Mark:
    return joined_marks(first, _settled(second))


def _settled(mark: Mark) -> Mark:
    """The mark of an output: a number for all is shared, and one for some layers is refused."""
    if mark.op is None:
        return mark
    if is_complete(mark):
        return SHARED
    raise Unfit("it is of some layers")


def is_leafwise(program: RuleProgram) -> bool:
    """Whether the update of each layer's array follows from that array alone.

    Args:
        program: of two layers in a list.
    """
    if is_random(program.jaxpr):
        return False
    each = [frozenset([i]) for i in range(program.outs)]
    made, _ = program.followed(DEPENDENCIES, each, operator.or_)
    return all(marks <= own for marks, own in zip(made, each, strict=True))


def axes_of_state(
    program: RuleProgram, axes: int, left_out: Literal["members", "all"]
) -> tuple[tuple[int, ...], tuple[KeyPath, ...], Any]:
    """Return which leaves of a state have an axis for each layer, or member.

    They are those in a tree of the model's structure, and those that depend on such leaves.

    Args:
        program: of one layer, or member.
        axes: the number of its layer axes that are left out.
        left_out: which axes are.

    Returns:
        For each leaf its axes, and its path; the structure of the state.

    Raises:
        UndecidedError: if a leaf without a layer axis differs from layer to layer.
    """
    of_layers = left_out == "all"
    held = [bool(leaf.layers if of_layers else leaf.members) for leaf in leaves_of(program.state)]
    each = [frozenset(["own"])] * program.outs
    _, state = program.followed(DEPENDENCIES, each, operator.or_, held)
    if of_layers and axes and any(m and not h for m, h in zip(state, held, strict=True)):
        raise UndecidedError
    locs, whole = jtu.tree_flatten_with_path(program.state)
    return tuple(axes if m else 0 for m in state), tuple(path for path, _ in locs), whole
