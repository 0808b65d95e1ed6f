"""Names and layouts of layers in PyTorch: how to register them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import Numbered, Packed, Relaid, from_torch, nn, register_torch_layout, to_torch
from pytreemod.errors import ArgumentError, StructureError
from tests.goldens import refusals
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
    """Holds a layer that is one level higher in PyTorch, and renames one array of it."""

    inner: Dense
    extra: jax.Array


@pytest.fixture(autouse=True)
def registered():
    """Layouts of this file, which tests exchange."""
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
    """A layer may name its inner arrays; the inner layer defines their layout."""
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
    """A class's own before its base's."""

    class Own(Dense):
        pass

    register_torch_layout(Own, {"kernel": "other"})

    assert [*to_torch(dense(Own))] == ["other", "offsets", "cache"]
    assert [*to_torch(dense())] == ["weight", "shifts.1", "shifts.2"]


class Gates(pm.Module):
    """Two arrays that are rows of one array in PyTorch, the second first."""

    closing: jax.Array
    opening: jax.Array


def gates(start=0):
    """Of one and two rows."""
    return Gates(jnp.asarray(wave(1, 3)) + np.float32(start), jnp.asarray(wave(2, 3, phase=start)))


def pack(*, rows=(2, 1), parts=(1, 0), names=("gates", "gates")):
    """Register them as one."""
    closing, opening = (Packed(name, part, rows) for name, part in zip(names, parts, strict=True))
    register_torch_layout(Gates, {"closing": closing, "opening": opening})


def test_several_may_be_one_there():
    """In the order of their parts, with a name before; also where members are in a list."""
    pack()
    arrays = to_torch({"a": gates()})

    assert [*arrays] == ["a.gates"]
    assert_same(arrays["a.gates"], np.concatenate([gates().opening, gates().closing]))
    assert_same(from_torch({"a": gates(5)}, arrays), {"a": gates()})

    register_torch_layout(Holder, {"inner": Numbered("", 2), "extra": None})
    stack = Holder(pm.stack([gates(), gates(1)]), jnp.ones(1))
    assert {name: array.shape for name, array in to_torch(stack).items()} == {
        "0.gates": (3, 3),
        "1.gates": (3, 3),
    }
    other = Holder(pm.stack([gates(2), gates(3)]), jnp.ones(1))
    assert_same(from_torch(other, to_torch(stack)), stack)


def test_one_that_is_missing_or_does_not_fit_is_told_once():
    """However many parts it has."""
    pack()
    with pytest.raises(StructureError, match="1 that differs") as caught:
        from_torch(gates(), {})
    assert str(caught.value).count("gates: missing") == 1
    with pytest.raises(
        StructureError, match=r"gates: expected f32\[3,3\], got f32\[4,3\]"
    ) as caught:
        from_torch(gates(), {"gates": wave(4, 3)})
    assert str(caught.value).count("got f32[4,3]") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parts": (0, 0)}, "gates: closing and opening"),
        ({"names": ("gates", "others")}, "gates: 1 of 2 parts"),
        ({"rows": (2, 2)}, r"closing: f32\[1,3\], which does not fit gates"),
    ],
)
def test_parts_that_are_no_whole_are_refused(options, text):
    """One part twice, one that is missing, one of other rows."""
    pack(**options)
    with pytest.raises(StructureError, match=text):
        to_torch(gates())


def test_rules_about_nothing_are_refused():
    """A misspelt field would else keep its name, unseen."""
    register_torch_layout(Dense, {"kernal": "weight"})
    with pytest.raises(ArgumentError, match="expected rules for fields of the layer") as caught:
        to_torch(dense())

    assert str(caught.value) == (
        "register_torch_layout(Dense): expected rules for fields of the layer, got rules for "
        "others.\n"
        "  at kernal"
    )


@pytest.mark.parametrize("depth", [None, 2])
def test_a_single_number_has_its_axes_here_and_none_there(depth):
    """The length of a whole matrix; of several layers as one, each of which has its own."""

    def make(key):
        def layer(key):
            return nn.WeightNorm(nn.Linear(3, 3, key=key), axis=None)

        return layer(key) if depth is None else nn.Stack(layer, depth, key=key)

    model, like = make(jax.random.key(0)), make(jax.random.key(1))
    tensors = to_torch(model)
    lengths = [tensors[name] for name in tensors if name.endswith("original0")]

    assert [np.shape(length) for length in lengths] == [()] * (depth or 1)
    assert_same(from_torch(like, tensors), model)


test_refusals = refusals(globals())
