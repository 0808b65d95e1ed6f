"""Trace functions without running them: shapes, jaxprs, closures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from pytreemod.errors import StructureError
from pytreemod.transform.arguments import function_name
from pytreemod.transform.packing import as_function_of_arrays, pack, unpack_structs
from pytreemod.transform.sowing import tracked, unseen
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.comparison import compare
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.prefixes import partition
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.traces import run_again
from pytreemod.typing import PyTree, jtu

_R = TypeVar("_R")

# The default of a function that may also be passed by keyword. It leaves the name free for an
# argument of the function itself.
_BY_KEYWORD: Any = object()


@with_short_errors
def filter_eval_shape(fun: Callable[..., _R] = _BY_KEYWORD, /, *args: Any, **kwargs: Any) -> _R:
    """The result of a call with `jax.ShapeDtypeStruct`s for arrays, without computing anything.

    Args:
        fun: any function; for a class, the result is the skeleton of an instance.
        *args: its arguments; a `jax.ShapeDtypeStruct` may replace an array.
        **kwargs: its arguments by keyword.

    Returns:
        The tree of the result; its static values are those that `fun` returned.

    Raises:
        ArgumentError: if `fun` is not callable.

    Examples:
        >>> import jax.numpy as jnp
        >>> filter_eval_shape(lambda n: {"x": jnp.ones((n, 2)), "n": n}, 3)
        {'n': 3, 'x': ShapeDtypeStruct(shape=(3, 2), dtype=float32)}
    """
    fun = kwargs.pop("fun", None) if fun is _BY_KEYWORD else fun
    check_callable("filter_eval_shape", fun)
    with unseen():
        run, arrays = as_function_of_arrays(fun, args, kwargs, is_abstract)
        return unpack_structs(jax.eval_shape(run, arrays))


class _MakeJaxpr(Transformed):
    __slots__ = ()

    transform_name = "filter_make_jaxpr"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the jaxpr, and the result in two parts."""
        with unseen():
            jaxpr, parts = _trace(self.fn, args, kwargs, lambda out: partition(out, is_array))
        return jaxpr, *parts


def _trace(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Callable[[Any], Any]
) -> tuple[Any, PyTree]:
    """Return the jaxpr of a call, and its result after `finish`, with shapes for arrays.

    `finish` runs inside the trace, where a struct that the function returns is not an array.
    """
    arrays, structure = divide((args, kwargs), is_abstract)

    def run(*values: Any) -> Any:
        args, kwargs = structure.assemble(values)
        return pack(finish(tracked(fn)(*args, **kwargs)))

    jaxpr, packed = jax.make_jaxpr(run, return_shape=True)(*arrays)
    return jaxpr, unpack_structs(packed)


def filter_make_jaxpr(fun: Callable[..., Any]) -> Callable[..., tuple[Any, PyTree, PyTree]]:
    """`jax.make_jaxpr` for functions of any trees.

    Args:
        fun: the function to trace.

    Returns:
        A function of the same arguments that returns three things. The first is the closed jaxpr,
        whose inputs are the arrays of the arguments in order. The second is the tree of the result
        with `jax.ShapeDtypeStruct`s for arrays and None for other leaves. The third is the same
        tree with those other leaves alone.

    Raises:
        ArgumentError: if `fun` is not callable.

    Examples:
        >>> import jax.numpy as jnp
        >>> jaxpr, dynamic, static = filter_make_jaxpr(lambda x, s: (x + 1, s))(jnp.ones(2), "a")
        >>> dynamic, static
        ((ShapeDtypeStruct(shape=(2,), dtype=float32), None), (None, 'a'))
    """
    check_callable("filter_make_jaxpr", fun)
    return _MakeJaxpr(fun, ())


class _Types:
    """The arguments and the result of a program, with structs for arrays; equal by value."""

    def __init__(self, takes: tuple[list[Any], Structure], gives: Structure, out_struct: PyTree):
        self.takes, self.gives, self.out_struct = takes, gives, out_struct

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Types) and not compare(self.trees, other.trees)

    def __hash__(self) -> int:
        return hash(tuple(self.takes[0]))

    @property
    def trees(self) -> tuple[PyTree, PyTree]:
        """The arguments `(args, kwargs)`, and the result."""
        structs, structure = self.takes
        return structure.assemble(structs), self.out_struct


class ClosureConverted:
    """A function whose captured arrays are data: the result of `filter_closure_convert`.

    Attributes:
        jaxpr: the function as a jaxpr.
        consts: the arrays that the function captured.
    """

    def __init__(self, name: str, types: _Types, consts: Sequence[Any], jaxpr: Any):
        self.name, self.types, self.consts, self.jaxpr = name, types, consts, jaxpr

    @property
    def in_struct(self) -> PyTree:
        """The arguments `(args, kwargs)`, with `jax.ShapeDtypeStruct`s for arrays."""
        return self.types.trees[0]

    @property
    def out_struct(self) -> PyTree:
        """The result, with `jax.ShapeDtypeStruct`s for arrays."""
        return self.types.out_struct

    def __repr__(self) -> str:
        return f"<filter_closure_convert of {self.name}>"

    @with_short_errors
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Raises:
            StructureError: if the arguments differ from those of the conversion in structure,
                shape, dtype or static values.
        """
        arrays, structure = divide((args, kwargs), is_abstract)
        structs, converted = self.types.takes
        # Trees of types, so that differences are reported by path.
        found = compare(
            converted.assemble(list(map(_struct, structs))),
            structure.assemble(list(map(_struct, arrays))),
        )
        if found:
            fact = f"{self.name} was closure-converted for other arguments"
            at = [f"{path_text(each.path[1:])}: {' -> '.join(each.texts)}" for each in found]
            raise StructureError(fact, at=at)
        return self.types.gives.assemble(run_again(self.jaxpr, self.consts, arrays))


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _flatten_with_keys(node: ClosureConverted) -> Any:
    # The jaxpr is a leaf, which the caller may leave out: two of one function are never equal.
    children = ((jtu.GetAttrKey(name), getattr(node, name)) for name in ("consts", "jaxpr"))
    return tuple(children), (node.name, node.types)


def _unflatten(aux: Any, children: Any) -> ClosureConverted:
    return ClosureConverted(*aux, *children)


jtu.register_pytree_with_keys(ClosureConverted, _flatten_with_keys, _unflatten)


@with_short_errors
def filter_closure_convert(
    fn: Callable[..., Any] = _BY_KEYWORD, /, *args: Any, **kwargs: Any
) -> ClosureConverted:
    """Turn the arrays that a function captured into data that a transform can see.

    The result is a pytree whose leaves are these arrays and the jaxpr, which is static. You can
    pass it into a filtered transform as an argument, where the arrays of the function itself would
    be invisible.

    Args:
        fn: the function.
        *args: example arguments; arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: the same by keyword.

    Returns:
        A function of arguments like the example, with `consts`, `in_struct`, `out_struct`.

    Raises:
        ArgumentError: if `fn` is not callable.
        StructureError: if it is called with arguments unlike the example.

    Examples:
        >>> import jax.numpy as jnp
        >>> y = jnp.asarray([2.0])
        >>> f = filter_closure_convert(lambda x: x * y, jnp.asarray([3.0]))
        >>> f(jnp.asarray([5.0])), len(f.consts)
        (Array([10.], dtype=float32), 1)
    """
    fn = kwargs.pop("fn", None) if fn is _BY_KEYWORD else fn
    check_callable("filter_closure_convert", fn, "fn")
    found: list[Structure] = []

    def finish(out: Any) -> Any:
        found.append(divide(out)[1])
        return out

    closed, out_struct = _trace(fn, args, kwargs, finish)
    arrays, structure = divide((args, kwargs), is_abstract)
    types = _Types((list(map(_struct, arrays)), structure), found[-1], out_struct)
    return ClosureConverted(function_name(fn), types, list(closed.consts), closed.jaxpr)
