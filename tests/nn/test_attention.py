"""`MultiheadAttention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
TORCH_WAYS = [(True, {}), (False, {}), (True, {"kdim": 6, "vdim": 3})]


def make(*args, **options):
    """A layer of two heads for sequences of size four, if nothing else is said."""
    return nn.MultiheadAttention(*(args or (2, 4)), **options, key=KEY)


def from_pytorch(theirs, layer):
    """The layer with PyTorch's weights, read off by hand."""
    arrays = {name: jnp.asarray(value.numpy()) for name, value in theirs.state_dict().items()}
    names = ("query_proj", "key_proj", "value_proj")
    if "in_proj_weight" in arrays:
        weights = jnp.split(arrays["in_proj_weight"], 3)
    else:
        weights = [arrays[f"{name}_proj_weight"] for name in "qkv"]
    paths = [f"{name}.weight" for name in names]
    changes = dict(zip(paths, weights, strict=True))
    changes["output_proj.weight"] = arrays["out_proj.weight"]
    if "in_proj_bias" in arrays:
        biases = jnp.split(arrays["in_proj_bias"], 3)
        changes |= dict(zip([f"{name}.bias" for name in names], biases, strict=True))
        changes["output_proj.bias"] = arrays["out_proj.bias"]
    for path, value in changes.items():
        name, part = path.split(".")
        layer = layer.replace(**{name: getattr(layer, name).replace(**{part: value})})
    return layer


def biases(*, used):
    """The options that say whether there are biases."""
    return {f"use_{name}_bias": used for name in ("query", "key", "value", "output")}


@pytest.mark.parametrize(("bias", "sizes"), TORCH_WAYS)
@pytest.mark.sampled
def test_the_weights_of_pytorchs_layer_give_its_outputs(torch, bias, sizes):
    """Packed or not, with and without bias, masked; PyTorch's mask says where not to look."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(4, 2, bias=bias, batch_first=True, **sizes).eval()
    if bias:
        torch.nn.init.normal_(theirs.in_proj_bias)
    layer = make(2, 4, sizes.get("kdim"), sizes.get("vdim"), **biases(used=bias))
    layer = from_pytorch(theirs, layer)
    given = wave(3, 5, 4), wave(3, 6, layer.key_size), wave(3, 6, layer.value_size)
    mask = np.asarray(wave(5, 6) > 0) | np.eye(5, 6, dtype=bool)

    for own, other in ((None, None), (mask, torch.tensor(~mask))):
        expected, _ = theirs(*map(torch.tensor, given), attn_mask=other)
        assert_close(layer(*map(jnp.asarray, given), own), expected)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.sampled
def test_the_weights_of_pytorchs_encoder_layer_give_its_outputs(torch, norm_first):
    """Attention, two norms and two dense layers, as `torch.nn.TransformerEncoderLayer`."""
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(
        4, 2, 8, 0.1, activation="gelu", batch_first=True, norm_first=norm_first
    ).eval()
    state = theirs.state_dict()
    arrays = {name: jnp.asarray(value.numpy()) for name, value in state.items()}
    attention = from_pytorch(theirs.self_attn, make(2, 4, **biases(used=True)))

    def loaded(layer, name):
        return layer.replace(weight=arrays[f"{name}.weight"], bias=arrays[f"{name}.bias"])

    norms = [loaded(nn.LayerNorm(4), name) for name in ("norm1", "norm2")]
    first = loaded(nn.Linear(4, 8, key=KEY), "linear1")
    second = loaded(nn.Linear(8, 4, key=KEY), "linear2")

    def feed_forward(x):
        return second(jax.nn.gelu(first(x), approximate=False))

    def encode(x):
        for part, norm in zip((attention, feed_forward), norms, strict=True):
            x = x + part(norm(x)) if norm_first else norm(x + part(x))
        return x

    x = wave(3, 5, 4)
    assert_close(encode(jnp.asarray(x)), theirs(torch.tensor(x)), rtol=1e-4, atol=1e-4)


def test_masks_for_all_for_heads_and_for_examples():
    """Each is the same as called example by example."""
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    mask = np.asarray(wave(3, 2, 5, 5) > -1) | np.eye(5, dtype=bool)

    each = jax.vmap(layer)(x, x, x, mask)
    assert_close(layer(x, x, x, mask), each)
    same = jnp.stack([layer(x[i], mask=mask[0]) for i in range(3)])
    assert_close(layer(x, mask=mask[:1]), same)
    assert_close(layer(x, mask=mask[0, 0])[1], layer(x[1], mask=jnp.asarray([mask[0, 0]] * 2)))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("is_mask", [True, False])
@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 0), (1, 1), (None, 0), (None, 1)], ids=str)
@pytest.mark.sampled
def test_what_an_axis_is_for_is_decided_by_how_many_there_are(axes, is_mask, implementation):
    """With as many examples as heads: for each of both, or one that is 1; example by example."""
    layer, x = make(2, 4, implementation=implementation), jnp.asarray(wave(2, 5, 4))
    whole = wave(2, 2, 5, 5)
    given = whole if axes[0] is not None else whole[0]
    for axis, is_one in zip((-4, -3), axes, strict=True):
        given = given.take([0], axis) if is_one else given
    value = jnp.asarray((given > 0) | np.eye(5, dtype=bool) if is_mask else given)
    name = "mask" if is_mask else "bias"
    each = jnp.broadcast_to(value, whole.shape)

    def alone(i):
        return layer(x[i], **{name: each[i]})

    if axes[0] is None:
        assert_close(layer(x[1], **{name: value}), alone(1))
        assert_close(jax.vmap(lambda x: layer(x, **{name: value}))(x)[0], alone(0))
    else:
        assert_close(layer(x, **{name: value}), jnp.stack([alone(0), alone(1)]))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_three_axes_are_not_guessed_for_a_batch(name):
    """Of examples or of heads, whatever their sizes; each line that the error shows works."""
    layer, x = make(), jnp.asarray(wave(2, 5, 4))
    given = jnp.asarray(wave(2, 5, 5))
    given = given > -1 if name == "mask" else given

    each = layer(x, **{name: given[..., None, :, :]})
    assert_close(each[1], layer(x[1], **{name: given[1]}))
    assert_close(layer(x, **{name: given[None]})[1], layer(x[1], **{name: given}))


def test_a_mask_of_keys_is_told_the_axes_it_lacks():
    """As PyTorch's key padding mask; both lines that are shown give the same."""
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    mask = jnp.asarray(np.arange(5) < np.array([[2], [5], [3]]))

    assert_close(layer(x, mask=mask[..., None, None, :]), layer(x, lengths=mask.sum(-1)))


def test_a_mask_that_is_added_is_a_bias():
    """As in PyTorch for floats: the hint of the error gives the result of a boolean mask."""
    layer, x = make(), jnp.asarray(wave(5, 4))
    added = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0.0, -jnp.inf)

    assert_close(layer(x, bias=added), layer(x, is_causal=True))


def test_integers_are_computed_with():
    """As in Equinox: in the dtype of the weights."""
    layer, x = make(), jnp.arange(20).reshape(5, 4) % 7
    with jax.numpy_dtype_promotion("standard"):
        out = layer(x)

    assert out.dtype == jnp.float32
    assert_close(out, layer(x.astype(float)))


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.sampled
def test_inference_is_known_while_tracing(inference):
    """With the lines that make it so; a value of Python is."""
    layer, x = make(2, 4, dropout_p=0.5), jnp.asarray(wave(5, 4))

    def call(inference):
        return layer(x, key=KEY, inference=inference)

    assert_close(jax.jit(call, static_argnums=0)(inference), call(inference))


def test_causal_masks_hide_what_comes_later():
    """A change of the last position changes no other position."""
    layer, x = make(), jnp.asarray(wave(5, 4))
    causal = jnp.tril(jnp.ones((5, 5), bool))
    moved = layer(x.at[-1].add(1), mask=causal)

    assert_close(moved[:-1], layer(x, mask=causal)[:-1])
    assert not np.allclose(moved[-1], layer(x, mask=causal)[-1])


def test_what_is_left_out_is_what_came_before():
    """Keys are the queries, values the keys."""
    layer, x, y = make(), jnp.asarray(wave(5, 4)), jnp.asarray(wave(3, 4))

    assert layer(x).tolist() == layer(x, x, x).tolist()
    assert layer(x, y).tolist() == layer(x, y, y).tolist()


def test_heads_may_be_processed():
    """They are given and taken with the axes (..., seq, num_heads, size)."""
    layer = make(2, 4, qk_size=6, vo_size=1)
    rope, x = nn.RotaryPositionalEmbedding(6), jnp.asarray(wave(3, 5, 4))
    shapes = []

    def process_heads(query, key, value):
        shapes.extend([query.shape, key.shape, value.shape])
        return rope(query, axis=-3), rope(key, axis=-3), value

    found = layer(x, process_heads=process_heads)
    assert shapes == [(3, 5, 2, 6), (3, 5, 2, 6), (3, 5, 2, 1)]
    assert_close(found[1], layer(x[1], process_heads=process_heads))
    assert not np.allclose(found, layer(x))
    assert_close(found, layer.replace(rotary=rope)(x))


@pytest.mark.slow
def test_heads_are_turned_as_in_equinox():
    """Under a map over the axis of heads, as its documentation has it, and over a batch."""
    layer, rope = make(2, 4, qk_size=6), nn.RotaryPositionalEmbedding(6)
    x = jnp.asarray(wave(3, 5, 4))

    def process_heads(query, key, value):
        turned = jax.vmap(rope, in_axes=1, out_axes=1)
        return turned(query), turned(key), value

    found = jax.vmap(lambda x: layer(x, x, x, process_heads=process_heads))(x)
    assert_close(found, layer.replace(rotary=rope)(x))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8)], ids=str)
@pytest.mark.sampled
def test_the_axis_of_heads_is_not_taken_for_positions(shape):
    """Turned as they come, or with the wrong axis mapped over, they had the angle of a head."""
    layer, rope = make(4, 8), nn.RotaryPositionalEmbedding(2)

    def process_heads(query, key, value):
        turn = jax.vmap(rope, in_axes=1, out_axes=1) if query.ndim == 4 else rope
        return turn(query), turn(key), value

    with pytest.raises(ShapeError, match=r"an explicit axis of positions(.|\n)*axis=-3\)"):
        layer(jnp.ones(shape), process_heads=process_heads)
    assert rope(jnp.ones((3, 5, 2))).shape == (3, 5, 2)


def test_a_rotary_embedding_that_was_compiled_elsewhere_is_refused_too():
    """JAX would reuse its trace, which took the heads for positions."""
    rope = jax.jit(nn.RotaryPositionalEmbedding(4))
    layer = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    rope(jnp.ones((6, 2, 4)))

    with pytest.raises(ShapeError, match="an explicit axis of positions"):
        layer(jnp.ones((6, 8)), process_heads=lambda q, k, v: (rope(q), rope(k), v))


def test_dropout_is_by_the_key_and_off_in_inference():
    """The same key drops the same; a batch drops in each example otherwise; 1 drops everything."""
    layer, x = make(2, 4, dropout_p=0.5), jnp.broadcast_to(jnp.asarray(wave(5, 4)), (2, 5, 4))
    found = layer(x, key=KEY)

    assert found.tolist() == layer(x, key=KEY).tolist()
    assert not np.allclose(found[0], found[1])
    still = make()(x)
    assert_close(layer(x, inference=True), still)
    assert_close(nn.inference_mode(layer)(x), still)
    assert_close(nn.inference_mode(layer)(x, key=KEY, inference=False), found)
    assert layer.deterministic is False
    assert not np.any(make(2, 4, dropout_p=1)(x, key=KEY))


def test_initial_values_may_be_chosen():
    """Each of the four layers gets them."""
    initializers = {"weight_init": jax.nn.initializers.ones, "bias_init": jax.nn.initializers.zeros}
    layer = make(2, 4, 3, output_size=5, **biases(used=True), **initializers)

    shapes = [leaf.shape for leaf in jax.tree.leaves(layer)]
    assert shapes == [(4, 4), (4,), (4, 3), (4,), (4, 4), (4,), (5, 4), (5,)]
    assert [float(leaf.sum()) for leaf in jax.tree.leaves(layer)[:2]] == [16, 0]


def test_every_leaf_has_the_dtype_that_was_asked_for():
    """And so has the result of such an input."""
    layer = make(2, 4, dtype=jnp.bfloat16, use_output_bias=True)

    assert {leaf.dtype for leaf in jax.tree.leaves(layer)} == {jnp.dtype(jnp.bfloat16)}
    assert layer(jnp.ones((3, 4), jnp.bfloat16)).dtype == jnp.bfloat16


# ---- grouped heads, windows, bias, normalized queries and keys


def test_multi_query_attention_is_the_same_keys_for_all_heads():
    """With one head of keys and values, as with that head's weights for each."""
    layer, x = make(2, 4, num_kv_heads=1, use_key_bias=True), jnp.asarray(wave(3, 5, 4))
    assert layer.key_proj.weight.shape == layer.value_proj.weight.shape == (2, 4)

    def twice(linear):
        bias = None if linear.bias is None else jnp.tile(linear.bias, 2)
        weight = jnp.tile(linear.weight, (2, 1))
        return linear.replace(weight=weight, bias=bias, out_features=4)

    whole = layer.replace(
        num_kv_heads=None, key_proj=twice(layer.key_proj), value_proj=twice(layer.value_proj)
    )
    assert_close(layer(x), whole(x))


def test_causal_and_window_are_masks():
    """By the field, by the argument, beside a mask, and by JAX's function."""
    x, places = jnp.asarray(wave(5, 4)), np.arange(5)
    band = (places[:, None] - places < 2) & (places[:, None] >= places)
    mask = np.asarray(wave(2, 5, 5) > 0) | np.eye(5, dtype=bool)
    layer = make(2, 4, is_causal=True, window=2)

    assert_close(layer(x), make()(x, mask=band))
    assert_close(layer(x, mask=mask), make()(x, mask=mask & band))
    assert_close(layer(x, is_causal=False), make()(x, mask=band | band.T))
    assert_close(make(2, 4, is_causal=True)(x), make()(x, is_causal=True))
    assert_close(layer.replace(implementation="xla")(x, mask=mask), layer(x, mask=mask))


def test_a_bias_is_added_to_the_products():
    """As an array or by positions; a very negative bias hides the same as a mask."""
    layer, x = make(), jnp.asarray(wave(3, 5, 4))
    hidden = np.triu(np.full((5, 5), -1e9, "f4"), 1)
    expected = layer(x, is_causal=True)

    def by_places(query, key):
        return jnp.where(key[None] > query[:, None], -1e9, 0.0)

    assert_close(layer(x, bias=hidden), expected)
    assert_close(layer(x, bias=by_places), expected)
    assert_close(layer(x, bias=np.broadcast_to(hidden, (3, 1, 5, 5))), expected)


@pytest.mark.parametrize("name", ["rms", "layer"])
@pytest.mark.sampled
def test_queries_and_keys_are_normalized_by_heads(name):
    """Then rotated: the magnitude of the input makes no difference."""
    layer = make(2, 8, qk_norm=name, rotary=nn.RotaryPositionalEmbedding(4))
    assert [type(layer.query_norm).__name__, layer.key_norm.weight.shape] == [
        {"rms": "RMSNorm", "layer": "LayerNorm"}[name],
        (4,),
    ]
    x, value = jnp.asarray(wave(5, 8)), jnp.asarray(wave(5, 8, phase=1))
    found = []
    layer(x, process_heads=lambda *heads: (found.extend(heads), heads)[1])
    sizes = (found[0] ** 2).mean(-1)

    assert_close(sizes, np.ones((5, 2)), rtol=2e-2)
    assert_close(layer(100 * x, 100 * x, value), layer(10 * x, 10 * x, value), rtol=1e-2, atol=1e-3)
    assert not np.allclose(layer(x), layer.replace(rotary=None)(x))


# ---- refusals


X, KEYS = jnp.ones((3, 4)), jnp.ones((5, 4))
