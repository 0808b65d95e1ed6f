"""Gradients with respect to the trainable leaves of any tree.

JAX differentiates a function of the list of chosen leaves. The gradient is a tree like the
argument, with None for all other leaves. The rest of the function's result comes back beside the
loss, packed.
"""

from __future__ import annotations

import functools as ft
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.chosen_leaves import choose, trainable_mask, warn_of_shared
from pytreemod.transform.packing import pack, unpack
from pytreemod.transform.sowing import collecting, split_sown
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.typing import FilterSpec, class_of, is_instance, jtu

_P = ParamSpec("_P")
_T = TypeVar("_T")
_V = TypeVar("_V")
_A = TypeVar("_A")
_X = TypeVar("_X")
# The argument that is differentiated comes first, by position.
_Fn: TypeAlias = Callable[Concatenate[_X, _P], _V]
_First: TypeAlias = Literal[0] | None
_Yes: TypeAlias = Literal[True]
_No: TypeAlias = Literal[False]


def trainable(model: _T, wrt: FilterSpec | None = None) -> tuple[_T, _T]:
    """Split a model as `filter_grad` does: the leaves to differentiate, and the rest.

    Initialize the optimizer with the first half, so that weight decay never changes leaves without
    a gradient.

    **Law.** `combine(*trainable(m, wrt)) == m`, and the first half has the structure of
    `filter_grad(f, wrt=wrt)(m)`.

    Args:
        model: any tree.
        wrt: as for [`filter_grad`][pytreemod.filter_grad].

    Returns:
        Two trees of the model's structure, with None for each leaf that is in the other.

    Warns:
        SharedParameterWarning: if one parameter is at two paths of the model.

    Examples:
        >>> import jax.numpy as jnp
        >>> trainable({"w": jnp.ones(2), "n": 3})
        ({'n': None, 'w': Array([1., 1.], dtype=float32)}, {'n': 3, 'w': None})
    """
    leaves, treedef = jtu.tree_flatten(model)
    mask = trainable_mask(model, wrt, "trainable(wrt)")
    warn_of_shared("trainable", "model", model, mask)
    pairs = list(zip(leaves, mask, strict=True))
    return (
        treedef.unflatten([x if m else None for x, m in pairs]),
        treedef.unflatten([None if m else x for x, m in pairs]),
    )


class DerivativeOptions(NamedTuple):
    """What to differentiate by, whether the function returns more, and JAX's own options."""

    wrt: FilterSpec | None
    argnums: int | tuple[int, ...] | None
    has_aux: bool
    jax: tuple[tuple[str, Any], ...]
    microbatches: int = 1
    reduce: str = "mean"


class _ValueAndGrad(Transformed):
    __slots__ = ()

    options: DerivativeOptions
    transform_name = "filter_value_and_grad"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the value of the function and the gradient."""
        options, where = self.options, f"{self.transform_name} of {self.__name__}"
        once = ft.partial(self._differentiate, where)
        if options.microbatches == 1:
            loss, grads, aux = once(args, kwargs)
        else:
            # Imported here, because it needs scans, which most programs do not load.
            from pytreemod.transform.microbatches import in_microbatches

            loss, grads, aux = in_microbatches(where, once, args, kwargs, options)
        return self.result((loss, aux) if options.has_aux else loss, aux, grads)

    def _differentiate(
        self, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        wrt, argnums, has_aux, options, *_ = self.options
        chosen = choose(self.transform_name, self.fn, args, wrt, argnums)

        def run(values: list[Any]) -> tuple[Any, Any]:
            result = collecting(self.fn)(*chosen.args(values), **kwargs)
            result, with_sown = split_sown(result)
            loss, aux = pair_of(result, where) if has_aux else (result, None)
            if issubclass(class_of(loss), (tuple, list)):
                fact = f"{where}: the loss is a {class_of(loss).__name__}"
                raise ArgumentError(fact, hint=f"pm.{self.transform_name}(f, has_aux=True)")
            return loss, pack(with_sown(aux))

        differentiate = jax.value_and_grad(run, has_aux=True, **dict(options))
        (loss, packed), grads = differentiate(chosen.values)
        return loss, chosen.place(grads), unpack(packed)

    def result(self, value: Any, aux: Any, grads: Any) -> Any:
        """Return the result for the caller."""
        return value, grads


class _Grad(_ValueAndGrad):
    __slots__ = ()

    transform_name = "filter_grad"

    def result(self, value: Any, aux: Any, grads: Any) -> Any:
        """Return the result for the caller."""
        return (grads, aux) if self.options.has_aux else grads


def pair_of(result: Any, where: str, pair: str = "loss, aux") -> tuple[Any, Any]:
    """Return the two values that a function must return.

    Args:
        result: the value that it returned.
        where: its name in errors.
        pair: the names of the two.

    Raises:
        ArgumentError: if it is not a pair.
    """
    if issubclass(class_of(result), (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise ArgumentError(f"{where}: the result is no pair ({pair}), but {describe(result)}")


def differentiating(
    cls: type[Transformed],
    fun: Any,
    wrt: Any,
    argnums: Any,
    has_aux: bool,
    options: dict[str, Any],
    **batch: Any,
) -> Any:
    """Put a function under a transform with these options; without one, return a decorator.

    Raises:
        ArgumentError: if the function is not callable.
    """
    if fun is None:
        given = {"wrt": wrt, "argnums": argnums, "has_aux": has_aux, "options": options, **batch}
        return ft.partial(differentiating, cls, **given)
    check_callable(cls.transform_name, fun)
    # As an option, which must have a hash.
    if is_instance(argnums, Iterable):
        argnums = tuple(map(operator.index, argnums))
    elif argnums is not None:
        argnums = operator.index(argnums)
    jax_options = tuple(sorted(options.items()))
    return cls(fun, DerivativeOptions(wrt, argnums, has_aux, jax_options, **batch))


@overload
def filter_value_and_grad(
    fun: _Fn[_X, _P, _V], *, argnums: _First = ..., has_aux: _No = ..., **options: Any
) -> _Fn[_X, _P, tuple[_V, _X]]: ...
@overload
def filter_value_and_grad(
    fun: _Fn[_X, _P, tuple[_V, _A]], *, argnums: _First = ..., has_aux: _Yes, **options: Any
) -> _Fn[_X, _P, tuple[tuple[_V, _A], _X]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[_P, Any], *, argnums: int | Sequence[int], has_aux: bool = ..., **options: Any
) -> Callable[_P, Any]: ...
@overload
def filter_value_and_grad(
    *, argnums: _First = ..., has_aux: _No = ..., **options: Any
) -> Callable[[_Fn[_X, _P, _V]], _Fn[_X, _P, tuple[_V, _X]]]: ...
@overload
def filter_value_and_grad(
    *, argnums: _First = ..., has_aux: _Yes, **options: Any
) -> Callable[[_Fn[_X, _P, tuple[_V, _A]]], _Fn[_X, _P, tuple[tuple[_V, _A], _X]]]: ...
@overload
def filter_value_and_grad(
    *, argnums: int | Sequence[int], has_aux: bool = ..., **options: Any
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def filter_value_and_grad(
    fun: Callable[..., Any] | None = None,
    *,
    wrt: FilterSpec | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    microbatches: int = 1,
    reduce: Literal["mean", "sum"] = "mean",
    **gradkwargs: Any,
) -> Any:
    """Like [`filter_grad`][pytreemod.filter_grad], but returns the value as well.

    Args:
        fun: a function with a scalar result; without it, the result is a decorator.
        wrt: the leaves to differentiate; see `filter_grad`.
        argnums: the arguments to differentiate; see `filter_grad`.
        has_aux: whether `fun` returns a pair `(loss, aux)`.
        microbatches: the number of parts of the batch; see `filter_grad`.
        reduce: `"mean"` or `"sum"`; see `filter_grad`.
        **gradkwargs: options of `jax.value_and_grad` (`holomorphic`, `allow_int`, ...).

    Returns:
        A function that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
        ArgumentError: as for `filter_grad`.
        SpecError: as for `filter_grad`.

    Examples:
        >>> import jax.numpy as jnp
        >>> f = filter_value_and_grad(lambda m, x: m["w"] * x)
        >>> f({"w": jnp.asarray(2.0), "name": "a"}, 3.0)  # doctest: +NORMALIZE_WHITESPACE
        (Array(6., dtype=float32, weak_type=True),
         {'name': None, 'w': Array(3., dtype=float32, weak_type=True)})
    """
    batch = {"microbatches": microbatches, "reduce": reduce}
    return differentiating(_ValueAndGrad, fun, wrt, argnums, has_aux, gradkwargs, **batch)


@overload
def filter_grad(
    fun: _Fn[_X, _P, _V], *, argnums: _First = ..., has_aux: _No = ..., **options: Any
) -> _Fn[_X, _P, _X]: ...
@overload
def filter_grad(
    fun: _Fn[_X, _P, tuple[_V, _A]], *, argnums: _First = ..., has_aux: _Yes, **options: Any
) -> _Fn[_X, _P, tuple[_X, _A]]: ...
@overload
def filter_grad(
    fun: Callable[_P, Any], *, argnums: int | Sequence[int], has_aux: bool = ..., **options: Any
) -> Callable[_P, Any]: ...
@overload
def filter_grad(
    *, argnums: _First = ..., has_aux: _No = ..., **options: Any
) -> Callable[[_Fn[_X, _P, Any]], _Fn[_X, _P, _X]]: ...
@overload
def filter_grad(
    *, argnums: _First = ..., has_aux: _Yes, **options: Any
) -> Callable[[_Fn[_X, _P, tuple[Any, _A]]], _Fn[_X, _P, tuple[_X, _A]]]: ...
@overload
def filter_grad(
    *, argnums: int | Sequence[int], has_aux: bool = ..., **options: Any
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def filter_grad(
    fun: Callable[..., Any] | None = None,
    *,
    wrt: FilterSpec | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    microbatches: int = 1,
    reduce: Literal["mean", "sum"] = "mean",
    **gradkwargs: Any,
) -> Any:
    """Return the gradient of a scalar function of any trees.

    Differentiates the floating arrays of the first argument, except buffers
    ([`buffer`][pytreemod.buffer]). The gradient has the structure of the argument, with None for
    every other leaf.

    **Law.** On the differentiated arrays it equals `jax.grad` of the function of these arrays
    alone.

    Args:
        fun: a function with a scalar result; without it, the result is a decorator.
        wrt: the leaves to differentiate: a selector, a predicate or a prefix tree of these and of
            bools. In any case, only floating arrays are differentiated. With several `argnums`, the
            spec applies to each argument; or pass a tuple with one spec for each. You can also pass
            a dict by argument name, where missing names get the default.
        argnums: the arguments to differentiate: an int (the gradient is a tree), or several (a
            tuple of trees).
        has_aux: whether `fun` returns a pair `(loss, aux)`; `aux` may be any tree.
        microbatches: the number of parts in which the batch is computed, one after the other, to
            save memory. Arrays after the first argument are split along axis 0 (close over one
            that is not to be split), a key `()` is split, a State goes from part to part. `aux` is
            that of the whole batch: joined along axis 0, or reduced as the loss.
        reduce: `"mean"` if the loss is a mean over examples, each treated alone; or `"sum"`.
        **gradkwargs: options of `jax.grad` (`holomorphic`, `allow_int`, ...).

    Returns:
        A function that returns the gradient, or `(gradient, aux)`.

    Raises:
        ArgumentError: if the differentiated argument is passed by keyword, or has nothing to
            differentiate, or if `fun` returns no pair with `has_aux`; or a part of `aux` has no
            axis of examples, and no mean.
        ShapeError: if the arrays to split have not one size that is a multiple of `microbatches`.
        SpecError: if `wrt` does not fit the arguments.

    Warns:
        SharedParameterWarning: if one parameter is at two differentiated paths. Each path has its
            own gradient.
        LostUpdateWarning: if `fun` uses up a State, and does not return its successor.

    Examples:
        >>> import jax.numpy as jnp
        >>> grad = filter_grad(lambda m, x: m["w"] * x)
        >>> grad({"w": jnp.asarray(2.0), "name": "a"}, 3.0)
        {'name': None, 'w': Array(3., dtype=float32, weak_type=True)}
    """
    batch = {"microbatches": microbatches, "reduce": reduce}
    return differentiating(_Grad, fun, wrt, argnums, has_aux, gradkwargs, **batch)
