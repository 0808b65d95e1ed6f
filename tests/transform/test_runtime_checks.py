"""`error_if`: where a failed check raises, what it says, and that it changes nothing else."""

import logging
import os
import subprocess
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from tests.helpers.checked_programs import FILTERED, PROGRAMS, unchanged
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.meshes import on
from tests.helpers.racing import race
from tests.helpers.trees import affine, ramp

GOOD, BAD = ramp(8, start=-6.0), ramp(8, start=0.0)
TEXT = "x is too large"
JAXS = (jax.errors.JaxRuntimeError, ValueError)


def small(x):
    """The check of these tests."""
    return pm.error_if(x, x > 3, TEXT)


def failure(call, *args):
    """The error of a failed check."""
    with pytest.raises(CheckError, match=rf"\A{TEXT}") as caught:
        jax.block_until_ready(call(*args))
    return caught.value


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled
def test_under_every_transform(name):
    """A check that holds changes no value and no derivative; one that fails raises each time."""
    checked, plain = (pm.filter_jit(PROGRAMS[name](check)) for check in (small, unchanged))

    assert_close(checked(GOOD), plain(GOOD))
    # Other filtered transforms raise, too, if nothing around them is compiled.
    for call in (checked, PROGRAMS[name](small) if name in FILTERED else checked):
        failure(call, BAD)
        assert_close(call(GOOD), plain(GOOD))


def test_what_comes_back_is_x():
    """A check that holds returns the very tree that it was given."""
    tree = {"layer": affine(), "text": "a", "numbers": [np.ones(2), 1.5, None]}

    assert pm.error_if(tree, False, TEXT) is tree
    assert pm.error_if(tree, jnp.zeros(3, bool), TEXT) is tree


@pytest.mark.parametrize("pred", [True, np.array([False, True]), 2, jnp.array([0, 3], jnp.uint8)])
def test_any_true_is_a_failure(pred):
    """A predicate is a bool, a number or an array of any shape: one in it is enough."""
    assert len(failure(pm.error_if, ramp(2), pred, TEXT).__notes__) == 1  # Of the line alone.
    failure(pm.filter_jit(lambda x: pm.error_if(x, pred, TEXT)), ramp(2))
    failure(pm.filter_jit(lambda x, p: pm.error_if(x, p, TEXT)), ramp(2), jnp.asarray(pred))


def test_a_known_predicate_is_decided_at_once():
    """True raises while the function is traced, wherever the result goes; False adds nothing."""
    for run in (lambda f: f(0.5), lambda f: jax.make_jaxpr(f)(BAD), lambda f: jax.vmap(f)(BAD)):
        failure(run, lambda x: (pm.error_if(x, True, TEXT), x)[1])
        failure(run, lambda x: pm.branched_error_if(x, True, 1, ["first", TEXT]))
        run(lambda x: pm.error_if(x, np.array(False), TEXT))
    assert jax.make_jaxpr(lambda x: pm.error_if(x, x.ndim != 1, TEXT))(BAD).eqns == []
    with jax.disable_jit():
        failure(pm.filter_jit(small), BAD)


@pytest.mark.parametrize("value", [1, 1.5, True, np.int8(3)])
@pytest.mark.parametrize("on_error", ["raise", "nan"])
def test_a_weak_type_stays_weak(value, on_error):
    """`x` is returned unchanged, so it promotes as it would without the check."""
    check = lambda x, pred: pm.error_if(x, pred, "no", on_error=on_error)  # noqa: E731
    x, fine = jnp.asarray(value), jnp.asarray(False)

    for checked in (jax.jit(check)(x, fine), jax.vmap(check, (None, 0))(x, fine[None])):
        assert (checked.dtype, checked.weak_type) == (x.dtype, x.weak_type)


# ---- what the error says


def test_the_index_in_the_batch_is_named():
    """Under vmap a note gives the index of the first member that failed."""
    by_both = jax.vmap(lambda x, y: pm.error_if(x, y > 3, TEXT), in_axes=(None, 0))
    for program, x, place in (
        (jax.vmap(jax.vmap(small)), BAD.reshape(2, 4), "(1, 0)"),
        (jax.vmap(small), BAD.reshape(4, 2), "2"),
        (lambda y: by_both(GOOD, y), BAD, "4"),
    ):
        assert f"for the batch index {place}" in failure(pm.filter_jit(program), x).__notes__


def test_the_line_of_the_check_is_named():
    """A note names the line; the traceback is that of the call, and shows nothing of JAX."""
    line = small.__code__.co_firstlineno + 2

    for call in (small, pm.filter_jit(small), pm.filter_jit(jax.vmap(small))):
        error = failure(call, BAD)
        assert f"checked at {__file__}:{line}, in small" in error.__notes__
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert files[0] == __file__
        assert call is small or not any(f"{os.sep}jax{os.sep}" in file for file in files)


def test_the_first_of_several_checks_is_named():
    """Of two checks, one after the other, the first that fails is raised."""
    later = lambda y: pm.error_if(y, y > 4, "later")  # noqa: E731
    failure(pm.filter_jit(lambda x: jax.lax.map(later, small(pm.error_if(x, x > 9, "no")))), BAD)


def test_an_index_chooses_the_message():
    """The message is the one with the traced index; of several, that of the first failure."""
    check = pm.filter_jit(lambda x, i: pm.branched_error_if(x, x > 3, i, ["a", "b", "c"]))
    first = jnp.array([0, 0, 0, 0, 1, 2, 2, 2])
    for index, text in ((2, "c"), (-1, "c"), (first, "b"), (7, "message 7")):
        with pytest.raises(CheckError, match=rf"\A{text}"):
            check(BAD, jnp.asarray(index))
    with pytest.raises(CheckError, match=r"\Ab"):
        check(BAD, 1)


def test_plain_jit_passes_on_where_a_check_failed():
    """JAX raises its own error, which has the message, the index and the line."""
    with pytest.raises(JAXS, match=rf"CheckError: {TEXT}\n") as error:
        jax.block_until_ready(jax.jit(jax.vmap(small))(BAD))
    assert "for the batch index 4\n" in str(error.value)
    assert "test_runtime_checks.py" in str(error.value).split("checked at ")[1]


@pytest.mark.parametrize("transform", [pm.filter_vmap, pm.filter_jit])
def test_an_old_failure_is_not_taken_for_a_later_error(transform):
    """The message of a check that failed under plain JAX may be in any other error's text."""

    def broken(x):
        raise ZeroDivisionError(f"not ours: {TEXT}")

    call = jax.jit(lambda x: jax.pure_callback(broken, x, x, vmap_method="sequential"))
    for fn in (broken, call):
        with pytest.raises(JAXS, match=TEXT):
            jax.block_until_ready(jax.jit(small)(BAD))
        with pytest.raises((*JAXS, ZeroDivisionError), match="not ours") as caught:
            jax.block_until_ready(transform(fn)(BAD))
        assert not isinstance(caught.value, CheckError)


# ---- where a check takes effect


def test_an_unused_check_is_dropped():
    """A check whose result is not used does nothing, and the program has no callback."""
    unused = pm.filter_jit(lambda x: (small(x), x)[1])

    assert_close(unused(BAD), BAD)
    assert "callback" not in unused.lower(BAD).compile().as_text()
    assert "callback" in pm.filter_jit(small).lower(BAD).compile().as_text()


def test_a_branch_that_is_not_taken_does_not_fail():
    """Only a check in the branch that runs fails, also one that always fails there."""
    check = lambda x: pm.error_if(x, jnp.array(True), TEXT)  # noqa: E731
    f = pm.filter_jit(lambda reached, x: pm.filter_cond(reached, check, unchanged, x))

    assert_close(f(jnp.array(False), BAD), BAD)
    failure(f, jnp.array(True), BAD)


@pytest.mark.parametrize("end", [10, 2**30], ids=["that ends", "that ends by the check alone"])
def test_a_loop_with_a_failing_check_ends(end, caplog):
    """The counter was set to zero in each round: the call never returned."""

    def run(n):
        step = lambda n: pm.error_if(n, n >= 5, TEXT) + 1  # noqa: E731
        return pm.filter_while_loop(lambda n: n < end, step, n)

    with caplog.at_level(logging.CRITICAL, "jax"):
        for call in (pm.filter_jit(run), run, pm.filter_jit(run).lower(jnp.array(0)).compile()):
            failure(call, jnp.array(0))


def test_new_shapes_with_a_check():
    """A check that is there for some shapes only raises from the first call with one of them."""
    jitted = pm.filter_jit(lambda x: (small(x) if x.ndim else x) + 1, donate="x")

    assert jitted(jnp.float32(9.0)) == 10.0
    failure(jitted, jnp.copy(BAD))
    assert_close(jitted(jnp.copy(GOOD)), GOOD + 1)


def test_on_several_devices():
    """The call raises, and no device waits for another."""
    call = pm.filter_jit(lambda x: jnp.sum(small(x)))
    for x in (pm.filter_shard(BAD, on("data")), pm.filter_shard(BAD, on())):
        failure(call, x)
        assert_close(call(0.1 * x), jnp.sum(0.1 * BAD))


# ---- threads


def printing(x):
    """With an effect, so that no call may be made twice."""
    jax.debug.callback(lambda x: None, x)
    return small(x)


# Functions that run in several threads: with a passing and with a failing check.
AT_ONCE = {
    "two programs": lambda: (pm.filter_jit(small), pm.filter_jit(lambda x: small(x))),
    "one program": lambda: (pm.filter_jit(small),) * 2,
    "donated": lambda: (pm.filter_jit(lambda x: small(x), donate="x"),) * 2,
    "with an effect": lambda: (pm.filter_jit(printing),) * 2,
    "compiled": lambda: (pm.filter_jit(small).lower(GOOD).compile(),) * 2,
}


@pytest.mark.parametrize("make", AT_ONCE.values(), ids=AT_ONCE)
def test_a_failure_is_raised_in_its_own_thread(make):
    """Of calls at once, of one program or of two, only that raises whose check failed."""
    fine, failing = make()

    def run(i):
        call, x = ((fine, GOOD), (failing, BAD))[i % 2]
        return [caught(call, jnp.copy(x)) for _ in range(20)]

    def caught(call, x):
        try:
            jax.block_until_ready(call(x))
        except CheckError:
            return True
        return False

    assert [set(found) for found in race(run, 4)] == [{False}, {True}] * 2


def test_calls_inside_of_calls_of_one_thread():
    """A thread does not wait for itself; and a failure of plain JAX meanwhile is not lost."""
    inner = pm.filter_jit(small, donate="x")
    call = pm.filter_jit(lambda x: small(inner(x)), donate="x")
    assert_close(call(jnp.copy(GOOD)), GOOD)
    failure(call, jnp.copy(BAD))

    host = jax.jit(lambda x: pm.error_if(x, x > 3, "on the host"))
    around = pm.filter_jit(
        lambda x: jax.pure_callback(lambda x: np.asarray(host(BAD)), x, small(x))
    )
    with pytest.raises((*JAXS, CheckError), match="on the host"):
        jax.block_until_ready(around(GOOD))


@pytest.mark.slow
def test_a_callback_in_a_thread_of_jaxs_may_call_what_has_the_same_check():
    """Programs that take long run in another thread: it must not wait for the call around it.

    If it does, this test waits for ever.
    """
    inner = pm.filter_jit(small)
    inner(GOOD)

    def host(x):
        threads.append(threading.get_ident())
        return inner(GOOD)

    @pm.filter_jit
    def outer(matrix):
        for _ in range(5):
            matrix = small(matrix @ matrix / len(matrix))
        return jax.pure_callback(host, GOOD, matrix[0, 0])

    threads = []
    assert_close(outer(jnp.full((1500, 1500), GOOD[0]) * 1e-3), GOOD)
    assert threads != [threading.get_ident()]


# ---- processes

PLAIN = """
import faulthandler, jax, jax.numpy as jnp, pytreemod as pm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
faulthandler.dump_traceback_later(100, exit=True)

def small(x): return pm.error_if(x, x > 3, "too large")
def mapped(f, out=P("d")): return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=out)
def scanned(x): return jax.lax.scan(lambda c, y: (small(c + y), c), 0 * x, jnp.stack([x, x]))[0]

both = [small, jax.grad(lambda x: (small(x) ** 2).sum())]
for kind, cases in ((AxisType.Explicit, both), (AxisType.Auto, [*both, jax.vmap(small), scanned])):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    if kind is AxisType.Auto:
        cases += [mapped(small), mapped(lambda x: jax.lax.psum(small(x), "d"), P())]
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("d")))
        for f in map(jax.jit, cases):
            print(jnp.isfinite(f(0.1 * x)).all() & jnp.isnan(f(x)).any(), flush=True)

def evaluated(y):
    with jax.ensure_compile_time_eval(): return y + jax.jit(small)(x)
print(jnp.isnan(jax.jit(evaluated)(x)).any())
"""


FIRST = """
import jax, jax.numpy as jnp, pytreemod as pm
jax.jit(lambda x: pm.filter_jit(lambda x: x + 1)(x))(1.0)
x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(jax.make_mesh((8,), ("d",)), jax.P("d")))
try: pm.filter_jit(lambda x: pm.error_if(x, x > 3, "too large"))(x)
except pm.CheckError as error: print(error)
"""
SCRIPTS = {"plain jit": (PLAIN, "True\n" * 9, 9), "first call": (FIRST, "too large\n", 0)}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "printed", "reported"), SCRIPTS.values(), ids=SCRIPTS)
def test_on_eight_devices_in_a_new_process(script, printed, reported):
    """Plain JAX prints and gives NaN: if it raised, the other devices would wait for ever.

    The first call of a process may be inside a trace: then no later call waited for its checks.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command, options = [sys.executable, "-c", script], {"stdin": subprocess.DEVNULL, "text": True}
    done = subprocess.run(command, env=env, capture_output=True, **options)

    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    assert done.stderr.count("too large\n") >= reported


@pytest.mark.parametrize("call", [lambda f, x: f(x), lambda f, x: f(x=x)], ids=["*", "**"])
def test_a_check_that_some_shapes_have_is_found_before_they_run(call):
    """On several devices, of which none can raise; whatever way an argument is passed."""
    mesh = jax.make_mesh((8,), ("d",))

    @pm.filter_jit
    def step(x):
        return 2 * (pm.error_if(x, x.sum() > 0, TEXT) if x.size > 8 else x)

    for size in (8, 16, 16, 24):
        x = jax.device_put(jnp.ones(size), jax.NamedSharding(mesh, jax.P("d")))
        if size == 8:
            assert_same(call(step, x), jnp.full(8, 2.0))
            continue
        with pytest.raises(CheckError, match=TEXT):
            call(step, x)


# ---- other reactions to a failure


def poisoned(x, pred):
    return pm.error_if((x, jnp.arange(2), jax.lax.complex(x, x)), pred, TEXT, on_error="nan")


@pytest.mark.parametrize("jit", [pm.filter_jit, jax.jit], ids=["filtered", "jax"])
def test_nan(jit):
    """`nan` replaces floating arrays, in the members that fail, and changes no derivative."""
    mapped = jit(jax.vmap(poisoned, in_axes=(None, 0)))
    floats, integers, numbers = mapped(ramp(2), jnp.array([False, True]))
    gradient = jit(jax.grad(lambda x: jnp.sum(poisoned(x, x > 1)[0])))(ramp(2))

    assert_close((floats[0], integers), (ramp(2), jnp.array([[0, 1], [0, 1]])))
    assert np.isnan([floats[1], numbers[1]]).all()
    assert_close(gradient, jnp.ones(2))


def test_the_environment_names_the_default(monkeypatch):
    """PYTREEMOD_ON_ERROR sets `default`, else EQX_ON_ERROR does; an argument wins over both."""
    monkeypatch.setenv("EQX_ON_ERROR", "off")
    assert_close(pm.filter_jit(lambda x: small(x))(BAD), BAD)
    monkeypatch.setenv("PYTREEMOD_ON_ERROR", "nan")
    assert np.isnan(pm.filter_jit(lambda x: small(x))(BAD)).all()
    failure(lambda: pm.error_if(BAD, BAD > 3, TEXT, on_error="raise"))
    monkeypatch.setenv("PYTREEMOD_ON_ERROR", "off")
    assert_same(small(BAD), BAD)
    monkeypatch.delenv("EQX_ON_ERROR")
    monkeypatch.delenv("PYTREEMOD_ON_ERROR")
    failure(small, BAD)


@pytest.mark.parametrize("variable", ["PYTREEMOD", "EQX"])
@pytest.mark.parametrize("jit", [unchanged, pm.filter_jit], ids=["eager", "jitted"])
def test_breakpoint(variable, jit, monkeypatch, capsys):
    """`breakpoint` prints the failure, opens a debugger that shows x and pred, then raises."""
    opened = []

    def debugger(*, num_frames, token):
        shown = sys._getframe(1).f_locals
        opened.append((num_frames, shown["x"].shape, shown["pred"].dtype))
        return token

    monkeypatch.setattr(jax.debug, "breakpoint", debugger)
    monkeypatch.setenv(f"{variable}_ON_ERROR", "breakpoint")
    monkeypatch.setenv(f"{variable}_ON_ERROR_BREAKPOINT_FRAMES", "4")
    for transform in (unchanged, jax.vmap):
        # A function of its own: the mode is read where it is traced.
        failure(jit(transform(lambda x: small(x))), BAD)
        assert opened[-1] == (4, BAD.shape, bool)
        assert TEXT in capsys.readouterr().err


MISTAKES = {
    "traced": (lambda: pm.filter_jit(lambda x: pm.error_if(x, x, TEXT))(GOOD), "pred"),
    "no array": (lambda: jax.jit(lambda pred: pm.error_if(0.5, pred, TEXT))(True), r"0\.5"),
    "no message": (lambda: pm.branched_error_if(GOOD, False, 2, ["a", "b"]), "2"),
    "no list": (lambda: pm.branched_error_if(GOOD, False, 0, TEXT), "messages are a list, not"),
    "no mode": (lambda: pm.error_if(GOOD, False, TEXT, on_error="explode"), "explode"),
}


@pytest.mark.parametrize(("call", "word"), MISTAKES.values(), ids=MISTAKES)
def test_a_check_that_could_not_be_heard_is_refused(call, word):
    """It would never fail, or fail without its message."""
    with pytest.raises(ArgumentError, match=word):
        call()
