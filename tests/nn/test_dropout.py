"""`Dropout`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import RngError
from tests.goldens import refusals
from tests.helpers.equations import equations
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def test_in_training_entries_are_dropped(key):
    """Half of the ones become zero, the others two."""
    out = nn.Dropout()(jnp.ones(1000), key=key)

    assert set(out.tolist()) == {0.0, 2.0}
    assert 400 < int((out == 0).sum()) < 600


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.Dropout(0), {}),
        (nn.Dropout(0.9, inference=True), {}),
        (nn.Dropout(0.9), {"inference": True}),
    ],
    ids=["p=0", "by field", "by argument"],
)
def test_without_dropping_no_key_is_needed(layer, options):
    """p = 0 and inference are the identity."""
    x = jnp.asarray(wave(4))

    assert_close(layer(x, **options), x)


def test_the_argument_overrides_the_field(key):
    """inference=False trains even a layer that was switched to inference."""
    layer = nn.Dropout(1.0, inference=True)

    assert layer(jnp.ones(3), key=key, inference=False).tolist() == [0, 0, 0]


def test_p_and_inference_are_configuration():
    """A Dropout has no leaves, and two of them with one p are one structure."""
    assert jax.tree.leaves(nn.Dropout(0.3)) == []
    assert jax.tree.structure(nn.Dropout(0.3)) == jax.tree.structure(nn.Dropout(0.3))
    assert jax.tree.structure(nn.Dropout(0.3)) != jax.tree.structure(nn.Dropout(0.4))


def test_training_without_a_key_is_refused():
    """As a RuntimeError, with both ways out."""
    text = (
        r"^Dropout\(p=0\.5\): expected a random key when training, got none\.(.|\n)*"
        r"layer\(x, key=jax\.random\.key\(0\)\)\n      layer = pm\.inference_mode\(layer\)$"
    )

    with pytest.raises(RngError, match=text) as caught:
        nn.Dropout(0.5)(jnp.ones(3))
    assert isinstance(caught.value, RuntimeError)


def test_an_array_as_p_becomes_a_number():
    """A known scalar is accepted; the leaves stay arrays only."""
    layer = nn.Dropout(jnp.array(0.5))

    assert layer.p == 0.5
    assert type(layer.p) is float


def streaming(p=0.5, **options):
    """A Dropout with its own stream, and its seeded State."""
    make = nn.make_with_state(lambda: nn.Dropout(p, stream=pm.RngStream(), **options))
    layer, state = make()
    return layer, state.seed(jax.random.key(3))


def test_with_a_stream_each_call_has_a_key_of_its_own():
    """The keys are those that the stream gives, one for each call."""
    layer, state = streaming()
    x = jnp.ones(64)
    key, _ = state.substate(layer).next_key(layer.stream)

    first, state = layer(x, state)
    second, state = layer(x, state)

    assert layer.is_stateful()
    assert_close(first, nn.Dropout(0.5)(x, key=key))
    assert (first != second).any()


def test_one_stream_in_two_layers_is_one_for_each():
    """Every position has its own entry in the State, and the layers drop different entries."""

    def make():
        stream = pm.RngStream()
        return nn.Dropout(0.5, stream=stream), nn.Dropout(0.5, stream=stream)

    (one, two), state = nn.make_with_state(make)()
    state = state.seed(jax.random.key(0))
    x = jnp.ones(64)

    first, state = one(x, state)
    second, state = two(x, state)

    assert len(jax.tree.leaves(state)) == 4  # two keys and two counts
    assert (first != second).any()


def test_a_key_takes_the_place_of_the_stream(key):
    """The State is returned unchanged; without a State, the output is returned alone."""
    layer, state = streaming()
    x = jnp.ones(64)

    out, after = layer(x, state, key=key)

    assert after is state
    assert_close(out, nn.Dropout(0.5)(x, key=key))
    assert_close(out, layer(x, key=key))


@pytest.mark.parametrize(
    ("p", "options", "call"),
    [(0.5, {"inference": True}, {}), (0.5, {}, {"inference": True}), (0, {}, {})],
    ids=["by field", "by argument", "p=0"],
)
def test_without_dropping_the_stream_is_not_used(p, options, call):
    """The very same array and State come back; the program is empty."""
    layer, state = streaming(p, **options)
    x = jnp.ones(3)

    assert layer(x, state, **call) == (x, state)
    assert layer(x, **call) is x
    assert not equations(lambda x, state: layer(x, state, **call), x, state)


def test_inference_mode_keeps_the_stream():
    """Switched to inference and back, the stream goes on."""
    layer, state = streaming()
    quiet = nn.inference_mode(layer)

    x, state = quiet(jnp.ones(64), state)
    x, state = nn.inference_mode(quiet, False)(x, state)

    assert set(x.tolist()) == {0.0, 2.0}


def test_a_state_that_is_not_needed_is_handed_back(key):
    """Without a stream, too, passing a State means that a pair comes back."""
    state = nn.State(())

    assert nn.Dropout(0.5)(jnp.ones(3), state, key=key)[1] is state
    assert not nn.Dropout(0.5).is_stateful()


@pytest.mark.slow
def test_streams_under_vmap():
    """Split, each example has its own mask; unsplit, all share one."""
    layer, state = streaming()
    x = jnp.ones((4, 64))
    axes = pm.by({pm.RngStream: 0, ...: None})

    same, state = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))(x, state)
    mapped = pm.filter_vmap(layer, in_axes=(0, axes), out_axes=(0, axes))
    other, state = mapped(x, state.split(4))
    again, _ = layer(x, state.join())

    assert (same == same[:1]).all()
    assert len({tuple(row) for row in np.asarray(jnp.concat([same[:1], other, again]))}) == 9


def test_a_stream_through_jit_and_grad():
    """The State goes through as an array does; a jitted step is traced once."""
    layer, state = streaming()
    traces = []

    @jax.jit
    def step(x, state):
        traces.append(None)
        loss = lambda x: (lambda out, new: (out.sum(), (out, new)))(*layer(x, state))  # noqa: E731
        return jax.grad(loss, has_aux=True)(x)

    for _ in range(3):
        grad, (out, state) = step(jnp.ones(64), state)
        assert_close(grad, out)
    assert len(traces) == 1


@pytest.mark.parametrize("dims", [1, [1], (np.int64(1),), (-1,)], ids=label)
def test_broadcast_axes_are_numbers(key, dims):
    """One of them or several, counted from either end."""
    layer = nn.Dropout(0.5, broadcast_dims=dims)
    dropped = layer(jnp.ones((32, 3)), key=key) == 0

    assert (dropped.all(1) == dropped.any(1)).all()
    assert {type(axis) for axis in layer.broadcast_dims} == {int}


def test_defaults_are_not_printed():
    """A plain Dropout prints no arguments, another one prints those that were passed."""
    assert repr(nn.Dropout(0.5)) == "Dropout()"
    assert "broadcast_dims=(1,)" in repr(nn.Dropout(0.5, broadcast_dims=1))
    assert "stream=RngStream" in repr(nn.Dropout(0.5, stream=pm.RngStream()))


def test_an_older_name_of_inference_is_taken_with_a_warning(key):
    """`deterministic`, when the layer is made, when it is called, and as an attribute."""
    text = (
        r"^Dropout\(.*\): expected inference=, got deterministic=, its older name\.\n"
        r"  write\n      inference=True$"
    )
    with pytest.warns(UserWarning, match=text):
        layer = nn.Dropout(0.5, deterministic=True)
    assert layer.inference is layer.deterministic is True
    with pytest.warns(UserWarning, match=text):
        out = nn.Dropout(0.5)(jnp.ones(3), deterministic=True)
    assert out.tolist() == [1.0] * 3


def test_inference_is_known_while_tracing():
    """A traced value is refused with a hint, in a call and in the constructor."""
    layer = nn.Dropout(0.5)
    assert layer(jnp.ones(3), inference=jnp.array(True)).tolist() == [1, 1, 1]


test_refusals = refusals(globals())
