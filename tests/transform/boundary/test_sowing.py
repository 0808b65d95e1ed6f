"""sow: values come out of every filtered transform, and out of nothing else."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pytreemod as pm
from pytreemod.errors import CaptureError, CheckError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

X = ramp(3)  # [1, 2, 3]


def f(x):
    """Shows twice its argument."""
    return pm.sow("twice", 2 * x) + 1


def total(x):
    """A scalar, which can be differentiated."""
    return jnp.sum(f(x) ** 2)


def captured(fn, *args):
    """The sown values of `fn`, as NumPy arrays."""
    seen = pm.capture(fn)(*args)[1]
    return {name: jax.tree.map(np.asarray, value) for name, value in seen.items()}


def on_devices(fn):
    """`fn` on the parts that three devices have."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("d",))
    return pm.filter_shard_map(
        fn, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
    )


def test_values_of_devices_have_a_leading_axis():
    """Each device's value as a whole, one after the other."""
    seen = captured(on_devices(f), ramp(6))

    np.testing.assert_array_equal(seen["twice"], 2 * np.asarray(ramp(6)).reshape(3, 2))


TWICE = [2.0, 4.0, 6.0]
PASSED = {
    "nothing": (f, TWICE),
    "jit": (pm.filter_jit(f), TWICE),
    "vmap": (pm.filter_vmap(f), TWICE),
    "vmap onto another axis": (
        pm.filter_vmap(lambda x: f(x * jnp.ones(2)), out_axes=1),
        [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]],
    ),
    "vmap of what is the same for all": (
        pm.filter_vmap(lambda x: (f(jnp.ones(())), x)[1]),
        [2.0, 2.0, 2.0],
    ),
    "pmap": (pm.filter_pmap(f), TWICE),
    "shard_map": (on_devices(f), [[2.0], [4.0], [6.0]]),
    "grad": (pm.filter_grad(total), TWICE),
    "value_and_grad": (pm.filter_value_and_grad(lambda x: (total(x), "a"), has_aux=True), TWICE),
    "grad of grad": (pm.filter_grad(lambda x: pm.filter_grad(total)(x).sum()), TWICE),
    "jvp": (lambda x: pm.filter_jvp(f, (x,), (x,)), TWICE),
    "vjp": (lambda x: pm.filter_vjp(f, x)[0], TWICE),
    "vjp with aux": (lambda x: pm.filter_vjp(lambda x: (f(x), 1), x, has_aux=True)[2], TWICE),
    "linearize": (lambda x: pm.filter_linearize(f, x)[0], TWICE),
    "jacfwd": (pm.filter_jacfwd(f), TWICE),
    "jacrev": (pm.filter_jacrev(f), TWICE),
    "hessian": (pm.filter_hessian(total), TWICE),
    "checkpoint": (pm.filter_checkpoint(f), TWICE),
    "checkify": (lambda x: pm.filter_checkify(f)(x)[1], TWICE),
    "scan": (lambda x: pm.filter_scan(lambda c, x: (f(c), x), 1.0, x), [2.0, 6.0, 14.0]),
    "scan, reversed": (
        lambda x: pm.filter_scan(lambda c, x: (f(c), x), 1.0, x, reverse=True),
        [14.0, 6.0, 2.0],
    ),
    "scan, unrolled": (
        lambda x: pm.filter_scan(lambda c, x: (f(c), x), 1.0, x, unroll=True),
        [2.0, 6.0, 14.0],
    ),
    "map": (lambda x: pm.filter_map(f, x), TWICE),
    "map in batches": (lambda x: pm.filter_map(f, x, batch_size=2), TWICE),
    "cond": (lambda x: pm.filter_cond(x[0] > 0, f, lambda x: pm.sow("twice", x), x), TWICE),
    "cond, the other": (
        lambda x: pm.filter_cond(x[0] < 0, lambda x: pm.sow("twice", x), f, x),
        TWICE,
    ),
    "switch": (lambda x: pm.filter_switch(1, [lambda x: pm.sow("twice", x), f], x), TWICE),
    "jit of vmap of checkpoint of grad": (
        pm.filter_jit(pm.filter_vmap(pm.filter_checkpoint(pm.filter_grad(total)))),
        TWICE,
    ),
    "vmap of jit of scan": (
        pm.filter_vmap(
            pm.filter_jit(lambda x: pm.filter_scan(lambda c, _: (f(c), c), x, length=2))
        ),
        [[2.0, 6.0], [4.0, 10.0], [6.0, 14.0]],
    ),
}


@pytest.mark.parametrize(("fn", "expected"), PASSED.values(), ids=PASSED)
@pytest.mark.sampled
def test_what_is_sown_comes_out(fn, expected):
    """The values of a plain call, stacked by maps and loops; the result is as without a capture."""
    out, seen = pm.capture(fn)(X)

    assert list(seen) == ["twice"]
    np.testing.assert_array_equal(seen["twice"], expected)
    jax.tree.map(np.testing.assert_array_equal, out, fn(X))


def until(x):
    """A while loop whose steps sow."""
    return jax.lax.while_loop(lambda x: x[0] < 5, f, x)


@pm.filter_custom_jvp
def with_rule(x):
    """A function with a custom derivative, which sows."""
    return f(x)


@with_rule.def_jvp
def rule(primals, tangents):
    """The derivative."""
    return primals[0], tangents[0]


REFUSED = {
    "jax.jit": jax.jit(f),
    "jax.vmap": jax.vmap(f),
    "jax.grad": jax.grad(total),
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, x: (f(c), x), 1.0, x),
    "jax.lax.while_loop": until,
    "filter_while_loop": lambda x: pm.filter_while_loop(lambda x: x[0] < 5, f, x),
    "vmap inside of jit": pm.filter_jit(jax.vmap(f)),
    "a function with a rule, compiled": pm.filter_jit(with_rule),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_could_not_come_out_is_refused(fn):
    """The error names a transform that would return the value."""
    with pytest.raises(CaptureError, match="twice"):
        pm.capture(fn)(X)


def test_without_a_capture_it_may_be_sown_anywhere():
    """No capture would miss it; and an earlier run does not change the refusal."""
    fn = REFUSED["vmap inside of jit"]
    fn(X)

    with pytest.raises(CaptureError, match="twice"):
        pm.capture(fn)(X)
    fn(X)


def test_sow_returns_its_value():
    """Law: sow(name, value) is value, with a capture and without."""
    value = {"a": [X]}

    assert pm.sow("value", value) is value
    assert pm.capture(lambda: pm.sow("value", value))()[0] is value


def test_what_is_no_array_comes_out_as_it_is():
    """Several members or steps have one such value."""
    fn = pm.filter_jit(pm.filter_vmap(lambda x: pm.sow("both", {"how": "a", "x": x})["x"]))

    seen = captured(fn, X)
    assert seen["both"]["how"] == "a"
    np.testing.assert_array_equal(seen["both"]["x"], X)


@pytest.mark.parametrize(
    ("sown", "shown"),
    [
        (["q#2", "q", "q"], ["q#2", "q", "q#3"]),
        (["q", "q", "q#2"], ["q", "q#3", "q#2"]),
        (["q#2", "q#2", "q#2#2"], ["q#2", "q#2#3", "q#2#2"]),
    ],
)
def test_no_value_takes_the_place_of_another(sown, shown):
    """A number may equal a sown name: each value has its own entry."""

    def run(x):
        for i, name in enumerate(sown):
            pm.sow(name, x + i)
        return x

    for call in (run, pm.filter_jit(run)):
        found = captured(call, X)
        assert list(found) == shown
        for i, value in enumerate(found.values()):
            assert_close(value, X + i)


def counted(transform):
    """A transformed function that sows, and how often it was traced."""
    traces = []

    def fn(x):
        traces.append(1)
        return f(x)

    return transform(fn), traces


def scanned(fn):
    """A scan whose step stays the same."""

    def step(carry, x):
        return carry, fn(x)

    return lambda x: pm.filter_scan(step, 0.0, x)[1]


@pytest.mark.parametrize("transform", [pm.filter_jit, scanned], ids=["jit", "scan"])
def test_a_function_is_traced_once_with_and_once_without_a_capture(transform):
    """However often it is called in turns; and no value is that of an earlier call."""
    fn, traces = counted(transform)
    for number in range(3):
        x = X + number
        np.testing.assert_array_equal(fn(x), 2 * x + 1)
        np.testing.assert_array_equal(captured(fn, x)["twice"], 2 * x)

    assert len(traces) == 2


def test_a_check_in_a_captured_function_is_one():
    """A failed check is raised, as without a capture."""

    @pm.filter_jit
    def fn(x):
        return f(pm.error_if(x, x < 0, "negative"))

    np.testing.assert_array_equal(captured(fn, X)["twice"], TWICE)
    with pytest.raises(CheckError, match="negative"):
        pm.capture(fn)(-X)


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, pm.filter_vmap])
def test_after_an_error_nothing_is_left(transform):
    """The next capture starts from nothing, and without one nothing is collected."""

    @transform
    def fails(x):
        f(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pm.capture(fails)(X)

    assert captured(lambda: None) == {}


def test_other_threads_collect_for_themselves():
    """A value that one thread sows is not in the capture of another thread."""
    fn = pm.filter_jit(f)
    barrier = threading.Barrier(3)
    seen = {}

    def run(number):
        def waiting(x):
            barrier.wait()
            out = fn(x)
            barrier.wait()
            return out

        x = X * number
        seen[number] = captured(waiting, x) if number else waiting(x)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    np.testing.assert_array_equal(seen[0], np.ones(3))
    for number in (1, 2):
        assert list(seen[number]) == ["twice"]
        np.testing.assert_array_equal(seen[number]["twice"], 2 * number * X)
