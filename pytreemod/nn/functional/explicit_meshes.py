"""How layers compute on a mesh with explicit axes.

On such a mesh each array's type says how it is split, and an operation whose operands are split
over the same mesh axis in different ways has no type: JAX asks instead of choosing. The layers
choose by one rule. *The first operand, x, leads*: the result has the mesh axes of x where it has
the axes of x, and those of the weight where it has the axes of the weight. A mesh axis that both
have is gathered from the weight, never from activations. Sums over an axis that both split alike
are completed over all devices.

Without such a mesh the functions here add no operation and pass no argument. Types are known while
tracing, so a formula that is `traced_once` decides at its first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from pytreemod.typing import Tracer, untyped_jax

Entries: TypeAlias = tuple[tuple[str, ...], ...]
"""The names of mesh axes that split each axis of an array: a spec as long as the array's rank."""


def explicit_mesh(*arrays: Any) -> Any:
    """The mesh with explicit axes of some arrays; None if there is none.

    Args:
        arrays: JAX arrays, or None.

    Returns:
        The first such mesh: as the types of arrays have it, without devices, while there is a
        trace; else with them.

    Examples:
        >>> import jax.numpy as jnp
        >>> explicit_mesh(jnp.ones(3)) is None
        True
    """
    found = None
    for array in arrays:
        if array is None:
            continue
        is_traced = isinstance(array, Tracer)
        # What a call outside of compiled code can afford to ask of each array.
        if not is_traced and not isinstance(array.sharding, NamedSharding):
            continue
        mesh: Any = jax.typeof(array).sharding.mesh
        if AxisType.Explicit not in mesh.axis_types:
            continue
        if is_traced:
            return mesh
        found = found or array.sharding.mesh
    return found


def entries(x: Shaped[Array, ...]) -> Entries:
    """How the type of an array says that it is split.

    Args:
        x: an array.

    Returns:
        For each axis of x, the mesh axes that split it.

    Examples:
        >>> import jax.numpy as jnp
        >>> entries(jnp.ones((3, 4)))
        ((), ())
    """
    spec = jax.typeof(x).sharding.spec
    # Asked for by its name where a gradient is to be summed later: see `shared`.
    spec = tuple(getattr(spec, "partitions", spec))
    found = tuple((at,) if isinstance(at, str) else tuple(at or ()) for at in spec)
    return found + ((),) * (x.ndim - len(found))


def sharding(mesh: Any, wanted: Sequence[tuple[str, ...]]) -> NamedSharding:
    """The sharding with these entries, for `out_sharding=`.

    Args:
        mesh: a mesh.
        wanted: the mesh axes for each axis.

    Returns:
        The sharding.
    """
    return NamedSharding(
        mesh, PartitionSpec(*(at if len(at) > 1 else (*at, None)[0] for at in wanted))
    )


def lies(x: Shaped[Array, ...]) -> NamedSharding | None:
    """The sharding of an array on a mesh with explicit axes, for `out_sharding=`, or None.

    Args:
        x: an array.

    Returns:
        The sharding.

    Examples:
        >>> import jax.numpy as jnp
        >>> lies(jnp.ones(3)) is None
        True
    """
    mesh = explicit_mesh(x)
    return None if mesh is None else sharding(mesh, entries(x))


def laid_out(x: Shaped[Array, ...], mesh: Any, wanted: Sequence[tuple[str, ...]]) -> Any:
    """Reshard an array; return the array itself if it has that sharding.

    An array that is on no mesh counts as replicated. The gradient gets the sharding of x.

    Args:
        x: an array.
        mesh: a mesh with explicit axes, as `explicit_mesh` has it.
        wanted: the mesh axes for each axis of x.

    Returns:
        The same numbers.
    """
    if explicit_mesh(x) is None:
        return untyped_jax.sharding.reshard(x, sharding(mesh, wanted))
    have, wanted = entries(x), tuple(wanted)
    names = {name for at in wanted for name in at}
    # In two steps where mesh axes go and others come: XLA knows no way for both at once.
    for then in (tuple(tuple(n for n in at if n in names) for at in have), wanted):
        x = x if then == entries(x) else untyped_jax.sharding.reshard(x, sharding(mesh, then))
    return x


def laid_like(values: Shaped[Array, ...], like: Shaped[Array, ...], axis: int) -> Any:
    """Reshard an array, such as a bias, like the one that it is added to or multiplied with.

    Args:
        values: an array of at most `like.ndim - axis` axes.
        like: what it is combined with.
        axis: where the first axis of `values` belongs, counted from the front.

    Returns:
        The same numbers; the array itself where `like` is on no mesh with explicit axes.
    """
    mesh = explicit_mesh(like)
    if mesh is None:
        return values
    theirs = entries(like)[axis : axis + values.ndim]
    sizes = like.shape[axis : axis + values.ndim]
    pairs = zip(values.shape, sizes, theirs, strict=True)
    return laid_out(values, mesh, [at if mine == size else () for mine, size, at in pairs])


def factors(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    terms: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]],
) -> tuple[Any, Any, NamedSharding | None]:
    """Lay out the two factors of a sum of products so that the sum is one that JAX accepts.

    Args:
        x: the factor that leads.
        weight: the factor that is gathered where both have a mesh axis.
        terms: a label for each axis of x, of the weight, and of the result, as the letters of
            an equation of `einsum`.

    Returns:
        x, the weight, and the `out_sharding` of their product. If neither is on a mesh with
        explicit axes: x and the weight unchanged, and None.

    Examples:
        >>> import jax.numpy as jnp
        >>> x, weight = jnp.ones((2, 3)), jnp.ones((4, 3))
        >>> factors(x, weight, ("bi", "oi", "bo"))[2] is None
        True
    """
    mesh = explicit_mesh(x, weight)
    if mesh is None:
        return x, weight, None
    at = dict(zip(terms[0], entries(x), strict=True))
    taken = {name for names in at.values() for name in names}
    for label, names in zip(terms[1], entries(weight), strict=True):
        # An axis that only the weight splits is split in both: of x each device has that part.
        at[label] = at.get(label) or tuple(name for name in names if name not in taken)
    ours, theirs, result = ([at[label] for label in term] for term in terms)
    return laid_out(x, mesh, ours), laid_out(weight, mesh, theirs), sharding(mesh, result)


def shared(x: Shaped[Array, ...], weights: Sequence[Shaped[Array, "out in"]]) -> Any:
    """Mark an x that several weights are multiplied with, so that its gradient is summed once.

    Where outputs are split, each device has a part of the sum that is the gradient of x. Of a
    marked x, the parts of all weights are added first, and then summed over the devices.

    Args:
        x: the array, its last axis that of the weights' inputs.
        weights: matrices, rows first.

    Returns:
        The same numbers; x itself where there is nothing to sum.

    Examples:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 3))
        >>> shared(x, [jnp.ones((4, 3)), jnp.ones((5, 3))]) is x
        True
    """
    mesh = explicit_mesh(x)
    # Only traced arrays have gradients.
    if mesh is None or len(weights) < 2 or not isinstance(x, Tracer):
        return x
    taken = {name for names in entries(x) for name in names}
    splits = [entries(weight) for weight in weights]
    outer, inner = ({name for split in splits for name in split[i]} - taken for i in (0, 1))
    # An x that is to be split along its last axis has parts of the gradient, not summands.
    if not outer or inner:
        return x
    to = PartitionSpec(*sharding(mesh, entries(x)).spec, reduced=frozenset(outer))
    return untyped_jax.sharding.reshard(x, NamedSharding(mesh, to))


def terms_of(
    equation: str, x: Shaped[Array, ...], weight: Shaped[Array, ...]
) -> tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]]:
    """The labels of an equation of two arrays, as `factors` takes them.

    Args:
        equation: as `jnp.einsum` takes it; the axes of "..." are known by their distance from the
            last of them.
        x: the first array.
        weight: the second one.

    Returns:
        A label for each axis of x, of the weight, and of the result.

    Examples:
        >>> import jax.numpy as jnp
        >>> terms_of("...i,oi->...o", jnp.ones((7, 2, 3)), jnp.ones((4, 3)))
        ((-2, -1, 'i'), ('o', 'i'), (-2, -1, 'o'))
    """
    inputs, arrow, out = "".join(equation.split()).partition("->")
    first, _, second = inputs.partition(",")
    if not arrow:
        # Batch axes come first, then the letters that occur once, in the alphabet's order.
        letters = sorted({*inputs} - {*".,"})
        once = "".join(letter for letter in letters if inputs.count(letter) == 1)
        out = ("..." if "..." in inputs else "") + once
    counts = [
        array.ndim - len(term.replace("...", "")) if "..." in term else 0
        for term, array in ((first, x), (second, weight))
    ]
    counts.append(max(counts))
    found: list[tuple[Hashable, ...]] = []
    for term, count in zip((first, second, out), counts, strict=True):
        before, dots, after = term.partition("...")
        found.append((*before, *(range(-count, 0) if dots else ()), *after))
    return found[0], found[1], found[2]


def divided(x: Shaped[Array, ...], axis: int, sizes: tuple[int, int]) -> Any:
    """Divide an axis into two, such as that of all heads' numbers.

    The first of the two is split as the axis was. Where its size does not divide by the number of
    devices, it is gathered: there is no way to split what would be parts of its entries.

    Args:
        x: an array.
        axis: which axis, from the end.
        sizes: of the two new axes.

    Returns:
        An array of one more axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> divided(jnp.ones((5, 6)), -1, (3, 2)).shape
        (5, 3, 2)
    """
    mesh = explicit_mesh(x)
    if mesh is not None:
        at = list(entries(x))
        if sizes[0] % math.prod(mesh.shape[name] for name in at[axis]):
            at[axis] = ()
            x = laid_out(x, mesh, at)
    axis += x.ndim
    return x.reshape((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def contracted(
    operation: Callable[[Any, Any, NamedSharding | None], Array],
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    terms: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]],
) -> Array:
    """A sum of products, with the shardings that `factors` chooses.

    A gathered weight is not stored for the backward pass, which gathers it again. Otherwise a
    loop over layers would store the gathered weights of all of them.

    Args:
        operation: of x, the weight, and the `out_sharding` of the result.
        x: the factor that leads.
        weight: the factor that is gathered where both have a mesh axis.
        terms: see `factors`.

    Returns:
        The result of the operation.
    """

    def run(x: Any, weight: Any) -> Array:
        return operation(*factors(x, weight, terms))

    if explicit_mesh(x, weight) is None:
        return run(x, weight)
    in_x, in_weight = ({name for at in entries(one) for name in at} for one in (x, weight))
    # Outside of a loop XLA may do with one gathering.
    again: Any = untyped_jax.checkpoint(run, prevent_cse=False) if in_x & in_weight else run
    return again(x, weight)
