"""What layers refuse, because the result would be silently wrong: one table for all of them.

Arrays would broadcast, other axes would be normalized, an update would be lost, entries of a mask
would be added. The error names the layer, or the argument.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError, StateError, StructureError

KEY = jax.random.key(0)
KINDS = DOWN, UP = nn.Conv1d, nn.ConvTranspose1d


def ones(*shape):
    return jnp.ones(shape)


def conv(kind, **options):
    return kind(3, 2, **{"kernel_size": 3, **options}, key=KEY)


def attention(*args, **options):
    return nn.MultiheadAttention(2, 4, key=KEY)(*args, **options)


def fewer_keys(query, key, value):
    return query, key[:1], value


def cached(x, batch=(), **options):
    make = nn.make_with_state(nn.MultiheadAttention)
    layer, state = make(4, 8, is_causal=True, cache_size=6, key=KEY)
    return layer(x, state=nn.reset_cache(layer, state, batch=batch), **options)


def by_distance(query, key):
    """A bias without an axis of heads: of four examples, it would be taken for four heads."""
    return -jnp.abs(query[..., :, None] - key[..., None, :]).astype(float)


def batch_norm(shape, *args, dtype=float, **options):
    layer, state = nn.make_with_state(nn.BatchNorm)(3, *args, **options)
    return layer(jnp.ones(shape, dtype), state)


def on_statistics_of_several():
    """One layer, with the State of three."""
    layer, state = nn.make_with_state(nn.BatchNorm)(4, inference=True)
    return layer(ones(3, 4), jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state))


class Wrong(pm.Module):
    """Gives something else back than its output and the State."""

    norm: nn.BatchNorm
    kind: str

    def __call__(self, x, state):
        out, state = self.norm(x, state)
        return {"alone": out, "two rows": out[:2], "swapped": (state, out)}[self.kind]


CONTAINERS = (
    ft.partial(nn.Stack, depth=2),
    ft.partial(nn.Ensemble, n=2),
    lambda make: nn.Sequential([make()]),
)


def wrong(container, kind):
    model, state = pm.make_with_state(container)(lambda: Wrong(nn.BatchNorm(2), kind))
    return model(ones(3, 2), state)


def stack(**changes):
    return nn.Stack(ft.partial(nn.Linear, 2, 2), 3, key=KEY).replace(**changes)


def ensemble(**changes):
    return nn.Ensemble(ft.partial(nn.Linear, 2, 2), 3, key=KEY).replace(**changes)


def several(layer):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)


def lazy(**options):
    return nn.Lazy(lambda n, key: nn.Linear(n, 4, key=key), key=KEY, **options)


def step(make):
    """A batch, and the carry of one sequence."""
    cell = make(3, 2, key=KEY)
    return cell(ones(4, 3), cell.initialize_carry((3,)))


def first(layers, x):
    return layers[0](x)


def twice(layer, x):
    """A layer that is called with its own result, which has another size."""
    return layer(layer(x))


def gru(**options):
    with jax.numpy_dtype_promotion("standard"):
        return nn.RNN(nn.GRUCell(3, 2, key=KEY))(ones(3, 4, 3), **options)


def spectral(weight):
    return nn.SpectralNorm(nn.Linear(3, 4, key=KEY).replace(weight=weight), "weight", key=KEY)


def spectral_call(weight):
    """A call with another weight than the one that it was made with."""
    layer, state = nn.make_with_state(spectral)(jnp.ones((4, 3)))
    return pm.tree_at("layer.weight", layer, weight)(ones(3), state)


class Flagged(pm.Module):
    """Has a flag as data, and a layer."""

    inner: nn.Dropout
    inference: bool = False


ROPE = nn.RotaryPositionalEmbedding(4)
EINSUM, CELLS = "...i,io->...o", (nn.GRUCell, nn.LSTMCell, nn.SimpleCell)
NORMS = [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm(4)]
FLAGGED = Flagged(nn.Dropout(0.5))
GRU = nn.GRUCell(3, 2, key=KEY)
X, BATCH, EXAMPLE = ones(3, 4), ones(2, 5, 4), ones(3, 8)

TABLE = {
    "Linear, Einsum": [
        (lambda: nn.LinearGeneral((2, 2), 2, key=KEY), ArgumentError, "2 axes"),
        (lambda: nn.LinearGeneral((2, 3), 2, (0, 1), key=KEY)(ones(3, 2)), TypeError, "contract"),
        # JAX does not refuse an axis of size 1, or a bias with an axis more.
        (lambda: nn.Einsum(EINSUM, (3, 2), key=KEY)(ones(7, 1)), ShapeError, r"Einsum.*\[7,1\]"),
        (lambda: nn.Einsum(EINSUM, (3, 2), (1, 2), key=KEY)(ones(3)), ShapeError, "bias_shape"),
    ],
    "Conv": [
        *(
            (ft.partial(conv, kind, **{name: value}), ArgumentError, rf"{kind.__name__}\({name}\)")
            for kind in KINDS
            for name, value in [
                *(("kernel_size", 0), ("stride", (1, 2)), ("padding", -1), ("padding", "FULL")),
                *(("groups", 2), ("groups", 3), ("padding_mode", "MIRROR")),
            ]
        ),
        (lambda: conv(UP, output_padding=1), ArgumentError, "output_padding"),
        (lambda: conv(UP, padding_mode="REFLECT", padding="SAME"), ArgumentError, "padding_mode"),
        (lambda: conv(UP, padding_mode="CIRCULAR"), ArgumentError, "padding_mode"),
        # What is changed is checked like arguments; the arrays, in the call.
        *((lambda k=k: nn.with_mode(conv(k), stride=2), ArgumentError, "stride") for k in KINDS),
        *((lambda k=k: conv(k).replace(padding="same"), ArgumentError, "padding") for k in KINDS),
        (lambda: conv(DOWN).replace(kernel_size=(5,))(ones(3, 9)), ShapeError, "weight of shape"),
        (lambda: conv(UP).replace(kernel_size=(5,))(ones(3, 9)), ShapeError, "weight of shape"),
        # An image without channels, a kernel that is larger than x, an empty result.
        (lambda: nn.Conv2d(1, 4, 3, key=KEY)(ones(9, 9)), ShapeError, "Conv"),
        (lambda: conv(UP)(ones(3)), ShapeError, "Conv"),
        (lambda: conv(DOWN, kernel_size=5, dilation=2)(ones(3, 8)), ShapeError, "Conv"),
        (lambda: conv(UP, padding=4)(ones(3, 5)), ShapeError, "Conv"),
    ],
    "Pool": [
        # A window of padding alone has no maximum, and several numbers would add axes.
        (lambda: nn.MaxPool1d(2, padding=2), ArgumentError, r"Pool.*\(padding\)"),
        (lambda: nn.AvgPool1d(2, padding="SAME"), ArgumentError, r"Pool.*\(padding\)"),
        (lambda: nn.MaxPool2d(2, (1, 2, 3)), ArgumentError, r"Pool.*\(stride\)"),
        (lambda: nn.MaxPool2d(2).replace(kernel_size=3), ArgumentError, r"\(kernel_size\)"),
        (lambda: nn.AdaptiveMaxPool1d(0), ArgumentError, r"Pool.*\(target_shape\)"),
        (lambda: nn.AdaptivePool(2, 1, jnp.sort)(X), ArgumentError, r"\(operation\)"),
        (lambda: nn.AdaptivePool(2, 1, lambda window: None)(X), ArgumentError, r"\(operation\)"),
        (lambda: nn.MaxPool2d(2)(ones(9, 9)), ShapeError, "Pool"),
        (lambda: nn.AvgPool1d(5)(ones(1, 4)), ShapeError, "Pool"),
        (lambda: nn.AdaptiveAvgPool2d((2, 3))(ones(1, 1, 4)), ShapeError, "Pool"),
    ],
    "norms": [
        # The result would be cut to whole, or to real numbers.
        *(
            (lambda norm=norm, dtype=dtype: norm(jnp.ones((4, 4), dtype)), ArgumentError, "Norm")
            for norm in NORMS
            for dtype in (int, complex)
        ),
        (lambda: nn.GroupNorm(2, 4, num_spatial_dims=2)(ones(2, 5, 4, 3)), ShapeError, "spatial"),
        (lambda: nn.GroupNorm(2, 4)(ones(7, 4, 2)), ShapeError, r"\(4, \.\.\.\)"),
        (lambda: nn.GroupNorm(2), ArgumentError, "needs channels"),
        (lambda: nn.RNN(GRU)(ones(3)), ShapeError, r"\(\.\.\., time, in\)"),
        (lambda: nn.RNN(GRU, time_major=True)(ones(3)), ShapeError, r"\(time, \.\.\., in\)"),
        (
            lambda: nn.Sequential([nn.Identity(), abs]),
            ArgumentError,
            r"(?s)\)\[1\].*nn\.Lambda\(f\)",
        ),
        (lambda: nn.Sequential([3]), ArgumentError, r"\)\[0\] is not a layer, but 3$"),
        (lambda: nn.GroupNorm(3, 4), ArgumentError, r"GroupNorm\(groups\).*divisor of 4, got 3"),
        (lambda: nn.InstanceNorm(3)(ones(7, 3, 5)), ShapeError, "InstanceNorm"),
        (lambda: nn.InstanceNorm(3)(ones(3)), ShapeError, "several values"),
        (lambda: nn.InstanceNorm(3, num_spatial_dims=1)(ones(3, 3, 1)), ShapeError, "several"),
        (lambda: nn.LayerNorm((2, 3))(ones(3)), ShapeError, r"\(\.\.\., 2, 3\)"),
    ],
    "BatchNorm": [
        (on_statistics_of_several, ShapeError, r"f32\[3,4\]"),
        (lambda: batch_norm((0, 3), mode="ema"), ShapeError, r"f32\[0,3\]"),
        # Every channel would be its bias.
        (lambda: batch_norm((1, 3)), ShapeError, r"f32\[1,3\]"),
        (lambda: batch_norm((5, 9, 3)), ShapeError, r"\(batch, 3, \.\.\.\), got f32\[5,9,3\]"),
        (lambda: batch_norm((3, 2), channel_axis=-1), ShapeError, r"\(\.\.\., 3\), got f32\[3,2\]"),
        (lambda: batch_norm((3,), channel_axis=-2), ShapeError, r"\(\.\.\., 3, any\), got f32"),
        (lambda: batch_norm((2, 3), dtype=complex), ArgumentError, r"c64\[2,3\]"),
        (lambda: batch_norm((3,), "batch"), NameError, "batch"),
        (lambda: nn.BatchNorm(3, mode="legacy"), ArgumentError, "'ema'"),
    ],
    "attention": [
        # Of examples or of heads? With as many examples as heads, nobody knows.
        (lambda: attention(BATCH, mask=jnp.ones((2, 5, 5), bool)), ShapeError, "mask"),
        (lambda: attention(BATCH, bias=ones(2, 5, 5)), ShapeError, "bias"),
        (lambda: attention(BATCH, mask=jnp.ones((2, 5), bool)), ShapeError, "mask"),
        (lambda: attention(X, mask=ones(3, 3)), ArgumentError, "mask"),
        (lambda: attention(X, bias=jnp.ones((3, 3), bool)), ArgumentError, "bias"),
        (lambda: attention(X, lengths=jnp.ones(2, int)), ShapeError, r"shape \(\)"),
        (lambda: attention(X, process_heads=fewer_keys), ShapeError, "process_heads"),
        (lambda: attention(X[None], ones(5, 4)), ShapeError, r"\(1, kv_seq, 4\)"),
        (lambda: attention(X, X, ones(5, 4)), ShapeError, r"\(3, 4\)"),
        # Heads that do not divide would be cut; a window of nothing would hide everything.
        (lambda: nn.MultiheadAttention(4, 8, num_kv_heads=3, key=KEY), ArgumentError, "kv_heads"),
        (lambda: nn.MultiheadAttention(4, 8, window=0, key=KEY), ArgumentError, "window"),
    ],
    "attention with a cache": [
        # Ignored, or at position 0 again.
        (lambda: cached(EXAMPLE, mask=jnp.ones((3, 3), bool)), ArgumentError, "mask"),
        (lambda: cached(EXAMPLE, bias=ones(3, 3)), ArgumentError, "bias"),
        (lambda: cached(EXAMPLE, is_causal=False), ArgumentError, "is_causal"),
        (lambda: cached(EXAMPLE, key_=ones(2, 8)), ShapeError, "as many keys"),
        (lambda: cached(EXAMPLE, process_heads=lambda q, k, v: (q, k, v)), ArgumentError, "rotary"),
        (lambda: cached(ones(4, 3, 8), (4,), bias=by_distance), ShapeError, "bias"),
        (lambda: cached(ones(4, 3, 8)), ShapeError, r"batch axes \(4,\)"),
    ],
    "positions": [
        # Vectors would have the angle of a head, or all the same.
        *(
            (ft.partial(ROPE, ones(*shape), **options), ShapeError, word)
            for shape, options, word in [
                ((5, 2, 4), {}, "axis=-3"),
                ((5, 2, 4), {"axis": 0}, "from the end"),
                ((4,), {}, "seq_length"),
                ((5, 4), {"positions": np.zeros(1)}, r"\(5,\)"),
                ((2, 5, 4), {"axis": -2, "offset": np.zeros(5)}, r"\(2,\)"),
            ]
        ),
        (lambda: ROPE(jnp.ones((5, 4), int)), ArgumentError, "floating"),
        (lambda: ROPE.replace(scaling={"rope_type": "yarn", "factor": 2}), ArgumentError, "'yarn'"),
    ],
    "over time": [
        *((ft.partial(step, make), ShapeError, make.__name__ + ".*hidden") for make in CELLS),
        (lambda: gru(seq_lengths=np.array([4, 2])), ShapeError, "seq_lengths"),
        (lambda: gru(seq_lengths=np.array([True, False, True])), ShapeError, "seq_lengths"),
        (lambda: gru(initial_carry=ones(2)), ShapeError, "hidden"),
        (lambda: gru(initial_carry=jnp.zeros((3, 2), jnp.bfloat16)), StructureError, "bf16"),
    ],
    "Stack and Ensemble": [
        *(
            (ft.partial(wrong, container, kind), StateError, "Wrong")
            for container in CONTAINERS
            for kind in ("alone", "two rows", "swapped")
        ),
        (lambda: several(stack())(ones(5, 2)), ShapeError, r"layer\.weight"),
        (lambda: several(stack())[0], ShapeError, r"layer\.weight"),
        (lambda: several(ensemble())(ones(5, 2)), ShapeError, "leading axis"),
        (lambda: stack()(ones(2), per_layer={"gate": ones(2)}), ShapeError, "gate"),
        (lambda: nn.Stack(lambda: nn.Lambda(jnp.diag), 3)(ones(2)), StructureError, "carry"),
        (lambda: stack()[3], IndexError, "range"),
        (lambda: ensemble()[3], IndexError, "range"),
        (lambda: stack(depth=4)(ones(2)), ShapeError, "leading axis of 4"),
        (lambda: ensemble(n=4)(ones(2)), ShapeError, "leading axis of 4"),
        (lambda: nn.Stack.from_layers([]), ArgumentError, "at least one"),
        (lambda: nn.Ensemble.from_members([]), ArgumentError, "at least one"),
        (lambda: ensemble()(ones(2, 3), in_axes=0), ShapeError, "x"),
        (lambda: ensemble()(ones(3, 2), in_axes=(0, 0)), SpecError, "in_axes"),
    ],
    "Lazy": [
        (lambda: lazy()(ones(2, 3)), StateError, "before materialize"),
        (lambda: pm.materialize([lazy(), lazy()], X, method=first), StateError, r"\[1\]"),
        (lambda: pm.materialize(lazy(), ones(2, 3), method=twice), ShapeError, "size 3, as before"),
        (lambda: pm.materialize(lazy(axis=-3), X), ShapeError, "axis -3"),
    ],
    "normed weights": [
        (lambda: spectral(jnp.zeros((4, 3))), ArgumentError, "SpectralNorm.*zeros"),
        (lambda: spectral(jnp.ones((4, 3), jnp.complex64)), ArgumentError, "SpectralNorm.*real"),
        # Several layers as one, whose matrices would be taken for one.
        (lambda: spectral_call(jnp.ones((2, 4, 3))), (TypeError, ShapeError), "weight|shape"),
    ],
    "modes": [
        # Data in the place of configuration, a value that is no flag.
        (lambda: nn.with_mode(nn.BatchNorm(2), weight=ones(2)), ArgumentError, "weight"),
        (lambda: nn.with_mode(FLAGGED, inner=None), ArgumentError, "inner"),
        (lambda: nn.inference_mode(FLAGGED, 1), ArgumentError, "inference"),
        (lambda: nn.inference_mode(FLAGGED.replace(inference=ones(2))), ArgumentError, "inference"),
    ],
    "other layers": [
        *((ft.partial(nn.Dropout, p), ArgumentError, "Dropout") for p in (-0.1, 1.1)),
        # True is not row 1.
        *(
            (ft.partial(nn.Embedding(5, 3, key=KEY), x), ArgumentError, "Embedding")
            for x in (jnp.array(True), np.ones(2), 1.0)
        ),
        (lambda: nn.Shared([X, BATCH], lambda t: t[0], lambda t: t[1]), ShapeError, r"Shared\(get"),
        # The number of rows is said twice, and one of them is wrong.
        (lambda: nn.Embedding(num_embeddings=3, weight=ones(4, 2))(1), ShapeError, "weight"),
        (lambda: nn.PReLU(ones(3))(ones(3, 5)), ShapeError, "PReLU"),
        (lambda: nn.PReLU(ones(3, 1))(ones(2, 5)), ShapeError, "PReLU"),
    ],
}


@pytest.mark.parametrize("kind", TABLE)
def test_what_would_be_silently_wrong_is_refused(kind):
    for use, error, word in TABLE[kind]:
        with pytest.raises(error, match=word):
            use()
