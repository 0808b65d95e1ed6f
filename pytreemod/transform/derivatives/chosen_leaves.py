"""What a derivative is taken by: which arguments, and which of their leaves.

The results are trees like the arguments, with derivatives for leaves. They look like models; so
each is marked as none (`as_derivatives`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.reading import mark_derivatives
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.transform.boundary.shared_parameters import has_twice, tell_shared
from pytreemod.transform.boundary.signatures import positional_names
from pytreemod.transform.boundary.sowing import collect
from pytreemod.transform.boundary.wrapping import argument_name, function_name
from pytreemod.tree.effects import states_in
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.prefixes import mask_of
from pytreemod.tree.selecting import Locations, Selector, as_selector, refuse_unmatched
from pytreemod.tree.snapshots import divide
from pytreemod.tree.structure_info import info_of
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu


def trainable_mask(
    tree: PyTree, wrt: FilterSpec | None, where: str, strict: bool = True, root: str = ""
) -> list[bool]:
    """Which leaves are differentiated: inexact arrays that `wrt` picks.

    Args:
        tree: the argument to differentiate.
        wrt: a filter spec; None for everything that is no buffer.
        where: what to call `wrt` in errors.
        strict: whether a path that matches nothing in this tree is a mistake.
        root: what to call the tree in errors.

    Returns:
        One bool for each leaf.

    Raises:
        SpecError: `wrt` does not fit the tree.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if wrt is None:
        chosen: Sequence[bool] = [role != "buffer" for role in info_of(treedef).roles]
    # One selector for several arguments: what it does not find in this one it finds in another.
    elif isinstance(wrt, Selector) and not strict:
        chosen = wrt.pick(Locations(locations(tree)), tree, None)
    else:
        chosen = mask_of(wrt, tree, where=where, root=root)
    return [c and is_inexact_array(x) for c, x in zip(chosen, leaves, strict=True)]


def as_derivatives(tree: PyTree, treedef: Any) -> PyTree:
    """Let a tree of derivatives, which has just been put together, say that it is one.

    What would be computed of them refuses to be read: the exponential of a gradient means nothing.
    And an `Optimizer` refuses them as its model.
    Every tree of derivatives, or of flags, that a user gets to see comes through here.

    Args:
        tree: the tree.
        treedef: of the model that it is like.
    """
    traits = info_of(treedef)
    if traits.has_records:
        mark_derivatives(tree, traits.has_computed)
    return tree


class Chosen:
    """What is differentiated in a call: the leaves, apart from everything else.

    Attributes:
        values: the chosen leaves.
        structure: of the arguments that they are in, with all else.
    """

    __slots__ = ("_args", "_indices", "_several", "_used", "structure", "values")

    def __init__(
        self, args: tuple[Any, ...], indices: tuple[int, ...], mask: list[bool], several: bool
    ):
        self._args = args
        self._indices = indices
        self._several = several
        self._used: list[bool] = []
        self.values, self.structure = divide(self.trees(), mask)

    def trees(self) -> tuple[PyTree, ...]:
        """The arguments that were asked for."""
        return tuple(self._args[i] for i in self._indices)

    def collect(
        self, fn: Callable[..., Any], values: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Call a function with other values for the chosen leaves; see `collect` of `sowing`."""
        args = list(self._args)
        trees = self.structure.assemble(values)
        for i, tree in zip(self._indices, trees, strict=True):
            args[i] = tree
        collected = collect(fn, args, kwargs)
        if info_of(self.structure.treedef).has_states:
            # Nothing else of them is stored: tracers must not outlive the trace.
            self._used = [not state.__usable__() for state in states_in(trees)]
        return collected

    def pass_on_use(self, by: str) -> None:
        """Use up the caller's States that the function used up in the arguments put together.

        What is passed on as it is can be used once, and so can this.
        """
        if any(self._used):
            for state, is_used in zip(states_in(self.trees()), self._used, strict=True):
                if is_used:
                    state.__use_up__(by)

    def apart(
        self, fn: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
        """The call of `collect`, for one run more, which changes nothing that the caller has.

        The States in it are others, so that those of the caller can be used once more.
        """
        arrays, structure = divide((fn, self._args, kwargs))
        fn, args, kwargs = structure.assemble(arrays)
        chosen = set(self.structure.positions or ())
        mask = [i in chosen for i in range(self.structure.treedef.num_leaves)]
        twin = Chosen(args, self._indices, mask, self._several)
        return lambda values: twin.collect(fn, values, kwargs)

    def place(self, derivatives: Sequence[Any]) -> PyTree:
        """Trees like the arguments, with a derivative for each chosen leaf and None elsewhere.

        One tree, or a tuple of them if several arguments were asked for.
        """
        trees = as_derivatives(self.structure.place(derivatives), self.structure.treedef)
        return trees if self._several else trees[0]

    def named(self, fn: Callable[..., Any]) -> list[tuple[str, Any]]:
        """Every leaf of the arguments, with where it is."""
        return [
            (path_text(path, name), leaf)
            for name, tree in zip(_names(fn, self._indices), self.trees(), strict=True)
            for path, leaf in jtu.tree_leaves_with_path(tree)
        ]


def choose(
    where: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrt: FilterSpec | None,
    argnums: int | tuple[int, ...] | None,
) -> Chosen:
    """Find what is differentiated in a call.

    Args:
        where: the transform's name.
        fn: the function that is called.
        args: its positional arguments.
        kwargs: its arguments by keyword, which are not differentiated.
        wrt: which leaves; for several arguments, also one spec for each, or a dict by name.
        argnums: which arguments; None for the first.

    Returns:
        The chosen leaves, which may be none.

    Raises:
        ArgumentError: an argument is not there, or is asked for twice.
        SpecError: `wrt` does not fit.
    """
    indices = _indices(where, fn, args, kwargs, argnums)
    trees = [args[i] for i in indices]
    if wrt is None:
        masks = [trainable_mask(tree, None, where) for tree in trees]
    else:
        masks = _picked(where, wrt, trees, _names(fn, indices), isinstance(argnums, tuple))
    chosen = Chosen(args, indices, [m for mask in masks for m in mask], isinstance(argnums, tuple))
    # Of all at once, and before anything has a name: most models share nothing.
    if has_twice(chosen.values):
        for name, tree, mask in zip(_names(fn, indices), trees, masks, strict=True):
            tell_shared(f"{where} of {function_name(fn)}", name, tree, mask)
    return chosen


def _indices(
    where: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | tuple[int, ...] | None,
) -> tuple[int, ...]:
    asked = (0,) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    for i in asked:
        if not -len(args) <= i < len(args):
            _refuse_missing(where, fn, args, kwargs, i)
    # Counted from the front, so that 0 and -2 are seen to be one argument.
    indices = tuple([i % len(args) for i in asked])
    if len(set(indices)) < len(indices):
        raise ArgumentError(f"{where}(argnums)", "each argument once", repr(argnums))
    return indices


def _names(fn: Callable[..., Any], indices: Iterable[int]) -> list[str]:
    names = positional_names(fn)
    return [argument_name(names, i) for i in indices]


def _picked(
    where: str, wrt: FilterSpec, trees: list[PyTree], names: list[str], several: bool
) -> list[list[bool]]:
    """Which leaves of each argument `wrt` picks."""
    if isinstance(wrt, (str, type)):
        wrt = as_selector(wrt)
    # A path is misspelt only if none of the arguments that it is applied to has it.
    shared = isinstance(wrt, Selector)
    if isinstance(wrt, Selector):
        refuse_unmatched([wrt], trees)
    specs = _specs(where, wrt, names) if several else [wrt]
    return [
        trainable_mask(tree, spec, f"{where}(wrt) for {name}", not shared, name)
        for tree, spec, name in zip(trees, specs, names, strict=True)
    ]


def _specs(where: str, wrt: Any, names: list[str]) -> list[Any]:
    """One filter spec for each of several arguments."""
    if class_of(wrt) in (tuple, list):
        if len(wrt) == len(names):
            return list(wrt)
        raise SpecError(
            f"{where}(wrt)",
            f"one spec for each of the {len(names)} differentiated arguments",
            f"{len(wrt)}",
            hint=["by name, what is left out has the default:", f"wrt={{{names[0]!r}: True}}"],
        )
    if class_of(wrt) is dict and any(key in names for key in wrt):
        unknown = [key for key in wrt if key not in names]
        if unknown:
            raise SpecError(
                f"{where}(wrt)",
                f"names of differentiated arguments ({', '.join(names)})",
                ", ".join(map(repr, unknown)),
            )
        return [wrt.get(name) for name in names]
    return [wrt] * len(names)


def _refuse_missing(
    where: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], index: int
) -> NoReturn:
    (name,) = _names(fn, [index])
    raise ArgumentError(
        f"{where} of {function_name(fn)}",
        f"argument {index} ({name}), which is differentiated, by position",
        f"{name!r} by keyword" if name in kwargs else f"{len(args)} positional arguments",
        hint=[
            "pass it first, without its name:",
            f"{function_name(fn)}({name}, ...)",
        ],
    )


def refuse_nothing(
    where: str, fn: Callable[..., Any], chosen: Chosen, wrt: Any, hint: Sequence[str] = ()
) -> None:
    """Raise the error for a call in which there is nothing to differentiate, if there is not.

    Args:
        where: the transform's name.
        fn: the function that is called.
        chosen: what was chosen.
        wrt: by what.
        hint: what to do, if that is not to differentiate another argument.

    Raises:
        ArgumentError: no leaf was chosen; what there was is listed.
        UnfinishedError: for a layer lacks a size.
    """
    if chosen.values:
        return
    only, *others = chosen.trees()
    refuse_unfinished(f"{where} of {function_name(fn)}", (only, *others) if others else only)
    raise ArgumentError(
        f"{where} of {function_name(fn)}",
        "at least one floating array to differentiate",
        "none" if wrt is None else f"none picked by wrt={wrt!r}",
        places=[f"{place}: {describe(leaf)}" for place, leaf in chosen.named(fn)],
        hint=hint
        or [
            "differentiate another argument, or pass arrays:",
            f"pm.{where}(f, argnums=1)",
        ],
    )


def chosen_places(fn: Callable[..., Any], chosen: Chosen) -> list[tuple[str, Any]]:
    """Where the chosen leaves are, each with the leaf."""
    every = chosen.named(fn)
    return [every[i] for i in chosen.structure.positions or ()]


def as_argnums(where: str, argnums: Any) -> int | tuple[int, ...] | None:
    """`argnums` as an int, a tuple or None.

    Raises:
        ArgumentError: it is none of these.
    """
    kind = class_of(argnums)
    if argnums is None or (issubclass(kind, int) and kind is not bool):
        return argnums
    several = tuple(argnums) if issubclass(kind, (list, tuple)) else ()
    if not several or any(class_of(i) is not int for i in several):
        raise ArgumentError(f"{where}(argnums)", "an int or several", describe(argnums))
    return several
