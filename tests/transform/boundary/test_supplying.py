"""supplying: values go into every transform that sown ones come out of, to the same calls."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import CaptureError, ShapeError
from pytreemod.transform.boundary.sowing import Label, note
from pytreemod.transform.boundary.supplying import (
    call_supplied,
    handing,
    is_planned,
    next_level,
    planned,
    take,
)
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

X = ramp(3)  # [1, 2, 3]
LEVEL = next_level()


def f(x, name="twice"):
    """Notes twice its argument, and adds the supplied value."""
    label, value = Label(LEVEL, name), 2 * x
    if is_planned():
        note(label, value)
    given = take(label) if handing else None
    return (value if given is None else value + given) + 1


def total(x):
    """A scalar, which can be differentiated."""
    return jnp.sum(f(x) ** 2)


def supplying(fn, *args, change):
    """The result of `fn` with values that `change` makes from the shape of each."""
    plan = planned(fn, args, {}).at(LEVEL)
    values = [change(i, shape) for i, shape in enumerate(plan.shapes)]
    return call_supplied(fn, args, {}, plan.labels, values)


def zeros(i, shape):
    return jnp.zeros(shape.shape, shape.dtype)


def constant(i, shape):
    return jnp.full(shape.shape, 10.0 ** (i + 1), shape.dtype)


def rising(i, shape):
    return jnp.arange(1, 1 + np.prod(shape.shape), dtype=shape.dtype).reshape(shape.shape)


def thrice(x):
    return f(pm.filter_vmap(f)(f(x)))


def deep(x):
    """The gradient of a scan in a map, compiled."""

    def row(y):
        return pm.filter_scan(lambda c, _: (f(c), c), y, None, length=2)[1]

    return pm.filter_jit(pm.filter_grad(lambda x: jnp.sum(pm.filter_vmap(row)(x) ** 2)))(x)


# Each with its result for values [1, 2, 3] in the order of the calls.
PASSED = {
    "nothing": (f, [4.0, 7.0, 10.0]),
    "jit": (pm.filter_jit(f), [4.0, 7.0, 10.0]),
    "vmap": (pm.filter_vmap(f), [4.0, 7.0, 10.0]),
    "vmap of one axis of two": (
        pm.filter_vmap(lambda x: f(x * jnp.ones(2)), out_axes=1),
        [[4.0, 8.0, 12.0], [5.0, 9.0, 13.0]],
    ),
    "grad": (pm.filter_grad(total), [16.0, 28.0, 40.0]),
    "vjp": (lambda x: pm.filter_vjp(f, x)[0], [4.0, 7.0, 10.0]),
    "linearize": (lambda x: pm.filter_linearize(f, x)[0], [4.0, 7.0, 10.0]),
    "jvp": (lambda x: pm.filter_jvp(f, (x,), (x,))[0], [4.0, 7.0, 10.0]),
    "jacrev": (lambda x: pm.filter_jacrev(lambda x: f(x) ** 2)(x).sum(0), [16.0, 28.0, 40.0]),
    "checkpoint": (pm.filter_checkpoint(f), [4.0, 7.0, 10.0]),
    "checkify": (lambda x: pm.filter_checkify(f)(x)[1], [4.0, 7.0, 10.0]),
    "scan": (lambda x: pm.filter_scan(lambda c, x: (f(c), x), 1.0, x)[0], 26.0),
    "scan of steps as data": (
        lambda x: pm.filter_scan(pm.Partial(lambda a, c, x: (f(a * c), x), 1.0 * x[:1]), x, x)[1],
        X,
    ),
    "scan, reversed": (
        lambda x: pm.filter_scan(lambda c, x: (c, f(x)), 1.0, x, reverse=True)[1],
        [4.0, 7.0, 10.0],
    ),
    "map": (lambda x: pm.filter_map(f, x), [4.0, 7.0, 10.0]),
    "map in batches": (lambda x: pm.filter_map(f, x, batch_size=2), [4.0, 7.0, 10.0]),
    "cond": (lambda x: pm.filter_cond(x[0] > 0, f, lambda x: -f(x), x), [4.0, 7.0, 10.0]),
    "switch": (lambda x: pm.filter_switch(1, [f, lambda x: -f(x)], x), [-4.0, -7.0, -10.0]),
    "jit of vmap": (pm.filter_jit(pm.filter_vmap(f)), [4.0, 7.0, 10.0]),
    "vmap of jit": (pm.filter_vmap(pm.filter_jit(f)), [4.0, 7.0, 10.0]),
}


@pytest.mark.parametrize(("fn", "expected"), PASSED.values(), ids=PASSED)
def test_what_is_supplied_goes_into_each_transform(fn, expected):
    """To the member, or step, that it is for."""
    assert_close(supplying(fn, X, change=rising), jnp.asarray(expected))


@pytest.mark.parametrize("fn", [fn for fn, _ in PASSED.values()], ids=PASSED)
def test_zeros_change_nothing(fn):
    """Law: with zeros, a function that adds them returns the same as without."""
    assert_close(supplying(fn, X, change=zeros), fn(X))


def test_each_call_gets_its_own():
    """Through transforms and outside of them, in the order of the calls."""
    plan = planned(thrice, (X,), {}).at(LEVEL)

    assert [label.route for label in plan.labels] == [(), (0,), ()]
    assert plan.names() == ["twice", "twice#2", "twice#3"]
    # ((2 x + 11) * 2 + 101) * 2 + 1001
    assert_close(supplying(thrice, X, change=constant), 8 * X + 44 + 202 + 1001)


def test_through_many_at_once():
    """The steps of members, differentiated and compiled."""
    (shape,) = planned(deep, (X,), {}).at(LEVEL).shapes

    assert shape.shape == (3, 2)
    # Of y² + (2 y + 1 + z)², where z is 1, 3, 5 in the first steps.
    assert_close(
        supplying(deep, X, change=rising), 2 * X + 4 * (2 * X + 1 + jnp.array([1.0, 3.0, 5.0]))
    )


def test_a_value_may_be_left_out():
    """None is supplied unchanged: the call gets None."""
    plan = planned(thrice, (X,), {}).at(LEVEL)

    out = call_supplied(thrice, (X,), {}, plan.labels, [None, jnp.ones(3), None])
    assert_close(out, thrice(X) + 2)


def test_other_values_are_no_new_program():
    """They are data: the function is traced once to plan, and once to run."""
    count = []

    @pm.filter_jit
    def fn(x):
        count.append(0)
        return pm.filter_scan(lambda c, x: (f(c), x), 1.0, x)[0]

    for start in range(3):
        supplying(fn, X, change=lambda i, shape, start=start: zeros(i, shape) + start)
    assert len(count) == 2
    fn(X)
    assert len(count) == 3


def test_steps_are_not_compiled_anew():
    """Outside of compiled code a scan with values finds its compiled program."""
    count = []

    def step(c, x):
        count.append(0)
        return f(c), x

    def fn(x):
        return pm.filter_scan(step, 1.0, x)[0]

    plan = planned(fn, (X,), {}).at(LEVEL)
    del count[:]
    for start in range(3):
        call_supplied(fn, (X,), {}, plan.labels, [jnp.full(3, float(start))])
    assert len(count) == 1


def test_donated_arguments_take_no_values_with_them():
    """Supplied values can be used again."""
    fn = pm.filter_jit(f, donate="all")
    plan = planned(fn, (X,), {}).at(LEVEL)
    value = ramp(3)

    for _ in range(2):
        assert_close(
            call_supplied(fn, (X + 0,), {}, plan.labels, [value]), jnp.asarray([4.0, 7.0, 10.0])
        )


def test_supplying_may_be_nested():
    """Values from outside pass through the inner one, to the same calls."""
    level = LEVEL + 1

    def inner(x):
        label = Label(level, "inner")
        note(label, x)
        return f(x) if is_planned() or not handing else f(x) + take(label)

    def outer(x):
        def run(x):
            return pm.filter_vmap(inner)(x)

        if is_planned():
            return call_supplied(run, (x,), {})
        plan = planned(run, (x,), {}).at(level)
        assert len(plan.labels) == 1
        return call_supplied(run, (x,), {}, plan.labels, [100 * x])

    fn = pm.filter_jit(outer)
    plan = planned(fn, (X,), {}).at(LEVEL)
    assert [label.route for label in plan.labels] == [(0, 0, 0)]
    assert_close(call_supplied(fn, (X,), {}, plan.labels, [X]), 103 * X + 1)


def test_captures_inside_and_outside_see_what_was_supplied():
    """A capture is one more transform; sown values are returned from a call with values."""

    def sowing(x):
        return pm.sow("out", f(x))

    def fn(x):
        return pm.capture(pm.filter_jit(sowing))(x)

    out, seen = supplying(fn, X, change=rising)
    assert_close((out, seen["out"]), (3 * X + 1, 3 * X + 1))
    plan = planned(pm.filter_jit(sowing), (X,), {}).at(LEVEL)
    out, seen = pm.capture(
        lambda x: call_supplied(pm.filter_jit(sowing), (x,), {}, plan.labels, [X])
    )(X)
    assert list(seen) == ["out"]
    assert_close(seen["out"], 3 * X + 1)


def test_nothing_is_sown_for_nobody():
    """With values, and without a capture, sow may be in a transform that hands nothing out."""

    def fn(x):
        return jax.vmap(lambda x: pm.sow("x", x))(f(x))

    assert_close(supplying(fn, X, change=zeros), 2 * X + 1)


def test_loops_of_other_transforms_are_not_counted():
    """Calls in a trace that values cannot enter have no number."""

    def fn(x):
        y = pm.filter_while_loop(lambda c: c[0] < 9, lambda c: pm.filter_jit(lambda y: y + 1)(c), x)
        return f(pm.filter_vmap(f)(y))

    for _ in range(2):
        assert [label.route for label in planned(fn, (X,), {}).at(LEVEL).labels] == [(0,), ()]
        assert_close(supplying(fn, X, change=zeros), fn(X))


REFUSED = {
    "jax.jit": jax.jit(f),
    "jax.vmap": jax.vmap(f),
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, x: (f(c), x), 1.0, x),
    "filter_while_loop": lambda x: pm.filter_while_loop(lambda x: x[0] < 5, f, x),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_reached_is_refused(fn):
    """The plan says so: nothing could come out, either."""
    with pytest.raises(
        CaptureError, match=r"value for 'twice': expected a call that can accept values"
    ):
        planned(fn, (X,), {})
    fn(X)


def test_what_is_not_planned_cannot_be_taken():
    """A run in which the value would have to pass a transform of JAX's."""
    plan = planned(f, (X,), {}).at(LEVEL)

    with pytest.raises(CaptureError, match=r"value for 'twice': expected a call that can accept"):
        call_supplied(jax.vmap(f), (X,), {}, plan.labels, [X])


def test_transforms_over_devices_take_no_values():
    """A capture sees inside of them; values do not go in."""
    plan = planned(pm.filter_pmap(f), (X,), {}).at(LEVEL)

    with pytest.raises(CaptureError, match="one inside filter_pmap"):
        call_supplied(pm.filter_pmap(f), (X,), {}, plan.labels, [X])


def test_values_have_an_entry_for_each_member():
    """A size that does not fit is refused by name."""
    for fn in (pm.filter_vmap(f), lambda x: pm.filter_scan(lambda c, x: (f(c), x), 1.0, x)):
        plan = planned(fn, (X,), {}).at(LEVEL)
        with pytest.raises(ShapeError, match=re.escape("at twice: f32[2]")):
            call_supplied(fn, (X,), {}, plan.labels, [jnp.ones(2)])


def test_a_function_that_does_something_else_is_refused():
    """Unused values are an error, not a silent wrong answer."""
    plan = planned(thrice, (X,), {}).at(LEVEL)

    with pytest.raises(CaptureError, match="expected a function that calls the same Modules"):
        call_supplied(f, (X,), {}, plan.labels, [X, X, X])
    assert not handing


def test_branches_take_a_value_in_the_same_transforms():
    """A branch that has the call in one more transform cannot be given the value."""

    def fn(x):
        return pm.filter_cond(x[0] > 0, f, pm.filter_vmap(f), x)

    with pytest.raises(CaptureError, match="branches that capture the same values"):
        planned(fn, (X,), {})


def test_other_threads_are_not_concerned():
    """While one thread supplies, another runs as ever."""
    entered, done, found = threading.Event(), threading.Event(), []

    def fn(x):
        entered.set()
        done.wait(30)
        return f(x)

    thread = threading.Thread(target=lambda: found.append(supplying(fn, X, change=rising)))
    thread.start()
    entered.wait(30)
    jitted = pm.filter_jit(pm.filter_vmap(lambda x: x + 1))
    assert_close(jitted(X), X + 1)
    done.set()
    thread.join()
    assert_close(found[0], 3 * X + 1)
