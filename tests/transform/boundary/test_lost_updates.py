"""A transform warns of a lost update of a State, and refuses that of a net."""

import functools as ft

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
        """One more."""
        return x * self.weight, state.set(self.count, state.get(self.count) + 1)


@pytest.fixture
def counter():
    """A model and its State."""
    return pm.make_with_state(Counter)()


def kept(model, state, x):
    """A loss that returns its State."""
    y, state = model(x, state)
    return jnp.sum(y**2), state


def dropped(model, state, x):
    """A loss that forgets it."""
    return kept(model, state, x)[0]


def scanned(f):
    """`f` as the step of a loop over the rows of `x`."""

    def run(model, state, x):
        return pm.filter_scan(lambda carry, row: (carry, f(model, state, row)), None, x)

    return run


def with_arguments(transform):
    """A transform that is given the function and its arguments at once."""
    return lambda f: lambda *args: transform(f, *args)


def with_a_derivative(f):
    """A function with a rule that is not needed, because nothing is differentiated."""
    custom = pm.filter_custom_jvp(f)
    custom.def_jvp(lambda primals, tangents: (f(*primals), None))
    return custom


def with_a_backward_pass(f):
    """The same, for the other transform."""
    custom = pm.filter_custom_vjp(f)
    custom.def_fwd(lambda perturbed, *args: (f(*args), None))
    custom.def_bwd(lambda residuals, grad, perturbed, *args: None)
    return custom


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("only",))
EVERYWHERE = {"mesh": MESH, "in_specs": jax.P(), "out_specs": jax.P()}

TRANSFORMS = {
    "filter_jit": pm.filter_jit,
    "filter_grad": pm.filter_grad,
    "filter_value_and_grad": pm.filter_value_and_grad,
    "filter_jacfwd": pm.filter_jacfwd,
    "filter_jacrev": pm.filter_jacrev,
    "filter_hessian": pm.filter_hessian,
    "filter_vjp": with_arguments(pm.filter_vjp),
    "filter_jvp": lambda f: lambda *args: pm.filter_jvp(f, args, (args[0], None, None)),
    "filter_linearize": with_arguments(pm.filter_linearize),
    "filter_custom_jvp": with_a_derivative,
    "filter_custom_vjp": with_a_backward_pass,
    "filter_vmap": lambda f: pm.filter_vmap(f, in_axes=(None, None, 0)),
    "filter_pmap": lambda f: (
        lambda *args: pm.filter_pmap(f, in_axes=(None, None, 0), devices=jax.devices()[:4])(*args)
    ),
    "filter_shard_map": lambda f: pm.filter_shard_map(f, **EVERYWHERE),
    "filter_checkpoint": pm.filter_checkpoint,
    "filter_checkify": pm.filter_checkify,
    "filter_eval_shape": with_arguments(pm.filter_eval_shape),
    "filter_make_jaxpr": pm.filter_make_jaxpr,
    "filter_closure_convert": with_arguments(pm.filter_closure_convert),
    "filter_scan": scanned,
    "filter_map": lambda f: lambda model, state, x: pm.filter_map(ft.partial(f, model, state), x),
    "filter_cond": lambda f: lambda *args: pm.filter_cond(True, f, dropped_nothing, *args),
    "filter_switch": lambda f: lambda *args: pm.filter_switch(1, [dropped_nothing, f], *args),
    "filter_fori_loop": lambda f: (
        lambda *args: pm.filter_fori_loop(0, 2, lambda i, x: x + f(*args), jnp.zeros(()))
    ),
    "filter_while_loop": lambda f: (
        lambda *args: pm.filter_while_loop(
            lambda x: x < 1, lambda x: x + 1 + f(*args), jnp.zeros(())
        )
    ),
}
NOT_TRACED = {
    "filter_associative_scan": "calls the function again and again: the second call is refused",
    "filter_pure_callback": "runs the function on the host, as a call does",
    "filter_io_callback": "the same",
    "filter_shard": "takes no function",
}


def test_every_transform_is_here():
    """A new one, too, must call a function as the others do: by `collect` or `call_tracked`."""
    every = {name for name in dir(pm) if name.startswith("filter_")}

    assert {*TRANSFORMS, *NOT_TRACED} == every


def dropped_nothing(model, state, x):
    """A branch that leaves the State alone."""
    return jnp.sum(x)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.sampled
def test_a_forgotten_state_is_told(transform, counter):
    """In silence, the count would stay at 0 for ever; whatever the transform."""
    with pytest.warns(LostUpdateWarning, match="State") as told:
        transform(dropped)(*counter, X)

    assert told[0].filename == __file__


@pytest.mark.parametrize("has_aux", ["filter_grad", "filter_value_and_grad", "filter_jacrev"])
def test_a_state_beside_the_loss_is_not_lost(has_aux, counter):
    """An update that is returned as aux is not lost."""
    getattr(pm, has_aux)(kept, has_aux=True)(*counter, X)


def test_a_state_that_comes_out_is_not_lost(counter):
    """Under the transforms that return whatever the function does."""
    model, state = counter
    (_, state), _ = pm.filter_jit(kept)(model, state, X), pm.filter_eval_shape(kept, *counter, X)
    _, state = pm.filter_vmap(kept, in_axes=(None, None, 0), out_axes=(0, None))(model, state, X)
    _, state = pm.filter_checkpoint(kept)(model, state, X)

    assert int(state.get(model.count)) == 3


def test_the_place_is_named(counter):
    """A path from the argument that holds the State, however deep, or that it came from outside."""
    model, state = counter

    with pytest.warns(LostUpdateWarning, match=r"(?m)^  at held\['state'\]\[0\]$"):
        pm.filter_jit(lambda x, held: dropped(model, held["state"][0], x))(X, {"state": [state]})
    with pytest.warns(LostUpdateWarning, match="State"):
        pm.filter_jit(lambda x: dropped(model, state, x))(X)


def test_told_when_traced_and_never_again(counter):
    """A compiled call costs nothing more, so it says nothing."""
    step = pm.filter_jit(lambda *args: dropped(*args))
    with pytest.warns(LostUpdateWarning, match="State"):
        step(*counter, X)
    step(*counter, X)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda *args: pm.filter_grad(kept, has_aux=True)(*args),
        lambda *args: pm.filter_jacfwd(kept, has_aux=True)(*args),
        lambda *args: pm.filter_jvp(kept, args, (args[0], None, None)),
        lambda *args: pm.filter_vjp(kept, *args, has_aux=True),
        lambda *args: pm.filter_linearize(kept, *args, has_aux=True),
    ],
    ids=["filter_grad", "filter_jacfwd", "filter_jvp", "filter_vjp", "filter_linearize"],
)
def test_a_derivative_uses_up_what_the_function_does(derivative, counter):
    """As a call alone does: the derivative evaluates the function."""
    derivative(*counter, X)

    with pytest.raises(StateError, match=r"State\.(get|use)"):
        derivative(*counter, X)


def test_inference_uses_no_state_up():
    """Where nothing changes, nothing is lost."""
    norm, state = pm.make_with_state(nn.BatchNorm)(3)

    pm.filter_jit(dropped)(nn.inference_mode(norm), state, X)


# ---- lost further out


def forgets(model, state, x):
    """The State comes out of the inner transform, and is dropped then."""
    y, _ = pm.filter_vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.sum(y)


def goes_back(model, state, x):
    """The function returns the old State instead of its successor."""
    return forgets(model, state, x), state


@pytest.mark.parametrize("f", [forgets, goes_back])
def test_an_update_that_was_dropped_around_a_transform_is_told(f, counter):
    """The inner transform is right, and so would be the outer one alone."""
    with pytest.warns(LostUpdateWarning, match="State"):
        pm.filter_jit(pm.filter_checkpoint(f))(*counter, X)


def test_a_part_that_is_not_put_back_is_told(counter):
    """A new substate does not change the State that it was taken from."""

    def call(model, state, x, is_put_back):
        part = state.substate(model)
        y, part = model(x, part)
        return y, (state.update(part) if is_put_back else state)

    pm.filter_jit(call)(*counter, X, True)
    with pytest.warns(LostUpdateWarning, match="State"):
        pm.filter_jit(call)(*counter, X, False)


def test_a_state_of_the_function_s_own_is_its_own():
    """A State that a function makes and drops is not lost."""

    @pm.filter_jit
    def run(x):
        model, state = pm.make_with_state(Counter)()
        return pm.filter_checkpoint(kept)(model, state, x)[0]

    run(X)


# ---- nets


def net_kept(net, x):
    """A loss that returns its net."""
    y, net = net(x)
    return jnp.sum(y**2), net


def net_dropped(net, x):
    """A loss that forgets it."""
    return net_kept(net, x)[0]


@pytest.mark.parametrize("compile", [False, True])
def test_a_net_that_a_loss_forgets_is_refused(compile):
    """Otherwise statistics remain 0 and dropout repeats its mask, without a warning."""
    net = pm.stateful(Counter())
    grad = pm.filter_grad(net_dropped)
    for _ in range(2):
        with pytest.raises(StateError, match=r"net_dropped[\s\S]*at net\.state"):
            (pm.filter_jit(grad) if compile else grad)(net, X)

    assert int(net(X)[1].state.get(net.model.count)) == 1  # The net remains usable.
