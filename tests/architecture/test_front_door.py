"""Modules that `import pytreemod` loads at once, and modules that it loads later."""

import ast
import subprocess
import sys
from importlib import import_module

import pytest

import pytreemod as pm
from tests.architecture.imports import FILES

LATER = vars(pm)["_LATER"]


def run(program):
    """The output of a new process; this one has already loaded everything."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def shown_to_type_checkers():
    """The names in the block that only type checkers read, each with the file it comes from."""
    body = ast.parse(FILES["pytreemod"].read_text()).body
    block = next(node for node in body if isinstance(node, ast.If)).body
    imports = [node for node in block if isinstance(node, ast.ImportFrom)]
    shown = {name.name: node.module for node in imports for name in node.names}
    same = {
        node.targets[0].id: shown[node.value.id] for node in block if isinstance(node, ast.Assign)
    }
    return shown | same


def test_type_checkers_see_what_is_loaded_later():
    """The same names, from the same files."""
    homes = {
        name: home.partition(":")[0] if home.partition(":")[2] else home.rpartition(".")[0]
        for name, home in LATER.items()
    }
    assert shown_to_type_checkers() == homes


@pytest.mark.parametrize("name", LATER)
def test_a_name_that_is_loaded_later_is_what_its_file_has(name):
    """The table names a file and its content; a room is itself."""
    room, _, attribute = LATER[name].partition(":")
    found = import_module(room)
    assert getattr(pm, name) is (getattr(found, attribute) if attribute else found)
    assert name in dir(pm)
    assert name in pm.__all__


@pytest.mark.slow
def test_rooms_that_a_program_may_do_without_are_loaded_when_asked_for():
    """Neither the layers nor `debug` is loaded by the import, nor is half of it."""
    rooms = ", ".join(repr(f"pytreemod.{name}") for name in ("nn", "debug"))
    program = f"""
import sys
import pytreemod as pm
print(*(room in sys.modules for room in ({rooms})))
pm.capture
print(*(room in sys.modules for room in ({rooms})))
pm.nn, pm.debug
print(*(room in sys.modules for room in ({rooms})))
"""
    assert run(program) == ["False", "False", "False", "True", "True", "True"]


@pytest.mark.slow
def test_a_star_import_brings_what_is_loaded_later():
    """As before there was such a thing."""
    program = """
from pytreemod import *
print(nn.Linear.__name__, capture.__name__, tree_inference.__name__, filter_jit.__name__)
"""
    assert run(program) == ["Linear", "capture", "inference_mode", "filter_jit"]


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
barrier, found, failed = threading.Barrier(8), [], []
def ask():
    barrier.wait()
    try:
        found.append((pm.nn.Stack, pm.nn, pm.inference_mode))
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(set(found)), len(found), failed)
"""
    assert run(program) == ["1", "8", "[]"]


def test_a_name_that_is_not_there_is_told_as_python_tells_it():
    """With Python's message, and the data that Python needs to suggest a similar name."""
    with pytest.raises(AttributeError, match="module 'pytreemod' has no attribute 'inferense'"):
        pm.inferense

    with pytest.raises(ImportError, match="cannot import name 'inferense' from 'pytreemod'"):
        exec("from pytreemod import inferense")


@pytest.mark.slow
def test_python_suggests_a_name_that_was_not_loaded_yet():
    """A misspelled name of a room that is not loaded."""
    program = "import pytreemod as pm; pm.inference_mod"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'inference_mode'?" in done.stderr
