"""Declaring fields."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.goldens import refusals
from tests.helpers.trees import Buffered, Static, ramp


def test_field_takes_what_dataclasses_field_takes():
    """Every argument of dataclasses.field arrives in the field."""
    declared = pm.field(
        default=3, init=False, repr=False, hash=True, compare=False, kw_only=True,
        metadata={"mine": 1},
    )  # fmt: skip

    assert isinstance(declared, dataclasses.Field)
    assert (declared.default, declared.init, declared.repr) == (3, False, False)
    assert (declared.hash, declared.compare, declared.kw_only) == (True, False, True)
    assert dict(declared.metadata) == {"mine": 1}
    assert pm.field(default_factory=list).default_factory is list


def test_metadata_keys_are_static_converter_role_and_constraint():
    """Libraries that read a field's metadata find the expected keys."""
    assert pm.field(static=True).metadata == {"static": True}
    assert pm.field(converter=tuple).metadata == {"converter": tuple}
    assert pm.field(role="lora").metadata == {"role": "lora"}
    assert pm.buffer(converter=tuple).metadata == {"converter": tuple, "role": "buffer"}
    with pytest.warns(DeprecationWarning, match=r"static_field: [^\n]*\n  write:\n      pm\.field"):
        assert pm.static_field(default=1).metadata == {"static": True}
    positive = pm.constraints.positive
    assert pm.buffer(constraint=positive).metadata == {"constraint": positive, "role": "buffer"}
    assert pm.field(constraint=None).metadata == {}
    assert pm.field().metadata == {}


def test_buffer_is_left_alone_by_filter_grad():
    """A buffer is data that goes through transforms, but no gradient and no trainable leaf."""
    model = Buffered(ramp(2), ramp(2), ramp(2))
    gradient = pm.filter_grad(lambda m: jnp.sum(m.weight * m.mean * m.low_rank))(model)

    assert len(jax.tree.leaves(model)) == 3
    assert gradient.mean is None
    assert gradient.weight.shape == (2,)
    assert pm.trainable(model)[0].mean is None


def test_static_fields_are_structure():
    """A static field is not a leaf, and trees that differ in it differ in structure."""
    assert jax.tree.leaves(Static(1.0, 2, "a")) == [1.0]
    assert jax.tree.structure(Static(1.0, 2)) != jax.tree.structure(Static(1.0, 3))


def test_one_declaration_serves_one_field_only():
    """Two classes that use field() get separate fields."""

    class First(pm.Module):
        x: int = pm.field(static=True)

    class Second(pm.Module):
        x: int = pm.field(converter=float)

    assert jax.tree.leaves(First(1)) == []
    assert jax.tree.leaves(Second(1)) == [1.0]


@pytest.mark.parametrize("own", [False, True])
def test_a_declaration_is_no_value(own):
    """A declaration that is assigned in `__init__`, or passed, would be useless data."""

    class Written(pm.Module):
        weight: object

    class Own(Written):
        def __init__(self, weight):
            self.weight = weight

    with pytest.raises(FieldError, match=r"\.weight: expected a value, got a field declaration"):
        (Own if own else Written)(pm.field(role="lora"))


test_refusals = refusals(globals())
