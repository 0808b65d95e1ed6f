"""A transform warns of a State that a function used up and did not return; a net is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import LostUpdateWarning, StateError

X = jnp.arange(12.0).reshape(4, 3)


class Counter(pm.Module):
    """The smallest layer with a State: counts its calls."""

    count: pm.StateIndex
    weight: jax.Array

    def __init__(self):
        self.count = pm.StateIndex(jnp.asarray(0))
        self.weight = jnp.asarray(1.0, jnp.float32)

    def __call__(self, x, state):
        return x * self.weight, state.set(self.count, state.get(self.count) + 1)


@pytest.fixture
def counter():
    """A model and its State; a warning that no test expects is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", LostUpdateWarning)
        yield pm.make_with_state(Counter)()


def kept(model, state, x):
    y, state = model(x, state)
    return jnp.sum(y**2), state


def dropped(model, state, x):
    return kept(model, state, x)[0]


def leave(model, state, x):
    return jnp.sum(x)


def with_a_rule(f):
    """A function with a rule that is not needed, because nothing is differentiated."""
    custom = pm.filter_custom_vjp(f)
    custom.def_fwd(lambda perturbed, *args: (f(*args), None))
    custom.def_bwd(lambda residuals, grad, perturbed, *args: None)
    return custom


def one(state):
    return jax.tree.map(lambda leaf: leaf[None], state)


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("only",))
WHOLE = {"mesh": MESH, "in_specs": jax.P(), "out_specs": jax.P()}
MAPPED = {"in_axes": (None, None, 0)}
DECORATORS = ["filter_jit", "filter_grad", "filter_value_and_grad", "filter_jacfwd"]
DECORATORS += ["filter_jacrev", "filter_hessian", "filter_checkpoint", "filter_checkify"]
DECORATORS += ["filter_make_jaxpr"]
# Those that take a function and return one; those that take its arguments, too; and loops.
TRANSFORMS = {
    **{name: getattr(pm, name) for name in DECORATORS},
    "filter_vmap": lambda f: pm.filter_vmap(f, **MAPPED),
    "filter_shard_map": lambda f: pm.filter_shard_map(f, **WHOLE),
    "filter_custom_vjp": with_a_rule,
    "filter_vjp": lambda f: lambda *args: pm.filter_vjp(f, *args),
    "filter_linearize": lambda f: lambda *args: pm.filter_linearize(f, *args),
    "filter_jvp": lambda f: lambda *args: pm.filter_jvp(f, args, (args[0], None, None)),
    "filter_eval_shape": lambda f: lambda *args: pm.filter_eval_shape(f, *args),
    "filter_closure_convert": lambda f: lambda *args: pm.filter_closure_convert(f, *args),
    "filter_cond": lambda f: lambda *args: pm.filter_cond(True, f, leave, *args),
    "filter_scan": lambda f: (
        lambda m, state, x: pm.filter_scan(lambda carry, s: (carry, f(m, s, x)), None, one(state))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.sampled
def test_a_forgotten_state_is_told(transform, counter):
    """In silence, the count would stay at 0 for ever; whatever the transform."""
    with pytest.warns(LostUpdateWarning, match=r"(?m)^  at (state|s)$") as told:
        transform(dropped)(*counter, X)

    assert told[0].filename == __file__


def test_a_state_that_comes_out_is_not_lost(counter):
    """Also through a nested structure, as a part, or from the function inside."""
    model, state = counter

    def nested(model, held, x):
        y, state = model(x, held["state"][0])
        return {"out": [y, {"state": (state,)}]}

    def part(model, state, x):
        return model(x, state.substate(model))[1]

    def put_back(model, state, x):
        return state.update(part(model, state, x))

    pm.filter_value_and_grad(kept, has_aux=True)(model, state.restored(), X)
    (state,) = pm.filter_jit(nested)(model, {"state": [state]}, X)["out"][1]["state"]
    _, state = pm.filter_vmap(kept, **MAPPED, out_axes=(0, None))(model, state, X)
    _, state = pm.filter_jit(pm.filter_checkpoint(kept))(model, state, X)
    state = pm.filter_jit(put_back)(model, state, X)
    state = pm.filter_jit(part)(model, state, X)

    assert int(state.get(model.count)) == 5


def test_a_state_that_is_only_read_is_not_lost(counter):
    """Nor one of the function's own, of layers in inference, or of what is not run."""
    model, state = counter
    norm, statistics = pm.make_with_state(nn.BatchNorm)(3)

    pm.filter_jit(lambda state: state.get(model.count) * 2)(state)
    pm.filter_jit(dropped)(nn.inference_mode(norm), statistics, X)
    pm.filter_jit(lambda x: kept(*pm.make_with_state(Counter)(), x)[0])(X)
    pm.filter_jit(lambda *args: (pm.filter_eval_shape(kept, *args)[0].shape, args[1]))(*counter, X)


def forgets(model, state, x):
    """The State comes out of the inner transform, and is dropped then."""
    y, _ = pm.filter_vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.sum(y)


LOST = {
    "nothing comes out": forgets,
    "the old one comes out": lambda *args: (forgets(*args), args[1]),
    "a part that is not put back": lambda model, state, x: model(x, state.substate(model))[0],
    "a part of it": lambda m, state, x: m(x, state.substate(m).substate(m).substate(m))[0],
}


@pytest.mark.parametrize("f", LOST.values(), ids=LOST)
def test_an_update_that_is_dropped_later_is_told_once(f, counter):
    """By path, where the inner transform is right; a compiled call costs and says nothing."""
    jitted = pm.filter_jit(pm.filter_checkpoint(lambda x, held: f(*held["both"], x)))
    with pytest.warns(LostUpdateWarning, match=r"(?m)^  at held\['both'\]\[1\]$"):
        jitted(X, {"both": counter})
    jitted(X, {"both": counter})


def net_dropped(net, x):
    return jnp.sum(net(x)[0] ** 2)


def test_a_net_that_a_loss_forgets_is_refused():
    """Otherwise statistics remain 0 and dropout repeats its mask, without a warning."""
    net = pm.stateful(Counter())
    for _ in range(2):
        with pytest.raises(StateError, match=r"net_dropped[\s\S]*at net\.state"):
            pm.filter_jit(pm.filter_grad(net_dropped))(net, X)

    assert int(net(X)[1].state.get(net.model.count)) == 1  # The net remains usable.
