"""The largest singular value of a weight, by power iteration.

Computes in float32 or wider, whatever the dtype of the weight.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pytreemod.nn.functional.explicit_meshes import (
    entries,
    factors,
    resharded,
    sharded_like,
    sharding,
)
from pytreemod.nn.functional.inlining import traced_once
from pytreemod.nn.functional.promotion import computing_dtype
from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.typing import TracedNumber


@traced_once("num_iterations")
def power_iteration(
    weight: Shaped[Array, "out ..."],
    u: Float[Array, " out"],
    v: Float[Array, " in"],
    *,
    num_iterations: int = 1,
    eps: TracedNumber = 1e-12,
) -> tuple[Float[Array, " out"], Float[Array, " in"]]:
    r"""Move u and v towards the first singular vectors of a weight, as a matrix.

    $u \leftarrow W v / \lVert W v \rVert$, then $v \leftarrow W^\top u / \lVert W^\top u \rVert$.

    Shapes:
        weight: (out, ...), with all axes but the first merged, of size in
        u: (out,)
        v: (in,)
        return: ((out,), (in,))

    Args:
        weight: the matrix; no gradient flows through it.
        u: the left vector so far; only its shape matters, because it is computed from v.
        v: the right vector so far.
        num_iterations: number of multiplications by the matrix and its transpose.
        eps: a norm smaller than this is replaced by it.

    Returns:
        Both vectors, of length one.

    Raises:
        ArgumentError: if weight is complex.
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> weight, v = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0.8, 0.6])
        >>> u, v = nn.functional.power_iteration(weight, jnp.ones(2), v, num_iterations=10)
        >>> u.round(3).tolist(), v.round(3).tolist()
        ([1.0, 0.0], [1.0, 0.0])

    Source:
        Miyato et al. 2018, https://arxiv.org/abs/1802.05957, algorithm 1, in the order of
        `torch.nn.utils.parametrizations.spectral_norm`.
    """
    # The vectors are constants, as in PyTorch, so that the gradient of the norm is u v^T.
    matrix = lax.stop_gradient(_matrix(weight))
    for _ in range(num_iterations):
        u = _unit(_times(matrix, v), eps)
        v = _unit(_times(matrix.T, u), eps)
    return u, v


def _matrix(weight: Array) -> Array:
    wide = weight.astype(computing_dtype(weight.dtype))
    if wide.ndim == 2:
        return wide
    mesh = explicit_mesh(wide)
    if mesh is not None:
        # Merged axes can only be split along the first of them.
        wide = resharded(wide, mesh, (*entries(wide)[:2], *((),) * (wide.ndim - 2)))
    return jnp.reshape(wide, (wide.shape[0], -1))


def _times(matrix: Array, vector: Array) -> Array:
    """Multiply; the product is replicated on a mesh, because a vector is small."""
    vector, matrix, to = factors(vector, matrix, (("in",), ("out", "in"), ("out",)))
    whole = None if to is None else sharding(to.mesh, ((),))
    return jnp.matmul(matrix, vector, out_sharding=whole)


def _unit(vector: Array, eps: TracedNumber) -> Array:
    # Not plus eps: then no vector would have length one, and the singular value would be too small.
    return vector / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(vector))), eps)


@traced_once()
def divide_by_spectral_norm(
    weight: Shaped[Array, "out ..."], u: Float[Array, " out"], v: Float[Array, " in"]
) -> Shaped[Array, "out ..."]:
    r"""Divide a weight by its largest singular value: $W / \sigma$ with $\sigma = u^T W v$.

    Shapes:
        weight: (out, ...), with all axes but the first merged, of size in
        u: (out,)
        v: (in,)
        return: the shape of weight

    Args:
        weight: the matrix.
        u: its first left singular vector, see `power_iteration`.
        v: its first right singular vector.

    Returns:
        An array of the shape and dtype of weight. Its gradient includes that of the norm.

    Raises:
        ArgumentError: if weight is complex.
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> weight, e = jnp.array([[4.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, 0.0])
        >>> nn.functional.divide_by_spectral_norm(weight, e, e).tolist()
        [[1.0, 0.0], [0.0, 0.5]]

    Source:
        Miyato et al. 2018, https://arxiv.org/abs/1802.05957, eq. (8).
    """
    matrix = _matrix(weight)
    image = _times(matrix, v)
    normed = matrix / jnp.vdot(sharded_like(u, image, 0), image)
    return jnp.reshape(normed, weight.shape).astype(weight.dtype)
