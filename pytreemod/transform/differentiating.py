"""Gradients with respect to the trainable leaves of any tree."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, overload

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, describe, explain
from pytreemod.transform.wrapping import (
    Transformed,
    argument_name,
    check_callable,
    function_name,
    positional_names,
)
from pytreemod.tree.nodes import places
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.prefixes import mask_of
from pytreemod.tree.selecting import Selector, refuse_unmatched
from pytreemod.tree.snapshots import divide
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu, untyped_jax

_P = ParamSpec("_P")
_T = TypeVar("_T")
_V = TypeVar("_V")
_A = TypeVar("_A")
_X = TypeVar("_X")
# The argument that is differentiated comes first, and by position.
_Function: TypeAlias = Callable[Concatenate[_X, _P], _V]


@ft.lru_cache(maxsize=512)
def _buffers(treedef: Any) -> tuple[bool, ...]:
    """Which leaves of trees of this structure are buffers."""
    stand_in = treedef.unflatten([0] * treedef.num_leaves)
    return tuple(spot.role == "buffer" for spot in places(stand_in))


def trainable_mask(tree: PyTree, wrt: FilterSpec | None, where: str) -> list[bool]:
    """Which leaves `filter_grad` differentiates: inexact arrays that `wrt` picks.

    Args:
        tree: the argument to differentiate.
        wrt: a filter spec; None for everything that is no buffer.
        where: what to call `wrt` in errors.

    Returns:
        One bool for each leaf.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if wrt is None:
        chosen: Sequence[bool] = [not b for b in _buffers(treedef)]
    elif isinstance(wrt, Selector):
        chosen = wrt.pick(list(places(tree)), tree, None)
    else:
        chosen = mask_of(wrt, tree, where=where)
    return [c and is_inexact_array(x) for c, x in zip(chosen, leaves, strict=True)]


def trainable(model: _T, wrt: FilterSpec | None = None) -> tuple[_T, _T]:
    """Split a model as `filter_grad` does: what is differentiated, and the rest.

    Initialize the optimizer with the first half, so that weight decay never reaches what the
    gradient did not.

    **Law.** `combine(*trainable(m, wrt)) == m`, and the first half has the structure of
    `filter_grad(f, wrt=wrt)(m)`.

    Args:
        model: any tree.
        wrt: as for [`filter_grad`][pytreemod.filter_grad].

    Returns:
        Two trees of the model's structure, with None in the place of what is in the other.

    Examples:
        >>> trainable({"w": jnp.ones(2), "n": 3})
        ({'n': None, 'w': Array([1., 1.], dtype=float32)}, {'n': 3, 'w': None})
    """
    leaves, treedef = jtu.tree_flatten(model)
    if isinstance(wrt, Selector):
        refuse_unmatched([wrt], [model])
    mask = trainable_mask(model, wrt, "trainable(wrt)")
    pairs = list(zip(leaves, mask, strict=True))
    return (
        treedef.unflatten([x if m else None for x, m in pairs]),
        treedef.unflatten([None if m else x for x, m in pairs]),
    )


class _Grad(Transformed):
    """A function under `filter_value_and_grad`, or `filter_grad`."""

    __slots__ = ()

    @classmethod
    def transform_name(cls) -> str:
        return "filter_value_and_grad"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        wrt, argnums, has_aux, gradkwargs = self.options
        chosen = self._chosen(argnums, args, kwargs)
        flat = {i: jtu.tree_flatten(args[i]) for i in chosen}
        where = f"{self.transform_name()}(wrt)"
        if isinstance(wrt, Selector):
            refuse_unmatched([wrt], [args[i] for i in chosen])
        masks = {i: trainable_mask(args[i], wrt, where) for i in chosen}
        if not any(map(any, masks.values())):
            self._refuse_nothing(args, chosen)
        fn = self.fn

        def run(diffs: dict[int, list[Any]]) -> tuple[Any, Any]:
            full = list(args)
            for i, (leaves, treedef) in flat.items():
                new = iter(diffs[i])
                full[i] = treedef.unflatten(
                    [next(new) if m else x for x, m in zip(leaves, masks[i], strict=True)]
                )
            value, aux = self._parted(fn(*full, **kwargs), has_aux)
            arrays, box[0] = divide(aux)
            return value, arrays

        box: list[Any] = [None]
        diffs = {i: [x for x, m in zip(flat[i][0], masks[i], strict=True) if m] for i in chosen}
        differentiate = untyped_jax.value_and_grad(run, has_aux=True, **dict(gradkwargs))
        (value, arrays), grads = differentiate(diffs)
        trees: list[Any] = []
        for i in chosen:
            new = iter(grads[i])
            trees.append(flat[i][1].unflatten([next(new) if m else None for m in masks[i]]))
        gradient = trees[0] if argnums is None or isinstance(argnums, int) else tuple(trees)
        return self.result(value, box[0].assemble(arrays), gradient, has_aux)

    @staticmethod
    def result(value: Any, aux: Any, gradient: Any, has_aux: bool) -> Any:
        """What the caller gets."""
        return ((value, aux) if has_aux else value), gradient

    def _chosen(
        self, argnums: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        indices = (0,) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
        names = positional_names(self.fn)
        for i in indices:
            if not -len(args) <= i < len(args):
                name = argument_name(names, i)
                raise ArgumentError(
                    explain(
                        f"{self.transform_name()} of {function_name(self.fn)}",
                        f"argument {i} ({name}), which is differentiated, by position",
                        f"{name!r} by keyword"
                        if name in kwargs
                        else f"{len(args)} positional arguments",
                        cure=[
                            "pass it first, without its name:",
                            f"{function_name(self.fn)}({name}, ...)",
                        ],
                    )
                )
        return tuple(i % len(args) for i in indices)

    def _refuse_nothing(self, args: tuple[Any, ...], chosen: tuple[int, ...]) -> None:
        names = positional_names(self.fn)
        spots = [
            f"{path_text(path, argument_name(names, i))}: {describe(leaf)}"
            for i in chosen
            for path, leaf in jtu.tree_leaves_with_path(args[i])
        ]
        raise ArgumentError(
            explain(
                f"{self.transform_name()} of {function_name(self.fn)}",
                "at least one floating array to differentiate",
                "none" if self.options[0] is None else f"none picked by wrt={self.options[0]!r}",
                places=spots,
                cure=[
                    "differentiate another argument, or pass arrays:",
                    "pm.filter_grad(f, argnums=1)",
                ],
            )
        )

    def _parted(self, result: Any, has_aux: bool) -> tuple[Any, Any]:
        where = f"{self.transform_name()} of {function_name(self.fn)}"
        parts: Any = result
        if has_aux:
            if not isinstance(result, tuple) or len(parts) != 2:
                raise ArgumentError(
                    explain(
                        where,
                        "a pair (loss, aux), for has_aux=True",
                        describe(result)
                        if not isinstance(result, tuple)
                        else f"{len(parts)} values",
                        cure=["return both:", "return loss, aux"],
                    )
                )
            value, aux = parts
        else:
            value, aux = result, None
        if isinstance(value, (tuple, list, dict)) or value is None:
            raise ArgumentError(
                explain(
                    where,
                    "a scalar loss",
                    f"a {class_of(value).__name__}",
                    cure=[
                        "return the loss alone, or a pair and say so:",
                        "pm.filter_grad(f, has_aux=True)",
                    ],
                )
            )
        if jnp.shape(value) != ():
            raise ShapeError(
                explain(
                    where,
                    "a scalar loss",
                    describe(value),
                    cure=["reduce it, for instance by", "return jnp.mean(loss)"],
                )
            )
        return value, aux


class _OnlyGrad(_Grad):
    __slots__ = ()

    @classmethod
    def transform_name(cls) -> str:
        return "filter_grad"

    @staticmethod
    def result(value: Any, aux: Any, gradient: Any, has_aux: bool) -> Any:
        return (gradient, aux) if has_aux else gradient


def _make(
    cls: type[_Grad], fun: Any, wrt: Any, argnums: Any, has_aux: bool, gradkwargs: dict[str, Any]
) -> Any:
    where = cls.transform_name()
    if issubclass(class_of(argnums), list):
        argnums = tuple(argnums)
    if not _is_argnums(argnums):
        raise ArgumentError(explain(f"{where}(argnums)", "an int or several", describe(argnums)))
    options = (wrt, argnums, has_aux, tuple(sorted(gradkwargs.items())))
    if fun is None:
        given = {"wrt": wrt, "argnums": argnums, "has_aux": has_aux, "gradkwargs": gradkwargs}
        return ft.partial(_make, cls, **given)
    check_callable(where, fun)
    return cls(fun, options)


def _is_argnums(argnums: Any) -> bool:
    kind = class_of(argnums)
    if argnums is None or (issubclass(kind, int) and kind is not bool):
        return True
    return issubclass(kind, tuple) and len(argnums) > 0 and all(class_of(i) is int for i in argnums)


@overload
def filter_value_and_grad(
    fun: _Function[_X, _P, _V],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    **gradkwargs: Any,
) -> _Function[_X, _P, tuple[_V, _X]]: ...
@overload
def filter_value_and_grad(
    fun: _Function[_X, _P, tuple[_V, _A]],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    **gradkwargs: Any,
) -> _Function[_X, _P, tuple[tuple[_V, _A], _X]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[_P, Any],
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    **gradkwargs: Any,
) -> Callable[_P, Any]: ...
@overload
def filter_value_and_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, _V]], _Function[_X, _P, tuple[_V, _X]]]: ...
@overload
def filter_value_and_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, tuple[_V, _A]]], _Function[_X, _P, tuple[tuple[_V, _A], _X]]]: ...
@overload
def filter_value_and_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    **gradkwargs: Any,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def filter_value_and_grad(
    fun: Callable[..., Any] | None = None,
    *,
    wrt: FilterSpec | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **gradkwargs: Any,
) -> Any:
    """Like [`filter_grad`][pytreemod.filter_grad], returning the value as well.

    Args:
        fun: a function with a scalar result; left out, a decorator is returned.
        wrt: which leaves to differentiate; see `filter_grad`.
        argnums: which arguments; see `filter_grad`.
        has_aux: whether `fun` returns a pair `(loss, aux)`.
        **gradkwargs: for `jax.value_and_grad` (`holomorphic`, `allow_int`, ...).

    Returns:
        A function that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
        ArgumentError: as for `filter_grad`.
        ShapeError: as for `filter_grad`.

    Examples:
        >>> f = filter_value_and_grad(lambda m, x: m["w"] * x)
        >>> f({"w": jnp.asarray(2.0), "name": "a"}, 3.0)  # doctest: +NORMALIZE_WHITESPACE
        (Array(6., dtype=float32, weak_type=True),
         {'name': None, 'w': Array(3., dtype=float32, weak_type=True)})
    """
    return _make(_Grad, fun, wrt, argnums, has_aux, gradkwargs)


@overload
def filter_grad(
    fun: _Function[_X, _P, Any],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    **gradkwargs: Any,
) -> _Function[_X, _P, _X]: ...
@overload
def filter_grad(
    fun: _Function[_X, _P, tuple[Any, _A]],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    **gradkwargs: Any,
) -> _Function[_X, _P, tuple[_X, _A]]: ...
@overload
def filter_grad(
    fun: Callable[_P, Any],
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    **gradkwargs: Any,
) -> Callable[_P, Any]: ...
@overload
def filter_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, Any]], _Function[_X, _P, _X]]: ...
@overload
def filter_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, tuple[Any, _A]]], _Function[_X, _P, tuple[_X, _A]]]: ...
@overload
def filter_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    **gradkwargs: Any,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def filter_grad(
    fun: Callable[..., Any] | None = None,
    *,
    wrt: FilterSpec | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **gradkwargs: Any,
) -> Any:
    """The gradient of a scalar function of any trees.

    Differentiates the floating arrays of the first argument, save buffers
    ([`buffer`][pytreemod.buffer]). The gradient has the argument's structure, with None in the
    place of every leaf that was not differentiated.

    **Law.** On what is differentiated it equals `jax.grad` of the function of these arrays alone.

    Args:
        fun: a function with a scalar result; left out, a decorator is returned.
        wrt: which leaves to differentiate: a selector, a predicate or a prefix tree of bools,
            applied to each differentiated argument. Floating arrays only, in any case.
        argnums: which arguments: an int (the gradient is a tree), or several (a tuple of trees).
        has_aux: whether `fun` returns a pair `(loss, aux)`; `aux` may be any tree.
        **gradkwargs: for `jax.grad` (`holomorphic`, `allow_int`, ...).

    Returns:
        A function that returns the gradient, or `(gradient, aux)`.

    Raises:
        ArgumentError: the differentiated argument was given by keyword, has nothing to
            differentiate, or `fun` does not return what `has_aux` says.
        ShapeError: the loss is no scalar.

    Examples:
        >>> grad = filter_grad(lambda m, x: m["w"] * x)
        >>> grad({"w": jnp.asarray(2.0), "name": "a"}, 3.0)
        {'name': None, 'w': Array(3., dtype=float32, weak_type=True)}
    """
    return _make(_OnlyGrad, fun, wrt, argnums, has_aux, gradkwargs)
