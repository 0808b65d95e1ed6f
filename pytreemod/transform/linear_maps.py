"""Derivatives along a direction, and the linear maps behind them: jvp, vjp, linearize.

Only the floating arrays of the trees are part of a linear map. At each end the user's trees have
None for zero, and for everything else.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError
from pytreemod.module.methods import BoundMethod
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.chosen_leaves import Chosen, as_derivatives, choose
from pytreemod.transform.gradients import pair_of
from pytreemod.transform.packing import pack, unpack
from pytreemod.transform.sowing import collecting, split_sown
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.tangents import match_derivative
from pytreemod.typing import FilterSpec, PyTree, jtu, untyped_jax


class _Jvp(Transformed):
    __slots__ = ()

    transform_name = "filter_jvp"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # The instance is the function's, not this transform's: it has no tangent.
        return self if instance is None else _Jvp(BoundMethod(self.fn, instance), self.options)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  (as jax.jvp takes them)
        self, primals: Sequence[Any], tangents: Sequence[Any], /, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return the result, and its tangent."""
        where, args = f"filter_jvp of {function_name(self.fn)}", tuple(primals)
        if len(args) != len(tangents):
            fact = f"{where}: {len(args)} primals have {len(tangents)} tangents"
            raise ArgumentError(fact, hint="pm.filter_jvp(f, (x, y), (dx, None))")
        found = match_derivative(args, tuple(tangents), where, "tangents")
        mask = [tangent is not None for tangent in found]
        chosen = Chosen(args, tuple(range(len(args))), mask, one=False)
        moving = [tangent for tangent in found if tangent is not None]
        run = of_arrays(self.fn, chosen, kwargs, where, has_aux=False)
        outs, moved, packed = jax.jvp(run, (chosen.values,), (moving,), has_aux=True)
        result, _ = unpack(packed)
        return _filled(result, outs), _Space.of(result).place(moved)


_MISSING: Any = object()


def filter_jvp(
    fn: Callable[..., Any],
    primals: Sequence[Any] = _MISSING,
    tangents: Sequence[Any] = _MISSING,
    **kwargs: Any,
) -> Any:
    """Return the derivative along a direction: `jax.jvp` for functions of any trees.

    **Law.** On the arrays that have a tangent it equals `jax.jvp` of the function of these alone;
    everything else is constant.

    Args:
        fn: the function. As a decorator, `filter_jvp(fn)` returns a function of `primals`,
            `tangents` and keywords.
        primals: a tuple of positional arguments.
        tangents: a tuple of the same structure. None means zero, at a leaf or for everything
            below a node; only floating arrays and numbers have another tangent.
        **kwargs: arguments for `fn` by keyword, which are constant.

    Returns:
        The result of `fn`, and a tree of the same structure with the tangent of each floating
        array, and None for other leaves.

    Raises:
        ArgumentError: if `primals` and `tangents` differ in length.
        StructureError: if a tangent has another structure, shape or dtype than its primal; the
            error names its path.

    Examples:
        >>> import jax.numpy as jnp
        >>> x, dx = jnp.asarray(3.0), jnp.asarray(1.0)
        >>> filter_jvp(lambda d, n: {"y": d["x"] ** n, "n": n}, ({"x": x}, 2), ({"x": dx}, None))
        ({'n': 2, 'y': Array(9., dtype=float32, weak_type=True)}, \
{'n': None, 'y': Array(6., dtype=float32, weak_type=True)})
    """
    check_callable("filter_jvp", fn)
    made = _Jvp(fn, None)
    if primals is _MISSING and tangents is _MISSING and not kwargs:
        return made
    return made(primals, tangents, **kwargs)


def of_arrays(
    fn: Any,
    chosen: Chosen,
    kwargs: dict[str, Any],
    where: str,
    has_aux: bool,
    counts: Callable[[Any], bool] = is_inexact_array,
    is_needed: bool = False,
) -> Callable[[list[Any]], Any]:
    """Return the function of the chosen arrays: to those of the result that count, and all of it.

    Args:
        fn: the user's function.
        chosen: the arrays, in its positional arguments.
        kwargs: its arguments by keyword.
        where: its name in errors.
        has_aux: whether it returns a pair `(result, aux)`.
        counts: which leaves of the result have a derivative.
        is_needed: whether there must be one.
    """

    def run(values: list[Any]) -> tuple[Any, Any]:
        result, with_sown = split_sown(collecting(fn)(*chosen.args(values), **kwargs))
        result, aux = pair_of(result, where, "result, aux") if has_aux else (result, None)
        outs, _ = divide(result, counts)
        if is_needed and not outs:
            raise ArgumentError(f"{where}: the result has no floating array")
        return outs, pack(with_sown((result, aux)))

    return run


def _filled(result: PyTree, outs: Sequence[Any]) -> PyTree:
    return divide(result, is_inexact_array)[1].assemble(outs)


@dataclass(frozen=True)
class _Space:
    """One end of a linear map: a structure, and the shapes of the arrays that are part of it."""

    treedef: Any
    structs: tuple[Any, ...]

    @classmethod
    def of(cls, tree: PyTree, structure: Structure | None = None) -> _Space:
        leaves, treedef = jtu.tree_flatten(tree)
        found = divide(tree, is_inexact_array)[1] if structure is None else structure
        at = {*(found.positions or ())}
        return cls(treedef, tuple(_struct(x) if i in at else None for i, x in enumerate(leaves)))

    def place(self, values: Sequence[Any]) -> PyTree:
        """A tree with a value for each array of the space, and None elsewhere."""
        new = iter(values)
        tree = self.treedef.unflatten([s if s is None else next(new) for s in self.structs])
        return as_derivatives(tree)

    def read(self, tree: PyTree, where: str, root: str) -> list[Any]:
        """The arrays of a tree of derivatives, with zeros for None."""
        skeleton = self.treedef.unflatten([_FIXED if s is None else s for s in self.structs])
        found = match_derivative(skeleton, tree, where, root)
        pairs = zip(found, self.structs, strict=True)
        return [jnp.zeros(s.shape, s.dtype) if x is None else x for x, s in pairs if s is not None]


class _Fixed:
    """Represents a leaf that is not part of the linear map."""

    def __repr__(self) -> str:
        return "a leaf without a derivative"


_FIXED = _Fixed()


def _struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


class _LinearMap:
    """A linear map between trees; a pytree whose children are the arrays it was made of."""

    def __init__(self, apply: Any, name: str, arguments: _Space, result: _Space):
        self.apply, self.name, self.arguments, self.result = apply, name, arguments, result

    def __init_subclass__(cls) -> None:
        jtu.register_pytree_with_keys(cls, _flatten_with_keys, ft.partial(_unflatten, cls))

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _flatten_with_keys(node: _LinearMap) -> Any:
    return ((jtu.GetAttrKey("apply"), node.apply),), (node.name, node.arguments, node.result)


def _unflatten(cls: type[_LinearMap], aux: Any, children: Any) -> _LinearMap:
    return cls(children[0], *aux)


class _Pullback(_LinearMap):
    """The map of `filter_vjp`: from a cotangent of the result to those of the arguments."""

    @with_short_errors
    def __call__(self, cotangent: PyTree, /) -> tuple[PyTree, ...]:
        (found,) = self.apply(self.result.read(cotangent, self.name, "cotangent"))
        return self.arguments.place(found)


class _Pushforward(_LinearMap):
    """The map of `filter_linearize`: from tangents of the arguments to those of the result."""

    @with_short_errors
    def __call__(self, /, *tangents: PyTree) -> PyTree:
        return self.result.place(self.apply(self.arguments.read(tangents, self.name, "tangents")))


class _Options(NamedTuple):
    has_aux: bool
    wrt: FilterSpec | None


class _Vjp(Transformed):
    __slots__ = ()

    options: _Options
    transform_name = "filter_vjp"
    linearize: ClassVar[Callable[..., Any]] = staticmethod(untyped_jax.vjp)
    linear_map: ClassVar[type[_LinearMap]] = _Pullback

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result, and the linear map at these arguments."""
        name, (has_aux, wrt) = self.transform_name, self.options
        where = f"{name} of {function_name(self.fn)}"
        chosen = choose(name, self.fn, args, wrt, range(len(args)), may_be_none=True)
        run = of_arrays(self.fn, chosen, kwargs, where, has_aux)
        outs, apply, packed = self.linearize(run, chosen.values, has_aux=True)
        result, aux = unpack(packed)
        ends = _Space.of(args, chosen.structure), _Space.of(result)
        linear = self.linear_map(apply, f"linear map of {where}", *ends)
        result = _filled(result, outs)
        return (result, linear, aux) if has_aux else (result, linear)


class _Linearize(_Vjp):
    __slots__ = ()

    transform_name = "filter_linearize"
    linearize: ClassVar[Callable[..., Any]] = staticmethod(untyped_jax.linearize)
    linear_map: ClassVar[type[_LinearMap]] = _Pushforward


def _linear(cls: type[_Vjp], fun: Any, primals: tuple[Any, ...], has_aux: bool, wrt: Any) -> Any:
    if fun is None:
        return ft.partial(_linear, cls, primals=(), has_aux=has_aux, wrt=wrt)
    check_callable(cls.transform_name, fun)
    made = cls(fun, _Options(has_aux, wrt))
    # A function without parameters needs no primals.
    return made(*primals) if primals or not Parameters.of(fun).every else made


def filter_vjp(
    fun: Callable[..., Any] | None = None,
    *primals: Any,
    has_aux: bool = False,
    wrt: FilterSpec | None = None,
) -> Any:
    """The value and the map from cotangents to gradients: `jax.vjp` for functions of any trees.

    Differentiates the floating arrays of all arguments, except buffers
    ([`buffer`][pytreemod.buffer]), as [`filter_grad`][pytreemod.filter_grad] does for one.

    **Law.** For a scalar function, `filter_vjp(f, x)[1](1.0) == (filter_grad(f)(x),)`.

    Args:
        fun: the function; without it, the result is a decorator. Without primals, the result is a
            function of them.
        *primals: its arguments.
        has_aux: whether `fun` returns a pair `(result, aux)`; `aux` may be any tree.
        wrt: the leaves to differentiate: a selector for every argument, one for each in a tuple,
            or a dict by argument name; see `filter_grad`.

    Returns:
        `(result, vjp_fn)` or `(result, vjp_fn, aux)`. `vjp_fn` takes a tree like the result, with a
        cotangent for each floating array and None (zero) for the rest. It returns a tuple with a
        tree for each argument, which has None at every leaf that was not differentiated. `vjp_fn`
        is a pytree, so you can pass it to other transforms.

    Raises:
        ArgumentError: if `fun` returns no pair with `has_aux`.
        SpecError: if `wrt` does not fit the arguments.
        StructureError: when `vjp_fn` is called: if a structure, shape or dtype is not that of the
            result; the error names its path.

    Examples:
        >>> import jax.numpy as jnp
        >>> y, vjp_fn = filter_vjp(lambda d, n: d["x"] ** n, {"x": jnp.asarray(3.0)}, 2)
        >>> y, vjp_fn(jnp.asarray(1.0))
        (Array(9., dtype=float32, weak_type=True), \
({'x': Array(6., dtype=float32, weak_type=True)}, None))
    """
    return _linear(_Vjp, fun, primals, has_aux, wrt)


def filter_linearize(
    fun: Callable[..., Any] | None = None,
    *primals: Any,
    has_aux: bool = False,
    wrt: FilterSpec | None = None,
) -> Any:
    """The value and the linear map that approximates a function: `jax.linearize` for any trees.

    Like [`filter_jvp`][pytreemod.filter_jvp], for many tangents at one point. `fun` runs once; each
    call of the map computes only the values that depend on the tangents.

    **Law.** `filter_linearize(f, *p)[1](*t) == filter_jvp(f, p, t)[1]`, where tangents that are
    None count as zeros.

    Args:
        fun: the function; without it, the result is a decorator. Without primals, the result is a
            function of them.
        *primals: its arguments.
        has_aux: whether `fun` returns a pair `(result, aux)`; `aux` may be any tree.
        wrt: the leaves that may have a tangent, as for [`filter_vjp`][pytreemod.filter_vjp]; by
            default all floating arrays except buffers.

    Returns:
        `(result, f_jvp)` or `(result, f_jvp, aux)`. `f_jvp` takes a tangent for each argument: a
        tree like it, with None for zeros and for leaves that are not differentiated. It returns a
        tree like the result, with None for all leaves except floating arrays. `f_jvp` is a pytree,
        so you can pass it to other transforms.

    Raises:
        ArgumentError: if `fun` returns no pair with `has_aux`.
        SpecError: if `wrt` does not fit the arguments.
        StructureError: when `f_jvp` is called: if a structure, shape or dtype is not that of its
            primal; the error names its path.

    Examples:
        >>> import jax.numpy as jnp
        >>> y, f_jvp = filter_linearize(lambda d, n: d["x"] ** n, {"x": jnp.asarray(3.0)}, 2)
        >>> y, f_jvp({"x": jnp.asarray(1.0)}, None)
        (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    return _linear(_Linearize, fun, primals, has_aux, wrt)
