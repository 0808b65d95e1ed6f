"""The dropout layer."""

import jax
from jaxtyping import Array, PRNGKeyArray, Shaped

from pytreemod.errors import RngError, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.checking import (
    Title,
    check_array,
    check_flag,
    check_key,
    check_number,
    named,
)
from pytreemod.nn.functional.dropping import dropout


class Dropout(Module):
    """Sets entries to zero with probability p while training; the others are divided by 1 - p.

    Shapes:
        x: any
        return: the shape of x

    Fields:
        none that are arrays; p and inference are configuration

    Args:
        p: probability of zero, from 0 to 1.
        inference: whether to do nothing, see `inference_mode`.

    State and randomness: uses one key when training, unless p is 0.

    Raises:
        ArgumentError: p is not a number from 0 to 1.
        RngError: training without a key.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.Dropout(0.5)
        >>> sorted(set(layer(jnp.ones(100), key=jax.random.key(0)).tolist()))
        [0.0, 2.0]
        >>> layer(jnp.ones(2), inference=True)
        Array([1., 1.], dtype=float32)

    Source:
        Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, in the form that
        scales while training.
    """

    p: float = field(static=True)
    inference: bool = field(static=True)

    def __init__(self, p: int | float = 0.5, inference: bool = False):
        self.p = check_number(named(self, "p"), p, 0.0, 1.0)
        self.inference = check_flag(named(self, "inference"), inference)

    @jax.named_scope("pm.nn.Dropout")
    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Shaped[Array, "..."]:
        """Drop entries of x.

        Args:
            x: any array.
            key: decides which entries; needed when training.
            inference: overrides the field of that name if not None.

        Returns:
            An array of the same shape.
        """
        where = Title(self, "p")
        x = check_array(where, x)
        if self.p == 0 or (self.inference if inference is None else inference):
            return x
        if key is None:
            cure = (
                "Pass a key, or switch to inference:",
                "layer(x, key=jax.random.key(0))",
                "layer = nn.inference_mode(layer)",
            )
            raise RngError(explain(str(where), "a random key when training", "none", cure=cure))
        return dropout(x, self.p, key=check_key(where, key))
