"""Formulas and layers beside PyTorch's: results and gradients, over a grid, in four dtypes.

PyTorch computes in float64, from numbers that are first rounded to our dtype, so the difference is
our rounding error. Arrays are in PyTorch's layout; if ours differs, our side converts it, so that
gradients are compared as well. The default run has the first row of each kind in float64, and
layers whose half precision is tested nowhere else.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.nn import functional
from tests.nn.numbers_to_compare import assert_close, wave

TOLERANCES = {"float64": 1e-11, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""By dtype, how far off a number may be: a part of the largest one of its array, or of one."""

ELSEWHERE = ("gru_cell", "lstm_cell", "simple_cell")
"""Kinds whose own tests compare gradients with PyTorch's in float64."""

HALF_BY_DEFAULT = ("linear_general", "einsum", "scale")
"""Kinds whose own tests have no half precision, but for sums."""

Row = tuple[Sequence[tuple[int, ...]], dict[str, Any]]
"""The shapes of arrays, and the options with which both sides are called."""


@dataclass(frozen=True)
class Kind:
    """A function of arrays and options, here and there; there, it is given `torch` first."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    rows: Sequence[Row]


def over(**choices: Any) -> Iterator[dict[str, Any]]:
    """Each combination of options; the first one has the first of all."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def functional_of(name: str, **always: Any) -> Callable[..., Any]:
    """PyTorch's function of that name; "{}" in the name is the number of spatial axes."""

    def call(torch: Any, x: Any, *arrays: Any, **options: Any) -> Any:
        function = getattr(torch.nn.functional, name.format(x.ndim - 2))
        return function(x, *arrays, **always, **options)

    return call


# ---- sums of products, and elementwise functions

LINEAR = [
    (((*batch, 3), (4, 3), (4,))[:count], {})
    for batch, count in itertools.product([(2, 3), (), (0,)], [3, 2])
]
LINEAR_GENERAL = [
    (((2, 3, 4), weight, weight[len(axis) :]), {"axis": axis})
    for axis, weight in [((-1, 0), (4, 2, 5, 6)), ((-1,), (4, 5)), ((0, 1, 2), (2, 3, 4, 1))]
]
EINSUM = [
    (shapes, {"equation": equation})
    for equation, *shapes in [
        ("...hi,hio->...ho", (5, 2, 3), (2, 3, 4), (2, 4)),
        ("abc,cad->bd", (2, 3, 4), (4, 2, 5), (5,)),
        ("ij,i->i", (3, 40), (3,), (3,)),
        ("ij,jk->ki", (3, 4), (4, 2), (2, 1)),
    ]
]
SCALE = [(((2, 3, 4), weight), {}) for weight in [(4,), (3, 1), (2, 3, 4), ()]]
EMBEDDING = [(((5, 2),), {"rows": rows}) for rows in ([[3, 0], [3, 4]], 2, [0] * 9)]
PRELU = [(((3, 4, *spatial), (4,)), {}) for spatial in [(5,), (), (2, 3)]]


def prelu(x: jax.Array, slope: jax.Array) -> jax.Array:
    """With the channels second, as PyTorch has them."""
    return functional.prelu(x, slope.reshape(4, *[1] * (x.ndim - 2)))


# ---- windows


def sized(count: int, *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes without the spatial axes that are too many."""
    return [shape[: 2 + count] for shape in shapes]


def convolutions() -> Iterator[Row]:
    """Everything over one axis; over more axes, the features that may fail there."""
    for options in over(stride=[1, 2], padding=[0, 2], dilation=[1, 2], groups=[1, 2]):
        shapes = sized(1, (2, 4, 6), (2, 4 // options["groups"], 3))
        yield [*shapes, (2,)], options
    for count, options in itertools.product(
        (2, 3), over(stride=[2], padding=[0, 1], dilation=[1, 2], groups=[2])
    ):
        yield [*sized(count, (2, 4, 6, 5, 4), (2, 2, 3, 2, 2)), (2,)], options
    for word in ("same", "valid"):
        yield sized(2, (2, 2, 5, 4), (2, 2, 3, 2)), {"padding": word, "dilation": (1, 2)}


def around(torch: Any, x: Any, weight: Any, *, padding: Any, padding_mode: str) -> Any:
    """PyTorch pads before it convolves, the last axis first."""
    flat = [amount for amount in reversed(padding) for _ in range(2)]
    padded = torch.nn.functional.pad(x, flat, padding_mode.lower())
    return functional_of("conv{}d")(torch, padded, weight)


AROUND = [
    (
        sized(count, (2, 2, 4, 5, 3), (3, 2, 3, 2, 2)),
        {"padding": (1, 2, 1)[:count], "padding_mode": mode},
    )
    for mode, count in itertools.product(("REFLECT", "REPLICATE", "CIRCULAR"), (2, 1, 3))
]


def conv_transpose(x: jax.Array, weight: jax.Array, bias: jax.Array, **options: Any) -> jax.Array:
    """With output channels first, and the taps the other way round."""
    groups = options.get("groups", 1)
    blocks = [jnp.swapaxes(block, 0, 1) for block in jnp.split(weight, groups)]
    weight = jnp.flip(jnp.concatenate(blocks), range(2, weight.ndim))
    return functional.conv_transpose(x, weight, bias, **options)


def transposed_convolutions() -> Iterator[Row]:
    """As `convolutions`."""
    for options in over(
        stride=[1, 3], padding=[0, 2], dilation=[1, 2], groups=[1, 2], output_padding=[0, 1]
    ):
        if options["output_padding"] < options["stride"]:
            yield [(2, 4, 4), (4, 3, 3), (3 * options["groups"],)], options
    for count, options in itertools.product(
        (2, 3), over(stride=[2], padding=[0, 1], dilation=[1, 2], groups=[2], output_padding=[0, 1])
    ):
        yield [*sized(count, (2, 4, 4, 3, 2), (4, 3, 3, 2, 2)), (6,)], options


def pools(**choices: Any) -> list[Row]:
    """Over two axes, then over one and three."""
    return [
        (sized(count, (2, 2, 5, 6, 4)), {"kernel_size": (2, 3, 2)[:count], **options})
        for count, options in itertools.product((2, 1, 3), over(**choices))
    ]


def max_pool(x: jax.Array, *, ceil_mode: bool, **options: Any) -> jax.Array:
    """Its option is called as in Equinox here."""
    return functional.max_pool(x, use_ceil=ceil_mode, **options)


# Where sizes divide: where they do not, PyTorch's windows overlap. So few numbers in a window that
# no two of them are one when they are rounded: between equals, JAX divides the gradient.
ADAPTIVE = [
    (((2, 2, *spatial),), {"output_size": (2, 1, 3)[: len(spatial)]})
    for spatial in ((4, 3), (4,), (2, 2, 3))
]


def adaptive_pool(operation: Callable[..., Any]) -> Callable[..., Any]:
    """By a mean or a maximum."""
    return lambda x, output_size: functional.adaptive_pool(x, output_size, operation)


# ---- normalization

LAYER_NORM = [
    (((2, 2, 3, 4), *[shape] * count), {"normalized_shape": shape, "eps": eps})
    for shape, count, eps in itertools.product([(4,), (2, 3, 4)], (2, 0), (1e-5, 0.1))
]
RMS_NORM = [
    (((2, 3, 4), *[shape] * count), {"normalized_shape": shape, "eps": eps})
    for shape, count, eps in itertools.product([(4,), (3, 4)], (1, 0), (1e-5, 0.1))
]
GROUP_NORM = [
    (((3, 4, *spatial), *[(4,)] * count), {"num_groups": groups})
    for groups, spatial, count in itertools.product((2, 1, 4), ((2, 3), (5,)), (2, 0))
]
INSTANCE_NORM = [
    (((3, 4, *spatial), *[(4,)] * count), {})
    for spatial, count in itertools.product(((2, 3), (5,), (2, 3, 2)), (2, 0))
]
BATCH_NORM = [
    (((4, 3, *spatial), *[(3,)] * count), {})
    for spatial, count in itertools.product(((2, 3), (), (5,)), (2, 0))
]
RUNNING = np.array([0.5, -1.0, 0.0]), np.array([1.0, 2.0, 0.25])
SINGULAR = [(((4, 3),), {}), (((4, 2, 3),), {})]


def with_shape(norm: Callable[..., Any]) -> Callable[..., Any]:
    """The shape comes after x, as a position, in both; but arrays are in between here."""
    return lambda x, *arrays, normalized_shape, eps: norm(x, normalized_shape, *arrays, eps=eps)


def theirs_with_shape(name: str) -> Callable[..., Any]:
    """And there."""
    return lambda torch, *given, **options: with_shape(getattr(torch.nn.functional, name))(
        *given, **options
    )


def group_norm(x: jax.Array, *arrays: jax.Array, num_groups: int) -> jax.Array:
    """Of a batch."""
    return functional.group_norm(x, num_groups, *arrays, channel_axis=1)


def theirs_of_groups(torch: Any, x: Any, *arrays: Any, num_groups: int) -> Any:
    """As above."""
    return torch.nn.functional.group_norm(x, num_groups, *arrays)


def by_running_statistics(torch: Any, x: Any, *arrays: Any) -> Any:
    """The layer in inference."""
    return torch.nn.functional.batch_norm(x, *map(torch.tensor, RUNNING), *arrays)


def vectors(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Singular vectors of some matrix; the gradient is the same for any vectors."""
    left, _, right = np.linalg.svd(wave(rows, columns).astype("f8"))
    return left[:, 0], right[0]


def spectral_norm(weight: jax.Array) -> jax.Array:
    """As in inference."""
    u, v = vectors(4, weight.size // 4)
    dtype = "float64" if weight.dtype == "float64" else "float32"
    return functional.divide_by_spectral_norm(weight, jnp.asarray(u, dtype), jnp.asarray(v, dtype))


def theirs_spectral(torch: Any, weight: Any) -> Any:
    """As `torch.nn.utils.parametrizations.spectral_norm` has it."""
    u, v = map(torch.tensor, vectors(4, weight.numel() // 4))
    return weight / torch.vdot(u, torch.mv(weight.flatten(1), v))


# ---- attention

MASKS = {
    "all": None,
    "causal": np.tril(np.ones((3, 5), bool), 2),
    "for each example": np.asarray(wave(2, 1, 3, 5) > -1) | np.eye(3, 5, dtype=bool),
}
SEQUENCES = ((2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 3))
ATTENTION = [(SEQUENCES, {"mask": name}) for name in MASKS]
PROJECTED = [
    (((2, 5, 4), (12, 4), (4, 4), *[(12,), (4,)][: 2 * bias]), {"mask": mask})
    for bias, mask in itertools.product((True, False), (False, True))
]
SEES = np.tril(np.ones((5, 5), bool))


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: str) -> jax.Array:
    """With the mask of that name."""
    return functional.dot_product_attention(query, key, value, MASKS[mask])


def theirs_attention(torch: Any, *given: Any, mask: str) -> Any:
    """PyTorch has heads before positions."""
    allowed = None if MASKS[mask] is None else torch.tensor(MASKS[mask])
    heads_first = [array.transpose(1, 2) for array in given]
    found = torch.nn.functional.scaled_dot_product_attention(*heads_first, allowed)
    return found.transpose(1, 2)


def layer_of_attention(
    x: jax.Array, packed: jax.Array, out: jax.Array, *biases: jax.Array, mask: bool
) -> jax.Array:
    """A layer with PyTorch's packed projections; two heads."""
    names = ("query", "key", "value", "output")
    used = {f"use_{name}_bias": bool(biases) for name in names}
    layer = nn.MultiheadAttention(2, 4, **used, dtype=x.dtype, key=jax.random.key(0))
    weights = [*jnp.split(packed, 3), out]
    added = [*jnp.split(biases[0], 3), biases[1]] if biases else [None] * 4
    for name, weight, bias in zip(names, weights, added, strict=True):
        part = getattr(layer, f"{name}_proj").replace(weight=weight, bias=bias)
        layer = layer.replace(**{f"{name}_proj": part})
    return layer(x, mask=SEES if mask else None)


def theirs_of_attention(torch: Any, x: Any, packed: Any, out: Any, *biases: Any, mask: bool) -> Any:
    """Sequences first, and an inverted mask."""
    into, after = biases or (None, None)
    given = [x.transpose(0, 1)] * 3
    found, _ = torch.nn.functional.multi_head_attention_forward(
        *given, 4, 2, packed, into, None, None, False, 0.0, out, after,
        attn_mask=torch.tensor(~SEES) if mask else None,
    )  # fmt: skip
    return found.transpose(0, 1)


# ---- recurrent networks


def gated(gates: int, *lead: int, carried: int = 1, directions: int = 1) -> list[tuple[int, ...]]:
    """The gradients with respect to x, the carry, and the arrays of a cell, for each direction."""
    carry = [(*lead, 2)] * carried
    return [
        (*lead, 3),
        *carry,
        *[(gates * 2, 3), (gates * 2, 2), (gates * 2,), (gates * 2,)] * directions,
    ]


def gru_arrays(w: Any, u: Any, one: Any, two: Any) -> tuple[Any, ...]:
    """Two biases of PyTorch are one bias here, except the one within the reset gate."""
    return w, u, one + two.at[4:].set(0), two[4:]


def gru_cell(x: jax.Array, hidden: jax.Array, *arrays: jax.Array) -> jax.Array:
    """A step."""
    return functional.gru_cell(x, hidden, *gru_arrays(*arrays))


def lstm_cell(x: jax.Array, h: jax.Array, c: jax.Array, *arrays: jax.Array) -> Any:
    """A step."""
    w, u, one, two = arrays
    return functional.lstm_cell(x, (h, c), w, u, one + two)


def simple_cell(x: jax.Array, hidden: jax.Array, *arrays: jax.Array) -> jax.Array:
    """A step."""
    w, u, one, two = arrays
    return functional.simple_cell(x, hidden, w, u, one + two)


def cell_of(kind: str, arrays: Sequence[jax.Array]) -> Any:
    """A cell with PyTorch's arrays."""
    make = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn_tanh": nn.SimpleCell}[kind]
    cell = make(3, 2, dtype=arrays[0].dtype, key=jax.random.key(0))
    if kind == "gru":
        names = ("weight_ih", "weight_hh", "bias", "bias_n")
        return cell.replace(**dict(zip(names, gru_arrays(*arrays), strict=True)))
    w, u, one, two = arrays
    return cell.replace(weight_ih=w, weight_hh=u, bias=one + two)


def over_time(x: jax.Array, *arrays: jax.Array, kind: str) -> jax.Array:
    """A cell in one direction, or two in both."""
    cells = [nn.RNN(cell_of(kind, arrays[i : i + 4])) for i in range(0, len(arrays), 4)]
    return (cells[0] if len(cells) == 1 else nn.Bidirectional(*cells))(x)


def theirs_over_time(torch: Any, x: Any, *arrays: Any, kind: str) -> Any:
    """From a state of zeros, with the batch first."""
    start = torch.zeros(len(arrays) // 4, x.shape[0], 2, dtype=x.dtype)
    carry = (start, start) if kind == "lstm" else start
    both = len(arrays) == 8
    return getattr(torch, kind)(x, carry, arrays, True, 1, 0.0, True, both, True)[0]


OVER_TIME = [
    (gated(gates, 2, 4, carried=0, directions=directions), {"kind": kind})
    for (kind, gates), directions in itertools.product(
        {"lstm": 4, "gru": 3, "rnn_tanh": 1}.items(), (2, 1)
    )
]


def torchs(name: str) -> Callable[..., Any]:
    """A function of the module `torch` itself."""
    return lambda torch, *arrays: getattr(torch, name)(*arrays)


KINDS = [
    Kind("linear", functional.linear, functional_of("linear"), LINEAR),
    Kind(
        "linear_general",
        functional.linear_general,
        lambda torch, x, weight, bias, axis: (
            torch.tensordot(x, weight, (axis, [*range(len(axis))])) + bias
        ),
        LINEAR_GENERAL,
    ),
    Kind(
        "einsum",
        functional.einsum,
        lambda torch, x, weight, bias, equation: torch.einsum(equation, x, weight) + bias,
        EINSUM,
    ),
    Kind("scale", functional.scale, lambda torch, x, weight: x * weight, SCALE),
    Kind(
        "embedding",
        lambda weight, rows: functional.embedding(jnp.asarray(rows), weight),
        lambda torch, weight, rows: torch.nn.functional.embedding(torch.tensor(rows), weight),
        EMBEDDING,
    ),
    Kind("prelu", prelu, functional_of("prelu"), PRELU),
    Kind("conv", functional.conv, functional_of("conv{}d"), [*convolutions()]),
    Kind("conv with a padding mode", functional.conv, around, AROUND),
    Kind(
        "conv_transpose",
        conv_transpose,
        functional_of("conv_transpose{}d"),
        [*transposed_convolutions()],
    ),
    Kind(
        "max_pool",
        max_pool,
        functional_of("max_pool{}d"),
        pools(stride=[2, 1], padding=[0, 1], ceil_mode=[False, True]),
    ),
    Kind(
        "avg_pool",
        functional.avg_pool,
        functional_of("avg_pool{}d"),
        pools(stride=[2, 1], padding=[0, 1]),
    ),
    *(
        Kind(
            f"adaptive_{name}_pool",
            adaptive_pool(operation),
            functional_of(f"adaptive_{name}_pool{{}}d"),
            ADAPTIVE,
        )
        for name, operation in {"avg": jnp.mean, "max": jnp.max}.items()
    ),
    Kind(
        "layer_norm", with_shape(functional.layer_norm), theirs_with_shape("layer_norm"), LAYER_NORM
    ),
    Kind("rms_norm", with_shape(functional.rms_norm), theirs_with_shape("rms_norm"), RMS_NORM),
    Kind("group_norm", group_norm, theirs_of_groups, GROUP_NORM),
    Kind(
        "instance_norm",
        ft.partial(functional.instance_norm, channel_axis=1),
        lambda torch, x, *arrays: torch.nn.functional.instance_norm(x, None, None, *arrays),
        INSTANCE_NORM,
    ),
    Kind(
        "batch_norm of a batch",
        lambda x, *arrays: functional.normalize_batch(x, *arrays)[0],
        lambda torch, x, *arrays: torch.nn.functional.batch_norm(
            x, None, None, *arrays, training=True
        ),
        BATCH_NORM,
    ),
    Kind(
        "batch_norm",
        lambda x, *arrays: functional.batch_norm(x, *map(jnp.asarray, RUNNING), *arrays),
        by_running_statistics,
        BATCH_NORM,
    ),
    Kind("divide_by_spectral_norm", spectral_norm, theirs_spectral, SINGULAR),
    Kind("dot_product_attention", attention, theirs_attention, ATTENTION),
    Kind("MultiheadAttention", layer_of_attention, theirs_of_attention, PROJECTED),
    Kind("gru_cell", gru_cell, torchs("gru_cell"), [(gated(3, 5), {})]),
    Kind(
        "lstm_cell",
        lstm_cell,
        lambda torch, x, h, c, *arrays: torch.lstm_cell(x, (h, c), *arrays),
        [(gated(4, 5, carried=2), {})],
    ),
    Kind("simple_cell", simple_cell, torchs("rnn_tanh_cell"), [(gated(1, 5), {})]),
    Kind("RNN, Bidirectional", over_time, theirs_over_time, OVER_TIME),
]


def cases() -> Iterator[Any]:
    """Every row of every kind in each dtype; most in the slow run."""
    for kind in KINDS:
        for i, row in enumerate(kind.rows):
            for dtype in TOLERANCES:
                by_default = dtype == "float64" and kind.name not in ELSEWHERE
                by_default |= dtype == "bfloat16" and kind.name in HALF_BY_DEFAULT
                marks = () if i == 0 and by_default else pytest.mark.slow
                yield pytest.param(kind, row, dtype, id=f"{kind.name} {i} {dtype}", marks=marks)


def of_torch(torch: Any, kind: Kind, given: Sequence[np.ndarray], options: dict[str, Any]) -> Any:
    """Results, random factors, and the gradients of the sum of their products."""
    tensors = [torch.tensor(array, requires_grad=True) for array in given]
    found = kind.theirs(torch, *tensors, **options)
    found = list(found) if isinstance(found, tuple) else [found]
    factors = [wave(*out.shape, phase=9) for out in found]
    torch.autograd.backward(found, [torch.tensor(factor).double() for factor in factors])
    return found, factors, [tensor.grad for tensor in tensors]


@pytest.mark.parametrize(("kind", "row", "dtype"), [*cases()])
@pytest.mark.sampled
def test_results_and_gradients_are_pytorchs(torch, kind, row, dtype):
    """And both are of the dtype that was given."""
    shapes, options = row
    with jax.enable_x64(dtype == "float64"):
        given = [jnp.asarray(wave(*shape, phase=i) / 2, dtype) for i, shape in enumerate(shapes)]
        expected, factors, slopes = of_torch(
            torch, kind, [np.asarray(array, "f8") for array in given], options
        )

        @jax.jit
        def compute(*arrays):
            out, pull = jax.vjp(lambda *arrays: kind.ours(*arrays, **options), *arrays)
            leaves, structure = jax.tree.flatten(out)
            seeds = [jnp.asarray(factor, dtype) for factor in factors]
            return leaves, pull(jax.tree.unflatten(structure, seeds))

        found, grads = compute(*given)

    for mine, other in zip([*found, *grads], [*expected, *slopes], strict=True):
        assert mine.dtype == dtype
        other = other.detach().numpy()
        scale = max(1.0, np.abs(other).max(initial=0.0))
        assert_close(np.asarray(mine, "f8"), other, rtol=0, atol=TOLERANCES[dtype] * scale)
