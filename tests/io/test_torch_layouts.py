"""How layers are called and laid out in PyTorch: what can be registered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.io import torch_layouts
from pytreemod.io.torch_layouts import Numbered, Relaid, layout_of, register_torch_layout
from pytreemod.io.torch_states import from_torch, to_torch
from tests.helpers.comparing import assert_same
from tests.nn.numbers_to_compare import wave


class Dense(pm.Module):
    """A layer with its matrix the other way round, and something that is here alone."""

    kernel: jax.Array
    offsets: jax.Array
    cache: jax.Array

    def __call__(self, x):
        return x @ self.kernel


class Wider(Dense):
    """Inherits the layout."""


class Holder(pm.Module):
    """Holds what stands one level higher in PyTorch, and calls one array of it otherwise."""

    inner: Dense
    extra: jax.Array


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Layouts of this file, and none afterwards."""
    monkeypatch.setattr(torch_layouts, "_LAYOUTS", dict(torch_layouts._LAYOUTS))
    register_torch_layout(
        Dense,
        {
            "kernel": Relaid("weight", np.transpose, np.transpose),
            "offsets": Numbered("shifts", 2, first=1),
            "cache": None,
        },
        unused=["version"],
    )
    register_torch_layout(Holder, {"inner": "", "inner.kernel": "special.matrix"})


def dense(cls=Dense, start=0):
    """A layer."""
    first = jnp.float32(start)
    return cls(jnp.asarray(wave(2, 3)) + first, jnp.asarray(wave(2, 4)) + first, jnp.zeros(1))


@pytest.mark.parametrize("cls", [Dense, Wider])
def test_rules_name_and_lay_out(cls):
    """Other names, other forms, several for one, nothing; a subclass has its base's."""
    layer = dense(cls)
    arrays = to_torch({"a": layer})

    assert {name: array.shape for name, array in arrays.items()} == {
        "a.weight": (3, 2),
        "a.shifts.1": (4,),
        "a.shifts.2": (4,),
    }
    assert arrays["a.weight"].flags.c_contiguous
    other = from_torch({"a": dense(cls, start=5)}, {**arrays, "a.version": np.int64(3)})
    assert_same(other, {"a": layer})


def test_the_outermost_rule_names_and_the_innermost_lays_out():
    """A layer may say what is inside of it is called; its form is for the inner layer to say."""
    arrays = to_torch([Holder(dense(), jnp.ones(1))])

    assert {name: array.shape for name, array in arrays.items()} == {
        "0.special.matrix": (3, 2),
        "0.shifts.1": (4,),
        "0.shifts.2": (4,),
        "0.extra": (1,),
    }


def test_rules_may_depend_on_the_layer():
    """A function from the layer to its rules."""
    register_torch_layout(Dense, lambda layer: {"kernel": f"kernel_of_{layer.kernel.shape[0]}"})

    assert [*to_torch(dense())] == ["kernel_of_2", "offsets", "cache"]


def test_the_first_base_with_a_layout_counts():
    """A class's own before its base's; classes without any have none."""
    register_torch_layout(Wider, {"kernel": "other"})

    assert layout_of(dense(Wider)).rules == {"kernel": "other"}
    assert layout_of(dense()).unused == ("version",)
    assert layout_of(pm.Partial(print)) is layout_of([]) is None


def test_what_cannot_be_registered_is_refused():
    """Instances, and rules that are none."""
    with pytest.raises(ArgumentError, match=r"register_torch_layout\(cls\): expected a class"):
        register_torch_layout(dense(), {})
    with pytest.raises(ArgumentError, match=r"register_torch_layout\(rules\): expected a dict, or"):
        register_torch_layout(Dense, ["weight"])


def test_rules_about_nothing_are_refused():
    """A misspelt field would else keep its name, unseen."""
    register_torch_layout(Dense, {"kernal": "weight"})
    with pytest.raises(ArgumentError, match="expected rules about what is in the layer") as caught:
        to_torch(dense())

    assert str(caught.value) == (
        "register_torch_layout(Dense): expected rules about what is in the layer, got others.\n"
        "  at kernal"
    )
