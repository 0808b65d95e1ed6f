"""`BatchNorm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.helpers.equations import equations
from tests.helpers.meshes import MESH, P
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def over_batch(layer):
    """The layer mapped over a batch, with one State for the batch."""
    return jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")


def normalized(x, mean, var):
    """The formula without weights, by NumPy; channels are the second axis."""
    x = np.asarray(x, "f8")
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - np.reshape(mean, shape)) / np.sqrt(np.reshape(var, shape) + 1e-5)


def set_weights(layer):
    """The layer with weights other than ones and zeros."""
    size = layer.input_size
    return layer.replace(
        weight=jnp.asarray(wave(size, phase=1)), bias=jnp.asarray(wave(size, phase=2))
    )


@pytest.mark.parametrize("axis_name", [None, "batch"])
@pytest.mark.parametrize("spatial", [(), (2, 3)], ids=label)
@pytest.mark.sampled
def test_batch_norm_is_pytorchs_over_many_steps(torch, spatial, axis_name):
    """Outputs and running statistics agree step by step in training, and then in inference."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, axis_name, eps=1e-3, momentum=0.8)
    layer = set_weights(layer)
    reference = getattr(torch.nn, f"BatchNorm{max(len(spatial), 1)}d")(3, 1e-3, momentum=0.2)
    reference.weight.data = torch.tensor(np.array(layer.weight))
    reference.bias.data = torch.tensor(np.array(layer.bias))

    @jax.jit
    def train(x, state):
        return (layer if axis_name is None else over_batch(layer))(x, state)

    for step in range(6):
        x = wave(4, 3, *spatial, phase=step) + step
        out, state = train(jnp.asarray(x), state)
        assert_close(out, reference(torch.tensor(x)), atol=1e-4)
        mean, var = state.get(layer.state_index)
        assert_close(mean, reference.running_mean)
        assert_close(var, reference.running_var)

    quiet, before = nn.inference_mode(layer), state
    x = wave(2, 3, *spatial, phase=9)
    out, state = (quiet if axis_name is None else over_batch(quiet))(jnp.asarray(x), state)
    assert_close(out, reference.eval()(torch.tensor(x)), atol=1e-4)
    assert_close(jnp.stack(state.get(layer.state_index)), jnp.stack((mean, var)))
    assert jax.tree.structure(state) == jax.tree.structure(before)


def test_mapped_and_direct_batches_are_the_same():
    """axis_name="batch" under vmap equals axis_name=None on the batch."""
    mapped, mapped_state = nn.make_with_state(nn.BatchNorm)(3, "batch")
    direct, direct_state = nn.make_with_state(nn.BatchNorm)(3)
    x = jnp.asarray(wave(4, 3, 2))

    found, found_state = over_batch(mapped)(x, mapped_state)
    expected, expected_state = direct(x, direct_state)

    assert_close(found, expected)
    for new, old in zip(
        found_state.get(mapped.state_index), expected_state.get(direct.state_index), strict=True
    ):
        assert_close(new, old)


def test_a_name_may_be_that_of_a_mesh_axis():
    """Half of the batch on each of two devices, mapped there: the statistics are those of all."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, ("devices", "batch"))
    direct, direct_state = nn.make_with_state(nn.BatchNorm)(3)
    x, spec = jnp.asarray(wave(8, 3)), jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("devices",))
    specs = {"in_specs": (spec("devices"), spec()), "out_specs": (spec("devices"), spec())}
    # JAX's check of replication over devices does not know the axis names of jax.vmap.
    mapped = jax.shard_map(over_batch(layer), mesh=mesh, **specs, check_vma=False)

    out, state = jax.jit(mapped)(x, state)

    expected, direct_state = direct(x, direct_state)
    assert_close(out, expected)
    found = zip(jax.tree.leaves(state), jax.tree.leaves(direct_state), strict=True)
    for own, other in found:
        assert_close(own, other)


@pytest.mark.parametrize(("axis", "is_right"), [(None, None), (1, True), (0, False)])
@pytest.mark.slow
def test_as_many_examples_on_a_device_as_channels(axis, is_right):
    """A part of a batch was taken for one example, and was normalized along the wrong axis."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, "data", channel_axis=axis)
    whole, whole_state = nn.make_with_state(nn.BatchNorm)(3)
    x = jnp.asarray(wave(3 * MESH.shape["data"], 3))
    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    call = pm.filter_shard_map(lambda x, s: layer(x, s), mesh=MESH, **specs)
    if axis is None:
        with pytest.raises(ShapeError, match="channel_axis"):
            call(x, state)
        return
    out, _ = call(x, state)
    is_whole = bool(jnp.allclose(out, whole(x, whole_state)[0], atol=1e-5))
    assert is_whole == is_right


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["torch", "batch", "ema"])
def test_the_parts_of_a_batch_on_a_mesh_are_normalized_as_one(mode):
    """With channel_axis a layer takes a part and reduces over a mesh axis, under defaults."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, "data", channel_axis=1, mode=mode)
    whole, whole_state = nn.make_with_state(nn.BatchNorm)(3, mode=mode)
    x = jnp.asarray(wave(8, 3, 2))
    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    call = pm.filter_shard_map(lambda x, s: layer(x, s), mesh=MESH, **specs)

    def loss(call, x, state):
        out, state = call(x, state)
        return jnp.sum(jnp.sin(out)), (out, state)

    grads, (out, state) = jax.grad(loss, 1, has_aux=True)(call, x, state)
    expected, (wanted, after) = jax.grad(loss, 1, has_aux=True)(whole, x, whole_state)

    assert_close(out, wanted)
    assert_close(grads, expected)
    for found, value in zip(
        state.get(layer.state_index), after.get(whole.state_index), strict=True
    ):
        assert_close(found, value)


@pytest.mark.parametrize("axis", [0, 2, -1, -2])
@pytest.mark.sampled
def test_channels_may_stand_anywhere(axis):
    """Counted from the front or from the back; all other axes are the batch."""
    x = wave(4, 3, 2)
    size = x.shape[axis]
    layer, state = nn.make_with_state(nn.BatchNorm)(size, channel_axis=axis)
    whole, whole_state = nn.make_with_state(nn.BatchNorm)(size)

    out, state = layer(jnp.asarray(x), state)
    moved, after = whole(jnp.moveaxis(jnp.asarray(x), axis, 1), whole_state)

    assert_close(out, jnp.moveaxis(moved, 1, axis))
    assert_close(state.get(layer.state_index)[1], after.get(whole.state_index)[1])
    for shape in ((size + 1,) * 3, ()):
        with pytest.raises(ShapeError, match="BatchNorm"):
            layer(jnp.ones(shape), after)


def test_frozen_statistics_cost_no_reduction():
    """In inference the State that comes back is the one that went in, and nothing is summed."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, inference=True)
    x = jnp.asarray(wave(4, 3))

    program = equations(lambda x, state: layer(x, state)[0], x, state)

    assert layer(x, state)[1] is state
    assert not {name for name in program if name.startswith("reduce")}


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("number", [0, 1], ids=["batch", "vmap"])
def test_the_program_is_the_hand_written_one(number):
    """Operations and costs of a step and of its gradient, as XLA compiles them."""
    programs = pytest.importorskip("benchmarks.programs", reason="compares with its programs")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        case = [c for c in programs.stateful_cases() if c.label.startswith("BatchNorm")][number]
        rows = list(programs.layer_rows(case))

    assert [(row.label, row.note) for row in rows if not row.met] == []
    assert len(rows) == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=label)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.sampled
def test_half_precision_layers_compute_in_single(dtype, inference):
    """Weights and outputs have half precision; statistics and intermediate values are float32."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, dtype=dtype, inference=inference)
    single, single_state = nn.make_with_state(nn.BatchNorm)(3, inference=inference)
    # The squares of these overflow float16.
    x = (300 * jnp.asarray(wave(4, 3))).astype(dtype)

    out, state = layer(x, state)
    expected, single_state = single(x.astype(jnp.float32), single_state)

    assert layer.weight.dtype == out.dtype == dtype
    assert_close(out.astype(jnp.float32), expected.astype(dtype).astype(jnp.float32))
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(single_state), strict=True)
    for own, other in pairs:
        assert own.dtype == jnp.float32
        assert_close(own, other)


def test_one_value_has_no_variance():
    """A batch of one is its own mean: out comes the bias, and the running variance decays."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, momentum=0.5)
    layer = set_weights(layer)

    out, state = layer(jnp.full((1, 3), 5.0), state)

    assert_close(out[0], layer.bias)
    mean, var = state.get(layer.state_index)
    assert_close(mean, [2.5] * 3)
    assert_close(var, [0.5] * 3)


@pytest.mark.parametrize("axis_name", [None, "batch"])
def test_running_statistics_normalize_a_batch_with_mode_ema(axis_name):
    """They begin with the first batch, move by the biased variance, and are used in training."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, axis_name, momentum=0.75, mode="ema")
    call = layer if axis_name is None else over_batch(layer)
    first, second = (np.asarray(wave(4, 3, 2, phase=p)) * 2 + p for p in (0, 1))
    statistics = [(x.mean((0, 2)), x.var((0, 2))) for x in (first, second)]

    out, state = call(jnp.asarray(first), state)
    assert_close(out, normalized(first, *statistics[0]))
    assert not state.get(layer.ema_first_time_index)
    out, state = call(jnp.asarray(second), state)

    expected = [0.75 * old + 0.25 * new for old, new in zip(*statistics, strict=True)]
    for found, value in zip(state.get(layer.state_index), expected, strict=True):
        assert_close(found, value)
    assert_close(out, normalized(second, *expected), atol=1e-5)
    quiet = nn.inference_mode(layer)
    again, _ = (quiet if axis_name is None else over_batch(quiet))(jnp.asarray(second), state)
    assert_close(again, out)


@pytest.mark.parametrize("momentum", [0.75, 1.0])
def test_running_statistics_are_corrected_with_mode_batch(momentum):
    """By how many batches were seen, where they are used; training is the standard one."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, momentum=momentum, mode="batch")
    plain, plain_state = nn.make_with_state(nn.BatchNorm)(3, momentum=momentum)
    quiet = nn.inference_mode(layer)
    mean, var, x = np.zeros(3), np.ones(3), jnp.asarray(wave(4, 3))
    for count in range(3):
        scale = 1 - momentum**count or 1
        expected = normalized(x, mean / scale, var / scale)
        assert_close(quiet(x, state)[0], expected)
        batch = np.asarray(wave(4, 3, phase=count)) * 2 + count
        out, state = layer(jnp.asarray(batch), state)
        expected, plain_state = plain(jnp.asarray(batch), plain_state)
        assert_close(out, expected)
        mean = momentum * mean + (1 - momentum) * batch.mean(0)
        var = momentum * var + (1 - momentum) * batch.var(0)


@pytest.mark.parametrize(("momentum", "affine"), [(0.0, True), (0.8, False), (1.0, True)])
def test_training_is_the_formula(momentum, affine):
    """Normalized by the batch; running statistics move by its mean and its unbiased variance."""
    make = nn.make_with_state(nn.BatchNorm)
    layer, state = make(3, momentum=momentum, channelwise_affine=affine)
    layer = set_weights(layer) if affine else layer
    mean, var = np.zeros(3), np.ones(3)

    for step in range(2):
        x = wave(4, 3, 2, phase=step) + step
        out, state = layer(jnp.asarray(x), state)
        expected = normalized(x, x.mean((0, 2)), x.var((0, 2)))
        if affine:
            expected = (
                expected * np.asarray(layer.weight)[:, None] + np.asarray(layer.bias)[:, None]
            )
        assert_close(out, expected, atol=1e-4)
        mean = momentum * mean + (1 - momentum) * x.mean((0, 2))
        var = momentum * var + (1 - momentum) * x.var((0, 2), ddof=0) * 8 / 7

    assert_close(jnp.stack(state.get(layer.state_index)), [mean, var])
    assert len(jax.tree.leaves(layer)) == (2 if affine else 0)


def test_no_gradient_flows_into_running_statistics():
    """For autodiff they do not depend on the batch; the result does."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3)

    def loss(x, of):
        out, after = layer(x, state.restored())
        return sum(map(jnp.sum, after.get(layer.state_index))) if of else jnp.sum(jnp.sin(out))

    x = jnp.asarray(wave(4, 3))
    assert not jax.grad(loss)(x, True).any()
    expected = jax.grad(
        lambda x: jnp.sum(jnp.sin((x - x.mean(0)) / jnp.sqrt(x.var(0)[None] + 1e-5)))
    )
    with jax.numpy_rank_promotion("allow"):
        assert_close(jax.grad(loss)(x, False), expected(x), atol=1e-5)


def test_the_argument_overrides_the_field():
    """inference=False trains a layer in inference, and True needs no mapped axis."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, "batch", inference=True)
    x = jnp.asarray(wave(4, 3)) + 1

    def train(x, state):
        return layer(x, state, inference=False)

    _, after = over_batch(train)(x, state.restored())
    assert (after.get(layer.state_index)[0] != 0).all()
    out, _ = layer.replace(inference=False)(x[0], state, inference=True)
    assert_close(out, x[0] / jnp.sqrt(jnp.float32(1 + 1e-5)))


def on_statistics_of_several():
    """One layer, with the State of three."""
    layer, state = pm.make_with_state(nn.BatchNorm)(4, inference=True)
    return layer(jnp.ones((3, 4)), jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state))


def called(shape, *args, **options):
    """A new layer for three channels, called with ones."""
    layer, state = nn.make_with_state(nn.BatchNorm)(3, *args, **options)
    return layer(jnp.ones(shape), state)


@pytest.mark.parametrize(
    ("use", "error", "word"),
    [
        (on_statistics_of_several, ShapeError, r"f32\[3,4\]"),
        (lambda: called((0, 3)), ShapeError, r"f32\[0,3\]"),
        (lambda: called((5, 9, 3)), ShapeError, r"f32\[5,9,3\]"),
        (lambda: called((3,), "batch"), ArgumentError, "batch"),
        (lambda: nn.BatchNorm(3, ("b", "b")), ArgumentError, "axis_name"),
        (lambda: nn.BatchNorm(3, momentum=1.5), ArgumentError, "momentum"),
        (lambda: nn.BatchNorm(3, mode="ema").replace(mode="batch"), ArgumentError, "mode"),
    ],
)
def test_what_is_refused(use, error, word):
    """Statistics that would broadcast or are of nothing, channels elsewhere, another mode."""
    with pytest.raises(error, match=word):
        use()
