"""Derivatives along a direction, and the linear maps behind them: jvp, vjp, linearize.

A linear map goes from trees to trees, but only some leaves of these are part of it. So each end is
a space (`_Space`): a structure, and the shapes of the arrays that are part of it. A space reads
the user's trees, with None for zero, and puts JAX's arrays into trees.

In a result, those arrays are part that depend on the arguments. JAX knows them: the tangents of all
others are zero by their types. It does not report this outside. So the user's function is traced
with one more input (`_MARKER`), whose tangent is never zero. Inside the trace, each array of the
result is tested (`zero_tangents`).
"""

from __future__ import annotations

import functools as ft
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.methods import bind
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.signatures import parameters_of, positional_names
from pytreemod.transform.boundary.sowing import watching, with_collected
from pytreemod.transform.boundary.supplying import supplied
from pytreemod.transform.boundary.wrapping import (
    Transformed,
    argument_name,
    check_callable,
    function_name,
)
from pytreemod.transform.derivatives.chosen_leaves import Chosen, as_derivatives, choose
from pytreemod.transform.derivatives.results import pair_of
from pytreemod.transform.derivatives.tangents import beside
from pytreemod.transform.derivatives.watching import watch
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.traces import zero_tangents
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu

# One more input, whose tangent is never zero; see `zero_tangents`.
_MARKER = np.ones((), np.float32)


def _is_computed(leaf: Any) -> bool:
    """Whether a leaf of a result may depend on the arguments: NumPy arrays are constants."""
    return is_inexact_array(leaf) and isinstance(leaf, jax.Array)


def _divide_nonzero(marker: Any, result: PyTree) -> tuple[list[Any], Structure]:
    """Divide a result: the arrays with a tangent that is not zero, and the rest."""
    # Only floating JAX arrays are tested; for all other leaves the answer is known.
    candidates, structure = divide(result, _is_computed)
    mask = [False] * structure.treedef.num_leaves
    for i, zero in zip(structure.positions or (), zero_tangents(marker, candidates), strict=True):
        mask[i] = not zero
    return divide(result, mask)


class _Jvp(Transformed):
    """A function under `filter_jvp`: takes primals and tangents."""

    __slots__ = ()

    transform_name = "filter_jvp"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # The instance is the function's, not this transform's: it has no tangent.
        return self if instance is None else _Jvp(bind(self.fn, instance), self.options)

    @raises_checks
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  (as jax.jvp takes them)
        self, primals: Sequence[Any], tangents: Sequence[Any], /, **kwargs: Any
    ) -> tuple[Any, Any]:
        args = _as_sequence(primals, "primals")
        found = self._tangents(args, _as_sequence(tangents, "tangents"))
        mask = [tangent is not None for tangent in found]
        chosen = Chosen(args, tuple(range(len(args))), mask, several=True)
        fn = supplied(self.fn)

        def run(marker: Any, diffs: list[Any]) -> tuple[Any, Any]:
            result, collected = chosen.collect(fn, diffs, kwargs)
            outs, parted = _divide_nonzero(marker, result)
            return outs, pack(with_collected((result, _space(parted, outs)), collected))

        outs, tangents_out, packed = jax.jvp(
            run,
            (_MARKER, chosen.values),
            (_MARKER, [tangent for tangent in found if tangent is not None]),
            has_aux=True,
        )
        result, space = unpack(packed)
        chosen.pass_on_use("filter_jvp")
        return space.fill(result, outs), space.place(tangents_out)

    def _tangents(self, args: tuple[Any, ...], tangents: tuple[Any, ...]) -> list[Any]:
        where = f"filter_jvp of {function_name(self.fn)}"
        if len(args) != len(tangents):
            raise ArgumentError(
                where,
                f"a tangent for each of the {len(args)} primals",
                f"{len(tangents)} tangents",
                hint=["None means zero:", "pm.filter_jvp(f, (x, y), (dx, None))"],
            )

        def roots() -> list[str]:
            names = positional_names(self.fn)
            return [argument_name(names, i) for i in range(len(args))]

        expected = "tangents like the primals"
        return beside(args, tangents, where=where, expected=expected, root=roots)


def _as_sequence(value: Any, name: str) -> tuple[Any, ...]:
    if issubclass(class_of(value), (tuple, list)):
        return tuple(value)
    raise ArgumentError(
        f"filter_jvp({name})",
        "a tuple with one entry for each argument",
        describe(value),
        hint=["for one argument:", f"({'x' if name == 'primals' else 'dx'},)"],
    )


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
        array. It has None for other leaves, and for those that do not depend on leaves with a
        tangent.

    Raises:
        ArgumentError: if `primals` or `tangents` are not tuples, or differ in length.
        DerivativeError: if a tangent has another structure, shape or dtype than its primal; the
            error names its path.

    Examples:
        >>> x, dx = jnp.asarray(3.0), jnp.asarray(1.0)
        >>> filter_jvp(lambda d, n: {"y": d["x"] ** n, "n": n}, ({"x": x}, 2), ({"x": dx}, None))
        ({'n': 2, 'y': Array(9., dtype=float32, weak_type=True)}, \
{'n': None, 'y': Array(6., dtype=float32, weak_type=True)})
    """
    check_callable("filter_jvp", fn)
    made = _Jvp(fn, None)
    if primals is _MISSING and tangents is _MISSING and not kwargs:
        return made
    if primals is _MISSING or tangents is _MISSING:
        raise ArgumentError(
            "filter_jvp",
            "primals and tangents",
            "only primals" if tangents is _MISSING and primals is not _MISSING else "none",
            hint=["for example:", "pm.filter_jvp(f, (x,), (dx,))"],
        )
    return made(primals, tangents, **kwargs)


@dataclass(frozen=True)
class _Space:
    """The trees that a linear map takes or returns: the paths and shapes of their arrays."""

    treedef: Any
    structs: tuple[Any, ...]

    @property
    def skeleton(self) -> PyTree:
        return self.treedef.unflatten([_FIXED if s is None else s for s in self.structs])

    def fill(self, tree: PyTree, values: Sequence[Any]) -> PyTree:
        """Return a tree of this space with other values for its arrays."""
        # By position, because an array of the tree may be constant, and not part of the space.
        return divide(tree, [s is not None for s in self.structs])[1].assemble(values)

    def place(self, values: Sequence[Any]) -> PyTree:
        """A tree like those of this space, with a value for each array and None elsewhere."""
        new = iter(values)
        tree = self.treedef.unflatten([s if s is None else next(new) for s in self.structs])
        return as_derivatives(tree, self.treedef)


class _Fixed:
    """Represents a leaf that is not differentiated."""

    def __repr__(self) -> str:
        return "a leaf that is not differentiated"


_FIXED = _Fixed()


def _space(structure: Structure, values: Sequence[Any]) -> _Space:
    structs: list[Any] = [None] * structure.treedef.num_leaves
    for i, x in zip(structure.positions or (), values, strict=True):
        structs[i] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _Space(structure.treedef, tuple(structs))


class _LinearMap:
    """A linear map between trees; a pytree whose children are the arrays it was made of."""

    __slots__ = ("apply", "codomain", "domain", "name")

    def __init__(self, apply: Any, name: str, domain: _Space, codomain: _Space):
        self.apply = apply
        self.name = name
        self.domain = domain
        self.codomain = codomain

    def __init_subclass__(cls) -> None:
        jtu.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def read(self, tree: PyTree, root: str, expected: str) -> list[Any]:
        """Return the arrays of a tree of the domain, with zeros for None."""
        structs = self.domain.structs
        found = beside(self.domain.skeleton, tree, where=self.name, expected=expected, root=root)
        pairs = [(x, s) for x, s in zip(found, structs, strict=True) if s is not None]
        return [jnp.zeros(s.shape, s.dtype) if x is None else x for x, s in pairs]


def _flatten_with_keys(node: _LinearMap) -> Any:
    aux = (type(node), node.name, node.domain, node.codomain)
    return ((jtu.GetAttrKey("apply"), node.apply),), aux


def _unflatten(aux: Any, children: Any) -> _LinearMap:
    cls, name, domain, codomain = aux
    return cls(children[0], name, domain, codomain)


class _Pullback(_LinearMap):
    """The map of `filter_vjp`: from a cotangent of the result to those of the arguments."""

    __slots__ = ()

    @raises_checks
    def __call__(self, /, *cotangents: PyTree) -> tuple[PyTree, ...]:
        if len(cotangents) != 1:
            expected = "one argument, the cotangent of the result"
            raise ArgumentError(self.name, expected, str(len(cotangents)))
        (cotangent,) = cotangents
        values = self.read(cotangent, "result", "cotangents like the result")
        (gradients,) = self.apply(values)
        return self.codomain.place(gradients)


class _Pushforward(_LinearMap):
    """The map of `filter_linearize`: from tangents of the arguments to those of the result."""

    __slots__ = ()

    @raises_checks
    def __call__(self, /, *tangents: PyTree) -> PyTree:
        values = self.read(tangents, "tangents", "tangents like the primals")
        return self.codomain.place(self.apply(_MARKER, values))


class _Options(NamedTuple):
    has_aux: bool
    wrt: FilterSpec | None


class _Linearizing(Transformed):
    """A function under `filter_vjp` or `filter_linearize`."""

    __slots__ = ()

    options: _Options
    is_backward: ClassVar[bool]

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        name, fn, has_aux = self.transform_name, self.fn, self.options.has_aux
        chosen = choose(name, fn, args, kwargs, self.options.wrt, tuple(range(len(args))))
        # Forward maps have no cotangents.
        seen = watch(fn, args, kwargs) if watching and self.is_backward else None
        fn = supplied(fn)

        def run(marker: Any, diffs: list[Any]) -> tuple[Any, Any]:
            called = fn
            if seen is not None:
                diffs, zeros = seen.divided(diffs)
                called = seen.supply(fn, zeros)
            (result, collected), aux = chosen.collect(called, diffs, kwargs), None
            if has_aux:
                where = f"{name} of {function_name(fn)}"
                result, aux = pair_of(result, where, "result, aux", reason=", for has_aux=True")
            outs, structure = self.divide(marker, result)
            whole = result, aux, _space(structure, outs)
            if seen is not None:
                return outs, pack(seen.hold(whole, collected))
            return outs, pack(with_collected(whole, collected))

        zeros = [] if seen is None else seen.zeros
        outs, apply, packed = self.linearize(run, [*chosen.values, *zeros])
        whole = unpack(packed)
        if seen is not None:
            whole, apply = seen.show_later(whole, apply)
        result, aux, space = whole
        chosen.pass_on_use(name)
        linear = self.make(apply, _space(chosen.structure, chosen.values), space)
        result = space.fill(result, outs)
        return (result, linear, aux) if has_aux else (result, linear)

    @staticmethod
    @abstractmethod
    def divide(marker: Any, result: PyTree) -> tuple[list[Any], Structure]:
        """Divide the result: the differentiated arrays, and the rest."""

    @staticmethod
    @abstractmethod
    def linearize(run: Callable[..., Any], values: list[Any]) -> tuple[Any, Any, Any]:
        """Return the transform of JAX."""

    @abstractmethod
    def make(self, apply: Any, arguments: _Space, result: _Space) -> _LinearMap:
        """Return the map for the caller."""


class _Vjp(_Linearizing):
    __slots__ = ()

    transform_name = "filter_vjp"
    is_backward = True

    @staticmethod
    def divide(marker: Any, result: PyTree) -> tuple[list[Any], Structure]:
        # Arrays that do not depend on the arguments take a cotangent, too: the caller need not
        # know.
        return divide(result, is_inexact_array)

    @staticmethod
    def linearize(run: Callable[..., Any], values: list[Any]) -> tuple[Any, Any, Any]:
        return jax.vjp(ft.partial(run, _MARKER), values, has_aux=True)  # pyright: ignore[reportUnknownVariableType]  (typed in part)

    def make(self, apply: Any, arguments: _Space, result: _Space) -> _LinearMap:
        return _Pullback(apply, f"vjp_fn of {function_name(self.fn)}", result, arguments)


class _Linearize(_Linearizing):
    __slots__ = ()

    transform_name = "filter_linearize"
    is_backward = False

    @staticmethod
    def divide(marker: Any, result: PyTree) -> tuple[list[Any], Structure]:
        return _divide_nonzero(marker, result)

    @staticmethod
    def linearize(run: Callable[..., Any], values: list[Any]) -> tuple[Any, Any, Any]:
        return jax.linearize(run, _MARKER, values, has_aux=True)  # pyright: ignore[reportUnknownVariableType]  (typed in part)

    def make(self, apply: Any, arguments: _Space, result: _Space) -> _LinearMap:
        return _Pushforward(apply, f"f_jvp of {function_name(self.fn)}", arguments, result)


def _linearize(
    cls: type[_Linearizing], fun: Any, primals: tuple[Any, ...], has_aux: bool, wrt: Any
) -> Any:
    if fun is None:
        return ft.partial(_linearize, cls, primals=(), has_aux=has_aux, wrt=wrt)
    check_callable(cls.transform_name, fun)
    made = cls(fun, _Options(has_aux, wrt))
    # A function without parameters needs no primals.
    return made(*primals) if primals or parameters_of(fun) == () else made


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
        ArgumentError: if the result of `fun` does not fit `has_aux`.
        SpecError: if `wrt` does not fit the arguments.
        DerivativeError: when `vjp_fn` is called: if a structure, shape or dtype is not that of the
            result; the error names its path.

    Examples:
        >>> y, vjp_fn = filter_vjp(lambda d, n: d["x"] ** n, {"x": jnp.asarray(3.0)}, 2)
        >>> y, vjp_fn(jnp.asarray(1.0))
        (Array(9., dtype=float32, weak_type=True), \
({'x': Array(6., dtype=float32, weak_type=True)}, None))
    """
    return _linearize(_Vjp, fun, primals, has_aux, wrt)


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
        tree like the result, with None for all leaves except floating arrays that depend on the
        arguments. `f_jvp` is a pytree, so you can pass it to other transforms.

    Raises:
        ArgumentError: if the result of `fun` does not fit `has_aux`.
        SpecError: if `wrt` does not fit the arguments.
        DerivativeError: when `f_jvp` is called: if a structure, shape or dtype is not that of its
            primal; the error names its path.

    Examples:
        >>> y, f_jvp = filter_linearize(lambda d, n: d["x"] ** n, {"x": jnp.asarray(3.0)}, 2)
        >>> y, f_jvp({"x": jnp.asarray(1.0)}, None)
        (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    return _linearize(_Linearize, fun, primals, has_aux, wrt)
