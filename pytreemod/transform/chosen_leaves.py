"""Choose the arguments to differentiate, and their leaves.

The results are trees like the arguments, with derivatives as leaves. They look like models, so
`as_derivatives` marks each of them as a tree of derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytreemod.errors import ArgumentError, SharedParameterWarning, SpecError, describe, warn
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.tree.instances import is_module, mark_derivative
from pytreemod.tree.nodes import locations, roles_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.prefixes import mask_of
from pytreemod.tree.selecting import Locations, Selector, as_selector, refuse_unmatched
from pytreemod.tree.sharing import places_of_shared
from pytreemod.tree.snapshots import divide
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

    Raises:
        SpecError: if `wrt` does not fit the tree.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if wrt is None:
        chosen: Sequence[bool] = [role != "buffer" for role in roles_of(treedef)]
    elif isinstance(wrt, Selector) and not strict:
        chosen = wrt.pick(Locations(locations(tree)), tree, None)
    else:
        chosen = mask_of(wrt, tree, where=where, root=root)
    return [c and is_inexact_array(x) for c, x in zip(chosen, leaves, strict=True)]


def as_derivatives(tree: PyTree) -> PyTree:
    """Mark a new tree as a tree of derivatives.

    Its computed leaves refuse to be read, because the exponential of a gradient means nothing. An
    `Optimizer` refuses it as a model. Every tree of derivatives or flags that a user gets is marked
    here.
    """

    def visit(node: Any) -> bool:
        if is_module(node):
            mark_derivative(node)
        return False  # It is no leaf: there may be computed leaves below.

    jtu.tree_leaves(tree, is_leaf=visit)
    return tree


class Chosen:
    """The leaves that a call differentiates.

    Attributes:
        values: the chosen leaves.
        structure: the arguments that contain them, without these leaves.
    """

    def __init__(
        self, args: tuple[Any, ...], indices: tuple[int, ...], mask: list[bool], one: bool
    ):
        self._args, self._indices, self._one = args, indices, one
        self.values, self.structure = divide(self.trees(), mask)

    def trees(self) -> tuple[PyTree, ...]:
        """Return the arguments to differentiate."""
        return tuple(self._args[i] for i in self._indices)

    def args(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of the call with other values for the chosen leaves."""
        args = [*self._args]
        for i, tree in zip(self._indices, self.structure.assemble(values), strict=True):
            args[i] = tree
        return args

    def place(self, derivatives: Sequence[Any]) -> PyTree:
        """Trees like the arguments, with a derivative for each chosen leaf and None elsewhere."""
        trees = as_derivatives(self.structure.place(derivatives))
        return trees[0] if self._one else trees


def choose(
    where: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    wrt: FilterSpec | None,
    argnums: int | Sequence[int] | None,
    *,
    may_be_none: bool = False,
) -> Chosen:
    """Find the leaves that a call differentiates.

    Args:
        where: the name of the transform.
        fn: the function that is called.
        args: its positional arguments.
        wrt: chooses leaves; for several arguments, also one spec for each, or a dict by name.
        argnums: chooses arguments; None for the first.
        may_be_none: whether there may be nothing to differentiate.

    Raises:
        ArgumentError: if an argument is missing, is chosen twice, or has nothing to differentiate.
        SpecError: if `wrt` does not fit.
    """
    one = argnums is None or isinstance(argnums, int)
    asked = (argnums or 0,) if argnums is None or isinstance(argnums, int) else tuple(argnums)
    for i in asked:
        if not -len(args) <= i < len(args):
            name = Parameters.of(fn).name(i)
            fact = f"argument {i} ({name}), which is differentiated, is not passed by position"
            raise ArgumentError(f"{where} of {function_name(fn)}: {fact}")
    indices = tuple([i % len(args) for i in asked])
    if len({*indices}) < len(indices):
        raise ArgumentError(f"{where}(argnums): an argument is chosen twice", hint=repr(argnums))
    trees = [args[i] for i in indices]
    if wrt is None:
        masks = [trainable_mask(tree, None, where) for tree in trees]
    else:
        masks = _picked(where, wrt, trees, _names(fn, indices), one)
    chosen = Chosen(args, indices, [mark for mask in masks for mark in mask], one)
    # Paths take a second walk, so they are made only if they are needed.
    if len({*map(id, chosen.values)}) < len(chosen.values):
        for name, tree, mask in zip(_names(fn, indices), trees, masks, strict=True):
            warn_of_shared(f"{where} of {function_name(fn)}", name, tree, mask)
    if not chosen.values and not may_be_none:
        _refuse_nothing(where, fn, wrt, list(zip(_names(fn, indices), trees, strict=True)))
    return chosen


def _names(fn: Callable[..., Any], indices: tuple[int, ...]) -> list[str]:
    parameters = Parameters.of(fn)
    return [parameters.name(i) for i in indices]


def _picked(
    where: str, wrt: Any, trees: list[PyTree], names: list[str], one: bool
) -> list[list[bool]]:
    """Return the leaves of each argument that `wrt` selects."""
    specs: list[Any] = [wrt] * len(trees)
    strict = True
    if isinstance(wrt, (str, type, Selector)):
        # A path is misspelt only if it matches in none of the arguments.
        specs, strict = [as_selector(wrt)] * len(trees), False
        refuse_unmatched(specs[:1], trees)
    elif not one and class_of(wrt) in (tuple, list):
        if len(wrt) != len(trees):
            expected = f"one spec for each of the {len(trees)} differentiated arguments"
            raise SpecError(f"{where}(wrt)", expected, str(len(wrt)))
        specs = [*wrt]
    elif not one and class_of(wrt) is dict and any(name in names for name in wrt):
        unknown = [name for name in wrt if name not in names]
        if unknown:
            raise SpecError(f"{where}(wrt): {unknown[0]!r} is no differentiated argument")
        specs = [wrt.get(name) for name in names]
    return [
        trainable_mask(tree, spec, f"{where}(wrt) for {name}", strict, name)
        for tree, spec, name in zip(trees, specs, names, strict=True)
    ]


def _refuse_nothing(
    where: str, fn: Callable[..., Any], wrt: Any, named: list[tuple[str, PyTree]]
) -> None:
    title = f"{where} of {function_name(fn)}"
    at = [
        f"{path_text(path, name)}: {describe(leaf)}"
        for name, tree in named
        for path, leaf in jtu.tree_leaves_with_path(tree)
    ]
    picked = "" if wrt is None else f", picked by wrt={wrt!r}"
    raise ArgumentError(f"{title}: there is no floating array to differentiate{picked}", at=at)


def warn_of_shared(where: str, root: str, tree: PyTree, mask: Sequence[bool]) -> None:
    """Warn if a parameter to be trained is at two paths of a tree: it becomes two parameters.

    Args:
        where: the name of the caller.
        root: the name of the tree.
        tree: the model.
        mask: whether each leaf is trained.
    """
    trained = [id(x) for x, m in zip(jtu.tree_leaves(tree), mask, strict=True) if m]
    # By identity, without paths, because most models share nothing.
    groups = places_of_shared(tree, mask) if len({*trained}) < len(trained) else []
    if groups:
        name = root.lstrip(".") or "model"
        first, second, *_ = (path_text(place.path) for place in groups[0])
        warn(
            SharedParameterWarning,
            f"{where}: an array is at two paths, and will be trained as two",
            at=[" and ".join(path_text(each.path, root) for each in group) for group in groups],
            hint=f"{name} = pm.tie({name}, {second!r}, to={first!r})",
        )
