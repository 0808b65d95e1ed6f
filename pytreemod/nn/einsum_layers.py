"""Dense layers over several axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Inexact, PRNGKeyArray, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import array, as_integer, as_sequence, assign_fields, flag, sizes
from pytreemod.module.fields import field
from pytreemod.nn.arguments import Title, check_array, named, own_arrays
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.linear_functions import einsum, linear_general
from pytreemod.nn.initializing import (
    Initializer,
    begin,
    initial_bias,
    initialize,
    uniform_by_fan_in,
)
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


def _check_axes(where: str, value: Any, layer: LinearGeneral) -> tuple[int, ...]:
    count = len(layer.in_features)
    given = as_sequence([value] if as_integer(value) is not None else value)
    axes = [] if given is None else [as_integer(axis) for axis in given]
    whole = tuple(axis for axis in axes if axis is not None)
    if len(axes) == len(whole) == count and len({*whole}) == count:
        return whole
    expected = f"{count} different axes, one for each of in_features"
    raise ArgumentError(where, expected, describe(value))


def _terms(equation: str) -> tuple[str, str, str]:
    """Return the letters of x, of the weight, and of the result."""
    inputs, _, out = equation.partition("->")
    first, _, second = inputs.partition(",")
    return first, second, out


def _check_equation(where: str, equation: Any, layer: Einsum) -> str:
    """Accept an equation of two arrays, in which no letter occurs twice in one array."""
    text = "".join(equation.split()) if isinstance(equation, str) else ""
    terms = _terms(text)
    letters = [term.replace("...", "", 1) for term in terms]
    # A letter twice in one array is a diagonal, whose sizes would not suffice for a clear error.
    is_one = text.count("->") == text.count(",") == 1 and "..." not in terms[1]
    is_one &= all(not word or (word.isalpha() and len({*word}) == len(word)) for word in letters)
    known = {*letters[0], *letters[1]}
    is_one &= {*letters[2]} <= known and ("..." in terms[0]) == ("..." in terms[2])
    if not is_one:
        expected = "an equation of x and the weight, such as '...i,io->...o'"
        raise ArgumentError(where, expected, describe(equation))
    shape = layer.weight_shape
    if len(terms[1]) != len(shape):
        expected = f"{len(shape)} letters for weight_shape={shape}"
        raise ArgumentError(where, expected, repr(terms[1]))
    return text


class LinearGeneral(Layer):
    r"""A dense layer over several axes at once: a `Linear` whose sizes are shapes.

    $y_{r,o} = b_o + \sum_i x_{r,i} W_{i,o}$, where i and o are several indices each.

    Sums over axes of x; the axes of out_features are the last ones of the result.

    Shapes:
        x: in_features on the axes of axis, by default the last ones
        return: the other axes of x, and then out_features

    Fields:
        weight: (*in_features, *out_features)
        bias: out_features, or None if use_bias=False

    Args:
        in_features: sizes of the axes that are summed over: a size, or a sequence of them.
        out_features: sizes of the new axes: a size, or a sequence of them.
        axis: the axes of x that are summed over, in the order of in_features. Axes that are counted
            from the back allow batch axes before them.
        use_bias: whether to add a bias.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with `(n, m)`, the products of
            in_features and of out_features, as `jax.nn.initializers` expect.
        bias_init: the same for the bias, called with out_features.

    State and randomness: none.

    Raises:
        ArgumentError: if an argument is not a size, or axis and in_features differ in length.
        RngError: if key is not a random key.
        ShapeError: if the axes of x are not in_features, or weight or bias does not have the shape
            above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> heads = nn.LinearGeneral(6, (2, 3), key=jax.random.key(0))
        >>> heads(jnp.ones((7, 6))).shape
        (7, 2, 3)
        >>> back = nn.LinearGeneral((2, 3), 6, axis=(-2, -1), key=jax.random.key(0))
        >>> back(heads(jnp.ones((7, 6)))).shape
        (7, 6)

    Source:
        `flax.nnx.LinearGeneral`, without its batch_axis; use `pm.filter_vmap` for that. Initial
        values U[-1/sqrt(n), 1/sqrt(n)] with n the product of in_features, as in `torch.nn.Linear`.
    """

    weight: Inexact[Array, "*weight_shape"]
    bias: Inexact[Array, "*out_features"] | None = array(given="use_bias")
    in_features: tuple[int, ...] = sizes()
    out_features: tuple[int, ...] = sizes()
    axis: tuple[int, ...] = field(static=True, accepts=_check_axes)
    use_bias: bool = flag()

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        axis: int | Sequence[int] = -1,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        # The check of axis needs in_features.
        assign_fields(self, in_features=in_features, out_features=out_features, axis=axis)
        self.use_bias = use_bias
        dtype, weight_key, bias_key = begin(self, dtype, key, 2)
        self.weight = initial_tensor(self, weight_init, weight_key, dtype)
        start = uniform_by_fan_in(math.prod(self.in_features)) if bias_init is None else bias_init
        self.bias = initial_bias(self, start, bias_key, dtype)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight: in_features, then out_features."""
        return (*self.in_features, *self.out_features)

    def __axis_names__(self) -> dict[str, tuple[str | None, ...]]:
        ends = (("in_features", self.in_features), ("out_features", self.out_features))
        ins, outs = (
            (name,) if len(sizes) == 1 else tuple(f"{name}_{i}" for i in range(len(sizes)))
            for name, sizes in ends
        )
        return {"weight": (*ins, *outs), "bias": outs}

    @ignores_key
    @in_scope("pm.nn.LinearGeneral")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Sum over the axes of x; `key` is ignored."""
        del key
        where = Title(self, "in_features", "out_features", "axis")
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        fits = all(
            -x.ndim <= axis < x.ndim and x.shape[axis] == size
            for axis, size in zip(self.axis, self.in_features, strict=True)
        )
        # Counted from both ends, two may be equal.
        if not fits or len({axis % x.ndim for axis in self.axis}) < len(self.axis):
            expected = f"x with axes {self.axis} of sizes {self.in_features}"
            raise ShapeError(where, expected, describe(x))
        return linear_general(x, weight, bias, axis=self.axis)


class Einsum(Layer):
    r"""Sums products of x and a weight by an equation, and adds a bias.

    $y = b + \sum x W$, over the letters that are not in the result.

    Shapes:
        x: as in the equation, with the sizes of the letters in weight_shape; `...` means any number
            of axes
        return: as in the equation

    Fields:
        weight: weight_shape
        bias: bias_shape, or None if that is None

    Args:
        equation: of x and the weight, as for `jax.numpy.einsum`: `"...i,io->...o"`.
        weight_shape: the shape of the weight.
        bias_shape: the shape of a bias, added to the last axes of the result, with 1 for any size;
            None for no bias.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with `(n, m)`, as `jax.nn.initializers`
            expect: n is the product of the axes that are summed over, m that of the others. If x,
            weight and result share an axis, it is called once for each entry of that axis.
        bias_init: the same for the bias, called with bias_shape; zeros if None.

    State and randomness: none.

    Raises:
        ArgumentError: if equation is not of two arrays, or does not fit weight_shape.
        RngError: if key is not a random key.
        ShapeError: if x does not fit the equation, bias_shape does not fit the result, or weight or
            bias does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> per_head = nn.Einsum("...hi,hio->...ho", (2, 3, 4), (2, 4), key=jax.random.key(0))
        >>> per_head(jnp.ones((7, 2, 3))).shape
        (7, 2, 4)

    Source:
        `flax.nnx.Einsum`. Initial values U[-1/sqrt(n), 1/sqrt(n)] with n as above, as in
        `torch.nn.Linear`.
    """

    weight: Inexact[Array, "*weight_shape"]
    bias: Inexact[Array, "*bias_shape"] | None = array(given="bias_shape")
    equation: str = field(static=True, accepts=_check_equation)
    weight_shape: tuple[int, ...] = sizes()
    bias_shape: tuple[int, ...] | None = sizes(optional=True)

    def __init__(
        self,
        equation: str,
        weight_shape: Sequence[int],
        bias_shape: int | Sequence[int] | None = None,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        # The check of the equation needs the weight's axes.
        assign_fields(self, weight_shape=weight_shape, equation=equation, bias_shape=bias_shape)
        dtype, weight_key, bias_key = begin(self, dtype, key, 2)
        self.weight = initial_factors(self, weight_init, weight_key, dtype)
        start = jax.nn.initializers.zeros if bias_init is None else bias_init
        self.bias = initial_bias(self, start, bias_key, dtype)

    def __axis_names__(self) -> dict[str, tuple[str | None, ...]]:
        _, second, out = _terms(self.equation)
        count = 0 if self.bias_shape is None else len(self.bias_shape)
        return {"weight": (*second,), "bias": (*out.replace("...", "")[-count:],) if count else ()}

    @ignores_key
    @in_scope("pm.nn.Einsum")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Sum products of x and the weight; `key` is ignored."""
        del key
        where = Title(self, "equation", "weight_shape")
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        first, second, out = _terms(self.equation)
        sizes = dict(zip(second, self.weight_shape, strict=True))
        lead, _, rest = first.rpartition("...")
        fits = x.ndim >= len(rest + lead) if "..." in first else x.ndim == len(first)
        if fits:
            shape = x.shape[: len(lead)] + x.shape[x.ndim - len(rest) :]
            fits = all(
                sizes.setdefault(letter, n) == n
                for letter, n in zip(lead + rest, shape, strict=True)
            )
        if not fits:
            known = ", ".join(f"{letter}={n}" for letter, n in sizes.items())
            expected = f"x with axes {first!r}, where {known}"
            raise ShapeError(where, expected, describe(x))
        self._check_bias(where, out, sizes)
        return einsum(x, weight, bias, equation=self.equation)

    def _check_bias(self, where: Title, out: str, sizes: dict[str, int]) -> None:
        """Require that the bias fits the last axes of the result, after its batch axes."""
        shape = () if self.bias_shape is None else self.bias_shape
        last = [sizes[letter] for letter in out.rpartition("...")[2]][-len(shape) :]
        if shape and (
            len(last) < len(shape) or any(b not in (1, n) for b, n in zip(shape, last, strict=True))
        ):
            expected = f"bias_shape to fit the last axes of {out!r}"
            raise ShapeError(where, expected, str(shape))


def initial_tensor(
    layer: LinearGeneral,
    weight_init: Initializer | None,
    key: PRNGKeyArray,
    dtype: Any,
    where: str | None = None,
) -> Array:
    """Draw the weight, (*in, *out), by an initializer that counts its inputs on the first axis."""
    where = named(layer, "weight_init") if where is None else where
    fans = math.prod(layer.in_features), math.prod(layer.out_features)
    start = uniform_by_fan_in(fans[0]) if weight_init is None else weight_init
    values = initialize(where, start, key, fans, dtype)
    return values.reshape(*layer.in_features, *layer.out_features)


def initial_factors(
    layer: Einsum,
    weight_init: Initializer | None,
    key: PRNGKeyArray,
    dtype: Any,
    where: str | None = None,
) -> Array:
    """Draw the weight by an initializer that counts its inputs on the first axis.

    JAX's initializers take fan-in from the axis before the last. But the equation decides which
    axes of the weight are inputs.
    """
    where = named(layer, "weight_init") if where is None else where
    first, second, out = _terms(layer.equation)
    shared = [i for i, letter in enumerate(second) if letter in first and letter in out]
    summed = [i for i, letter in enumerate(second) if letter not in out]
    # Copies, then inputs, then outputs: an initializer takes a matrix (inputs, outputs).
    order = [*shared, *summed]
    order += [i for i in range(len(second)) if i not in order]
    shape = [layer.weight_shape[i] for i in order]
    copies = math.prod(shape[: len(shared)])
    fan_in = math.prod(shape[len(shared) : len(shared) + len(summed)])
    fans = fan_in, math.prod(shape[len(shared) + len(summed) :])
    start = uniform_by_fan_in(fan_in) if weight_init is None else weight_init

    def draw(key: PRNGKeyArray) -> Array:
        return initialize(where, start, key, fans, dtype)

    # Each of these is a separate matrix; their number does not change fan-in.
    values = jax.vmap(draw)(jax.random.split(key, copies)) if shared else draw(key)
    back = sorted(range(len(order)), key=lambda i: order[i])
    return values.reshape(shape).transpose(back)
