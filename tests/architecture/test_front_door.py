"""Modules that `import pytreemod` loads at once, and modules that it loads later."""

import subprocess
import sys
import types

import pytest

import pytreemod as pm
import tasks
from tests.architecture.imports import FILES


def run(program):
    """The output of a new process; this one has already loaded everything."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_type_checkers_see_what_python_finds():
    """The stub is made of the front door as it is now: after a change, `python3 tasks.py stub`."""
    assert FILES["pytreemod"].with_suffix(".pyi").read_text("utf-8") == tasks.stub()


def test_only_public_names_are_shown():
    """Of this file's rooms, those that users import from; each name is there."""
    rooms = {"constraints", "debug", "nn", "select", "testing"}
    shown = {name: getattr(pm, name) for name in dir(pm)}

    assert {n for n, value in shown.items() if isinstance(value, types.ModuleType)} == rooms
    assert [name for name in shown if name.startswith("_")] == []


@pytest.mark.parametrize("name", ["constraints", "debug", "nn", "select", "testing"])
@pytest.mark.sampled
def test_a_part_may_be_imported(name):
    """`from pytreemod.constraints import positive`, before anything else has loaded it."""
    program = f"import pytreemod.{name}, pytreemod; print(pytreemod.{name}.__name__)"
    assert run(program) == [f"pytreemod.{name}"]


def test_layers_are_loaded_when_asked_for():
    """The import does not load them."""
    program = "import sys, pytreemod; print('pytreemod.nn' in sys.modules, pytreemod.nn.__name__)"
    assert run(program) == ["False", "pytreemod.nn"]


@pytest.mark.slow
def test_a_room_may_be_loaded_while_a_function_is_traced():
    """Layers that were loaded inside a trace work outside of it: nothing of the trace is cached."""
    program = """
import jax, jax.numpy as jnp
import pytreemod as pm

@jax.jit
def traced(x):
    return pm.nn.LayerNorm(2)(x)

print(traced(jnp.ones(2)).shape, pm.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))(jnp.ones(2)).shape)
"""
    assert run(program) == ["(2,)", "(1,)"]


def test_threads_may_ask_for_a_room_at_once():
    """All get the one room, whole."""
    program = """
import sys, threading
import pytreemod as pm
sys.setswitchinterval(1e-6)
barrier, found = threading.Barrier(8), []
def ask():
    barrier.wait()
    found.append((pm.nn.Stack, pm.nn, pm.inference_mode))
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(set(found)), len(found))
"""
    assert run(program) == ["1", "8"]
