"""`filter_linear_transpose`: the transpose of a linear function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, DerivativeError, describe, explain
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.sowing import call_tracked
from pytreemod.transform.boundary.wrapping import check_callable, function_name
from pytreemod.transform.derivatives.chosen_leaves import as_derivatives
from pytreemod.transform.derivatives.tangents import beside
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract
from pytreemod.tree.snapshots import divide
from pytreemod.typing import PyTree, jtu, untyped_jax


def filter_linear_transpose(
    fun: Callable[..., Any], *primals: Any
) -> Callable[[PyTree], tuple[PyTree, ...]]:
    """Return the transpose of a linear function: `jax.linear_transpose` for functions of any trees.

    It is linear in the floating arrays of its arguments. Everything else in them is constant, and
    so are the arrays of `fun` itself.

    **Law.** With `<a, b>` for the sum of the products of all arrays in two trees,
    `<transposed(ct), (x,)> == <ct, fun(x)>`.

    Args:
        fun: the function. Like JAX, it ignores terms that are not linear in the arguments, such as
            an added bias.
        *primals: its arguments. Only the shapes and dtypes of floating arrays matter, so a
            `jax.ShapeDtypeStruct` may replace each.

    Returns:
        A function that takes a tree like the result, with a cotangent for each array and None
        (zero) for the rest. It returns a tuple with a tree for each argument, which has None at
        every constant leaf.

    Raises:
        ArgumentError: if `fun` is not callable, or a constant has only a shape.
        DerivativeError: if an array in the result is not floating. When the transpose is called: if
            a structure, shape or dtype is not that of the result, or the function is not linear.

    Examples:
        >>> f = lambda d, n: {"y": n * d["x"][::2], "n": n}
        >>> transposed = filter_linear_transpose(f, {"x": jnp.ones(4), "unit": "cm"}, 3)
        >>> transposed({"y": jnp.asarray([1.0, 2.0]), "n": None})
        ({'unit': None, 'x': Array([3., 0., 6., 0.], dtype=float32)}, None)
    """
    check_callable("filter_linear_transpose", fun)
    where = f"filter_linear_transpose of {function_name(fun)}"
    linear, structure = divide(primals, _is_linear)
    _refuse_unknown(where, structure.assemble(linear))

    def run(values: list[Any]) -> Any:
        return pack(call_tracked(fun, structure.assemble(values), {}))

    # The transpose takes the result of `run`: with the same plan.
    packed = jax.eval_shape(run, linear)
    (plan,) = packed
    structs, parts = divide(unpack(packed), is_abstract)
    result = parts.place(structs)
    _refuse_others(where, result)
    transpose = untyped_jax.linear_transpose(run, linear)

    @raises_checks
    def transposed(cotangent: PyTree) -> tuple[PyTree, ...]:
        expected = "a cotangent like the result"
        found = beside(result, cotangent, where=where, expected=expected, root="result")
        pairs = zip(found, structs, strict=True)
        given = [jnp.zeros(s.shape, s.dtype) if x is None else x for x, s in pairs]
        try:
            (values,) = transpose({plan: given})
        # JAX has no class for this error. It raises the first if a rule is missing, and the second
        # if a rule fails.
        except (NotImplementedError, AssertionError) as error:
            raise DerivativeError(_explain_no_transpose(where)) from error
        return as_derivatives(structure.place(values), structure.treedef)

    return transposed


def _is_linear(leaf: Any) -> bool:
    return is_abstract(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _refuse_unknown(where: str, primals: tuple[Any, ...]) -> None:
    wrong = _places(primals, "primals", lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    if wrong:
        expected = "values for the constant leaves, which are not floating"
        raise ArgumentError(where, expected, "shapes", at=wrong)


def _refuse_others(where: str, result: PyTree) -> None:
    wrong = _places(result, "result", is_abstract)
    if wrong:
        expected = "a result of floating arrays"
        raise DerivativeError(where, expected, "other arrays", at=wrong)


def _places(tree: PyTree, root: str, counts: Callable[[Any], bool]) -> list[str]:
    """Return the paths of leaves that `counts` selects and that are not floating."""
    leaves = jtu.tree_leaves_with_path(tree)
    wrong = [(path, leaf) for path, leaf in leaves if counts(leaf) and not _is_linear(leaf)]
    return [f"{path_text(path, root)}: {describe(leaf)}" for path, leaf in wrong]


def _explain_no_transpose(where: str) -> str:
    return explain(
        where,
        "a function that is linear in the floating arrays of its arguments",
        "a nonlinear function",
        hint=["transpose its derivative:", "pm.filter_vjp(f, *primals)[1]"],
    )
