"""Choose the arguments to differentiate, and their leaves.

The results are trees like the arguments, with derivatives as leaves. They look like models, so
`as_derivatives` marks each of them as a tree of derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.reading import mark_derivatives
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.transform.boundary.shared_parameters import has_twice, warn_of_shared
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
    """Return a mask of the leaves to differentiate: inexact arrays that `wrt` selects.

    Args:
        tree: the argument to differentiate.
        wrt: a filter spec; None for everything except buffers.
        where: the name of `wrt` in errors.
        strict: whether a path that matches nothing in this tree is an error.
        root: the name of the tree in errors.

    Returns:
        One bool for each leaf.

    Raises:
        SpecError: if `wrt` does not fit the tree.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if wrt is None:
        chosen: Sequence[bool] = [role != "buffer" for role in info_of(treedef).roles]
    # One selector for several arguments: a path may match in another argument.
    elif isinstance(wrt, Selector) and not strict:
        chosen = wrt.pick(Locations(locations(tree)), tree, None)
    else:
        chosen = mask_of(wrt, tree, where=where, root=root)
    return [c and is_inexact_array(x) for c, x in zip(chosen, leaves, strict=True)]


def as_derivatives(tree: PyTree, treedef: Any) -> PyTree:
    """Mark a new tree as a tree of derivatives.

    Its computed leaves refuse to be read, because the exponential of a gradient means nothing. An
    `Optimizer` refuses it as a model. Every tree of derivatives or flags that a user gets is marked
    here.

    Args:
        tree: the tree.
        treedef: the structure of the model.
    """
    traits = info_of(treedef)
    if traits.has_records:
        mark_derivatives(tree, traits.has_computed)
    return tree


class Chosen:
    """The leaves that a call differentiates, separate from everything else.

    Attributes:
        values: the chosen leaves.
        structure: the arguments that contain them, without these leaves.
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
        """Return the arguments to differentiate."""
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
            # Only the flags are stored: tracers must not outlive the trace.
            self._used = [not state.__usable__() for state in states_in(trees)]
        return collected

    def pass_on_use(self, by: str) -> None:
        """Use up the caller's States if the function used up their copies in the arguments.

        A State that is passed on can be used once, and so can these.
        """
        if any(self._used):
            for state, is_used in zip(states_in(self.trees()), self._used, strict=True):
                if is_used:
                    state.__use_up__(by)

    def apart(
        self, fn: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
        """Return the call of `collect` for one more run, which changes nothing that the caller has.

        Its States are copies, so the caller's can still be used once.
        """
        arrays, structure = divide((fn, self._args, kwargs))
        fn, args, kwargs = structure.assemble(arrays)
        chosen = set(self.structure.positions or ())
        mask = [i in chosen for i in range(self.structure.treedef.num_leaves)]
        twin = Chosen(args, self._indices, mask, self._several)
        return lambda values: twin.collect(fn, values, kwargs)

    def place(self, derivatives: Sequence[Any]) -> PyTree:
        """Trees like the arguments, with a derivative for each chosen leaf and None elsewhere.

        One tree, or a tuple of trees if several arguments were chosen.
        """
        trees = as_derivatives(self.structure.place(derivatives), self.structure.treedef)
        return trees if self._several else trees[0]

    def named(self, fn: Callable[..., Any]) -> list[tuple[str, Any]]:
        """Return every leaf of the arguments, with its path."""
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
    """Find the leaves that a call differentiates.

    Args:
        where: the name of the transform.
        fn: the function that is called.
        args: its positional arguments.
        kwargs: its arguments by keyword, which are not differentiated.
        wrt: chooses leaves; for several arguments, also one spec for each, or a dict by name.
        argnums: chooses arguments; None for the first.

    Returns:
        The chosen leaves, perhaps none.

    Raises:
        ArgumentError: if an argument is missing, or is chosen twice.
        SpecError: if `wrt` does not fit.
    """
    indices = _indices(where, fn, args, kwargs, argnums)
    trees = [args[i] for i in indices]
    if wrt is None:
        masks = [trainable_mask(tree, None, where) for tree in trees]
    else:
        masks = _picked(where, wrt, trees, _names(fn, indices), isinstance(argnums, tuple))
    chosen = Chosen(args, indices, [m for mask in masks for m in mask], isinstance(argnums, tuple))
    # For all at once, and before names are made, because most models share nothing.
    if has_twice(chosen.values):
        for name, tree, mask in zip(_names(fn, indices), trees, masks, strict=True):
            warn_of_shared(f"{where} of {function_name(fn)}", name, tree, mask)
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
    # Counted from the front, so that 0 and -2 are found to be one argument.
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
    """Return the leaves of each argument that `wrt` selects."""
    if isinstance(wrt, (str, type)):
        wrt = as_selector(wrt)
    # A path is misspelt only if it matches in none of the arguments.
    shared = isinstance(wrt, Selector)
    if isinstance(wrt, Selector):
        refuse_unmatched([wrt], trees)
    specs = _specs(where, wrt, names) if several else [wrt]
    return [
        trainable_mask(tree, spec, f"{where}(wrt) for {name}", not shared, name)
        for tree, spec, name in zip(trees, specs, names, strict=True)
    ]


def _specs(where: str, wrt: Any, names: list[str]) -> list[Any]:
    """Return one filter spec for each of several arguments."""
    if class_of(wrt) in (tuple, list):
        if len(wrt) == len(names):
            return list(wrt)
        raise SpecError(
            f"{where}(wrt)",
            f"one spec for each of the {len(names)} differentiated arguments",
            f"{len(wrt)}",
            hint=["pass specs by name; others use the default:", f"wrt={{{names[0]!r}: True}}"],
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
    """Raise an error if a call has nothing to differentiate.

    Args:
        where: the name of the transform.
        fn: the function that is called.
        chosen: the chosen leaves.
        wrt: the spec that chose them.
        hint: what to do; by default, differentiate another argument.

    Raises:
        ArgumentError: if no leaf was chosen; the error lists the leaves there are.
        UnfinishedError: if the reason is a layer that lacks a size.
    """
    if chosen.values:
        return
    only, *others = chosen.trees()
    refuse_unfinished(f"{where} of {function_name(fn)}", (only, *others) if others else only)
    raise ArgumentError(
        f"{where} of {function_name(fn)}: there is no floating array to differentiate"
        + ("" if wrt is None else f", picked by wrt={wrt!r}"),
        at=[f"{place}: {describe(leaf)}" for place, leaf in chosen.named(fn)],
        hint=hint or f"pm.{where}(f, argnums=1)",
    )


def chosen_places(fn: Callable[..., Any], chosen: Chosen) -> list[tuple[str, Any]]:
    """Return the paths of the chosen leaves, each with its leaf."""
    every = chosen.named(fn)
    return [every[i] for i in chosen.structure.positions or ()]


def as_argnums(where: str, argnums: Any) -> int | tuple[int, ...] | None:
    """`argnums` as an int, a tuple or None.

    Raises:
        ArgumentError: if it is none of these.
    """
    kind = class_of(argnums)
    if argnums is None or (issubclass(kind, int) and kind is not bool):
        return argnums
    several = tuple(argnums) if issubclass(kind, (list, tuple)) else ()
    if not several or any(class_of(i) is not int for i in several):
        raise ArgumentError(f"{where}(argnums)", "an int or several", describe(argnums))
    return several
