"""sow: values come out of every filtered transform, and out of nothing else."""

import re
import threading

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec

import pytreemod as pm
from pytreemod.errors import CaptureError, CheckError
from pytreemod.transform.boundary.sowing import is_collecting
from tests.goldens import refusals
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
    """The values of a plain call, stacked along axis 0 by maps and loops."""
    seen = captured(fn, X)

    assert list(seen) == ["twice"]
    np.testing.assert_array_equal(seen["twice"], expected)


@pytest.mark.parametrize(("fn", "expected"), PASSED.values(), ids=PASSED)
@pytest.mark.sampled
def test_results_are_those_of_a_call_without_a_capture(fn, expected):
    """Law: capture(f)(x)[0] == f(x)."""
    del expected
    out, _ = pm.capture(fn)(X)

    jax.tree.map(np.testing.assert_array_equal, out, fn(X))


@pytest.mark.parametrize("name", ["vmap", "shard_map", "grad", "vjp", "hessian", "scan", "cond"])
def test_what_is_sown_comes_out_of_compiled_transforms(name):
    """Inside of filter_jit transforms hand out the same."""
    fn, expected = PASSED[name]

    np.testing.assert_array_equal(captured(pm.filter_jit(fn), X)["twice"], expected)


def test_shapes_come_out_of_eval_shape():
    """Without computing, sown values are as abstract as the result."""
    seen = pm.capture(lambda x: pm.filter_eval_shape(f, x))(X)[1]

    assert seen == {"twice": jax.ShapeDtypeStruct((3,), jnp.float32)}


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
    "jax.checkpoint": jax.checkpoint(f),
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, x: (f(c), x), 1.0, x),
    "jax.lax.map": lambda x: jax.lax.map(f, x),
    "jax.lax.cond": lambda x: jax.lax.cond(x[0] > 0, f, f, x),
    "jax.lax.while_loop": until,
    "filter_while_loop": lambda x: pm.filter_while_loop(lambda x: x[0] < 5, f, x),
    "filter_fori_loop": lambda x: pm.filter_fori_loop(0, 2, lambda i, x: f(x), x),
    "filter_make_jaxpr": lambda x: pm.filter_make_jaxpr(f)(x)[0],
    "jit inside of vmap": jax.vmap(pm.filter_jit(f)),
    "vmap inside of jit": pm.filter_jit(jax.vmap(f)),
    "a function with a rule, compiled": pm.filter_jit(with_rule),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_could_not_come_out_is_refused(fn):
    """The error names a transform that would return the value."""
    with pytest.raises(CaptureError, match=r"sow\('twice'\): expected a call that can return"):
        pm.capture(fn)(X)


RUNNABLE = {name: fn for name, fn in REFUSED.items() if "rule" not in name}


@pytest.mark.parametrize("fn", RUNNABLE.values(), ids=RUNNABLE)
def test_without_a_capture_it_may_be_sown_anywhere(fn):
    """No capture would miss it; and an earlier run does not change the refusal."""
    fn(X)

    with pytest.raises(CaptureError, match="inside a transform that returns none"):
        pm.capture(fn)(X)
    fn(X)


def test_sow_returns_its_value():
    """Law: sow(name, value) is value, with a capture and without."""
    value = {"a": [X]}

    assert pm.sow("value", value) is value
    assert pm.capture(lambda: pm.sow("value", value))()[0] is value


def test_a_container_is_shown_as_it_was():
    """Later changes of the container are not shown."""

    def changing(x):
        box = pm.sow("box", [x])
        box.append(x)
        return box

    out, seen = pm.capture(changing)(1)
    assert (out, seen) == ([1, 1], {"box": [1]})


def test_what_is_no_array_comes_out_as_it_is():
    """Several members or steps have one such value."""
    fn = pm.filter_jit(pm.filter_vmap(lambda x: pm.sow("both", {"how": "a", "x": x})["x"]))

    seen = captured(fn, X)
    assert seen["both"]["how"] == "a"
    np.testing.assert_array_equal(seen["both"]["x"], X)


def test_names_are_counted_in_the_order_of_calls():
    """The second value of a name has its number."""

    @pm.filter_jit
    def thrice(x):
        return f(f(pm.sow("first", f(x))))

    assert list(captured(thrice, X)) == ["twice", "first", "twice#2", "twice#3"]


@pytest.mark.parametrize(
    ("sown", "shown"),
    [
        (["q#2", "q", "q"], ["q#2", "q", "q#3"]),
        (["q", "q", "q#2"], ["q", "q#3", "q#2"]),
        (["q#2", "q#2", "q", "q"], ["q#2", "q#2#2", "q", "q#3"]),
        (["q", "q", "q#3", "q", "q"], ["q", "q#2", "q#3", "q#4", "q#5"]),
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


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["q", "q#2", "q#3", "q#2#2", "p"]), max_size=8))
def test_as_many_values_are_shown_as_are_sown(names):
    """In their order; the first of each name under that name."""
    _, seen = pm.capture(lambda: [pm.sow(name, i) for i, name in enumerate(names)])()

    assert list(seen.values()) == list(range(len(names)))
    assert all(seen[name] == names.index(name) for name in names)


def test_branches_may_sow_in_different_orders():
    """They are sown by name."""

    def forth(x):
        return pm.sow("b", 2 * pm.sow("a", x))

    def back(x):
        b = pm.sow("b", x)
        return pm.sow("a", 3 * b)

    def fn(pred):
        return pm.filter_cond(pred, forth, back, X)

    np.testing.assert_array_equal(captured(fn, True)["b"], 2 * X)
    np.testing.assert_array_equal(captured(fn, False)["a"], 3 * X)


def test_branches_that_sow_different_names_are_refused():
    """Each name that only one of them has is listed."""
    text = re.escape("expected branches that capture the same values") + (
        r"[^\n]*\n  at true_fun: 'twice'\n  at false_fun: 'other'\n  sow zeros"
    )

    def fn(x):
        return pm.filter_cond(x[0] > 0, f, lambda x: pm.sow("other", x), x)

    for _ in range(2):
        with pytest.raises(CaptureError, match=text):
            pm.capture(fn)(X)
    np.testing.assert_array_equal(fn(X), [3.0, 5.0, 7.0])


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


def test_a_trace_for_a_capture_is_no_retrace():
    """A function that may be traced once can be captured, with nothing to explain."""
    fn = pm.filter_jit(f, max_traces=1)
    fn(X)

    said = []
    with pm.debug.explain_retraces(fn, announce=said.append):
        assert list(captured(fn, X)) == ["twice"]
        fn(X)
    assert said == []


def test_a_donated_argument_is_donated():
    """The sown values exist nevertheless."""
    x = jnp.array(X)
    seen = captured(pm.filter_jit(f, donate="all"), x)

    assert x.is_deleted()
    np.testing.assert_array_equal(seen["twice"], TWICE)


def test_results_lie_where_out_shardings_says():
    """Sown values keep their own sharding."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    fn = pm.filter_jit(
        lambda x: {"y": (f(x), pm.sow("sum", x.sum()))[0]}, out_shardings={"y": sharding}
    )

    out, seen = pm.capture(fn)(X)
    assert out["y"].sharding == sharding
    assert float(seen["sum"]) == 6.0


def test_a_check_in_a_captured_function_is_one():
    """A failed check is raised, as without a capture."""

    @pm.filter_jit
    def fn(x):
        return f(pm.error_if(x, x < 0, "negative"))

    np.testing.assert_array_equal(captured(fn, X)["twice"], TWICE)
    with pytest.raises(CheckError, match="negative"):
        pm.capture(fn)(-X)


def test_without_jit_it_is_the_same():
    """JAX's switch that turns compiling off changes nothing."""
    with jax.disable_jit():
        np.testing.assert_array_equal(captured(pm.filter_jit(f), X)["twice"], TWICE)


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, pm.filter_vmap])
def test_after_an_error_nothing_is_left(transform):
    """The next capture starts from nothing, and without one nothing is collected."""

    @transform
    def fails(x):
        f(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pm.capture(fails)(X)

    assert not is_collecting()
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


def test_nothing_is_sown_on_the_host():
    """A callback may run at any time, in any thread: no call can return the value."""
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)

    @pm.filter_jit
    def fn(x):
        return pm.filter_pure_callback(
            lambda x: np.asarray(f(np.asarray(x))), x, result_shape_dtypes=struct
        )

    np.testing.assert_array_equal(fn(X), [3.0, 5.0, 7.0])
    with pytest.raises(RuntimeError, match=r"sow\('twice'\): expected a call"):
        jax.block_until_ready(pm.capture(fn)(X))


def test_a_callback_that_ran_outside_sows_nothing_inside():
    """Outside of `jit`, too, where JAX knows the program of an equal callback."""
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)

    def on_host(x):
        return np.asarray(f(np.asarray(x)))

    def fn(x):
        return pm.filter_pure_callback(on_host, x, result_shape_dtypes=struct)

    np.testing.assert_array_equal(fn(X), [3.0, 5.0, 7.0])
    with pytest.raises(RuntimeError, match=r"sow\('twice'\): expected a call"):
        jax.block_until_ready(pm.capture(fn)(X))
    np.testing.assert_array_equal(fn(X), [3.0, 5.0, 7.0])


test_refusals = refusals(globals())
