"""Names for classes and functions: found both ways, and never taken from one another unseen."""

import contextlib
import functools as ft
import json
import tempfile
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError
from tests.goldens import refusals
from tests.io.files import header_of, write_described


class Holder(pm.Module):
    """Something that has a name, as configuration."""

    thing: object = pm.field(static=True)


pm.register_for_files(Holder, name="test_registered.Holder")


def registered_name(thing):
    """Its name in a file; None if it has no registered name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        pm.save(path, Holder(thing))
        text = header_of(path)["__metadata__"]["pytreemod.tree"]
    ((kind, name),) = json.loads(text)["tree"]["module"][2]["thing"].items()
    assert kind in ("class", "function")
    return None if name.startswith("?") else name


def registered_as(name):
    """The object of a name; None if there is none."""
    tree = {"leaf": "x", "value": {"function": name}}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FileError):
        return pm.load(write_described(Path(folder) / "f", tree))


def test_the_librarys_layers_and_jaxs_activations_are_there():
    assert registered_as("pytreemod.nn.Linear") is nn.Linear
    assert registered_name(jax.nn.gelu) == "jax.nn.gelu"
    assert registered_as("jax.numpy.tanh") is jnp.tanh
    assert registered_as("jax.lax.tanh") is jax.lax.tanh
    assert registered_as("pytreemod.StateIndex") is pm.StateIndex


def test_every_public_layer_has_a_name():
    """A layer that is added later is found without another list."""
    layers = [t for t in vars(nn).values() if isinstance(t, type) and issubclass(t, pm.Module)]

    assert len(layers) > 20
    assert [layer for layer in layers if registered_name(layer) is None] == []


def test_nothing_that_writes_or_runs_is_there():
    """A hostile file must not be able to put such a function into a model."""
    for name in ("jax.numpy.save", "jax.numpy.load", "jax.nn.initializers", "builtins.eval", "os"):
        assert registered_as(name) is None
    others = [t for t in vars(nn).values() if isinstance(t, type) and not issubclass(t, pm.Module)]
    assert [registered_name(t) for t in others] == [None] * len(others)
    functions = [registered_as(f"jax.nn.{name}") for name in vars(jax.nn)]
    assert not any(isinstance(function, types.ModuleType) for function in functions)


def test_register_as_a_decorator_with_and_without_a_name():
    @pm.register_for_files
    class Plain(pm.Module):
        pass

    @pm.register_for_files(name="project.Renamed")
    class Other(pm.Module):
        pass

    assert registered_as("Plain") is Plain
    assert registered_as("project.Renamed") is Other
    assert registered_name(Other) == "project.Renamed"


def test_a_class_that_is_defined_again_takes_the_name():
    """As when a cell of a notebook is run twice; the old class has it no more."""

    def define():
        @pm.register_for_files
        class Again(pm.Module):
            pass

        return Again

    old, new = define(), define()

    assert registered_as("Again") is new
    assert registered_name(old) is None


def test_a_class_of_two_names_keeps_the_other():
    """When one that is defined again takes the first of them."""

    def define():
        class Twice(pm.Module):
            pass

        return Twice

    old = pm.register_for_files(pm.register_for_files(define(), name="first"), name="second")
    new = pm.register_for_files(define(), name="first")

    assert (registered_name(old), registered_name(new)) == ("second", "first")
    assert registered_as("second") is old


def test_what_jax_calls_by_two_names_has_the_one_that_comes_first():
    """A file says one of them, for ever: another one would be another function."""
    assert registered_as("jax.nn.swish") is registered_as("jax.nn.silu") is jax.nn.silu
    assert registered_name(jax.nn.silu) == "jax.nn.silu"
    assert registered_name(jnp.abs) == "jax.numpy.abs"


def test_a_name_of_another_is_refused():
    @pm.register_for_files(name="taken")
    class One(pm.Module):
        pass

    with pytest.raises(ArgumentError, match=r"expected an unused name.*'taken'"):
        pm.register_for_files(nn.Linear, name="taken")
    assert registered_as("taken") is One


def test_a_jitted_function_does_not_take_its_functions_name():
    """Both have one qualified name, but they are different objects."""

    def stretch(x):
        return x

    pm.register_for_files(stretch)
    with pytest.raises(ArgumentError, match="an unused name"):
        pm.register_for_files(jax.jit(stretch))
    assert registered_as("stretch") is stretch


def test_what_has_no_name_of_its_own_takes_no_others():
    """Any two partials, and any two lambdas, looked like one that was defined again."""
    part = pm.register_for_files(ft.partial(max, 1), name="part")
    assert pm.register_for_files(part, name="part") is part
    with pytest.raises(ArgumentError, match="an unused name"):
        pm.register_for_files(ft.partial(min, 1), name="part")

    def define(text):
        return pm.register_for_files(eval(text), name="short")

    define("lambda x: x + 1")
    again = define("lambda x: x + 1")
    assert registered_as("short") is again
    with pytest.raises(ArgumentError, match="an unused name"):
        define("lambda x: x * 2")


def test_models_of_the_librarys_own_making_are_rebuilt(tmp_path):
    """Alone, from the file: also models in which a function has replaced an array."""
    net = nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    first, second = "layers[0].weight", "layers[1].weight"
    for model in (
        pm.lora(net, first, 1, key=jax.random.key(1)),
        pm.tie(net, second, to=first),
        pm.tie(net, second, to=first, through=jnp.transpose),
        pm.map_parameters(jnp.tanh, net, first),
        nn.WeightNorm(net.layers[0]),
        pm.with_precision(net, "params=float32,compute=bfloat16"),
        pm.with_role(net, first, "mine"),
        nn.Ensemble(lambda key: nn.Linear(2, 2, key=key), 2, key=jax.random.key(0)),
    ):
        pm.save(tmp_path / "file", model)
        assert pm.load(tmp_path / "file") == model


def test_every_computed_leaf_of_the_library_has_a_name():
    """So that a model with one can be rebuilt without `like`."""
    waiting, found = [pm.Computed], []
    while waiting:
        kinds = waiting.pop().__subclasses__()
        waiting += kinds
        found += [kind for kind in kinds if kind.__module__.startswith("pytreemod.")]

    assert len(found) >= 4
    assert [kind for kind in found if registered_name(kind) is None] == []


test_refusals = refusals(globals())
