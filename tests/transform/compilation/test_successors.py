"""Callers of a jitted function who drop the new State: a warning, or for a net an error."""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import LostUpdateWarning, StateError
from pytreemod.transform.compilation import successors
from tests.helpers.cached_traces import CACHING

X = jnp.arange(12.0).reshape(4, 3)
LOST = (
    r"expected the State that the last call returned, got the old State, so that "
    r"the update of count is lost\.\n  at state\n"
)
OLD = r"one that (call|step|Stateful) has already replaced\. Attempted to use old state\."


class Counter(pm.Module):
    """Counts its calls, unless a flag says otherwise."""

    count: pm.StateIndex
    inference: bool = False

    def __init__(self):
        self.count = pm.StateIndex(jnp.asarray(0.0))

    def __call__(self, x, state):
        """One more."""
        n = state.get(self.count)
        return x + n, state if self.inference else state.set(self.count, n + 1)


class Both(pm.Module):
    """A user's own class that holds a State."""

    model: Counter
    state: pm.State


@pytest.fixture
def counter():
    """A model and its State."""
    return pm.make_with_state(Counter)()


@pm.filter_jit
def call(model, state, x):
    """A typical step."""
    return model(x, state)


@pm.filter_jit
def in_containers(model, held, x):
    """The same, if a State is inside an argument."""
    y, new = model(x, held["state"][0])
    return {"out": (y, [new])}


@pm.filter_jit
def through_transforms(model, state, x):
    """These transforms do not use up the State of this trace."""
    state = jax.jit(lambda state: model(0.0, state)[1])(state)
    return pm.filter_vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)


@pm.filter_jit
def own_class(both, x):
    """With a State in a Module of the user's."""
    y, state = both.model(x, both.state)
    return y, both.replace(state=state)


@pytest.mark.parametrize("step", [call, through_transforms], ids=["alone", "transforms"])
def test_a_loop_that_forgets_the_state_is_told_once(step, counter):
    """In its second step, with the State's path and the tokens; then it is known."""
    model, state = counter
    _ = step(model, state, X)
    with pytest.warns(LostUpdateWarning, match=LOST) as told:
        _ = step(model, state, X)

    assert told[0].filename == __file__
    for _ in range(3):
        _ = step(model, state, X)


@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize("caching", CACHING.values(), ids=CACHING)
def test_a_cached_trace_inside(caching, is_cached, counter):
    """The outer function has a successor, wherever the State was changed."""
    model, state = counter
    run = caching(lambda x, state: model(x, state))
    if is_cached:
        run(X, state.restored())
    step = pm.filter_jit(lambda x, state: run(x, state))
    step(X, state)
    with pytest.warns(LostUpdateWarning, match="got the old State, so that the update of count"):
        step(X, state)


def test_each_trace_has_its_own_successors(counter):
    """The State is elsewhere in the results of calls with other shapes."""
    model, state = counter

    @pm.filter_jit
    def step(x, state):
        out = model(x, state)
        return out if x.ndim > 1 else out[1]

    for x in (X, X[0], X):
        step(x, state.restored())
    step(X, state)
    step(X[0], state)
    with pytest.warns(LostUpdateWarning, match="got the old State"):
        step(X, state)


def test_by_keyword_and_in_containers(counter):
    """Wherever the State is, on either side."""
    model, state = counter
    in_containers(model, x=X, held={"state": [state]})
    with pytest.warns(LostUpdateWarning, match=r"at held\['state'\]\[0\]"):
        in_containers(model, x=X, held={"state": [state]})


def test_in_a_class_of_the_user_s(counter):
    """Built, and pending: the check does not build the result of a call."""
    both = Both(*counter)
    for _ in range(2):
        new = own_class(both, X)
        with pytest.warns(LostUpdateWarning, match="at both.state"):
            new = own_class(both, X)
        both = new[1]


def test_a_class_that_was_passed_on_was_not_lost(counter):
    """It need not have been read."""
    both = Both(*counter)
    for _ in range(2):
        _, new = own_class(both, X)
        own_class(new, X)


def test_a_result_that_is_held_and_read_later_is_told_too(counter):
    """A later read is not known in advance."""
    model, state = counter
    results = [call(model, state, X)]
    with pytest.warns(LostUpdateWarning, match=LOST):
        results.append(call(model, state, X))

    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "go_on",
    [
        lambda model, new: new.get(model.count),
        lambda model, new: call(model, new, X),
        lambda model, new: jax.tree.leaves(new),
        lambda model, new: repr(new),
        lambda model, new: new.restored(),
        lambda model, new: pm.filter_eval_shape(lambda state: state, new),
    ],
    ids=["read", "passed on", "flattened", "shown", "restored", "in another transform"],
)
def test_a_state_may_be_used_twice_where_what_came_out_was_used(go_on, counter):
    """To repeat a step is the caller's right, as in Equinox."""
    model, state = counter
    for _ in range(3):
        _, new = call(model, state, X)
        go_on(model, new)


def test_nothing_is_told_where_nothing_advances(counter):
    """A loop of evaluation may drop the result."""
    model, state = counter
    model = nn.inference_mode(model)
    for _ in range(3):
        _ = call(model, state, X)

    norm, state = pm.make_with_state(nn.BatchNorm)(3)
    for x in (X, X + 1, X[:2]):
        _ = call(nn.inference_mode(norm), state, x)


def test_functions_are_told_apart(counter):
    """A State that one function drops causes no warning at another, but at its own next call."""
    model, state = counter
    other = pm.filter_jit(lambda model, state, x: model(x, state))
    for step in (call, other):
        step(model, state, X)
    for step in (call, other):
        with pytest.warns(LostUpdateWarning, match="that the update of count is lost"):
            step(model, state, X)


def test_a_copy_says_that_the_old_one_is_meant(counter):
    """`restored` is the way to repeat a step."""
    model, state = counter
    for _ in range(3):
        _ = call(model, state.restored(), X)


def test_a_call_that_fails_has_dropped_nothing(counter):
    """There is no successor."""
    model, state = counter

    @pm.filter_jit
    def fails(state, x):
        y, state = model(x, state)
        return pm.error_if(y, x[0, 0] < 1, "too small"), state

    for _ in range(3):
        with pytest.raises(pm.errors.CheckError, match="too small"):
            fails(state, X)


def test_another_state_of_the_same_names_is_left_alone(counter):
    """A teacher has the names of its student."""
    model, teacher = counter
    _, student = pm.make_with_state(Counter)()

    @pm.filter_jit
    def step(teacher, student, x):
        x, _ = nn.inference_mode(model)(x, teacher)
        return model(x, student)

    for _ in range(3):
        _, student = step(teacher, student, X)


def test_the_arrays_that_came_out_are_not_held(counter):
    """An old State knows that it has a successor, but does not hold it."""
    model, state = counter
    _, new = call(model, state, X)
    array = weakref.ref(new.get(model.count))
    del new

    assert array() is None


@pm.filter_jit
def step(net, x):
    """The step of a net."""
    return net(x)


@pm.filter_jit
def nested(nets, x):
    """Two nets, of which one is called."""
    y, first = nets["first"](x)
    return y, {"first": first, "second": nets["second"]}


def test_a_net_whose_successor_came_out_refuses():
    """New, and as it came from a call, which has not even built it."""
    new = pm.stateful(Counter())
    _, second = step(new, X)
    _, third = step(second, X)
    for old in (new, second):
        for use in (lambda old: step(old, X), jax.tree.leaves):
            with pytest.raises(StateError, match=OLD):
                use(old)
        with pytest.raises(StateError, match="the newest net"):
            old(X)

    assert float(third.state.get(third.model.count)) == 2
    assert float(second.restored().state.get(second.model.count)) == 1


def test_a_net_that_is_the_function_refuses():
    """Its arrays are arguments, too."""
    jitted = pm.filter_jit(pm.stateful(Counter()))
    jitted(X)
    with pytest.raises(StateError, match=OLD):
        jitted(X)


@pytest.mark.parametrize("is_pending", [False, True], ids=["new", "pending"])
def test_only_one_of_two_threads_gets_the_successor_of_a_net(is_pending, monkeypatch):
    """Both calls have run before one of them uses up the net; the other is refused."""
    net = pm.stateful(Counter())
    net = step(net, X)[1] if is_pending else net
    step(net.restored(), X)  # Compiled.
    have_run, use_up_in, found = threading.Barrier(2), successors.use_up_in, []

    def use_up_together(*args):
        have_run.wait()
        use_up_in(*args)

    def run():
        try:
            found.append(step(net, X)[1])
        except StateError as error:
            found.append(str(error))

    monkeypatch.setattr(successors, "use_up_in", use_up_together)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (error,) = [each for each in found if isinstance(each, str)]
    assert "State.step: expected the newest State" in error
    with pytest.raises(StateError, match="the newest net"):
        net(X)


def test_the_net_that_was_called_refuses_and_its_neighbor_does_not():
    """They have tokens of the same names."""
    nets = {name: pm.stateful(Counter()) for name in ("first", "second")}
    for _ in range(2):
        _, new = nested(nets, X)
        with pytest.raises(StateError, match="the newest net"):
            nets["first"](X)
        nets["second"](X)
        nets = new


def test_a_net_may_be_two_arguments():
    """Each is a value of its own, as in other trees, whether it has been read or not."""
    both = pm.filter_jit(lambda a, b, x: (a(x), b(x)))
    for net in (pm.stateful(Counter()), step(pm.stateful(Counter()), X)[1]):
        (_, one), (_, other) = both(net, net, X)
        assert one == other
        with pytest.raises(StateError, match="the newest net"):
            net(X)


def test_a_net_that_is_only_changed_is_not_replaced():
    """A net that was not called has no update to lose."""
    scaled = pm.filter_jit(lambda net: jax.tree.map(lambda x: x * 2, net))
    net = pm.stateful(Counter())

    assert scaled(net) == scaled(net)

    @pm.filter_jit
    def step(net, other, x):
        return net(x), jax.tree.map(lambda x: x * 2, other)

    other = pm.stateful(nn.BatchNorm(3))
    step(net, other, X)
    assert other.state.__usable__()


def test_a_net_at_rest_is_called_again_and_again():
    """Nothing of it changes."""
    net = nn.inference_mode(pm.stateful(nn.BatchNorm(3)))
    for _ in range(3):
        step(net, X)
    net(X)


def test_what_is_lost_while_tracing_is_found_there():
    """In a trace around, a net that was passed to a jitted function is old as well."""

    @pm.filter_jit
    def outer(net, x):
        x, _ = step(net, x)
        return step(net, x)

    with pytest.raises(StateError, match=OLD):
        outer(pm.stateful(Counter()), X)


def test_a_capture_around_changes_nothing(counter):
    """The captured values are returned beside the result."""
    model, state = counter
    seen = pm.capture(call, Counter)
    seen(model, state, X)
    with pytest.warns(LostUpdateWarning, match=LOST):
        seen(model, state, X)


def test_numbers_are_what_they_are_without_jit(counter):
    """The records change no result."""
    model, state = counter
    _, plain = model(X, state.restored())
    for _ in range(2):
        y, state = call(model, state, X)

    np.testing.assert_array_equal(y, X + plain.get(model.count))
