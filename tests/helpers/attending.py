"""Attention by its formulas, to compare layers with."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def attention(
    weights: Any, x: Any, heads: int, *, window: int | None = None, is_rotary: bool = False
) -> Any:
    """Causal self-attention with four matrices, for query, key, value and output."""
    time, width = x.shape
    query, key, value = (
        jnp.moveaxis((x @ w.T).reshape(time, heads, -1), 1, 0) for w in weights[:3]
    )
    size, places = width // heads, np.arange(time)
    if is_rotary:
        angles = np.outer(places, 1e4 ** (-np.arange(0, size, 2) / size))[None]

        def turned(x: Any) -> Any:
            first, second = jnp.split(x, 2, axis=-1)
            cos, sin = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        query, key = turned(query), turned(key)
    away = places[:, None] - places[None]
    seen = (away >= 0) & (away < (time if window is None else window))
    logits = jnp.einsum("hqd,hkd->hqk", query, key) / math.sqrt(size)
    weighted = jnp.where(seen[None], jnp.exp(logits), 0.0)
    weighted = weighted / weighted.sum(-1, keepdims=True)
    found = jnp.einsum("hqk,hkd->qhd", weighted, value).reshape(time, width)
    return found @ weights[3].T
