"""`Layer`: the base of layers whose annotations define the shapes of their arrays."""

from __future__ import annotations

from typing import Any

from pytreemod.module.array_shapes import ArrayShapes, contract_of
from pytreemod.module.classes import Module
from pytreemod.nn.arguments import Title, own_arrays


class Layer(Module):
    """Base of layers whose annotations define the shapes of their arrays.

    A name in an annotation such as `Float[Array, "out_size in_size"]` is a size if it is a static
    field, or a property, of the class. A name with a star is several sizes. Declare an array that
    may be None with `field(given=...)`, which names the flag for it.

    Then arrays and configuration always match: `replace` and `with_mode` refuse a size that the
    arrays do not have. [`own_arrays`][pytreemod.nn.Layer.own_arrays] refuses an array of another
    shape. Annotations that name anything else are not checked.

    Warns:
        FieldWarning: if an annotation cannot be evaluated, and is not checked.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from jaxtyping import Array, Float
        >>> from pytreemod import nn
        >>> class Gain(nn.Layer):
        ...     factor: Float[Array, "size"]
        ...     size: int = pm.field(static=True)
        ...     def __call__(self, x):
        ...         (factor,) = self.own_arrays("factor")
        ...         return factor * x
        >>> gain = Gain(jnp.ones(3), 3)
        >>> gain(2.0)
        Array([2., 2., 2.], dtype=float32)
        >>> gain.replace(size=4)
        Traceback (most recent call last):
        pytreemod.errors.ShapeError: Gain: size=4 does not fit its arrays
          at factor: f32[3], expected shape (4,)
          layer = layer.replace(size=4, factor=...)
    """

    def __array_shapes__(self) -> ArrayShapes:
        return contract_of(type(self)).shapes(self)

    def own_arrays(self, *names: str) -> tuple[Any, ...]:
        """Read arrays of the layer, and check that they have the shapes of their annotations.

        Every axis counts: layers that a map has made as one have an extra axis, and are refused.

        Args:
            *names: of fields.

        Returns:
            Their values, in that order.

        Raises:
            ShapeError: if an array has another shape, is missing, or should not exist.
            ArgumentError: if a value is not an array.
        """
        return own_arrays(Title(self, *contract_of(type(self)).names), *names)
