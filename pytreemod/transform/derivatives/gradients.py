"""Gradients with respect to the trainable leaves of any tree.

The leaves to differentiate are chosen and taken out (`chosen_leaves`). JAX differentiates a
function of the list of these leaves. The gradient is a tree like the argument, with None for all
other leaves. The rest of the function's result is returned beside the loss, packed.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    TypeVar,
    overload,
)

import jax
import jax.numpy as jnp

from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.shared_parameters import warn_of_shared
from pytreemod.transform.boundary.signatures import check_options
from pytreemod.transform.boundary.sowing import watching, with_collected
from pytreemod.transform.boundary.supplying import supplied
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.derivatives.chosen_leaves import (
    as_argnums,
    choose,
    chosen_places,
    refuse_nothing,
    trainable_mask,
)
from pytreemod.transform.derivatives.reaching import Unused, check_unused, reach_of, report_unused
from pytreemod.transform.derivatives.results import explain_loss, pair_of
from pytreemod.transform.derivatives.watching import watch
from pytreemod.transform.host.failures import raises_checks
from pytreemod.typing import FilterSpec, jtu, untyped_jax

_P = ParamSpec("_P")
_T = TypeVar("_T")
_V = TypeVar("_V")
_A = TypeVar("_A")
_X = TypeVar("_X")
# The argument that is differentiated comes first, by position.
_Function: TypeAlias = Callable[Concatenate[_X, _P], _V]


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

    Raises:
        UnfinishedError: if a layer lacks a size.

    Warns:
        SharedParameterWarning: if one parameter is at two paths of the model.

    Examples:
        >>> trainable({"w": jnp.ones(2), "n": 3})
        ({'n': None, 'w': Array([1., 1.], dtype=float32)}, {'n': 3, 'w': None})
    """
    leaves, treedef = jtu.tree_flatten(model)
    refuse_unfinished("trainable", model)
    mask = trainable_mask(model, wrt, "trainable(wrt)")
    warn_of_shared("trainable", "model", model, mask)
    pairs = list(zip(leaves, mask, strict=True))
    return (
        treedef.unflatten([x if m else None for x, m in pairs]),
        treedef.unflatten([None if m else x for x, m in pairs]),
    )


class _Options(NamedTuple):
    wrt: FilterSpec | None
    argnums: int | tuple[int, ...] | None
    has_aux: bool
    unused: Unused
    gradkwargs: tuple[tuple[str, Any], ...]


class _Grad(Transformed):
    """A function under `filter_value_and_grad`, or `filter_grad`."""

    __slots__ = ()

    options: _Options

    transform_name = "filter_value_and_grad"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        name, fn, options = self.transform_name, self.fn, self.options
        chosen = choose(name, fn, args, kwargs, options.wrt, options.argnums)
        refuse_nothing(name, fn, chosen, options.wrt)
        seen = watch(fn, args, kwargs) if watching else None
        fn = supplied(fn)
        unused = options.unused
        again = None if unused == "ignore" else chosen.apart(fn, kwargs)
        losses: list[Any] = []

        def run(diffs: list[Any]) -> tuple[Any, Any]:
            called = fn
            if seen is not None:
                diffs, zeros = seen.divided(diffs)
                called = seen.supply(fn, zeros)
            (value, collected), aux = chosen.collect(called, diffs, kwargs), None
            if options.has_aux:
                value, aux = pair_of(value, self._where(), "loss, aux", reason=", for has_aux=True")
            # Only bad ones are stored: JAX would report a good loss as a leaked tracer.
            is_good = isinstance(value, jax.Array) and value.shape == ()
            if not is_good or not jnp.issubdtype(value.dtype, jnp.floating):
                losses.append(value)
            if seen is not None:
                return value, pack(seen.hold(aux, collected))
            is_alone = not options.has_aux and collected is None
            return value, None if is_alone else pack(with_collected(aux, collected))

        differentiate = jax.value_and_grad(run, has_aux=True, **dict(options.gradkwargs))
        try:
            zeros = [] if seen is None else seen.zeros
            (value, packed), grads = differentiate([*chosen.values, *zeros])
        except TypeError as error:
            for loss in losses:
                is_holomorphic = bool(dict(options.gradkwargs).get("holomorphic"))
                explain_loss(name, fn, loss, error, is_holomorphic=is_holomorphic)
            raise
        finally:
            # Tracers must not outlive the trace.
            losses.clear()
        if again is not None:
            reach = reach_of(
                lambda diffs: _loss_of(again(diffs)[0], options.has_aux), chosen.values
            )
            report_unused(self._where(), unused, chosen_places(fn, chosen), reach)
        aux = None if packed is None else unpack(packed)
        if seen is not None:
            grads, cotangents = seen.divided(grads)
            aux = seen.show(aux, cotangents)
        chosen.pass_on_use(name)
        return self.result(value, aux, chosen.place(grads), options.has_aux)

    @staticmethod
    def result(value: Any, aux: Any, gradient: Any, has_aux: bool) -> Any:
        """Return the result for the caller."""
        return ((value, aux) if has_aux else value), gradient

    def _where(self) -> str:
        return f"{self.transform_name} of {function_name(self.fn)}"


def _loss_of(value: Any, has_aux: bool) -> Any:
    return value[0] if has_aux else value


class _OnlyGrad(_Grad):
    __slots__ = ()

    transform_name = "filter_grad"

    @staticmethod
    def result(value: Any, aux: Any, gradient: Any, has_aux: bool) -> Any:
        return (gradient, aux) if has_aux else gradient


def _make(
    cls: type[_Grad],
    fun: Any,
    wrt: Any,
    argnums: Any,
    has_aux: bool,
    unused: Any,
    gradkwargs: dict[str, Any],
) -> Any:
    where = cls.transform_name
    # Before there is a function, so that a mistake in a decorator is reported at its line.
    argnums = as_argnums(where, argnums)
    check_options(where, gradkwargs, untyped_jax.value_and_grad, filter_grad)
    check_unused(where, unused)
    kinds = tuple(sorted(gradkwargs.items()))
    options = _Options(wrt, argnums, has_aux, unused, kinds)
    if fun is None:
        return ft.partial(_under, cls, options)
    return _under(cls, options, fun)


def _under(cls: type[_Grad], options: _Options, fun: Any) -> _Grad:
    check_callable(cls.transform_name, fun)
    return cls(fun, options)


@overload
def filter_value_and_grad(
    fun: _Function[_X, _P, _V],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> _Function[_X, _P, tuple[_V, _X]]: ...
@overload
def filter_value_and_grad(
    fun: _Function[_X, _P, tuple[_V, _A]],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    unused: Unused = ...,
    **gradkwargs: Any,
) -> _Function[_X, _P, tuple[tuple[_V, _A], _X]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[_P, Any],
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[_P, Any]: ...
@overload
def filter_value_and_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, _V]], _Function[_X, _P, tuple[_V, _X]]]: ...
@overload
def filter_value_and_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, tuple[_V, _A]]], _Function[_X, _P, tuple[tuple[_V, _A], _X]]]: ...
@overload
def filter_value_and_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def filter_value_and_grad(
    fun: Callable[..., Any] | None = None,
    *,
    wrt: FilterSpec | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    unused: Unused = "ignore",
    **gradkwargs: Any,
) -> Any:
    """Like [`filter_grad`][pytreemod.filter_grad], but returns the value as well.

    Args:
        fun: a function with a scalar result; without it, the result is a decorator.
        wrt: the leaves to differentiate; see `filter_grad`.
        argnums: the arguments to differentiate; see `filter_grad`.
        has_aux: whether `fun` returns a pair `(loss, aux)`.
        unused: what to do about parameters without a gradient; see `filter_grad`.
        **gradkwargs: options of `jax.value_and_grad` (`holomorphic`, `allow_int`, ...).

    Returns:
        A function that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
        ArgumentError: as for `filter_grad`.
        ShapeError: as for `filter_grad`.
        SpecError: as for `filter_grad`.
        DerivativeError: as for `filter_grad`.

    Examples:
        >>> f = filter_value_and_grad(lambda m, x: m["w"] * x)
        >>> f({"w": jnp.asarray(2.0), "name": "a"}, 3.0)  # doctest: +NORMALIZE_WHITESPACE
        (Array(6., dtype=float32, weak_type=True),
         {'name': None, 'w': Array(3., dtype=float32, weak_type=True)})
    """
    return _make(_Grad, fun, wrt, argnums, has_aux, unused, gradkwargs)


@overload
def filter_grad(
    fun: _Function[_X, _P, Any],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> _Function[_X, _P, _X]: ...
@overload
def filter_grad(
    fun: _Function[_X, _P, tuple[Any, _A]],
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    unused: Unused = ...,
    **gradkwargs: Any,
) -> _Function[_X, _P, tuple[_X, _A]]: ...
@overload
def filter_grad(
    fun: Callable[_P, Any],
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[_P, Any]: ...
@overload
def filter_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[False] = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, Any]], _Function[_X, _P, _X]]: ...
@overload
def filter_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: Literal[0] | None = ...,
    has_aux: Literal[True],
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[[_Function[_X, _P, tuple[Any, _A]]], _Function[_X, _P, tuple[_X, _A]]]: ...
@overload
def filter_grad(
    *,
    wrt: FilterSpec | None = ...,
    argnums: int | Sequence[int],
    has_aux: bool = ...,
    unused: Unused = ...,
    **gradkwargs: Any,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def filter_grad(
    fun: Callable[..., Any] | None = None,
    *,
    wrt: FilterSpec | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    unused: Unused = "ignore",
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
        unused: what to do if the loss does not use a leaf, or cuts it off (`stop_gradient`,
            rounding, comparisons): `"error"`, `"warn"`, or `"ignore"`. The check costs one more
            trace of `fun`. It ignores gradients that are zero for other reasons: see
            [`gradient_report`][pytreemod.debug.gradient_report].
        **gradkwargs: options of `jax.grad` (`holomorphic`, `allow_int`, ...).

    Returns:
        A function that returns the gradient, or `(gradient, aux)`.

    Raises:
        ArgumentError: if the differentiated argument is passed by keyword, or has nothing to
            differentiate, or if the result of `fun` does not fit `has_aux`.
        ShapeError: if the loss is not a scalar.
        SpecError: if `wrt` does not fit the arguments.
        DerivativeError: with `unused="error"`, if leaves get no gradient; the error names all.

    Warns:
        UnusedParameterWarning: with `unused="warn"`, if leaves get no gradient.
        SharedParameterWarning: if one parameter is at two differentiated paths. Each path has its
            own gradient.
        LostUpdateWarning: if `fun` uses up a State, and does not return its successor.

    Examples:
        >>> grad = filter_grad(lambda m, x: m["w"] * x)
        >>> grad({"w": jnp.asarray(2.0), "name": "a"}, 3.0)
        {'name': None, 'w': Array(3., dtype=float32, weak_type=True)}
    """
    return _make(_OnlyGrad, fun, wrt, argnums, has_aux, unused, gradkwargs)
