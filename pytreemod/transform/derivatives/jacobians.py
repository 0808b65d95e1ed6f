"""Jacobians and Hessians of functions of any trees.

JAX differentiates a function of the list of chosen leaves, which returns the list of differentiable
leaves of the result. The Jacobian is a tree with the structure of the result. Each of its leaves
is a tree with the structure of the argument. A Hessian is the forward-mode Jacobian of a
reverse-mode Jacobian.
"""

from __future__ import annotations

import functools as ft
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, DerivativeError, describe
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.signatures import check_options
from pytreemod.transform.boundary.sowing import with_collected
from pytreemod.transform.boundary.supplying import supplied
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.derivatives.chosen_leaves import (
    as_argnums,
    as_derivatives,
    choose,
    chosen_places,
    refuse_nothing,
)
from pytreemod.transform.derivatives.results import pair_of
from pytreemod.transform.derivatives.tangents import is_differentiable
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array_like
from pytreemod.tree.snapshots import divide
from pytreemod.typing import FilterSpec, PyTree, jtu, untyped_jax


class _Options(NamedTuple):
    has_aux: bool
    argnums: int | tuple[int, ...] | None
    wrt: FilterSpec | None
    jaxkwargs: tuple[tuple[str, Any], ...]


class _Jacobian(Transformed):
    """A function under `filter_jacfwd` or `filter_jacrev`."""

    __slots__ = ()

    options: _Options
    # Arrays that JAX wants to be real, unless the function is holomorphic.
    of: ClassVar[str]

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        name, fn, options = self.transform_name, self.fn, self.options
        where = f"{name} of {function_name(fn)}"
        chosen = choose(name, fn, args, kwargs, options.wrt, options.argnums)
        refuse_nothing(name, fn, chosen, options.wrt)
        is_real = not dict(options.jaxkwargs).get("holomorphic")
        if is_real and self.of == "arguments":
            # Here the paths are known; JAX's error names no leaf.
            self._refuse_complex(where, chosen_places(fn, chosen))
        fn = supplied(fn)

        def run(diffs: list[Any]) -> tuple[Any, Any]:
            (result, collected), aux = chosen.collect(fn, diffs, kwargs), None
            if options.has_aux:
                result, aux = pair_of(result, where, "result, aux", reason=", for has_aux=True")
            if is_real and self.of == "results":
                named = jtu.tree_leaves_with_path(result)
                self._refuse_complex(where, [(path_text(p, "result"), leaf) for p, leaf in named])
            outs, _ = divide(result, is_differentiable)
            if not outs:
                _refuse_no_result(where, result)
            # The result is returned, too, because it shows the paths of the Jacobians.
            return outs, pack(with_collected((result, aux), collected))

        jacobians, packed = self.differentiate(run, dict(options.jaxkwargs))(chosen.values)
        result, aux = unpack(packed)
        _, structure = divide(result, is_differentiable)
        matrices = structure.place([chosen.place(jacobian) for jacobian in jacobians])
        as_derivatives(matrices, structure.treedef)
        chosen.pass_on_use(name)
        return (matrices, aux) if options.has_aux else matrices

    def _refuse_complex(self, where: str, leaves: Sequence[tuple[str, Any]]) -> None:
        found = [f"{place}: {describe(leaf)}" for place, leaf in leaves if _is_complex(leaf)]
        if found:
            raise DerivativeError(
                where,
                f"real {self.of}",
                "complex ones",
                at=found,
                hint=[
                    "for a holomorphic function:",
                    f"pm.{self.transform_name}(f, holomorphic=True)",
                ],
            )

    @staticmethod
    @abstractmethod
    def differentiate(run: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Return the transform of JAX."""


def _is_complex(leaf: Any) -> bool:
    is_number = is_array_like(leaf)
    return is_number and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating))


def _refuse_no_result(where: str, result: PyTree) -> None:
    named = jtu.tree_leaves_with_path(result)
    places = [f"{path_text(path, 'result')}: {describe(leaf)}" for path, leaf in named]
    expected = "at least one floating array in the result"
    raise ArgumentError(where, expected, "none", at=places)


class _Forward(_Jacobian):
    __slots__ = ()
    of = "arguments"

    transform_name = "filter_jacfwd"

    @staticmethod
    def differentiate(run: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        return jax.jacfwd(run, has_aux=True, **options)  # pyright: ignore[reportUnknownVariableType]  (typed in part)


class _Reverse(_Jacobian):
    __slots__ = ()
    of = "results"

    transform_name = "filter_jacrev"

    @staticmethod
    def differentiate(run: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        return jax.jacrev(run, has_aux=True, **options)  # pyright: ignore[reportUnknownVariableType]  (typed in part)


class _Hessian(Transformed):
    """A function under `filter_hessian`."""

    __slots__ = ()

    transform_name = "filter_hessian"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Errors of either half name `filter_hessian`.
        return _HessianOfRows(_RowsOfHessian(self.fn, self.options), self.options)(*args, **kwargs)


class _RowsOfHessian(_Reverse):
    __slots__ = ()

    transform_name = "filter_hessian"


class _HessianOfRows(_Forward):
    __slots__ = ()

    transform_name = "filter_hessian"


def _make(
    cls: type[Transformed],
    fun: Any,
    has_aux: bool,
    argnums: Any,
    wrt: Any,
    jaxkwargs: dict[str, Any],
) -> Any:
    where = cls.transform_name
    # Before there is a function, so that a mistake in a decorator is reported at its line.
    argnums = as_argnums(where, argnums)
    function = getattr(untyped_jax, where.removeprefix("filter_"))
    check_options(where, jaxkwargs, function, filter_jacfwd)
    if fun is None:
        given = {"has_aux": has_aux, "argnums": argnums, "wrt": wrt, "jaxkwargs": jaxkwargs}
        return ft.partial(_make, cls, **given)
    check_callable(where, fun)
    return cls(fun, _Options(has_aux, argnums, wrt, tuple(sorted(jaxkwargs.items()))))


def filter_jacfwd(
    fun: Callable[..., Any] | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] | None = None,
    wrt: FilterSpec | None = None,
    **jaxkwargs: Any,
) -> Any:
    """Return the Jacobian by forward mode: `jax.jacfwd` for functions of any trees.

    Good for few inputs and many outputs. By default it differentiates the same leaves as
    [`filter_grad`][pytreemod.filter_grad]: the floating arrays of the first argument, except
    buffers. The Jacobian has the structure of the result. At each floating array or number it has
    a tree with the structure of the argument. Each leaf of that tree is `d result / d leaf`, of
    shape `(*result.shape, *leaf.shape)`. Every other leaf of either is None.

    **Law.** On the differentiated arrays it equals `jax.jacfwd` of the function of these arrays
    alone.

    Args:
        fun: the function; without it, the result is a decorator.
        has_aux: whether `fun` returns a pair `(result, aux)`; `aux` may be any tree.
        argnums: the arguments: an int, or several (then each Jacobian is a tuple of trees).
        wrt: the leaves, as for `filter_grad`.
        **jaxkwargs: options of `jax.jacfwd` (`holomorphic`).

    Returns:
        A function that returns the Jacobian, or `(jacobian, aux)`.

    Raises:
        ArgumentError: if the differentiated argument is passed by keyword, or has nothing to
            differentiate; if the result has no floating array, or does not fit `has_aux`.
        SpecError: if `wrt` does not fit the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> jac = filter_jacfwd(lambda d: {"y": d["x"] ** 2, "name": d["name"]})
        >>> jac({"x": jnp.asarray([1.0, 2.0]), "name": "a"})
        {'name': None, 'y': {'name': None, 'x': Array([[2., 0.],
               [0., 4.]], dtype=float32)}}
    """
    return _make(_Forward, fun, has_aux, argnums, wrt, jaxkwargs)


def filter_jacrev(
    fun: Callable[..., Any] | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] | None = None,
    wrt: FilterSpec | None = None,
    **jaxkwargs: Any,
) -> Any:
    """Return the Jacobian by reverse mode: `jax.jacrev` for functions of any trees.

    Good for many inputs and few outputs; otherwise as [`filter_jacfwd`][pytreemod.filter_jacfwd].

    **Law.** On the differentiated arrays it equals `jax.jacrev` of the function of these arrays
    alone.

    Args:
        fun: the function; without it, the result is a decorator.
        has_aux: whether `fun` returns a pair `(result, aux)`; `aux` may be any tree.
        argnums: the arguments: an int, or several (then each Jacobian is a tuple of trees).
        wrt: the leaves, as for [`filter_grad`][pytreemod.filter_grad].
        **jaxkwargs: options of `jax.jacrev` (`holomorphic`).

    Returns:
        A function that returns the Jacobian, or `(jacobian, aux)`.

    Raises:
        ArgumentError: as for `filter_jacfwd`.
        SpecError: if `wrt` does not fit the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> filter_jacrev(lambda x, n: x**n)(jnp.asarray([1.0, 2.0]), 3)
        Array([[ 3.,  0.],
               [ 0., 12.]], dtype=float32)
    """
    return _make(_Reverse, fun, has_aux, argnums, wrt, jaxkwargs)


def filter_hessian(
    fun: Callable[..., Any] | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] | None = None,
    wrt: FilterSpec | None = None,
    **jaxkwargs: Any,
) -> Any:
    """Return the matrix of second derivatives: `jax.hessian` for functions of any trees.

    **Law.** It equals `filter_jacfwd(filter_jacrev(f))`, with the same options for both.

    Args:
        fun: the function; without it, the result is a decorator.
        has_aux: whether `fun` returns a pair `(result, aux)`; `aux` may be any tree.
        argnums: the arguments: an int, or several (then each level is a tuple of trees).
        wrt: the leaves, as for [`filter_grad`][pytreemod.filter_grad].
        **jaxkwargs: options of `jax.hessian` (`holomorphic`).

    Returns:
        A function that returns the Hessian, or `(hessian, aux)`. For a scalar function of a tree,
        the Hessian is a tree like the argument, with another such tree at each differentiated leaf.

    Raises:
        ArgumentError: as for [`filter_jacfwd`][pytreemod.filter_jacfwd].
        SpecError: if `wrt` does not fit the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> filter_hessian(lambda d: d["x"] ** 3)({"x": jnp.asarray(2.0), "name": "a"})
        {'name': None, 'x': {'name': None, 'x': Array(12., dtype=float32, weak_type=True)}}
    """
    return _make(_Hessian, fun, has_aux, argnums, wrt, jaxkwargs)
