"""Jacobians and Hessians of functions of any trees.

JAX differentiates a function of the list of chosen leaves, which returns the list of differentiable
leaves of the result. The Jacobian is a tree like the result; each of its leaves is a tree like the
argument. A Hessian is the forward-mode Jacobian of a reverse-mode Jacobian.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pytreemod.transform.arguments import function_name
from pytreemod.transform.chosen_leaves import as_derivatives, choose
from pytreemod.transform.gradients import DerivativeOptions, differentiating
from pytreemod.transform.linear_maps import of_arrays
from pytreemod.transform.packing import unpack
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.snapshots import divide
from pytreemod.tree.tangents import is_differentiable
from pytreemod.typing import FilterSpec, untyped_jax


class _Forward(Transformed):
    __slots__ = ()

    options: DerivativeOptions
    transform_name = "filter_jacfwd"
    differentiate: ClassVar[Callable[..., Any]] = staticmethod(untyped_jax.jacfwd)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the Jacobian."""
        wrt, argnums, has_aux, options, *_ = self.options
        where = f"{self.transform_name} of {function_name(self.fn)}"
        chosen = choose(self.transform_name, self.fn, args, wrt, argnums)

        run = of_arrays(self.fn, chosen, kwargs, where, has_aux, is_differentiable, True)
        jacobians, packed = self.differentiate(run, has_aux=True, **dict(options))(chosen.values)
        result, aux = unpack(packed)
        structure = divide(result, is_differentiable)[1]
        found = structure.place([chosen.place(jacobian) for jacobian in jacobians])
        as_derivatives(found)
        return (found, aux) if has_aux else found


class _Reverse(_Forward):
    __slots__ = ()

    transform_name = "filter_jacrev"
    differentiate: ClassVar[Callable[..., Any]] = staticmethod(untyped_jax.jacrev)


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
            differentiate; if the result has no floating array, or is no pair with `has_aux`.
        SpecError: if `wrt` does not fit the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> jac = filter_jacfwd(lambda d: {"y": d["x"] ** 2, "name": d["name"]})
        >>> jac({"x": jnp.asarray([1.0, 2.0]), "name": "a"})
        {'name': None, 'y': {'name': None, 'x': Array([[2., 0.],
               [0., 4.]], dtype=float32)}}
    """
    return differentiating(_Forward, fun, wrt, argnums, has_aux, jaxkwargs)


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
    return differentiating(_Reverse, fun, wrt, argnums, has_aux, jaxkwargs)


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
    options = {"argnums": argnums, "wrt": wrt, **jaxkwargs}
    if fun is None:
        return ft.partial(filter_hessian, has_aux=has_aux, **options)
    check_callable("filter_hessian", fun)
    return filter_jacfwd(filter_jacrev(fun, has_aux, **options), has_aux, **options)
