"""Branches over any trees: `filter_cond` and `filter_switch`.

JAX needs branches to return the same arrays; everything else that they return must be equal, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from pytreemod.errors import ArgumentError, StructureError
from pytreemod.transform.packing import pack, unpack
from pytreemod.transform.sowing import WithSown, collecting
from pytreemod.transform.steps import Functions
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.comparison import compare
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.typing import PyTree, jtu

_Out = TypeVar("_Out")

_lax: Any = jax.lax


@with_short_errors
def filter_cond(
    pred: Any, true_fun: Callable[..., _Out], false_fun: Callable[..., _Out], *operands: Any
) -> _Out:
    """`jax.lax.cond` for functions of any trees.

    Values other than arrays, numbers included, are passed to the branches unchanged. In their
    results such values must be equal. So each branch may change a different part of a model, and
    return the rest unchanged.

    **Law.** It equals `true_fun(*operands) if pred else false_fun(*operands)`.

    Args:
        pred: a scalar.
        true_fun: called if it is true.
        false_fun: called if it is not.
        *operands: their arguments.

    Returns:
        The result of the chosen branch.

    Raises:
        ArgumentError: if a branch is not callable.
        StructureError: if the branches return different structures, shapes, dtypes or static
            values; the error shows both by path.

    Examples:
        >>> import jax.numpy as jnp
        >>> model = {"w": jnp.asarray(1.0), "b": jnp.asarray(2.0), "name": "model"}
        >>> filter_cond(True, lambda m: {**m, "w": -m["w"]}, lambda m: {**m, "b": -m["b"]}, model)
        ... # doctest: +NORMALIZE_WHITESPACE
        {'b': Array(2., dtype=float32, weak_type=True), 'name': 'model',
         'w': Array(-1., dtype=float32, weak_type=True)}
    """
    fns = {"true_fun": true_fun, "false_fun": false_fun}
    return _choose("filter_cond", fns, operands, lambda *given: _lax.cond(pred, *given))


@with_short_errors
def filter_switch(index: Any, branches: Sequence[Callable[..., _Out]], *operands: Any) -> _Out:
    """`jax.lax.switch` for functions of any trees; see [`filter_cond`][pytreemod.filter_cond].

    **Law.** It equals `branches[min(max(index, 0), len(branches) - 1)](*operands)`.

    Args:
        index: the number of the branch, an integer scalar; if there is none, the nearest.
        branches: functions of the same arguments, such as Modules.
        *operands: their arguments.

    Returns:
        The result of the chosen branch.

    Raises:
        ArgumentError: if there is no branch, or one is not callable.
        StructureError: as for `filter_cond`.

    Examples:
        >>> import jax.numpy as jnp
        >>> filter_switch(1, [jnp.sin, jnp.cos], jnp.asarray(0.0))
        Array(1., dtype=float32, weak_type=True)
    """
    fns = {f"branches[{i}]": fn for i, fn in enumerate(branches)}
    if not fns:
        raise ArgumentError("filter_switch: there is no branch")

    def choose(*given: Any) -> Any:
        *branches, own, values = given
        return _lax.switch(index, branches, own, values)

    return _choose("filter_switch", fns, operands, choose)


def _choose(
    where: str, named: dict[str, Any], operands: tuple[Any, ...], choose: Callable[..., Any]
) -> PyTree:
    for name, fn in named.items():
        check_callable(where, fn, name)
    fns = Functions([*named.values()])
    values, structure = divide(operands)

    def make() -> list[Any]:
        fns_of = fns.assembler()

        def branch(i: int) -> Any:
            def call(own: Any, values: Any) -> Any:
                return collecting(fns_of(own)[i])(*structure.assemble(values))

            def run(own: Any, values: Any) -> Any:
                return pack(call(own, values))

            return call, run

        return [branch(i) for i in range(len(named))]

    branches = fns.cached((where, structure), make)
    try:
        packed = choose(*(run for _, run in branches), fns.arrays, values)
    except TypeError as error:
        results = [_result(call, fns.arrays, values) for call, _ in branches]
        _explain(where, dict(zip(named, results, strict=True)), error)
        raise
    return unpack(packed)


def _result(call: Callable[..., Any], own: Any, values: Any) -> PyTree:
    """Return the result of a branch with a type for each array."""
    found: list[Any] = []

    def look(own: Any, values: Any) -> tuple[()]:
        found.append(jtu.tree_map(_type, call(own, values)))
        return ()

    jax.eval_shape(look, own, values)
    return found[0]


def _type(leaf: Any) -> Any:
    return jax.typeof(leaf) if is_array(leaf) else leaf


def _explain(where: str, results: dict[str, PyTree], error: TypeError) -> None:
    """Raise a better error than JAX's if branches return different trees."""
    (name, first), *others = results.items()
    for other, result in others:
        (own, first_names, shown), (theirs, names, values) = _apart(first), _apart(result)
        if first_names != names:
            at = [f"{name}: {', '.join(first_names)}", f"{other}: {', '.join(names)}"]
            fact = f"{where}: the branches show different values to the capture"
            raise StructureError(fact, at=at) from error
        form = f"{{}} from {name}, {{}} from {other}"
        at = [each.line("result", form) for each in compare(own, theirs)]
        at += [each.line("shown", form) for each in compare(shown, values)]
        if at:
            raise StructureError(
                f"{where}: the branches return different results", at=at
            ) from error


def _apart(result: PyTree) -> tuple[PyTree, list[str], PyTree]:
    """Return the result itself, and the names and values of what is shown to a capture."""
    if type(result) is not WithSown:
        return result, [], []
    return result.result, [label.name for label in result.labels], result.values
