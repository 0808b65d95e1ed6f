"""A warning names streams that all members of a map draw from, unless you chose that."""

import functools as ft
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SharedStreamWarning
from tests.goldens import refusals
from tests.helpers.cached_traces import CACHING
from tests.helpers.meshes import EXPLICIT, MESH, on
from tests.labels import label

KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 4)
X = jnp.zeros(4)
SAME = "expected random streams that differ from member to member"
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
    with pytest.warns(SharedStreamWarning, match=SAME) as told:
        y, state = over_x(LAYER)(X, state)

    assert len(told) == 1
    assert told[0].filename == __file__
    assert str(told[0].message).splitlines()[1:] == [
        "  at state['noise']",
        "  give each member its own stream; or pass None to share the numbers:",
        "      axes = pm.by({pm.RngStream: 0, ...: None})  # for state.split(n)",
        "      axes = pm.by({pm.RngStream: None, ...: None})",
    ]
    assert len(set(y.tolist())) == 1
    run = pm.filter_vmap(LAYER, in_axes=(0, STREAMS), out_axes=(0, STREAMS))
    y, state = run(X, state.split(4))
    assert len(set(y.tolist())) == 4


def scanned(x, state):
    """In a loop."""
    return pm.filter_scan(lambda s, x: LAYER(x, s)[::-1], state, x[None])[::-1]


def part(x, state):
    """In a part of the State."""
    x, own = LAYER(x, state.substate(LAYER))
    return x, state.update(own)


def with_gradient(x, state):
    """In the loss of a gradient."""
    return pm.filter_grad(lambda x: LAYER(x, state), has_aux=True)(x)


DRAWS = {
    "both": LAYER.both,
    "jit": pm.filter_jit(lambda x, state: LAYER(x, state)),
    "checkpoint": pm.filter_checkpoint(LAYER),
    "scan": scanned,
    "grad": with_gradient,
    "substate": part,
}


@pytest.mark.parametrize("fn", DRAWS.values(), ids=DRAWS)
def test_wherever_it_is_drawn_from(fn):
    """Directly, or in a transform inside of the map."""
    with pytest.warns(SharedStreamWarning, match=r"\n  at state\['noise'\]"):
        over_x(fn)(X, make()[1])


@pytest.mark.parametrize("transform", [name for name in CACHING if name != "filter_pmap"])
@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached"])
def test_a_cached_trace_is_known_to_draw(transform, is_cached):
    """Its code does not run again, but the map knows the streams. (`filter_pmap` itself warns.)"""
    run, (_, state) = CACHING[transform](lambda x, state: LAYER(x, state)), make()
    if is_cached:
        run(X[0], state.restored())
    with pytest.warns(SharedStreamWarning, match=r"\n  at state\['noise'\]"):
        over_x(run)(X, state)


def test_all_streams_are_named_in_one_warning():
    """Each once, and none that was not drawn from."""
    with pytest.warns(SharedStreamWarning, match=SAME) as told:
        over_x(LAYER.both)(X, make()[1])
    assert str(told[0].message).count("  at ") == 2


@pytest.mark.parametrize("whole", [P(), None, pm.by({"count": P("data"), ...: P()}), on()])
def test_under_shard_map(whole):
    """Unless the streams are divided between the devices, or that is said."""
    state = make()[1].split(4, "count") if isinstance(whole, type(STREAMS)) else make()[1]

    def draw(x, state):
        key, state = state.next_key(LAYER.noise)
        return x + jax.random.normal(key), state

    specs = {"in_specs": (P("data"), whole), "out_specs": (P("data"), whole)}
    with pytest.warns(SharedStreamWarning, match=rf"\(in_specs\) of draw: {SAME}") as told:
        pm.filter_jit(pm.filter_shard_map(draw, mesh=MESH, **specs))(X, state)
    assert "pm.RngStream: P('data')" in str(told[0].message)
    for axis, split in ((P("data"), True), (None, False)):
        axes = pm.by({pm.RngStream: axis, ...: P()})
        specs = {"in_specs": (P("data"), axes), "out_specs": (P("data"), axes)}
        state = make()[1].split(4) if split else make()[1]
        y, _ = pm.filter_jit(pm.filter_shard_map(draw, mesh=MESH, **specs))(X, state)
        assert len(set(y.tolist())) == (4 if split else 1)


def test_under_shard_map_as_the_arguments_lie():
    """Their types say how."""
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, on("data", mesh=EXPLICIT))
        run = pm.filter_shard_map(LAYER, out_specs=(P("data"), None))
        with pytest.warns(SharedStreamWarning, match=r"at state\['noise'\]"):
            run(x, jax.device_put(make()[1], on(mesh=EXPLICIT)))


def seeded(x, key, state):
    """With a key for each member."""
    return LAYER(x, state.seed(key))


def made(x, key, _):
    """With a separate State, whose streams have the same names."""
    layer, state = pm.make_with_state(Noise)()
    return layer(x, state.seed(key))


def first(x, key, state):
    """Of streams split inside."""
    return LAYER(x, jax.tree.map(lambda a: a[0] if a.ndim else a, state.seed(key).split(2)))


@pytest.mark.parametrize("fn", [seeded, made, first], ids=label)
@pytest.mark.parametrize("under", [lambda fn: fn, pm.filter_jit], ids=["", "jit"])
def test_keys_that_are_given_inside(fn, under):
    """Inner keys show that the outer streams are not drawn from."""
    run = pm.filter_vmap(under(fn), in_axes=(0, 0, None))
    # The second time, from a cached trace.
    for _ in range(2):
        y, _ = run(X, KEYS, make()[1])
        assert len(np.unique(y)) == 4


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


def test_a_rule_for_all_arguments_names_streams():
    """Whether the rule is for all arguments, or for one by its name."""
    for in_axes in (pm.by({pm.RngStream: None, "count": None, ...: 0}), {"state": ON_PURPOSE}):
        state = make()[1]
        state = state.split(4, "count") if isinstance(in_axes, dict) else state
        pm.filter_vmap(lambda x, state: LAYER(x, state), in_axes=in_axes)(X, state)


def test_two_states_with_a_stream_of_one_name():
    """It is not known which of them was drawn from, so there is no warning."""
    run = pm.filter_vmap(lambda x, a, b: LAYER(x, a), in_axes=(0, STREAMS, None))
    run(X, make()[1].split(4), make()[1])


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


test_refusals = refusals(globals())


class WithState(pm.Module):
    """A layer that has its State."""

    layer: Noise
    state: pm.State

    def __call__(self, x):
        return self.layer(x, self.state)


def in_a_gradient(layer, state):
    """A function that draws in the loss of a gradient."""

    def loss(x):
        y, new = layer(x, state)
        return jnp.sum(y), new

    return pm.filter_grad(loss, has_aux=True)


CONTAINED = {
    "closure": lambda layer, state: lambda x: layer(x, state),
    "jitted closure": lambda layer, state: pm.filter_jit(lambda x: layer(x, state)),
    "closure in a gradient": in_a_gradient,
    "closure in a scan": lambda layer, state: (
        lambda x: pm.filter_scan(lambda s, x: layer(x, s)[::-1], state, x[None])[::-1]
    ),
    "self": WithState,
    "method": lambda layer, state: WithState(layer, state).__call__,
    "Partial": lambda layer, state: jax.tree_util.Partial(layer, state=state),
    "default": lambda layer, state: lambda x, state=state: layer(x, state),
}


@pytest.mark.parametrize("contain", CONTAINED.values(), ids=CONTAINED)
@pytest.mark.parametrize("transform", ["vmap", "shard_map"])
def test_a_state_that_is_no_argument(contain, transform):
    """It has no axis that could be mapped."""
    options = {"in_axes": 0, "out_axes": (0, None)}
    run = ft.partial(pm.filter_vmap, **options)
    if transform == "shard_map":
        specs = {"in_specs": P("data"), "out_specs": (P("data"), P())}
        run = ft.partial(pm.filter_shard_map, mesh=MESH, **specs)
    with pytest.warns(SharedStreamWarning, match=SAME) as told:
        run(contain(*make()))(X)
    assert "\n  at noise, of a State that is not an argument\n  pass the State as an" in str(
        told[0].message
    )
