"""Warn about random streams that all members of a map draw from: they get the same numbers.

A State without a mapped axis means this, and users rarely want it: every example would have the
same dropout mask. While the function runs, the library records which of the streams in its
arguments it draws from (see `tree.effects`). A warning names those that are not mapped. It omits
streams that the user chose not to map: a rule of `by` names them, or maps another stream of their
State. A State that the function contains, or captures, is the same for all members, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytreemod.errors import SharedStreamWarning, warn
from pytreemod.transform.boundary.signatures import parameters_of, positional_names
from pytreemod.transform.boundary.wrapping import function_name
from pytreemod.transform.interception.argument_specs import (
    Named,
    Terms,
    assign_arguments,
    named_arguments,
)
from pytreemod.tree.effects import is_state
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By
from pytreemod.typing import jtu


def warn_of_shared_streams(
    fn: Callable[..., Any],
    drawn: Mapping[Any, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    are_mapped: Sequence[bool],
    spec: Any,
    terms: Terms,
) -> None:
    """Warn about the streams that all members of a map have drawn from.

    Args:
        fn: the function that was mapped.
        drawn: the identities of the streams that were drawn from, each with whether members may
            share it, even if no argument has it.
        args: the arguments of the call.
        kwargs: those by keyword.
        are_mapped: for each array in them, whether it differs between members.
        spec: the spec of the mapped arguments.
        terms: the values of which the spec is made.

    Warns:
        SharedStreamWarning: if there is such a stream.
    """
    arguments = named_arguments(positional_names(fn), args, kwargs)
    # Usually there is none, and the rules need not be evaluated.
    if not any(_shared(drawn, arguments, are_mapped)):
        return
    naming = jtu.tree_map(_naming, spec, is_leaf=terms.stops)
    known = [parameter.name for parameter in parameters_of(fn) or ()]
    named = assign_arguments(naming, arguments, len(args), known, terms)
    # An argument that the spec leaves out has the default, which is not a bool.
    chosen = [a.value is True or b for a, b in zip(named, are_mapped, strict=True)]
    places, enclosed = _shared(drawn, arguments, chosen)
    if places or enclosed:
        warn(
            SharedStreamWarning,
            f"{terms.where} of {function_name(fn)}: all members draw the same random numbers",
            at=[*places, *(f"{name}, of a State that is not an argument" for name in enclosed)],
            hint=f"pm.by({{pm.RngStream: {terms.example}, ...: None}})  # with state.split(n)",
        )


def _naming(value: Any) -> Any:
    return value.naming() if isinstance(value, By) else False


def _shared(
    drawn: Mapping[Any, bool], arguments: Sequence[Named], marks: Sequence[bool]
) -> tuple[list[str], list[str]]:
    """The streams drawn from in States without a mark at any of these streams.

    Returns:
        Paths in the arguments, and the names of streams in other States.
    """
    left = iter(marks)
    found: dict[str, Any] = {}
    passed: set[Any] = set()
    marked: set[Any] = set()
    for argument in arguments:
        leaves, treedef = jtu.tree_flatten(argument.tree)
        tree = treedef.unflatten([is_array(leaf) and next(left) for leaf in leaves])
        for path, node in jtu.tree_leaves_with_path(tree, is_leaf=is_state):
            values: Mapping[Any, Any] = node.__values__() if is_state(node) else {}
            # A stream without a key has no leaves: it got its key inside.
            streams = {name: jtu.tree_leaves(values[name]) for name in values if name in drawn}
            own = {name for name in streams if any(streams[name])}
            passed |= streams.keys()
            marked |= own
            for name in streams:
                if streams[name] and not own:
                    found[path_text((*path, jtu.DictKey(name)), argument.name)] = name
    # Another State may have a stream of that name, and then the drawn one is unknown.
    places = [place for place, name in found.items() if name not in marked]
    may_share = {name for name, may in drawn.items() if may}
    return places, sorted(map(str, may_share - passed))
