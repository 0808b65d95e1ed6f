"""Declaring fields."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.helpers.trees import Buffered, ramp


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
    with pytest.warns(DeprecationWarning, match="static_field"):
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


def test_one_declaration_serves_one_field_only():
    """Two classes that use field() get separate fields."""

    class First(pm.Module):
        x: int = pm.field(static=True)

    class Second(pm.Module):
        x: int = pm.field(converter=float)

    assert jax.tree.leaves(First(1)) == []
    assert jax.tree.leaves(Second(1)) == [1.0]


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: pm.field(static=True, metadata={"static": True}), "static"),
        (lambda: pm.field(static=True, role="lora"), "role|lora"),
        (lambda: pm.field(static=True, constraint=pm.constraints.positive), "constraint|positive"),
        (lambda: pm.field(constraint=jnp.exp), "exp"),
        (lambda: pm.field(statik=True), "statik"),
        # A field that is trained, with a function of ours as its default.
        (
            lambda: type(pm.Module)(
                "Forgot", (pm.Module,), {"__annotations__": {"mean": object}, "mean": pm.buffer}
            ),
            r"Forgot\.mean",
        ),
    ],
)
def test_a_contradiction_is_refused(declare, text):
    """One of the two would be lost."""
    with pytest.raises((FieldError, TypeError), match=text):
        declare()
