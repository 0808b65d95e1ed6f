"""error_if: where a failing check raises, its message, and the cost without a check."""

import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Affine, affine, ramp

GOOD, BAD = ramp(6, start=-3.0), ramp(6, start=0.0)
TEXT = "x is too large"
ON_ERROR = "PYTREEMOD_ON_ERROR"


def small(x):
    """The check of these tests."""
    return pm.error_if(x, x > 3, TEXT)


def no_check(x):
    return x


def has_check(jitted, x=GOOD):
    """Whether a call of a function under filter_jit waits for its results."""
    return jitted.find((x,), {})[0].has_check


def failure(call, *args):
    """The error of a failed check."""
    with pytest.raises(CheckError, match=rf"\A{TEXT}") as caught:
        call(*args)
    return caught.value


def squares(check):
    return lambda x: jnp.sum(check(x) ** 2)


def each(check, x):
    """The check on one element after the other, by a scan."""
    return jax.lax.scan(lambda carry, y: (carry, check(y)), 0, x)[1]


def repeated(check, x):
    """The check twice, by a while loop."""
    more, body = lambda c: c[0] < 2, lambda c: (c[0] + 1, check(c[1]))
    return jax.lax.while_loop(more, body, (0, x))[1]


PROGRAMS = {
    "call": lambda check: check,
    "filter_jit": pm.filter_jit,
    "jax.jit": jax.jit,
    "vmap": jax.vmap,
    "filter_vmap": pm.filter_vmap,
    "scan": lambda check: lambda x: each(check, x),
    "while_loop": lambda check: lambda x: repeated(check, x),
    "cond": lambda check: lambda x: jax.lax.cond(x[0] > -9, check, no_check, x),
    "grad": lambda check: jax.grad(squares(check)),
    "filter_grad": lambda check: pm.filter_grad(squares(check)),
    "value_and_grad": lambda check: pm.filter_value_and_grad(squares(check)),
    "hessian": lambda check: jax.hessian(lambda x: jnp.sum(check(x) ** 3)),
    "jvp": lambda check: lambda x: jax.jvp(check, (x,), (x,)),
    "vjp": lambda check: lambda x: jax.vjp(lambda y: check(y) ** 2, x)[1](x),
    "checkpoint": lambda check: jax.grad(squares(jax.checkpoint(check))),
    "in a Module": lambda check: lambda x: check(Affine(jnp.eye(6), 0 * x)(x)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.sampled
def test_under_every_transform(program):
    """Where the check holds, the result is that without it; where not, each call raises."""
    checked, plain = pm.filter_jit(program(small)), pm.filter_jit(program(no_check))

    assert_close(checked(GOOD), plain(GOOD))
    assert has_check(checked)
    assert not has_check(plain)
    for _ in range(2):
        failure(checked, BAD)
    assert_close(checked(GOOD), plain(GOOD))


JITTED = pm.filter_jit(small)
LOSS = pm.filter_jit(squares(small))
COMPILED_INSIDE = {
    "filter_vmap": pm.filter_vmap(JITTED),
    "jax.vmap": jax.vmap(JITTED),
    "jax.grad": jax.grad(LOSS),
    "filter_grad": pm.filter_grad(LOSS),
    "filter_jvp": lambda x: pm.filter_jvp(JITTED, (x,), (x,)),
    "filter_vjp": lambda x: pm.filter_vjp(JITTED, x),
    "filter_jacrev": pm.filter_jacrev(JITTED),
    "filter_checkpoint": pm.filter_checkpoint(JITTED),
    "filter_scan": lambda x: pm.filter_scan(lambda carry, y: (carry, small(y)), 0, x),
    "filter_map": lambda x: pm.filter_map(small, x),
    "filter_while_loop": lambda x: pm.filter_while_loop(
        lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, small(carry[1])), (0, x)
    ),
    "filter_cond": lambda x: pm.filter_cond(x[0] > -99, small, no_check, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", COMPILED_INSIDE.values(), ids=COMPILED_INSIDE.keys())
def test_a_filtered_transform_that_nothing_compiles(program):
    """A program that JAX compiles inside raises the check's error at each call, not JAX's."""
    jax.block_until_ready(program(BAD - 9))
    for _ in range(2):
        failure(program, BAD)


def test_other_errors_of_jax_arrive_undisturbed():
    """An error of a user's callback is not taken for the check that failed before."""

    def broken(x):
        raise ZeroDivisionError("not ours")

    call = jax.jit(lambda x: jax.pure_callback(broken, x, x, vmap_method="sequential"))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=TEXT):
        jax.block_until_ready(jax.jit(small)(BAD))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="not ours") as caught:
        jax.block_until_ready(pm.filter_vmap(call)(BAD))

    assert not isinstance(caught.value, CheckError)


def test_what_comes_back_is_x():
    """Eagerly, a check that holds gives back the very tree that it was given."""
    tree = {"layer": affine(), "text": "a", "numbers": [np.ones(2), 1.5, None]}

    assert pm.error_if(tree, False, TEXT) is tree
    assert pm.error_if(tree, jnp.zeros(3, bool), TEXT) is tree
    assert pm.error_if(tree, True, TEXT, on_error="off") is tree


@pytest.mark.parametrize(
    "pred",
    [
        True,
        np.bool_(True),
        np.array([False, True]),
        jnp.array([[True, False]]),
        2,
        np.int64(-1),
        jnp.array([0, 3], jnp.uint8),
    ],
    ids=repr,
)
@pytest.mark.sampled
def test_any_true_is_a_failure(pred):
    """A predicate is a bool or an array of any shape, or a count; one True in it is enough."""
    failure(pm.error_if, ramp(2), pred, TEXT)
    failure(pm.filter_jit(lambda x: pm.error_if(x, pred, TEXT)), ramp(2))
    failure(pm.filter_jit(lambda x, p: pm.error_if(x, p, TEXT)), ramp(2), jnp.asarray(pred))


# ---- the message of the error


def notes(call, *args):
    return failure(call, *args).__notes__


PLACES = {
    "not mapped": (small, BAD, None),
    "mapped": (jax.vmap(small), BAD, "4, and 1 more"),
    "mapped twice": (jax.vmap(jax.vmap(small)), BAD.reshape(2, 3), "(1, 1), and 1 more"),
    "arrays in a batch": (jax.vmap(small), BAD.reshape(2, 3), "1"),
    "in a scan": (lambda x: each(jax.vmap(small), x.reshape(3, 2)), BAD, "0, and 1 more"),
    "of the gradient": (jax.vmap(jax.grad(squares(small))), BAD, "4, and 1 more"),
    "of another argument": (
        jax.vmap(lambda x, y: pm.error_if(x, y > 3, TEXT) + y, in_axes=(None, 0)),
        (GOOD, BAD),
        "4, and 1 more",
    ),
}


def batch_notes(error):
    return [note for note in error.__notes__ if "batch" in note]


@pytest.mark.parametrize(("program", "x", "place"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.sampled
def test_the_index_in_the_batch_is_named(program, x, place):
    """Under vmap a note says which member failed first, and how many others did."""
    error = failure(pm.filter_jit(program), *(x if type(x) is tuple else (x,)))

    assert batch_notes(error) == ([] if place is None else [f"for the batch index {place}"])


def test_the_line_of_the_check_is_named():
    """A note names the file, the line and the function of the check."""
    line = small.__code__.co_firstlineno + 2

    for call in (small, pm.filter_jit(small), pm.filter_jit(jax.vmap(small))):
        assert f"checked at {__file__}:{line}, in small" in notes(call, BAD)


def test_the_error_is_raised_from_the_users_line():
    """The traceback leads from the call to this library, and not through JAX."""
    jitted = pm.filter_jit(small)
    traceback = failure(jitted, BAD).__traceback__
    files = []
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next

    assert files[0] == __file__
    assert not any(os.sep + "jax" + os.sep in file for file in files)


def test_the_first_of_several_checks_is_named():
    """Of two checks one after the other the first that fails is raised."""

    @pm.filter_jit
    def f(x):
        x = pm.error_if(x, x > 9, "never")
        x = pm.error_if(x, x > 3, TEXT)
        return each(lambda y: pm.error_if(y, y > 4, "later"), x)

    failure(f, BAD)


BRANCHED = {
    "traced": (lambda x, i: (x, x > 3, i), (BAD, jnp.int32(2)), "c"),
    "known": (lambda x: (x, x > 3, 1), (BAD,), "b"),
    "NumPy": (lambda x: (x, x > 3, np.int8(1)), (BAD,), "b"),
    "from the end": (lambda x, i: (x, x > 3, i), (BAD, jnp.int32(-1)), "c"),
    "one for each": (lambda x, i: (x, x > 3, i), (BAD, jnp.array([0, 0, 0, 0, 1, 2])), "b"),
    "too large": (lambda x, i: (x, x > 3, i), (BAD, jnp.int32(7)), "message 7 of 3"),
}


@pytest.mark.parametrize(("inputs", "args", "text"), BRANCHED.values(), ids=BRANCHED.keys())
def test_an_index_chooses_the_message(inputs, args, text):
    """The message is the one with the traced index; of several, that of the first failure."""

    def check(*args):
        return pm.branched_error_if(*inputs(*args), ["a", "b", "c"])

    with pytest.raises(CheckError, match=rf"\A{text}"):
        pm.filter_jit(check)(*args)
    if text != "message 7 of 3":
        with pytest.raises(CheckError, match=rf"\A{text}"):
            check(*args)


# ---- where a check takes effect, and its cost


def test_an_unused_check_is_dropped():
    """A check whose result is not used does nothing, and the program has no callback."""
    unused = pm.filter_jit(lambda x: (small(x), x)[1])

    assert_close(unused(BAD), BAD)
    assert "callback" not in unused.lower(BAD).compile().as_text()
    assert "callback" in pm.filter_jit(small).lower(BAD).compile().as_text()


def test_only_a_function_with_a_check_waits():
    """Calls of other functions take the short road, also if their checks are off."""
    plain = pm.filter_jit(jnp.sin)
    off = pm.filter_jit(lambda x: pm.error_if(x, x > 3, TEXT, on_error="off"))
    nan = pm.filter_jit(lambda x: pm.error_if(x, x > 3, TEXT, on_error="nan"))
    checked = pm.filter_jit(small)
    for f in (plain, off, nan, checked):
        f(GOOD)

    assert [has_check(f) for f in (plain, off, nan, checked)] == [False, False, False, True]
    assert not any(f.find((GOOD,), {})[0].is_special for f in (plain, off, nan))


def test_a_check_that_can_not_fail_costs_nothing():
    """A predicate that is False when the function is traced leaves no trace of the check."""
    known = pm.filter_jit(lambda x: pm.error_if(x, x.ndim != 1, TEXT))
    known(GOOD)

    assert not has_check(known)
    assert jax.make_jaxpr(lambda x: pm.error_if(x, False, TEXT))(GOOD).eqns == []


def test_a_branch_that_is_not_taken_does_not_fail():
    """A check that always fails marks a branch that must not be reached: by an array."""

    @pm.filter_jit
    def f(reached, x):
        always = jnp.array(True)
        return jax.lax.cond(reached, lambda x: pm.error_if(x, always, TEXT), no_check, x)

    assert_close(f(jnp.array(False), BAD), BAD)
    failure(f, jnp.array(True), BAD)


KNOWN = {
    "eagerly": lambda check: check(BAD),
    "filter_jit": lambda check: pm.filter_jit(check)(BAD),
    "filter_grad": lambda check: pm.filter_grad(squares(check))(BAD),
    "without arrays": lambda check: check(0.5),
}


@pytest.mark.parametrize("run", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.sampled
def test_a_bool_is_decided_at_once(run):
    """True raises while tracing, wherever the result goes; False asks for no array."""
    failure(run, lambda x: pm.error_if(x, True, TEXT))
    failure(run, lambda x: pm.branched_error_if(x, True, 1, ["first", TEXT]))
    failure(run, lambda x: pm.error_if(x, True, TEXT, on_error="breakpoint"))
    run(lambda x: pm.error_if(x, False, TEXT))
    run(lambda x: pm.error_if(x, np.array(False), TEXT))
    run(lambda x: pm.error_if(x, True, TEXT, on_error="off"))


def over_jit(check):
    inner = jax.jit(check)
    return lambda x, scale: inner(x) * scale


def over_scan(check):
    body = lambda carry, y: (carry, check(y))  # noqa: E731
    return lambda x, scale: jax.lax.scan(body, 0, x)[1] * scale


@pytest.mark.parametrize("over", [over_jit, over_scan])
def test_a_check_in_code_that_jax_had_traced_before(over):
    """JAX keeps traces of inner functions; a check in one is found by every function around it."""
    program = over(lambda x: pm.error_if(x, x > 3, TEXT))
    for scale in (1.0, 2.0):
        jitted = pm.filter_jit(lambda x, scale=scale: program(x, scale))
        assert_close(jitted(GOOD), GOOD * scale)
        assert has_check(jitted)
        failure(jitted, BAD)


def test_new_shapes_with_a_check():
    """A check that is there for some shapes only raises from the first call with one of them."""
    jitted = pm.filter_jit(lambda x: small(x) if x.ndim else x)

    assert jitted(jnp.float32(9.0)) == 9.0
    assert not has_check(jitted)
    failure(jitted, BAD)
    failure(jitted, BAD)
    assert has_check(jitted)
    assert jitted(jnp.float32(8.0)) == 8.0


def test_a_compiled_function_raises():
    """The result of `lower(...).compile()` raises as the jitted function does."""
    compiled = pm.filter_jit(small).lower(GOOD).compile()

    assert_close(compiled(GOOD), GOOD)
    failure(compiled, BAD)


# ---- other reactions to a failure


def poisoned(x, pred):
    return pm.error_if((x, jnp.arange(2), jax.lax.complex(x, x)), pred, TEXT, on_error="nan")


@pytest.mark.parametrize("jit", [pm.filter_jit, jax.jit], ids=["filtered", "jax"])
def test_nan(jit):
    """`nan` replaces floating arrays, in the members that fail, and changes no derivative."""
    mapped = jit(jax.vmap(poisoned, in_axes=(None, 0)))
    floats, integers, numbers = mapped(ramp(2), jnp.array([False, True]))
    gradient = jit(jax.grad(lambda x: jnp.sum(poisoned(x, x > 1)[0])))(ramp(2))

    assert_close(floats[0], ramp(2))
    assert_close(integers, jnp.array([[0, 1], [0, 1]]))
    assert np.isnan([floats[1], numbers[1]]).all()
    assert_close(gradient, jnp.ones(2))


def test_the_environment_names_the_default(monkeypatch):
    """PYTREEMOD_ON_ERROR sets `default`; an argument wins over it."""
    monkeypatch.setenv(ON_ERROR, "off")
    assert_close(small(BAD), BAD)
    assert_close(pm.filter_jit(lambda x: small(x))(BAD), BAD)
    with pytest.raises(CheckError, match=TEXT):
        pm.error_if(BAD, BAD > 3, TEXT, on_error="raise")
    monkeypatch.setenv(ON_ERROR, "nan")
    assert np.isnan(small(BAD)).all()
    monkeypatch.delenv(ON_ERROR)
    failure(small, BAD)


@pytest.fixture
def debugger(monkeypatch):
    """A fake debugger instead of JAX's; a list of `(num_frames, x, pred)`."""
    opened = []

    def breakpoint(*, num_frames, token):
        shown = sys._getframe(1).f_locals
        opened.append((num_frames, shown["x"], shown["pred"]))
        return token

    monkeypatch.setattr(jax.debug, "breakpoint", breakpoint)
    return opened


def test_settings_of_equinox_are_heard(monkeypatch, debugger):
    """A script that sets EQX_ON_ERROR works unchanged; where both are set, ours decides."""
    monkeypatch.setenv("EQX_ON_ERROR", "off")
    assert_close(small(BAD), BAD)

    monkeypatch.setenv(ON_ERROR, "breakpoint")
    monkeypatch.setenv("EQX_ON_ERROR_BREAKPOINT_FRAMES", "4")
    failure(pm.filter_jit(lambda x: small(x)), BAD)
    assert debugger[-1][0] == 4


@pytest.mark.parametrize("transform", [no_check, jax.vmap], ids=["one", "mapped"])
@pytest.mark.parametrize("jit", [no_check, pm.filter_jit], ids=["eager", "jitted"])
def test_breakpoint(transform, jit, debugger, capsys):
    """`breakpoint` prints the failure, opens a debugger that shows x and pred, then raises."""

    def stop(x):
        return pm.error_if({"x": x}, x > 3, TEXT, on_error="breakpoint")["x"]

    error = failure(jit(transform(stop)), BAD)

    num_frames, x, pred = debugger[-1]
    assert num_frames == 1
    assert x["x"].shape == BAD.shape
    assert pred.dtype == bool
    assert TEXT in capsys.readouterr().err
    assert ("batch index 4" in str(error.__notes__)) == (transform is jax.vmap)


# ---- in a separate process: checks that might hang, or read from the terminal

SEVERAL_DEVICES = """
import faulthandler, jax, jax.numpy as jnp, pytreemod as pm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
faulthandler.dump_traceback_later(100, exit=True)

def small(x): return pm.error_if(x, x > 3, "too large")

def mapped(f, out=P("d")): return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=out)

def scanned(x): return jax.lax.scan(lambda c, y: (small(c + y), c), 0 * x, jnp.stack([x, x]))[0]

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    sharded, whole = (NamedSharding(mesh, spec) for spec in (P("d"), P()))
    x, y = (jax.device_put(jnp.arange(16.0), sharding) for sharding in (sharded, whole))
    cases = {"sharded": (small, x), "grad": (jax.grad(lambda x: (small(x) ** 2).sum()), x)}
    if kind is AxisType.Auto:
        cases |= {
            "whole": (small, y),
            "vmap": (jax.vmap(small), x),
            "scan": (scanned, x),
            "shard_map": (mapped(small), x),
            "collective": (mapped(lambda x: jax.lax.psum(small(x), "d"), P()), x),
        }
    with jax.set_mesh(mesh):
        for name, (f, x) in cases.items():
            good = 0.1 * x
            filtered, plain = pm.filter_jit(f), jax.jit(f)
            assert jnp.isfinite(filtered(good)).all() and jnp.isfinite(plain(good)).all()
            try: raised = filtered(x) is None
            except pm.CheckError as error: raised = str(error) == "too large"
            poisoned = bool(jnp.isnan(plain(x)).any())
            print(kind.name, name, raised, poisoned, flush=True)
"""


def run(script, **options):
    """Run a script in a separate process."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_several_devices():
    """On eight devices nothing hangs: filter_jit raises; jax.jit prints and gives NaN."""
    done = run(SEVERAL_DEVICES)

    assert done.returncode == 0, done.stderr
    assert [line.split()[2:] for line in done.stdout.splitlines()] == [["True", "True"]] * 9
    assert "CheckError: too large" in done.stderr
    assert "on several devices cannot raise it; filter_jit can" in done.stderr


@pytest.mark.parametrize("end", [10, 2**30], ids=["that ends", "that ends by the check alone"])
def test_a_loop_with_a_failing_check_ends(end, caplog):
    """The counter was set to zero in each round: the call never returned."""

    def body(s):
        return pm.error_if(s, s >= 5, TEXT) + 1

    def run():
        return pm.filter_while_loop(lambda s: s < end, body, jnp.array(0))

    with caplog.at_level(logging.CRITICAL, "jax"):
        for call in (pm.filter_jit(run), run, pm.filter_jit(run)):
            with pytest.raises(CheckError, match=TEXT):
                call()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_what_is_no_float_goes_on_as_it_is(dtype):
    """The error is raised later, and until then the program computes with the old value."""
    seen = []

    @pm.filter_jit
    def run(x):
        x = pm.error_if(x, x.any(), TEXT)
        jax.debug.callback(lambda x: seen.append(np.asarray(x).tolist()), x)
        return x

    for values in ([0, 0], [1, 0]):
        x = jnp.array(values, dtype)
        try:
            run(x)
        except CheckError:
            assert values == [1, 0]
        jax.effects_barrier()
        assert seen.pop() == x.tolist()


@pytest.mark.parametrize("value", [1, 1.5, True, np.int8(3)])
@pytest.mark.parametrize("on_error", ["raise", "nan"])
def test_a_weak_type_stays_weak(value, on_error):
    """`x` is returned unchanged, so that it promotes as it would without the check."""

    def check(x, pred):
        return pm.error_if(x, pred, "no", on_error=on_error)

    x, fine = jnp.asarray(value), jnp.asarray(False)
    for checked in (jax.jit(check)(x, fine), jax.vmap(check, (None, 0))(x, fine[None])):
        assert (checked.dtype, checked.weak_type) == (x.dtype, x.weak_type)


def test_plain_jit_passes_on_where_a_check_failed():
    """Index and line: JAX has the message of an error, and none of its notes."""

    def check(x):
        return pm.error_if(x, x < 0, "x must be non-negative")

    with pytest.raises(Exception, match=r"CheckError: x must be non-negative\n") as error:
        jax.block_until_ready(jax.jit(jax.vmap(check))(jnp.asarray([1.0, -1.0])))
    assert "for the batch index 1\n" in str(error.value)
    assert "test_runtime_checks.py" in str(error.value).split("checked at ")[1]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: pm.error_if(GOOD, GOOD, TEXT), "pred"),
        (lambda: pm.filter_jit(lambda x: pm.error_if(x, x, TEXT))(GOOD), "pred"),
        (lambda: jax.jit(lambda pred: pm.error_if(0.5, pred, TEXT))(True), "0.5"),
        (lambda: pm.branched_error_if(GOOD, False, 2, ["a", "b"]), "2"),
        (lambda: pm.error_if(GOOD, False, TEXT, on_error="explode"), "explode"),
    ],
    ids=["floats", "traced floats", "no array", "no message", "no mode"],
)
def test_a_check_that_could_not_be_heard_is_refused(call, word):
    """It would never fail, or fail without its message."""
    with pytest.raises(ArgumentError, match=word):
        call()
