"""Trace functions without running them: shapes, jaxprs, closures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from pytreemod.errors import StructureError
from pytreemod.transform.boundary.packing import pack, pack_call, unpack_structs
from pytreemod.transform.boundary.sowing import call_tracked
from pytreemod.transform.boundary.supplying import supplied
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.compilation.programs import Program, Signature
from pytreemod.tree.differences import Slot, compare
from pytreemod.tree.partitioning import partition
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.traces import run_again
from pytreemod.typing import PyTree, jtu

_R = TypeVar("_R")


# The default of a function that may also be passed by keyword. It leaves the name free for an
# argument of the function itself.
_BY_KEYWORD: Any = object()


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
    arrays, structure = divide((supplied(fun), args, kwargs), is_abstract)

    def run(values: list[Any]) -> Any:
        return pack_call(*structure.assemble(values))

    return unpack_structs(jax.eval_shape(run, arrays))


class _MakeJaxpr(Transformed):
    __slots__ = ()

    transform_name = "filter_make_jaxpr"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        jaxpr, parts = _trace(self.fn, args, kwargs, lambda out: partition(out, is_array))
        return jaxpr, *parts


def _trace(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: Callable[[Any], Any],
) -> tuple[Any, PyTree]:
    """Return the jaxpr of a call, and its result after `finish`, with shapes for arrays.

    `finish` runs inside the trace, where a struct that the function returns is not an array.
    """
    arrays, structure = divide((args, kwargs), is_abstract)

    def run(*values: Any) -> Any:
        return pack(finish(call_tracked(fn, *structure.assemble(values))))

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


class ClosureConverted:
    """A function whose captured arrays are data: the result of `filter_closure_convert`.

    Attributes:
        consts: the arrays that the function captured.
        in_struct: the structure of the arguments, with shapes.
        out_struct: the structure of the result, with shapes.
    """

    def __init__(
        self, name: str, program: Program, consts: list[Any], takes: Signature, gives: Signature
    ):
        self.name = name
        self.program = program
        self.consts = consts
        self._takes = takes
        self._gives = gives

    @property
    def jaxpr(self) -> Any:
        """The function as a jaxpr."""
        return self.program.jaxpr

    @property
    def in_struct(self) -> PyTree:
        """The arguments `(args, kwargs)`, with `jax.ShapeDtypeStruct`s for arrays."""
        return self._takes.tree

    @property
    def out_struct(self) -> PyTree:
        """The result, with `jax.ShapeDtypeStruct`s for arrays."""
        return self._gives.tree

    def __repr__(self) -> str:
        return f"<filter_closure_convert of {self.name}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Raises:
            StructureError: if the arguments differ from those of the conversion in structure,
                shape, dtype or static values.
        """
        arrays, structure = divide((args, kwargs), is_abstract)
        self._check(arrays, structure)
        return self._gives.structure.assemble(run_again(self.jaxpr, self.consts, arrays))

    def _check(self, arrays: list[Any], structure: Structure) -> None:
        # Trees of types, so that differences are reported by path, as for branches and loops.
        before = self._takes.structure.assemble(_slots(self._takes.structs))
        found = compare(before, structure.assemble(_slots(arrays)))
        if found:
            places = [f"{_argument(entry.path)}: {' -> '.join(entry.texts)}" for entry in found]
            raise StructureError(
                f"closure-converted {self.name}",
                "the arguments that it was converted for",
                "others",
                at=places,
            )


def _slots(values: Iterable[Any]) -> list[Any]:
    return [Slot(jax.ShapeDtypeStruct(value.shape, value.dtype)) for value in values]


def _argument(path: tuple[Any, ...]) -> str:
    """Return a path in `(args, kwargs)` for a message."""
    if len(path) < 2:
        return (
            "the arguments" if not path else "keywords" if path[0].idx else "positional arguments"
        )
    root = path[1].key if path[0].idx else f"args[{path[1].idx}]"
    return path_text(path[2:], root)


def _flatten_converted(node: ClosureConverted) -> Any:
    return (node.consts,), (node.name, node.program, node._takes, node._gives)  # pyright: ignore[reportPrivateUsage]  (ours)


def _flatten_converted_with_keys(node: ClosureConverted) -> Any:
    (consts,), aux = _flatten_converted(node)
    return ((jtu.GetAttrKey("consts"), consts),), aux


def _unflatten_converted(aux: Any, children: Any) -> ClosureConverted:
    name, program, takes, gives = aux
    return ClosureConverted(name, program, children[0], takes, gives)


jtu.register_pytree_with_keys(
    ClosureConverted, _flatten_converted_with_keys, _unflatten_converted, _flatten_converted
)


def filter_closure_convert(
    fn: Callable[..., Any] = _BY_KEYWORD, /, *args: Any, **kwargs: Any
) -> ClosureConverted:
    """Turn the arrays that a function captured into data that a transform can see.

    The result is a pytree whose leaves are these arrays. You can pass it into a transform as an
    argument, where the arrays of the function itself would be invisible. Everything else is
    structure. Converting the function again gives the same structure: in the other branch of a
    `cond`, or in the next step of a loop.

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
    out_structure: Any = None

    def finish(out: Any) -> Any:
        # The structure is not returned: it would be a part of a plan, which equals no other.
        nonlocal out_structure
        arrays, out_structure = divide(out)
        return arrays

    closed, structs = _trace(fn, args, kwargs, finish)
    arrays, in_structure = divide((args, kwargs), is_abstract)
    in_structs = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return ClosureConverted(
        function_name(fn),
        Program(closed.jaxpr),
        list(closed.consts),
        Signature(in_structs, in_structure),
        Signature(structs, out_structure),
    )
