"""The functions that normalize, and the statistics that go with `batch_norm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import (
    batch_norm,
    batch_statistics,
    group_norm,
    instance_norm,
    layer_norm,
    moving_average,
    normalize_batch,
    rms_norm,
    update_running,
)
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=label)
def test_layer_norm_is_pytorchs(torch, shape):
    """The same numbers as torch.nn.functional.layer_norm over one, two and three axes."""
    x, weight, bias = wave(2, 3, 4), wave(*shape, phase=1), wave(*shape, phase=2)

    found = layer_norm(jnp.asarray(x), shape, jnp.asarray(weight), jnp.asarray(bias), eps=1e-3)

    reference = torch.nn.functional.layer_norm(
        torch.tensor(x), shape, torch.tensor(weight), torch.tensor(bias), 1e-3
    )
    assert_close(found, reference)


def test_layer_norm_without_weights_has_mean_zero_and_variance_one():
    """As its name says, compared with NumPy."""
    out = np.asarray(layer_norm(jnp.asarray(wave(5, 8)), (8,)))

    assert_close(out.mean(1), np.zeros(5))
    assert_close(out.var(1), np.ones(5), atol=1e-3)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=label)
@pytest.mark.slow
def test_rms_norm_is_pytorchs(torch, shape):
    """The same numbers and gradients as torch.nn.functional.rms_norm; a bias is added to that."""
    x, weight, bias = wave(2, 3, 4), wave(*shape, phase=1), wave(*shape, phase=2)
    theirs = [torch.tensor(array, requires_grad=True) for array in (x, weight)]
    reference = torch.nn.functional.rms_norm(theirs[0], shape, theirs[1], 1e-3)
    reference.sin().sum().backward()

    ours = jnp.asarray(x), jnp.asarray(weight)
    found = rms_norm(ours[0], shape, ours[1], jnp.asarray(bias), eps=1e-3)
    grads = jax.grad(lambda x, w: jnp.sin(rms_norm(x, shape, w, eps=1e-3)).sum(), (0, 1))(*ours)

    assert_close(found, reference.detach().numpy() + bias)
    for grad, tensor in zip(grads, theirs, strict=True):
        assert_close(grad, tensor.grad, atol=1e-4)


def test_rms_norm_is_the_formula_of_its_paper():
    """x / sqrt(mean of squares + eps), by NumPy; in half precision computed in single."""
    x = wave(5, 8)
    expected = x / np.sqrt((x.astype("f8") ** 2).mean(1, keepdims=True) + 1e-2)

    assert_close(rms_norm(jnp.asarray(x), (8,), eps=1e-2), expected)
    half = rms_norm(jnp.asarray(300 * x, jnp.float16), (8,), eps=0.0)
    assert half.dtype == jnp.float16
    assert_close(np.square(half.astype("f4")).mean(1), np.ones(5), atol=3e-3)
    assert_close(rms_norm(jnp.full((1, 1), 1e-3), (1,)), [[1e-3 / np.sqrt(1.1e-5)]])


@pytest.mark.parametrize("spatial", [(), (3,), (2, 3)], ids=label)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.sampled
def test_group_norm_is_pytorchs(torch, groups, spatial):
    """The same numbers as torch.nn.functional.group_norm, for a batch and for one example."""
    x, weight, bias = wave(5, 4, *spatial), wave(4, phase=1), wave(4, phase=2)
    reference = torch.nn.functional.group_norm(
        torch.tensor(x), groups, torch.tensor(weight), torch.tensor(bias), 1e-3
    )

    def apply(x, **options):
        given = jnp.asarray(x), groups, jnp.asarray(weight), jnp.asarray(bias)
        return group_norm(*given, eps=1e-3, **options)

    assert_close(apply(x, channel_axis=1), reference)
    assert_close(apply(x[0]), reference[0])


def test_group_norm_is_the_formula_of_its_paper():
    """Each group for itself: (x - mean) / sqrt(var + eps), by NumPy in double precision."""
    x, eps = wave(3, 2, 6, 5), 1e-2
    expected = np.empty(x.shape)
    for example in range(6):
        for group in (slice(0, 2), slice(2, 4), slice(4, 6)):
            chosen = (*divmod(example, 2), group)
            block = x[chosen].astype("f8")
            expected[chosen] = (block - block.mean()) / np.sqrt(block.var() + eps)

    assert_close(group_norm(jnp.asarray(x), 3, channel_axis=2, eps=eps), expected)
    assert_close(group_norm(jnp.asarray(x[0, 0]), 3, eps=eps), expected[0, 0])


@pytest.mark.parametrize("spatial", [(3,), (2, 3)], ids=label)
@pytest.mark.slow
def test_instance_norm_is_pytorchs(torch, spatial):
    """The same numbers and gradients, for a batch and for one example; in half precision, too."""
    given = wave(5, 4, *spatial), wave(4, phase=1), wave(4, phase=2)
    theirs = [torch.tensor(array, requires_grad=True) for array in given]
    x, weight, bias = theirs
    reference = torch.nn.functional.instance_norm(x, None, None, weight, bias, eps=1e-3)
    reference.sin().sum().backward()

    def apply(x, weight, bias):
        return instance_norm(x, weight, bias, channel_axis=1, eps=1e-3)

    ours = [jnp.asarray(array) for array in given]
    grads = jax.grad(lambda *arrays: jnp.sin(apply(*arrays)).sum(), (0, 1, 2))(*ours)
    assert_close(apply(*ours), reference)
    for grad, tensor in zip(grads, theirs, strict=True):
        assert_close(grad, tensor.grad, atol=1e-4)
    half = instance_norm(ours[0].astype(jnp.bfloat16), channel_axis=1)
    assert half.dtype == jnp.bfloat16
    axes = tuple(range(2, half.ndim))
    assert_close(half.astype("f4").mean(axes), np.zeros((5, 4)), atol=0.02)


def test_group_norm_adds_1e_5_where_nothing_else_is_said():
    """As in PyTorch and Equinox: seen where the variance is as small."""
    x = jnp.asarray([[-1e-3], [1e-3]])

    assert_close(group_norm(x, 1), np.asarray(x) / np.sqrt(1e-6 + 1e-5))


def test_variance_does_not_cancel():
    """A large mean costs no accuracy: 1e4 + (-1, 1) normalizes to (-1, 1)."""
    x = jnp.array([[1e4 - 1, 1e4 + 1]], jnp.float32)

    assert_close(layer_norm(x, (2,), eps=0.0), [[-1, 1]])
    assert_close(group_norm(x[0], 1, eps=0.0), [-1, 1])
    assert_close(batch_statistics(x, channel_axis=0)[1], [1])


@pytest.mark.parametrize("spatial", [(), (3,), (2, 3)], ids=label)
def test_batch_norm_is_pytorchs(torch, spatial):
    """Statistics, normalized values and running averages of torch.nn.functional.batch_norm."""
    x, weight, bias = wave(4, 3, *spatial), wave(3, phase=1), wave(3, phase=2)
    running = [torch.zeros(3), torch.ones(3)]
    reference = torch.nn.functional.batch_norm(
        torch.tensor(x), *running, torch.tensor(weight), torch.tensor(bias), True, 0.1, 1e-3
    )

    mean, var, count = batch_statistics(jnp.asarray(x), channel_axis=1)
    found = batch_norm(jnp.asarray(x), mean, var, jnp.asarray(weight), jnp.asarray(bias), eps=1e-3)

    assert_close(found, reference)
    assert_close(update_running(jnp.zeros(3), mean, 0.9), running[0])
    assert_close(update_running(jnp.ones(3), var * count / (count - 1), 0.9), running[1])


def test_statistics_over_mapped_axes_are_those_of_the_whole_batch():
    """Mapped once or twice, mean, variance and count equal those over all examples at once."""
    x = jnp.asarray(wave(2, 4, 3, 5))
    expected = batch_statistics(x.reshape(8, 3, 5), channel_axis=1)

    def statistics(x):
        return batch_statistics(x, channel_axis=0, axis_name=("outer", "inner"))

    mapped = jax.vmap(jax.vmap(statistics, axis_name="inner"), axis_name="outer")
    mean, var, count = mapped(x)

    assert_close(mean, jnp.broadcast_to(expected[0], (2, 4, 3)))
    assert_close(var, jnp.broadcast_to(expected[1], (2, 4, 3)))
    assert count[0, 0] == expected[2] == 40


def test_half_precision_is_computed_in_single_and_given_back_in_half():
    """bfloat16 in and out, with the statistics of the float32 computation between."""
    x = jnp.asarray(wave(4, 64)).astype(jnp.bfloat16)
    single = x.astype(jnp.float32)

    out = layer_norm(x, (64,), jnp.ones(64, jnp.bfloat16))
    mean, var, _ = batch_statistics(x, channel_axis=0)

    assert out.dtype == jnp.bfloat16
    assert_close(
        out.astype(jnp.float32), layer_norm(single, (64,)).astype(jnp.bfloat16).astype("f4")
    )
    assert_close(
        group_norm(x[0], 4).astype("f4"), group_norm(single[0], 4).astype(jnp.bfloat16).astype("f4")
    )
    assert group_norm(x[0], 4).dtype == jnp.bfloat16
    assert mean.dtype == var.dtype == jnp.float32
    assert batch_norm(x, mean, var, channel_axis=0).dtype == jnp.bfloat16


def test_no_gradient_flows_into_running_averages():
    """The averages of a step do not depend, for autodiff, on its batch."""
    grad = jax.grad(lambda new: update_running(jnp.zeros(2), new, 0.9).sum())(jnp.ones(2))

    assert grad.tolist() == [0, 0]


def test_a_moving_average_begins_with_its_first_value_and_passes_gradients_on():
    """Unlike `update_running`, because the average itself normalizes."""
    old, new = jnp.zeros(2), jnp.array([1.0, 4.0])

    assert_close(moving_average(old, new, 0.75, is_first=True), new)
    assert_close(moving_average(old, new, 0.75, is_first=jnp.asarray(False)), new / 4)
    grad = jax.grad(lambda new: moving_average(old, new, 0.75, is_first=False).sum())(new)
    assert_close(grad, jnp.full(2, 0.25))


def test_channels_are_the_second_axis_where_nothing_else_is_said():
    """As in PyTorch; and 1e-5 is added to the variance."""
    x, mean, var = (jnp.asarray(wave(2, 3, 4)), jnp.arange(3.0), jnp.full(3, 1e-5))

    out, *statistics, count = normalize_batch(x)

    assert_close(out, normalize_batch(x, channel_axis=1, eps=1e-5)[0])
    assert [value.shape for value in statistics] == [(3,), (3,)]
    assert count == 8
    assert_close(
        batch_norm(x, mean, var),
        (np.asarray(x) - np.arange(3.0)[:, None]) / np.sqrt(2e-5),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("normalize", "most"),
    [
        (lambda x, w, b: layer_norm(x, (8,), w, b), 2),
        (lambda x, w, b: rms_norm(x, (8,), w, b), 2),
        (lambda x, w, b: group_norm(x, 2, w, b, channel_axis=2), 2),
        (lambda x, w, b: instance_norm(x.swapaxes(1, 2), w, b, channel_axis=1), 2),
        (lambda x, w, b: batch_norm(x, w, w, w, b, channel_axis=2), 1),
        (lambda x, w, b: normalize_batch(x, w, b, channel_axis=2)[0], 1),
    ],
    ids=["layer", "rms", "group", "instance", "batch", "normalize"],
)
def test_little_is_stored_for_the_backward_pass(normalize, most):
    """Arrays of the size of x: a loop over layers stores them for each of its layers."""
    x, weight = jnp.ones((4, 5, 8)), jnp.ones(8)

    stored = jax.eval_shape(lambda *args: jax.vjp(normalize, *args)[1], x, weight, weight)

    assert sum(each.size == x.size for each in jax.tree.leaves(stored)) <= most
