"""Errors: a user sees the frames of the program, and at most six of the library."""

import traceback
from pathlib import Path

import jax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import CheckError, ShapeError
from tests.helpers.trees import ramp

PACKAGE = str(Path(pm.__file__).parent)
X = ramp(3)


def fails(x, *_):
    """A user's function, which fails while it is traced."""
    error = ZeroDivisionError("of the user")
    error.add_note("a note")
    raise error from KeyError("the cause")


class Failing(pm.Module):
    weight: jax.Array

    def __call__(self, x):
        return fails(x)


def apply(model, x):
    return model(x)


STACK = nn.Stack(lambda key: Failing(jax.random.normal(key)), 3, key=jax.random.key(0))
CALLS = {
    "jit of value_and_grad": lambda: pm.filter_jit(pm.filter_value_and_grad(fails))(X),
    "vmap of grad of remat": lambda: pm.filter_vmap(pm.filter_grad(pm.filter_checkpoint(fails)))(X),
    "scan": lambda: pm.filter_scan(fails, 1.0, X),
    "cond in jit": lambda: pm.filter_jit(lambda x: pm.filter_cond(x[0] > 0, fails, fails, x))(X),
    "while": lambda: pm.filter_while_loop(lambda x: x[0] > 0, fails, X),
    "hessian": lambda: pm.filter_hessian(fails)(X),
    "closure convert": lambda: pm.filter_closure_convert(fails, X),
    "lower": lambda: pm.filter_jit(fails).lower(X),
    "Stack in jit": lambda: pm.filter_jit(apply)(STACK, X),
    "capture": lambda: pm.capture(pm.filter_jit(apply), Failing)(STACK, X),
}


def frames_of(call):
    """The error of a call, the files of its frames, and those of the package."""
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        call()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    return caught.value, files, [name for name in files if name.startswith(PACKAGE)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_shows_at_most_six_frames_of_ours(call):
    """The last frame is the user's line; notes and causes are kept."""
    error, files, ours = frames_of(call)

    assert len(ours) <= 6
    assert files[-1] == __file__
    assert error.__notes__[0] == "a note"
    assert isinstance(error.__cause__, KeyError)


def test_all_frames_may_be_kept(monkeypatch):
    """PYTREEMOD_TRACEBACK=full shows the machinery, too; layers are shown without it."""
    _, _, short = frames_of(CALLS["Stack in jit"])
    monkeypatch.setenv("PYTREEMOD_TRACEBACK", "full")
    _, _, full = frames_of(CALLS["Stack in jit"])

    assert any(name.startswith(f"{PACKAGE}/nn") for name in short)
    assert len(full) > len(short) + 6


def test_a_wrong_shape_shows_the_formulas_of_layers():
    """Not what all layers share: the checks, the State and the keys."""
    net = nn.Sequential([nn.Linear(4, 2, key=jax.random.key(0))])
    with pytest.raises(ShapeError, match="Linear") as caught:
        pm.filter_jit(pm.filter_grad(lambda net: net(X).sum()))(net)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    ours = [name.removeprefix(PACKAGE) for name in files if name.startswith(PACKAGE)]

    assert ours == ["/transform/jit.py", "/nn/sequential.py", "/nn/linear.py"]


WAITING = {"jit": lambda f: f, "vmap": pm.filter_vmap, "compiled": lambda f: f.lower(X).compile()}


@pytest.mark.parametrize("wrap", WAITING.values(), ids=WAITING)
def test_a_failed_check_has_no_error_of_jax_above_it(wrap):
    """A CheckError is the only error in the text that Python prints."""
    jitted = pm.filter_jit(lambda x: pm.error_if(x, x > 2, "too large"))
    with pytest.raises(CheckError, match="too large") as caught:
        wrap(jitted)(X)
    text = "".join(traceback.format_exception(caught.value))

    assert [word for word in ("JaxRuntimeError", "During", "direct cause") if word in text] == []
