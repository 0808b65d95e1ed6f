"""Donation: the arrays that a call donates, and the memory that it saves."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import DonatedError
from tests.helpers.training import adam, batch, network, step, step_by_hand
from tests.helpers.trees import affine, ramp

# ---- which arrays


OWN = ("all", "warn", "all-except-first", "warn-except-first")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("donate", ["none", *OWN])
@pytest.mark.parametrize("kind", ["instance", "bound method", "Partial", "transform"])
@pytest.mark.sampled
def test_arrays_of_the_callable_itself_are_given_with_all(donate, kind):
    """A large model consists of them; they are neither the first argument nor named."""
    model = affine()
    fn = {
        "instance": model,
        "bound method": model.__call__,
        "Partial": pm.Partial(lambda model, x: model(x), model),
        "transform": pm.filter_vmap(model, in_axes=None, axis_size=2),
    }[kind]
    x = ramp(3)
    # The arrays come out, so that JAX has a use for them.
    pm.filter_jit(pm.Partial(lambda fn, x: (fn, x, fn(x)), fn), donate=donate)(x)
    assert model.weight.is_deleted() == (donate in OWN)
    assert x.is_deleted() == (donate in ("all", "warn"))


def test_a_callable_that_gave_itself_away_is_gone():
    """The text says that it was the callable: the next call has nothing left to call."""
    model = affine()
    step = pm.filter_jit(model, donate="warn-except-first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(ramp(3))

    with pytest.raises(DonatedError, match=r"function\.bias"):
        step(ramp(3))


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda m: pm.filter_jit(lambda q, p: (q, p), donate="all")(m, m), r"q\.weight"),
        (lambda m: pm.filter_jit(lambda x, y: (x + y,), donate="y")(m.bias, m.bias), r"\bx\b"),
        (lambda m: pm.filter_jit(pm.Partial(lambda m, x: (m, x), m), donate="all")(m.bias), "x"),
    ],
    ids=["two models", "one of two", "own and argument"],
)
def test_one_buffer_is_given_once(call, where):
    """Both paths are named; JAX would fail, or read what was given away."""
    with pytest.raises(DonatedError, match=where):
        call(affine())


# ---- memory

WIDTH, DEPTH = 128, 4
MEGABYTE = 2**20


def programs(donate):
    """The compiled train step with Modules, and the one by hand; model and state have 0.8 MB."""
    model = network(WIDTH, DEPTH)
    state, (x, y) = adam(model), batch(WIDTH)
    ours = pm.filter_jit(step, donate=("model", "state") if donate else "none")
    by_hand = jax.jit(step_by_hand, donate_argnums=(0, 1) if donate else ())
    lists = jax.tree.leaves(model), jax.tree.leaves(state)
    return ours.lower(model, state, x, y).compile(), by_hand.lower(*lists, x, y).compile()


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
@pytest.mark.slow
def test_memory_is_that_of_jax_jit(donate):
    """By the compiler's account, donation saves the same memory as for flat lists, to the byte."""
    ours, by_hand = (compiled.memory_analysis() for compiled in programs(donate))
    size = 4 * (3 * DEPTH * (WIDTH**2 + WIDTH) + 1)

    assert ours.alias_size_in_bytes == by_hand.alias_size_in_bytes == (size if donate else 0)
    for name in ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes"):
        assert getattr(ours, name) == getattr(by_hand, name)
    assert size > 0.75 * MEGABYTE


def test_a_training_loop_holds_one_model():
    """With donation, live arrays after any number of steps are one model, one state, one batch."""
    x, y = batch(32)
    train = pm.filter_jit(step, donate=("model", "state"))
    model = network(32, 2)
    # Copies, for some arrays of the state are one and the same at first.
    model, state = jax.tree.map(jnp.copy, (model, adam(model)))
    # Held, so that no array of another test is freed meanwhile; donated arrays are not live.
    held = jax.live_arrays()
    before, given = set(map(id, held)), jax.tree.leaves((model, state))
    for _ in range(3):
        model, state, loss = train(model, state, x, y)
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in before]

    assert all(array.is_deleted() for array in given)
    assert {*map(id, new)} == {*map(id, jax.tree.leaves((model, state, loss)))}


@pytest.mark.parametrize(
    "use",
    [
        lambda f, model: f(model),
        lambda f, model: jax.tree.leaves(f(model)),
        lambda f, model: f.lower(model).compile()(model),
        lambda f, model: pm.filter_grad(lambda m: jnp.sum(m.layers[0].weight))(f(model)),
        lambda f, model: pm.debug.explain_retraces(f)(model),
    ],
    ids=["called", "flattened", "compiled", "differentiated", "explained"],
)
def test_no_cache_keeps_a_models_arrays(use):
    """A dropped model's arrays go, while the function, its programs and its log live on."""
    keep = pm.filter_jit(lambda model: jax.tree.map(lambda x: x + 1, model))
    model = jax.tree.map(jnp.copy, network())
    watched = [weakref.ref(leaf) for leaf in jax.tree.leaves(model)]
    result = use(keep, model)
    watched += [weakref.ref(leaf) for leaf in jax.tree.leaves(result)]
    del model, result
    gc.collect()

    assert [ref() for ref in watched] == [None] * len(watched)
