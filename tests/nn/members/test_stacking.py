"""Members taken apart and put together."""

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod import nn
from pytreemod.nn.members.stacking import is_shared, split_members, stack_members
from pytreemod.state.tokens import Unnamed, tokens_of
from tests.goldens import refusals


class Drawing(pm.Module):
    """A layer with an array and a stream."""

    by: jax.Array
    stream: pm.RngStream

    def __init__(self, by):
        self.by = jnp.asarray(by)
        self.stream = pm.RngStream()

    def __call__(self, x, state):
        return x, state


def filled(by, seed):
    """One whose stream holds its key."""
    layer, state = pm.make_with_state(Drawing)(by)
    return state.seed(jax.random.key(seed)).fill(layer)


def draws(layer):
    """The next key of a layer's stream, as numbers."""
    layer, state = pm.make_with_state(lambda: layer)()
    return jax.random.key_data(state.next_key(layer.stream)[0]).tolist()


FILLED = nn.Stack.from_layers([filled(by, seed=0) for by in (1.0, 2.0, 3.0)])


def test_each_layer_that_is_taken_draws_its_own():
    """A stream without a key stays without."""
    first, second, _ = FILLED

    assert [float(one.by) for one in (first, second)] == [1.0, 2.0]
    assert draws(first) != draws(second)
    # None of them is joined with the others.
    assert first.stream.init.outer == ()
    assert nn.Stack(lambda: Drawing(1.0), 2)[0].stream.init is None


def test_several_layers_keep_one_stream():
    """It has no axis that could be cut."""
    part = FILLED[1:].layer

    assert part.by.tolist() == [2.0, 3.0]
    assert draws(part) == draws(FILLED.layer)


def test_tokens_are_renewed():
    """A name would say that some State has the value."""
    stack, _ = pm.make_with_state(lambda: FILLED)()

    assert stack.layer.stream.marker == "layer.stream"
    assert isinstance(stack[0].stream.marker, Unnamed)


def test_layers_are_stacked():
    """Arrays are stacked, one token represents all, and the first stream continues."""
    layers = [filled(1.0, seed=0), filled(2.0, seed=1)]
    one = stack_members(layers)

    assert one.by.tolist() == [1.0, 2.0]
    assert len(tokens_of(one)) == 1
    assert draws(one) == draws(layers[0])


def test_what_all_share_is_among_the_rest():
    """Below a path that is shared, however deep."""
    tree = {"a": {"b": jnp.ones(2)}, "c": jnp.ones(2), "d": "text"}
    own, rest = split_members(tree, ["['a']"])

    assert own["a"]["b"] is None
    assert own["c"] is tree["c"]
    assert rest == {"a": tree["a"], "c": None, "d": "text"}
    path = (jax.tree_util.GetAttrKey("a"), jax.tree_util.GetAttrKey("b"))
    assert is_shared(path, ["a"])
    assert is_shared(path[:1], ["a"])
    assert is_shared(path, ["a.b"])
    assert not is_shared(path, ["b"])


test_refusals = refusals(globals())
