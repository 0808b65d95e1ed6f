"""filter_vmap warns if all members draw from one random stream, unless that was chosen."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SharedStreamWarning

X = jnp.zeros(4)
STREAMS = pm.by({pm.RngStream: 0, ...: None})
ON_PURPOSE = pm.by({pm.RngStream: None, ...: 0})


class Noise(pm.Module):
    """Two streams, and a count."""

    noise: pm.RngStream
    other: pm.RngStream
    count: pm.StateIndex

    def __init__(self):
        self.noise, self.other = pm.RngStream(), pm.RngStream()
        self.count = pm.StateIndex(jnp.asarray(0))

    def __call__(self, x, state):
        """Noise of the first on x."""
        key, state = state.set(self.count, 1).next_key(self.noise)
        return x + jax.random.normal(key), state


def make(layer=Noise):
    """A layer and its State, with keys."""
    layer, state = pm.make_with_state(layer)()
    return layer, state.seed(jax.random.key(0))


LAYER, _ = make()


def over_x(fn, **options):
    """A map over x, with one State for all."""
    return pm.filter_vmap(fn, **{"in_axes": (0, None), "out_axes": (0, None), **options})


@pytest.mark.parametrize(
    "run",
    [over_x(LAYER), over_x(LAYER, in_axes={"state": None}), pm.filter_jit(over_x(LAYER))],
    ids=["by position", "by name", "compiled"],
)
def test_the_stream_is_named_with_the_hint(run):
    """At the line of the call; with the code of the hint each member has other numbers."""
    with pytest.warns(SharedStreamWarning, match=r"state\['noise'\]") as told:
        y, _ = run(X, make()[1])

    assert [each.filename for each in told] == [__file__]
    assert len({*y.tolist()}) == 1
    assert "pm.by({pm.RngStream: 0, ...: None})  # with state.split(n)" in str(told[0].message)
    y, _ = over_x(LAYER, in_axes=(0, STREAMS), out_axes=(0, STREAMS))(X, make()[1].split(4))
    assert len({*y.tolist()}) == 4


CHOSEN = {
    "mapped": (STREAMS, None),
    "on purpose": (ON_PURPOSE, "count"),
    "one by name": (pm.by({"noise": 0, ...: None}), "noise"),
    "another": (pm.by({"other": 0, "noise": None, ...: None}), "other"),
}


@pytest.mark.parametrize(("axes", "split"), CHOSEN.values(), ids=CHOSEN)
def test_what_is_mapped_or_chosen_not_to_be_is_not_told(axes, split):
    """By a rule that names the stream, or maps another one of the State."""
    run = over_x(LAYER, in_axes=(0, axes), out_axes=(0, axes))
    assert run(X, make()[1].split(4, split))[0].shape == (4,)
    same = over_x(LAYER, in_axes=(0, pm.by({pm.RngStream: None, ...: None})))
    assert len({*same(X, make()[1])[0].tolist()}) == 1


def test_no_draw_is_no_mistake():
    """Statistics of a batch, dropout in inference mode, a State that goes through."""
    x, dropout = jnp.ones((4, 3)), lambda: nn.Dropout(0.5, stream=pm.RngStream())
    norm, state = pm.make_with_state(nn.BatchNorm)(3, "batch")
    over_x(norm, axis_name="batch")(x, state)
    net, state = make(dropout)
    over_x(nn.inference_mode(net))(x, state)
    over_x(lambda x, state: (x, state.set(LAYER.count, 1)))(X, make()[1])
