"""The sharding of layers' results on a mesh with explicit axes.

On such a mesh the type of each array says how it is split. An operation whose operands are split
over the same mesh axis in different ways has no type: JAX asks instead of choosing. The layers
choose by one rule: *the first operand, x, leads*. The result has the mesh axes of x on the axes of
x, and those of the weight on the axes of the weight. If both have a mesh axis, the weight is
gathered along it, never the activations. Sums over an axis that both split alike are completed over
all devices.

Without such a mesh the functions here add no operation and pass no argument. Types are known while
tracing, so a formula that is `traced_once` decides at its first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.typing import Tracer, untyped_jax

Entries: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes that split each axis of an array: a spec as long as the rank of the array."""


def entries(x: Shaped[Array, ...]) -> Entries:
    """Return how an array is split, according to its type.

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
    # `partitions` is required where a gradient is to be summed later: see `shared`.
    spec = tuple(getattr(spec, "partitions", spec))
    found = tuple((at,) if isinstance(at, str) else tuple(at or ()) for at in spec)
    return found + ((),) * (x.ndim - len(found))


def sharding(mesh: Any, wanted: Sequence[tuple[str, ...]]) -> NamedSharding:
    """Return the sharding with these entries, for `out_sharding=`.

    Args:
        mesh: a mesh.
        wanted: the mesh axes for each axis.

    Returns:
        The sharding.
    """
    return NamedSharding(
        mesh, PartitionSpec(*(at if len(at) > 1 else (*at, None)[0] for at in wanted))
    )


def resharded(x: Shaped[Array, ...], mesh: Any, wanted: Sequence[tuple[str, ...]]) -> Any:
    """Reshard an array; return the array itself if it has that sharding.

    An array on no mesh counts as replicated. The gradient gets the sharding of x.

    Args:
        x: an array.
        mesh: a mesh with explicit axes, as from `explicit_mesh`.
        wanted: the mesh axes for each axis of x.

    Returns:
        The same numbers.
    """
    if explicit_mesh(x) is None:
        return untyped_jax.sharding.reshard(x, sharding(mesh, wanted))
    have, wanted = entries(x), tuple(wanted)
    names = {name for at in wanted for name in at}
    # In two steps if some mesh axes leave and others enter: XLA cannot do both at once.
    for then in (tuple(tuple(n for n in at if n in names) for at in have), wanted):
        x = x if then == entries(x) else untyped_jax.sharding.reshard(x, sharding(mesh, then))
    return x


def sharded_like(values: Shaped[Array, ...], like: Shaped[Array, ...], axis: int) -> Any:
    """Reshard an array, such as a bias, like the array that it is added to or multiplied with.

    Args:
        values: an array of at most `like.ndim - axis` axes.
        like: the array that it is combined with.
        axis: the axis of `like` that matches the first axis of `values`, counted from the front.

    Returns:
        The same numbers; the array itself if `like` is on no mesh with explicit axes.
    """
    mesh = explicit_mesh(like)
    if mesh is None:
        return values
    theirs = entries(like)[axis : axis + values.ndim]
    sizes = like.shape[axis : axis + values.ndim]
    pairs = zip(values.shape, sizes, theirs, strict=True)
    return resharded(values, mesh, [at if mine == size else () for mine, size, at in pairs])


def factors(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    terms: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]],
) -> tuple[Any, Any, NamedSharding | None]:
    """Shard the two factors of a sum of products so that JAX accepts the sum.

    Args:
        x: the factor that leads.
        weight: the factor that is gathered if both have a mesh axis.
        terms: a label for each axis of x, of the weight, and of the result, like the letters of
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
        # If only the weight splits a summed axis, x is split along it, too.
        at[label] = at.get(label) or tuple(name for name in names if name not in taken)
    ours, theirs, result = ([at[label] for label in term] for term in terms)
    return resharded(x, mesh, ours), resharded(weight, mesh, theirs), sharding(mesh, result)


def shared(x: Shaped[Array, ...], weights: Sequence[Shaped[Array, "_ in"]]) -> Any:
    """Mark an x that several weights are multiplied with, so that its gradient is summed once.

    If outputs are split, each device has a part of the sum that is the gradient of x. For a marked
    x, the parts of all weights are added first, and then summed over the devices.

    Args:
        x: the array; its last axis is the input axis of the weights.
        weights: matrices, rows first.

    Returns:
        The same numbers; x itself if there is nothing to sum.

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
    # If x is to be split along its last axis, devices have parts of the gradient, not summands.
    if not outer or inner:
        return x
    to = PartitionSpec(*sharding(mesh, entries(x)).spec, reduced=frozenset(outer))
    return untyped_jax.sharding.reshard(x, NamedSharding(mesh, to))


def terms_of(
    equation: str, x: Shaped[Array, ...], weight: Shaped[Array, ...]
) -> tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]]:
    """Return the labels of an equation of two arrays, as `factors` takes them.

    Args:
        equation: as for `jnp.einsum`; the axes of "..." are labeled by their distance from the
            last of them.
        x: the first array.
        weight: the second array.

    Returns:
        A label for each axis of x, of the weight, and of the result.
        A label for each axis of x, of the weight, and of the result.

    Examples:
        >>> import jax.numpy as jnp
        >>> terms_of("...i,oi->...o", jnp.ones((7, 2, 3)), jnp.ones((4, 3)))
        ((-2, -1, 'i'), ('o', 'i'), (-2, -1, 'o'))
    """
    inputs, arrow, out = "".join(equation.split()).partition("->")
    first, _, second = inputs.partition(",")
    if not arrow:
        # Batch axes come first, then the letters that occur once, in alphabetical order.
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
    """Divide an axis into two, such as an axis with the numbers of all heads.

    The first of the two is split like the axis. If its size is not divisible by the number of
    devices, it is gathered, because parts of its entries cannot be split.

    Args:
        x: an array.
        axis: the axis, counted from the end.
        sizes: of the two new axes.

    Returns:
        An array with one more axis.

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
            x = resharded(x, mesh, at)
    axis += x.ndim
    return x.reshape((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def contracted(
    operation: Callable[[Any, Any, NamedSharding | None], Array],
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    terms: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]],
) -> Array:
    """Compute a sum of products, with the shardings that `factors` chooses.

    A gathered weight is not stored for the backward pass, which gathers it again. Otherwise a
    loop over layers would store the gathered weights of all of them.

    Args:
        operation: from x, the weight, and the `out_sharding` of the result, to the result.
        x: the factor that leads.
        weight: the factor that is gathered if both have a mesh axis.
        terms: see `factors`.

    Returns:
        The result of the operation.
    """

    def run(x: Any, weight: Any) -> Array:
        return operation(*factors(x, weight, terms))

    if explicit_mesh(x, weight) is None:
        return run(x, weight)
    in_x, in_weight = ({name for at in entries(one) for name in at} for one in (x, weight))
    # Outside a loop XLA may gather only once.
    again: Any = untyped_jax.checkpoint(run, prevent_cse=False) if in_x & in_weight else run
    return again(x, weight)
