"""How the checks of a program are returned to any caller."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

TEXT = "x is negative"
GOOD, BAD = ramp(8, start=0.0), ramp(8, start=-2.0)


@pytest.fixture(autouse=True)
def forgetting():
    """No test leaves failures to another."""
    yield
    with contextlib.suppress(CheckError):
        pm.debug.raise_errors()


def check(x):
    return pm.error_if(x, x < 0, TEXT)


def later(fn, **options):
    return pm.filter_jit(fn, checks="later", **options)


def raised(call):
    """The notes of the failure that a call raises."""
    with pytest.raises(CheckError, match=rf"\A{TEXT}") as caught:
        call()
    return caught.value.__notes__


def test_a_program_inside_of_another_leaves_its_checks_to_that():
    """Whether calls of that wait or not; a plain transform waits as it does without."""
    inner = later(lambda x: {"x": check(x), "n": 3})
    waiting, other = (pm.filter_jit(lambda x: inner(x)["x"]), later(lambda x: inner(x)["x"] + 1))

    assert_close(waiting(GOOD), GOOD)
    assert raised(lambda: waiting(BAD))
    other(BAD)
    assert raised(pm.debug.raise_errors)[-1] == "in call 1 of <lambda>"
    assert raised(lambda: pm.filter_vmap(lambda x: inner(x)["x"])(BAD))[0].startswith("for the")
    assert pm.debug.raise_errors() is None


def test_the_index_in_a_batch_goes_to_the_program_around():
    inner = later(pm.filter_vmap(check))

    notes = raised(lambda: pm.filter_jit(lambda x: inner(x[::-1]))(BAD))
    assert notes[0] == "for the batch index 6"


def test_a_program_without_results_has_nothing_to_hold_a_check():
    """Inside of another; by itself it has."""
    inner = later(lambda x: (check(x), None)[1])

    pm.filter_jit(lambda x: (inner(x), x)[1])(BAD)
    inner(BAD)
    assert raised(pm.debug.raise_errors)


def test_a_compiled_program_reports():
    """By its own calls, too."""
    compiled = later(check).lower(BAD).compile()
    assert_close(compiled(BAD), BAD)

    assert raised(lambda: compiled(GOOD))[-1] == "in call 1 of check"


def test_looking_without_running_reports_nothing():
    f = later(lambda x: (check(x), "static"))

    assert f.eval_shape(BAD) == (jax.ShapeDtypeStruct((8,), jnp.float32), "static")
    assert len(pm.filter_make_jaxpr(f)(BAD)[0].out_avals) == 1
    assert pm.debug.raise_errors() is None


def test_an_exported_program_has_no_call_that_could_raise():
    with pytest.raises(ArgumentError, match='expected checks in the program, got checks="later"'):
        jax.export.export(later(check))(GOOD)


def test_donated_arrays_are_gone():
    """The next call raises, and gives nothing away."""
    f = later(lambda x, y: check(x) + y, donate="x")
    x = f(jnp.array(BAD), 1.0)
    assert raised(lambda: f(x, 1.0))

    assert_close(f(x, 1.0), BAD + 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("form", ["one", "tree"])
def test_results_on_several_devices(kind, form):
    """The summary is on all of them, and results lie where they are to."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    fns = {"one": check, "tree": lambda x: {"a": pm.filter_vmap(check)(x), "b": x}}
    out = {"one": split, "tree": {"a": split, "b": whole}}[form]
    f = later(fns[form], out_shardings=out)

    result = f(jax.device_put(BAD, split))
    assert jax.tree.map(lambda x, s: x.sharding == s, result, out) in (True, {"a": True, "b": True})
    assert raised(pm.debug.raise_errors)[-1].startswith("in call ")
    f(jax.device_put(GOOD, split))
    assert pm.debug.raise_errors() is None
    plain = later(lambda x: x + 1, out_shardings=split)
    assert_close(plain(jax.device_put(GOOD, split)), GOOD + 1)


def test_methods_and_modules():
    """Functions that are trees count their calls apart."""

    class Layer(pm.Module):
        bound: jax.Array

        @pm.filter_jit(checks="later")
        def __call__(self, x):
            return pm.error_if(x, x < self.bound, TEXT)

        def other(self, x):
            return self(x)

    layer = Layer(jnp.asarray(0.0))
    layer(GOOD)
    layer(BAD)
    assert raised(lambda: layer(GOOD))[-1].startswith("in call 2 of ")
    later(layer.other)(BAD)
    assert raised(pm.debug.raise_errors)[-1] == "in call 1 of other"


def test_an_unknown_word_is_refused():
    with pytest.raises(ArgumentError, match=r"expected \"wait\" or \"later\".*'later'"):
        pm.filter_jit(check, checks="latr")
    with pytest.raises(ArgumentError, match="filter_jit\\(checks\\)"):
        pm.filter_jit(checks=None)
