"""A warning names streams that all members of a map draw from, unless you chose that."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SharedStreamWarning
from tests.helpers.meshes import MESH

KEY = jax.random.key(0)
X = jnp.zeros(4)
STREAMS = pm.by({pm.RngStream: 0, ...: None})
ON_PURPOSE = pm.by({pm.RngStream: None, ...: 0})


class Noise(pm.Module):
    """Two streams, one of which it uses, and a count."""

    noise: pm.RngStream
    other: pm.RngStream
    count: pm.StateIndex

    def __init__(self):
        self.noise, self.other = pm.RngStream(), pm.RngStream()
        self.count = pm.StateIndex(jnp.asarray(0))

    def __call__(self, x, state):
        """Noise on x."""
        state = state.set(self.count, state.get(self.count) + 1)
        key, state = state.next_key(self.noise)
        return x + jax.random.normal(key), state

    def both(self, x, state):
        """With noise of the other stream, too."""
        x, state = self(x, state)
        key, state = state.next_key(self.other)
        return x + jax.random.normal(key), state


def make(layer=Noise, *args, **kwargs):
    """A layer and its State, with keys."""
    layer, state = pm.make_with_state(layer)(*args, **kwargs)
    return layer, state.seed(KEY)


LAYER, _ = make()


def noisy(_=None, *, key=KEY):
    """A net with dropout."""
    return nn.Sequential([nn.Linear(3, 3, key=key), nn.Dropout(0.5, stream=pm.RngStream())])


def over_x(fn, **options):
    """A map over x, with one State for all."""
    return pm.filter_vmap(fn, **{"in_axes": (0, None), "out_axes": (0, None), **options})


def test_the_stream_is_named_with_the_hint():
    """At the line of the call; with the code of the hint each member has other numbers."""
    _, state = make()
    with pytest.warns(SharedStreamWarning, match="noise") as told:
        y, state = over_x(LAYER)(X, state)

    assert len(told) == 1
    assert told[0].filename == __file__
    assert "state['noise']" in str(told[0].message)
    assert len(set(y.tolist())) == 1
    run = pm.filter_vmap(LAYER, in_axes=(0, STREAMS), out_axes=(0, STREAMS))
    y, state = run(X, state.split(4))
    assert len(set(y.tolist())) == 4


@pytest.mark.parametrize("whole", [P(), pm.by({"count": P("data"), ...: P()})])
def test_under_shard_map(whole):
    """Unless the streams are divided between the devices, or that is said."""
    state = make()[1].split(4, "count") if isinstance(whole, type(STREAMS)) else make()[1]

    def draw(x, state):
        key, state = state.next_key(LAYER.noise)
        return x + jax.random.normal(key), state

    specs = {"in_specs": (P("data"), whole), "out_specs": (P("data"), whole)}
    with pytest.warns(SharedStreamWarning, match=r"state\['noise'\]"):
        pm.filter_jit(pm.filter_shard_map(draw, mesh=MESH, **specs))(X, state)
    for axis, split in ((P("data"), True), (None, False)):
        axes = pm.by({pm.RngStream: axis, ...: P()})
        specs = {"in_specs": (P("data"), axes), "out_specs": (P("data"), axes)}
        state = make()[1].split(4) if split else make()[1]
        y, _ = pm.filter_jit(pm.filter_shard_map(draw, mesh=MESH, **specs))(X, state)
        assert len(set(y.tolist())) == (4 if split else 1)


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        (STREAMS, None),
        (ON_PURPOSE, "count"),
        (pm.by({"noise": 0, ...: None}), "noise"),
        (pm.by({"other": 0, "noise": None, ...: None}), "other"),
    ],
)
def test_what_is_mapped_or_chosen_not_to_be_is_not_told(axes, split):
    """By a rule that names the stream, or maps another one of the State."""
    run = pm.filter_vmap(LAYER.both, in_axes=(0, axes), out_axes=(0, axes))
    run(X, make()[1].split(4, split))


def test_no_draw_is_no_mistake():
    """Statistics of a batch, dropout in inference mode, a State that goes through."""
    x = jnp.ones((4, 3))
    norm, state = pm.make_with_state(nn.BatchNorm)(3, "batch")
    over_x(norm, axis_name="batch")(x, state)
    net, state = make(noisy)
    over_x(nn.inference_mode(net))(x, state)
    over_x(lambda x, state: (x, state.set(LAYER.count, 1)))(X, make()[1])
    over_x(pm.filter_jit(lambda x, state: (x, state)))(x, state.restored())


def test_it_can_be_silenced():
    """As any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pm.SharedStreamWarning)
        over_x(LAYER)(X, make()[1])


@pytest.mark.parametrize(
    "make_run",
    [
        lambda layer, state: lambda x: layer(x, state),
        lambda layer, state: jax.tree_util.Partial(layer, state=state),
    ],
    ids=["captured", "part of the function"],
)
def test_a_state_that_is_no_argument(make_run):
    """It has no axis that could be mapped: every member drew the same, in silence."""
    with pytest.warns(SharedStreamWarning, match="noise"):
        pm.filter_vmap(make_run(*make()), out_axes=(0, None))(X)
