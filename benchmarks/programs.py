"""Whether the compiled program equals that of hand-written JAX.

    python -m benchmarks.programs [--quick] [--json]

This file has a function of plain arrays for every layer, and for the training step of
`examples/digits.py`. Each layer, its gradient and the training step are compiled in both forms. The
table compares the operations of XLA's optimized programs, and XLA's estimates of flops,
transcendental functions and bytes. Nothing is timed, so the comparison is exact; the table prints
the differences.

Before the comparison, both programs run and must return the same numbers.
"""

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax import lax

import pytreemod as pm
from benchmarks.libraries import OURS
from benchmarks.tables import Benchmark, Row
from pytreemod import nn

BY_HAND = "by hand"
EPS = 1e-5
COSTS = ("flops", "transcendentals", "bytes accessed")
OPERATION = re.compile(r"^ +(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", re.MULTILINE)
DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"


# --- programs and their differences ---------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """The operations and costs of a compiled program."""

    operations: Counter[str]
    costs: dict[str, float]

    @classmethod
    def of(cls, compiled: Any) -> "Program":
        """From the result of `jax.jit(f).lower(...).compile()`."""
        costs = compiled.cost_analysis()
        return cls(
            Counter(OPERATION.findall(compiled.as_text())),
            {name: float(costs.get(name, 0)) for name in COSTS},
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"operations": dict(sorted(self.operations.items())), **self.costs}


def differences(ours: Program, by_hand: Program) -> list[str]:
    """The operations and costs in which two programs differ."""
    names = sorted({*ours.operations, *by_hand.operations})
    found = [
        f"{name} {ours.operations[name] - by_hand.operations[name]:+d}"
        for name in names
        if ours.operations[name] != by_hand.operations[name]
    ]
    found += [
        f"{name} {ours.costs[name] - by_hand.costs[name]:+g}"
        for name in COSTS
        if ours.costs[name] != by_hand.costs[name]
    ]
    return found


def comparison(label: str, ours: Program, by_hand: Program) -> Row:
    """A row that compares two programs."""
    differing = differences(ours, by_hand)
    return Row(
        label,
        f"{by_hand.operations.total()} ops",
        {OURS: "different" if differing else "equal"},
        {BY_HAND: by_hand.as_dict(), OURS: ours.as_dict(), "differences": differing},
        target="equal",
        met=not differing,
        note=", ".join(differing),
    )


def require_same_numbers(label: str, ours: Any, by_hand: Any) -> None:
    """Check that two programs return the same numbers."""
    pairs = zip(jtu.tree_leaves(ours), jtu.tree_leaves(by_hand), strict=True)
    for pair in pairs:
        mine, other = map(as_numbers, pair)
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=label)


def as_numbers(leaf: jax.Array) -> jax.Array:
    """A leaf as numbers: the bits of a random key."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


# --- the layers by hand: functions of a list of arrays and an input -------------------------------

Arrays = list[jax.Array]


def linear(arrays: Arrays, x: jax.Array) -> jax.Array:
    weight, *bias = arrays
    # `x @ weight.T` would transpose the matrix for a vector, too.
    y = weight @ x if x.ndim == 1 else x @ weight.T
    return y + bias[0] if bias else y


def perceptron(arrays: Arrays, x: jax.Array) -> jax.Array:
    *hidden, weight, bias = arrays
    for pair in zip(hidden[::2], hidden[1::2], strict=True):
        x = jax.nn.relu(linear(list(pair), x))
    return linear([weight, bias], x)


def convolution(
    arrays: Arrays,
    x: jax.Array,
    *,
    padding: Sequence[tuple[int, int]],
    stride: int = 1,
    groups: int = 1,
) -> jax.Array:
    weight, bias = arrays
    y = lax.conv_general_dilated(
        x[None], weight, [stride] * len(padding), padding, feature_group_count=groups
    )
    return y[0] + bias.reshape(-1, *[1] * len(padding))


def transposed_convolution(arrays: Arrays, x: jax.Array, *, stride: int) -> jax.Array:
    """Without padding: every entry is spread over a window of the weight's size."""
    weight, bias = arrays
    taps = weight.shape[2:]
    y = lax.conv_general_dilated(
        x[None], weight, [1] * len(taps), [(n - 1, n - 1) for n in taps], [stride] * len(taps)
    )
    return y[0] + bias.reshape(-1, *[1] * len(taps))


def adaptive_pool(arrays: Arrays, x: jax.Array, *, reduce: Callable[..., jax.Array]) -> jax.Array:
    """To two entries on each axis; the axes have even sizes."""
    for axis in range(1, x.ndim):
        x = reduce(x.reshape(*x.shape[:axis], 2, -1, *x.shape[axis + 1 :]), axis=axis + 1)
    return x


def prelu(arrays: Arrays, x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, x * arrays[0])


def max_pool(arrays: Arrays, x: jax.Array) -> jax.Array:
    window = (1, *[2] * (x.ndim - 1))
    return lax.reduce_window(x, -jnp.inf, lax.max, window, (1,) * x.ndim, "VALID")


def average_pool(arrays: Arrays, x: jax.Array) -> jax.Array:
    window = (1, *[2] * (x.ndim - 1))
    return lax.reduce_window(x, 0.0, lax.add, window, (1,) * x.ndim, "VALID") / np.prod(window)


def layer_norm(arrays: Arrays, x: jax.Array) -> jax.Array:
    weight, bias = arrays
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    return centered * lax.rsqrt(variance + EPS) * weight + bias


def rms_norm(arrays: Arrays, x: jax.Array) -> jax.Array:
    weight, bias = arrays
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + EPS) * weight + bias


def group_norm(arrays: Arrays, x: jax.Array, groups: int) -> jax.Array:
    """With the channels of x first."""
    grouped = x.reshape(groups, -1)
    centered = grouped - jnp.mean(grouped, axis=1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=1, keepdims=True)
    out = (centered * lax.rsqrt(variance + EPS)).reshape(x.shape)
    weight, bias = (array.reshape(-1, *(1,) * (x.ndim - 1)) for array in arrays)
    return out * weight + bias


def simple_step(arrays: Arrays, x: jax.Array, h: jax.Array) -> jax.Array:
    weight_ih, weight_hh, bias = arrays
    return jnp.tanh(weight_ih @ x + bias + weight_hh @ h)


def gru_step(arrays: Arrays, x: jax.Array, h: jax.Array) -> jax.Array:
    weight_ih, weight_hh, bias, bias_n = arrays
    from_x, from_h = (jnp.split(y, 3) for y in (weight_ih @ x + bias, weight_hh @ h))
    reset, update = (jax.nn.sigmoid(from_x[i] + from_h[i]) for i in range(2))
    new = jnp.tanh(from_x[2] + reset * (from_h[2] + bias_n))
    return new + update * (h - new)


def gru(arrays: Arrays, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = gru_step(arrays, x, h)
        return h, h

    return lax.scan(step, jnp.zeros(arrays[1].shape[1]), x)[1]


def lstm_step(arrays: Arrays, x: jax.Array, h: jax.Array, c: jax.Array) -> Any:
    weight_ih, weight_hh, bias = arrays
    i, f, g, o = jnp.split(weight_ih @ x + weight_hh @ h + bias, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm(arrays: Arrays, x: jax.Array, reverse: bool = False) -> jax.Array:
    def step(hidden: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        hidden = lstm_step(arrays, x, *hidden)
        return hidden, hidden[0]

    zeros = jnp.zeros(arrays[1].shape[1])
    return lax.scan(step, (zeros, zeros), x, reverse=reverse)[1]


def lstm_both_ways(arrays: Arrays, x: jax.Array) -> jax.Array:
    return jnp.concatenate([lstm(arrays[:3], x), lstm(arrays[3:], x, reverse=True)], axis=-1)


def stack(arrays: Arrays, x: jax.Array) -> jax.Array:
    """Layers in a scan, whose arrays have a leading layer axis."""
    return lax.scan(lambda x, layer: (linear(list(layer), x), None), x, tuple(arrays))[0]


def instance_norm(arrays: Arrays, x: jax.Array) -> jax.Array:
    """With the channels of x first, and no weights."""
    centered = x - jnp.mean(x, axis=1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=1, keepdims=True)
    return centered * lax.rsqrt(variance + EPS)


def summed(arrays: Arrays, x: jax.Array, *, equation: str) -> jax.Array:
    weight, bias = arrays
    return jnp.einsum(equation, x, weight) + bias


def dropout(arrays: Arrays, x: jax.Array, key: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(keep, x / 0.5, 0)


def rotary(arrays: Arrays, x: jax.Array) -> jax.Array:
    """Rotate pairs across the halves by the angles of their positions."""
    length, size = x.shape
    frequencies = 1 / 10_000.0 ** (jnp.arange(0.0, size, 2) / size)
    angles = jnp.outer(jnp.arange(float(length)), frequencies)
    cos, sin = (jnp.concatenate([table, table], -1) for table in (jnp.cos(angles), jnp.sin(angles)))
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def attention(arrays: Arrays, x: jax.Array, mask: jax.Array, heads: int) -> jax.Array:
    """Self-attention."""
    query, key, value = ((x @ weight.T).reshape(len(x), heads, -1) for weight in arrays[:3])
    logits = jnp.einsum("qhd,khd->hqk", query / query.shape[-1] ** 0.5, key)
    logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    found = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), value)
    return found.reshape(len(x), -1) @ arrays[3].T


def embedding(arrays: Arrays, x: jax.Array) -> jax.Array:
    (weight,) = arrays
    return jnp.take(weight, x, axis=0)


def per_channel(values: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The values in a shape that broadcasts against `x`."""
    return values.reshape(-1, *[1] * (x.ndim - axis - 1))


def batch_norm(
    arrays: Arrays, running: Arrays, x: jax.Array, *, momentum: float = 0.99, axis: int = 1
) -> tuple[jax.Array, Arrays]:
    """On a batch with the channels at axis 1; or on one example under vmap, at axis 0."""
    weight, bias = arrays
    axes = tuple(i for i in range(x.ndim) if i != axis)
    over_batch = partial(lax.pmean, axis_name="batch") if axis == 0 else lambda value: value
    count = x.size // x.shape[axis] * (lax.psum(1, "batch") if axis == 0 else 1)

    mean = over_batch(jnp.mean(x, axes))
    centered = x - per_channel(mean, x, axis)
    variance = over_batch(jnp.mean(jnp.square(centered), axes))
    scale = lax.rsqrt(variance + EPS) * weight
    y = centered * per_channel(scale, x, axis) + per_channel(bias, x, axis)

    now = [mean, variance * (count / (count - 1))]
    return y, [
        momentum * old + (1 - momentum) * lax.stop_gradient(new)
        for old, new in zip(running, now, strict=True)
    ]


def spectral_norm(arrays: Arrays, running: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    """A linear layer whose matrix is divided by its norm, after one step of power iteration."""
    weight, bias = arrays
    matrix, (_, v) = lax.stop_gradient(weight), running
    u = matrix @ v
    u = u / jnp.maximum(jnp.linalg.norm(u), 1e-12)
    v = matrix.T @ u
    v = v / jnp.maximum(jnp.linalg.norm(v), 1e-12)
    return linear([weight / jnp.vdot(u, weight @ v), bias], x), [u, v]


def weight_norm(arrays: Arrays, x: jax.Array) -> jax.Array:
    """A linear layer whose rows have the lengths `g`."""
    v, g, bias = arrays
    return linear([v * (g / jnp.sqrt(jnp.sum(jnp.square(v), 1, keepdims=True))), bias], x)


def streaming_dropout(arrays: Arrays, running: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    """Dropout with a key from `fold_in` of a count."""
    key, count = running
    return dropout(arrays, x, jax.random.fold_in(key, count)), [key, count + 1]


def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map over a batch with the axis name "batch"; model and statistics are not mapped."""

    def call(model: Any, state: Any, x: jax.Array) -> Any:
        each = partial(function, model)
        return jax.vmap(each, in_axes=(None, 0), out_axes=(0, None), axis_name="batch")(state, x)

    return call


# --- every layer with its hand-written function ---------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer, its hand-written function, and inputs for both."""

    label: str
    layer: Any
    by_hand: Callable[..., Any]
    inputs: tuple[Any, ...]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)
    state: nn.State | None = None


def wave(*shape: int) -> jax.Array:
    """Numbers between -1 and 1, all different."""
    return jnp.sin(1.0 + jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32)).reshape(shape)


def stateless_cases(key: jax.Array) -> list[Case]:
    """Layers that map an array to an array."""
    image = wave(2, 6, 6)
    window = {"kernel_size": 2}
    return [
        Case("Linear", nn.Linear(8, 4, key=key), linear, (wave(8),)),
        Case("Linear, a batch", nn.Linear(8, 4, key=key), linear, (wave(5, 8),)),
        Case("Linear without bias", nn.Linear(8, 4, use_bias=False, key=key), linear, (wave(8),)),
        Case("MLP", nn.MLP(8, 3, 16, 2, key=key), perceptron, (wave(8),)),
        Case("MLP, a batch", nn.MLP(8, 3, 16, 2, key=key), perceptron, (wave(5, 8),)),
        Case(
            "Conv1d",
            nn.Conv1d(2, 3, 3, padding=1, key=key),
            partial(convolution, padding=[(1, 1)]),
            (wave(2, 8),),
        ),
        Case(
            "Conv2d, strided, in groups",
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, key=key),
            partial(convolution, padding=[(1, 1)] * 2, stride=2, groups=2),
            (image,),
        ),
        Case(
            "Conv3d",
            nn.Conv3d(2, 3, 2, key=key),
            partial(convolution, padding=[(0, 0)] * 3),
            (wave(2, 4, 4, 4),),
        ),
        *(
            Case(type(layer).__name__, layer, by_hand, (wave(2, *[4] * dims),))
            for layers, by_hand in (
                ((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), max_pool),
                ((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), average_pool),
            )
            for dims, layer in enumerate((make(**window) for make in layers), start=1)
        ),
        *(
            Case(
                type(layer).__name__,
                layer,
                partial(transposed_convolution, stride=2),
                (wave(2, *[3] * dims),),
            )
            for dims, layer in enumerate(
                (
                    make(2, 3, 3, 2, key=key)
                    for make in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
                ),
                start=1,
            )
        ),
        *(
            Case(
                type(layer).__name__,
                layer,
                partial(adaptive_pool, reduce=reduce),
                (wave(2, *[4] * dims),),
            )
            for layers, reduce in (
                ((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), jnp.mean),
                ((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), jnp.max),
            )
            for dims, layer in enumerate((make(2) for make in layers), start=1)
        ),
        Case("PReLU", nn.PReLU(), prelu, (wave(8),)),
        Case("RMSNorm", nn.RMSNorm(8), rms_norm, (wave(8),)),
        Case("RMSNorm, a batch", nn.RMSNorm(8), rms_norm, (wave(5, 8),)),
        Case("LayerNorm", nn.LayerNorm(8), layer_norm, (wave(8),)),
        Case("LayerNorm, a batch", nn.LayerNorm(8), layer_norm, (wave(5, 8),)),
        Case("GroupNorm", nn.GroupNorm(2, 4), partial(group_norm, groups=2), (wave(4, 3, 5),)),
        Case("InstanceNorm", nn.InstanceNorm(4), instance_norm, (wave(4, 15),)),
        Case(
            "LinearGeneral",
            nn.LinearGeneral((4, 3), (2, 5), (-2, -1), key=key),
            partial(summed, equation="bij,ijkl->bkl"),
            (wave(7, 4, 3),),
        ),
        Case(
            "Einsum",
            nn.Einsum("...hi,hio->...ho", (2, 3, 4), (2, 4), key=key),
            partial(summed, equation="bhi,hio->bho"),
            (wave(7, 2, 3),),
        ),
        Case(
            "Dropout",
            nn.Dropout(0.5),
            dropout,
            (wave(32), key),
            call=lambda layer, x, key: layer(x, key=key),
        ),
        Case("RotaryPositionalEmbedding", nn.RotaryPositionalEmbedding(8), rotary, (wave(5, 8),)),
        Case(
            "MultiheadAttention, masked",
            nn.MultiheadAttention(2, 8, key=key),
            partial(attention, heads=2),
            (wave(5, 8), jnp.tril(jnp.ones((5, 5), bool))),
            call=lambda layer, x, mask: layer(x, x, x, mask),
        ),
        Case("WeightNorm", nn.WeightNorm(nn.Linear(8, 4, key=key)), weight_norm, (wave(8),)),
        Case("Embedding", nn.Embedding(7, 4, key=key), embedding, (jnp.array([3, 0, 6]),)),
        Case("SimpleCell", nn.SimpleCell(8, 4, key=key), simple_step, (wave(8), wave(4))),
        Case("GRUCell", nn.GRUCell(8, 4, key=key), gru_step, (wave(8), wave(4))),
        Case(
            "LSTMCell",
            nn.LSTMCell(8, 4, key=key),
            lambda arrays, *given: lstm_step(arrays, *given)[0],
            (wave(8), wave(4), wave(4)),
            call=lambda layer, x, h, c: layer(x, (h, c))[0],
        ),
        Case(
            "Bidirectional",
            nn.Bidirectional(
                nn.RNN(nn.LSTMCell(8, 4, key=key)), nn.RNN(nn.LSTMCell(8, 4, key=key))
            ),
            lstm_both_ways,
            (wave(5, 8),),
        ),
        Case("Stack", nn.Stack(partial(nn.Linear, 8, 8), 3, key=key), stack, (wave(8),)),
        Case("GRU over time", nn.RNN(nn.GRUCell(8, 4, key=key)), gru, (wave(5, 8),)),
        Case("LSTM over time", nn.RNN(nn.LSTMCell(8, 4, key=key)), lstm, (wave(5, 8),)),
        Case(
            "LSTM over time, from the end",
            nn.RNN(nn.LSTMCell(8, 4, key=key), reverse=True, keep_order=True),
            partial(lstm, reverse=True),
            (wave(5, 8),),
        ),
        Case("Identity", nn.Identity(), lambda arrays, x: x, (wave(8),)),
        Case("Lambda", nn.Lambda(jnp.tanh), lambda arrays, x: jnp.tanh(x), (wave(8),)),
        Case(
            "Sequential",
            nn.Sequential([nn.Linear(8, 4, key=key), nn.Lambda(jnp.tanh), nn.LayerNorm(4)]),
            lambda arrays, x: layer_norm(arrays[2:], jnp.tanh(linear(arrays[:2], x))),
            (wave(8),),
        ),
    ]


def stateful_cases() -> list[Case]:
    """Layers that have State."""
    whole, state = nn.make_with_state(nn.BatchNorm)(3)
    one, one_state = nn.make_with_state(nn.BatchNorm)(3, "batch")
    key, x = jax.random.key(0), wave(4, 3, 5)
    spectral, spectral_state = nn.make_with_state(nn.SpectralNorm)(
        nn.Linear(8, 4, key=key), "weight", key=key
    )
    streaming, stream_state = nn.make_with_state(nn.Dropout)(0.5, stream=pm.RngStream())
    return [
        Case(
            "BatchNorm",
            whole,
            batch_norm,
            (x,),
            call=lambda layer, state, x: layer(x, state),
            state=state,
        ),
        Case(
            "BatchNorm under vmap",
            one,
            mapped(partial(batch_norm, axis=0)),
            (x,),
            call=mapped(lambda layer, state, x: layer(x, state)),
            state=one_state,
        ),
        Case(
            "SpectralNorm",
            spectral,
            spectral_norm,
            (wave(8),),
            call=lambda layer, state, x: layer(x, state),
            state=spectral_state,
        ),
        Case(
            "Dropout with a stream",
            streaming,
            streaming_dropout,
            (wave(32),),
            call=lambda layer, state, x: layer(x, state),
            state=stream_state.seed(key),
        ),
    ]


def without_case(cases: Sequence[Case]) -> list[str]:
    """Layers without a hand-written version."""
    covered = {type(case.layer) for case in cases}
    # Base classes, whose program is that of their subclasses.
    covered |= {base for cls in covered for base in cls.__mro__}
    layers = {
        name: value
        for name, value in vars(nn).items()
        if isinstance(value, type) and issubclass(value, pm.Module) and "__call__" in dir(value)
    }
    return sorted(name for name, value in layers.items() if value not in covered)


Function = Callable[..., Any]


def both_ways(case: Case) -> tuple[Function, tuple[Any, ...], Function, tuple[Any, ...]]:
    """Our function with its arguments, and the hand-written function with its arguments."""
    arrays = jtu.tree_leaves(case.layer)
    if case.state is None:
        return case.call, (case.layer, *case.inputs), case.by_hand, (arrays, *case.inputs)
    running = jtu.tree_leaves(case.state)
    return (
        case.call,
        (case.layer, case.state, *case.inputs),
        case.by_hand,
        (arrays, running, *case.inputs),
    )


def squared(function: Function, *, has_aux: bool) -> Function:
    """A function that returns a scalar of the output, to differentiate."""

    def scalar(*args: Any) -> Any:
        if not has_aux:
            return jnp.sum(jnp.square(function(*args)))
        out, aux = function(*args)
        return jnp.sum(jnp.square(out)), aux

    return scalar


def layer_rows(case: Case) -> Iterator[Row]:
    """The layer, and its gradient with respect to its arrays and its input."""
    ours, our_args, by_hand, hand_args = both_ways(case)
    yield compared(case.label, pm.filter_jit(ours), our_args, jax.jit(by_hand), hand_args)

    has_aux = case.state is not None
    at = 1 + has_aux
    scalar = squared(ours, has_aux=has_aux)

    def of_pair(pair: tuple[Any, jax.Array], *rest: Any) -> Any:
        layer, x = pair
        return scalar(layer, *rest[: at - 1], x, *rest[at - 1 :])

    layer, *between = our_args[:at]
    x, *rest = our_args[at:]
    argnums = (0, at) if jnp.issubdtype(x.dtype, jnp.inexact) else (0,)
    by_hand = jax.grad(squared(by_hand, has_aux=has_aux), argnums, has_aux=has_aux)
    yield compared(
        f"{case.label}, gradient",
        pm.filter_jit(pm.filter_grad(of_pair, has_aux=has_aux)),
        ((layer, x), *between, *rest),
        jax.jit(by_hand),
        hand_args,
    )


def compared(label: str, ours: Any, our_args: Any, by_hand: Any, hand_args: Any) -> Row:
    """Compile both, run both, compare."""
    compiled = ours.lower(*our_args).compile(), by_hand.lower(*hand_args).compile()
    require_same_numbers(label, compiled[0](*our_args), compiled[1](*hand_args))
    return comparison(label, *map(Program.of, compiled))


# --- the training step of the digits example, by hand ---------------------------------------------


def load_digits_example() -> ModuleType | None:
    """The example as a module, or None if its dependencies are not installed."""
    spec = importlib.util.spec_from_file_location("digits_example", DIGITS)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError:
        return None
    return module


BatchNorms = list[Arrays]


def convolve_and_normalize(
    weight: jax.Array, norm: Arrays, running: Arrays, x: jax.Array
) -> tuple[jax.Array, Arrays]:
    """One block of the digit reader, for one image under vmap."""
    y = lax.conv_general_dilated(x[None], weight, (1, 1), [(1, 1), (1, 1)])[0]
    y, running = batch_norm(norm, running, y, momentum=0.9, axis=0)
    return jax.nn.relu(y), running


def halve(x: jax.Array) -> jax.Array:
    """Max pooling with a window of 2 by 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")


def read_digit(
    arrays: Arrays, running: BatchNorms, image: jax.Array, key: jax.Array
) -> tuple[jax.Array, BatchNorms]:
    """The ten logits of one image; `arrays` is in the order of the model's leaves."""
    x, new = image, []
    for i, statistics in enumerate(running):
        weight, *norm = arrays[3 * i : 3 * i + 3]
        x, statistics = convolve_and_normalize(weight, norm, statistics, halve(x) if i == 2 else x)
        new.append(statistics)
    features = halve(x).reshape(-1)
    keep = jax.random.bernoulli(key, 0.7, features.shape)
    features = jnp.where(keep, features / 0.7, 0)
    return linear(arrays[-2:], features), new


def make_step_by_hand(optimizer: optax.GradientTransformation) -> Function:
    """The training step of the example, on lists of arrays."""

    def loss_fn(
        arrays: Arrays, running: BatchNorms, images: jax.Array, labels: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[BatchNorms, jax.Array]]:
        keys = jax.random.split(key, len(images))
        batched = jax.vmap(
            partial(read_digit, arrays), in_axes=(None, 0, 0), out_axes=(0, None), axis_name="batch"
        )
        logits, running = batched(running, images, keys)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (running, jnp.mean(logits.argmax(axis=1) == labels))

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(
        arrays: Arrays,
        running: BatchNorms,
        opt_state: optax.OptState,
        images: jax.Array,
        labels: jax.Array,
        key: jax.Array,
    ) -> tuple[Any, ...]:
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (running, accuracy)), grads = value_and_grad(arrays, running, images, labels, key)
        updates, opt_state = optimizer.update(grads, opt_state, arrays)
        return optax.apply_updates(arrays, updates), running, opt_state, loss, accuracy

    return step


def digits_row(batch_size: int) -> Row:
    """The training step."""
    digits, label = load_digits_example(), "training step of examples/digits.py"
    if digits is None:
        return Row(label, "-", {}, {}, note="needs pytreemod[examples]")
    optimizer = digits.make_optimizer(100)
    model, state = nn.make_with_state(digits.DigitReader)(key=jax.random.key(0))
    batch = (
        np.asarray(wave(batch_size, 1, 8, 8)),
        np.arange(batch_size, dtype=np.int32) % 10,
        jax.random.key(1),
    )
    arrays, values = jtu.tree_leaves(model), jtu.tree_leaves(state)
    running = [values[i : i + 2] for i in range(0, len(values), 2)]
    # Both steps donate their arguments, so each needs its own arrays.
    mine = jtu.tree_map(jnp.copy, (model, state))
    opt_state = optimizer.init(pm.filter(model, pm.is_inexact_array))
    our_args = (*mine, opt_state, *batch)
    hand_args = (arrays, running, optimizer.init(arrays), *batch)
    return compared(
        label, digits.make_step(optimizer), our_args, make_step_by_hand(optimizer), hand_args
    )


# --- the table ----------------------------------------------------------------------------------


def rows(quick: bool) -> Iterator[Row]:
    """Every layer and its gradient, and the training step."""
    cases = [*stateless_cases(jax.random.key(0)), *stateful_cases()]
    for case in cases[::6] if quick else cases:
        yield from layer_rows(case)
    yield digits_row(4 if quick else 64)
    if missing := without_case(cases):
        yield Row("layers without a hand-written version", "-", {}, {}, note=", ".join(missing))


BENCHMARK = Benchmark("Compiled programs, against hand-written JAX", BY_HAND, rows)

if __name__ == "__main__":
    BENCHMARK.main()
