"""Donation: the arrays that a call donates, and the memory that it saves."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import DonatedError, SpecError
from pytreemod.transform.compilation.donation import Donation, as_donation, count_arrays, separation
from tests.goldens import refusals
from tests.helpers.training import adam, batch, network, step, step_by_hand
from tests.helpers.trees import Holder, Pair, affine, ramp

# ---- which arrays

NAMES = ("model", "state", "x")
CALL = (affine(), [ramp(1), ramp(1)], ramp(1)), {"more": Pair(ramp(1), 2.0)}

RULES = {
    "all": ("all", "111111"),
    "all but the first": ("all-except-first", "001111"),
    "a name": ("state", "001100"),
    "two names": (("model", "x"), "110010"),
    "a keyword": (["more"], "000001"),
    "a path": (pm.select.path("model.weight"), "100000"),
    "any path": (pm.select.path("*.weight"), "100000"),
    "a class": (type(affine()), "110000"),
    "without": (~pm.select.path("state"), "110011"),
    "by access": (pm.select.at(lambda call: call.model.bias), "010000"),
}


def takes(model, state, x, **more):
    """A function with names and with keywords."""


@pytest.mark.parametrize(("donate", "expected"), RULES.values(), ids=RULES.keys())
def test_each_array_of_a_call_is_given_or_kept(donate, expected):
    """One answer for each array, in the order of the arguments; other leaves have none."""
    flags = as_donation(donate, takes).flags(NAMES, *CALL)

    assert "".join(str(int(flag)) for flag in flags) == expected


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
    assert not as_donation(("x",), takes).gives_own
    assert not as_donation(pm.select.path("x"), takes).gives_own


def test_a_callable_that_gave_itself_away_is_gone():
    """The text says that it was the callable: the next call has nothing left to call."""
    model = affine()
    step = pm.filter_jit(model, donate="warn-except-first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(ramp(3))

    text = r"(?s)Affine: expected arrays that were not donated, got 1 .*\n  at function\.bias: f32"
    with pytest.raises(DonatedError, match=text):
        step(ramp(3))


def test_one_buffer_twice_that_is_not_given_is_nobodys_mistake():
    """An error of the user's about donated buffers is passed on unchanged."""

    def fn(x, y, z):
        raise ValueError("a buffer to donate")

    x = ramp(2)
    with pytest.raises(ValueError, match=r"^a buffer to donate") as caught:
        pm.filter_jit(fn, donate="z")(x, x, ramp(3))
    assert type(caught.value) is ValueError


def test_nothing_is_given_without_a_rule():
    """`none`, and an empty list of names, donate nothing."""
    assert as_donation("none", takes) is None
    assert as_donation((), takes) is None


def test_rules_are_equal_by_value():
    """Equal rules are one rule: functions with it share their compiled programs."""
    assert as_donation(("model", "x"), takes) == as_donation(["model", "x"], takes)
    assert hash(as_donation("all", takes)) == hash(Donation("all", quiet=True))
    assert as_donation("all", takes) != as_donation("warn", takes)
    assert as_donation("model", takes) != as_donation("x", takes)


@pytest.mark.parametrize("flags", ["", "1", "0", "11", "00", "1100", "0110", "1010", "0001"])
def test_parting_then_joining_is_the_identity(flags):
    """join(*separate(arrays)) is arrays, and the first part has those that are given."""
    marks = [flag == "1" for flag in flags]
    arrays = list(range(len(flags)))
    separate, join = separation(marks)
    given, kept = separate(arrays)

    assert join(given, kept) == arrays
    assert list(given) == [a for a, mark in zip(arrays, marks, strict=True) if mark]


def test_arrays_are_counted():
    """NumPy's count, numbers and configuration do not."""
    assert count_arrays([CALL, 1.5, "a", Holder(jnp.tanh)]) == 6


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


def test_donated_arrays_are_let_go_at_once():
    """A donated array is freed after the call, although the old tree still exists."""
    model = jax.tree.map(jnp.copy, network())
    state = jax.tree.map(jnp.copy, adam(model))
    pm.filter_jit(step, donate=("model", "state"))(model, state, *batch())

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((model, state)))


def test_what_is_not_donated_is_left_alone():
    """Of a tree, a selector gives away the part that it names, and no more."""
    model = jax.tree.map(jnp.copy, network())
    pm.filter_jit(lambda model: model, donate=pm.select.path("model.layers[0]"))(model)

    deleted = [leaf.is_deleted() for leaf in jax.tree.leaves(model)]
    assert deleted == [True, True, False, False, False, False]


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

    assert keep.entries
    assert [ref() for ref in watched] == [None] * len(watched)


def test_an_access_to_an_argument_that_there_is_not_is_refused():
    """`call.modle` is not a None that donates nothing."""
    step = pm.filter_jit(lambda model: model, donate=pm.select.at(lambda call: call.modle))
    with pytest.raises(SpecError, match=r"an argument of the call \(model\), got 'modle'"):
        step(affine())


test_refusals = refusals(globals())
