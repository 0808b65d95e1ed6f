"""Building instances: the generated `__init__`, and the steps after any `__init__`."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.helpers import string_annotations, trees
from tests.helpers.trees import affine, double, new, ramp

SIGNATURES = [
    (trees.Affine, "(weight, bias)"),
    (trees.Defaults, "(weight, scale=, name=, act=, bias=, inner=)"),
    (trees.Factories, "(parts=, table=)"),
    (trees.KeywordsOnly, "(*, scale=, weight)"),
    (trees.Prepared, "(scale, weight)"),
    (trees.Parent, "(size, *, use_bias=)"),
    (string_annotations.Initialized, "(size=)"),
]


def test_the_signature_is_that_of_the_init():
    """Its own or inherited; or one parameter for each field in order."""
    for cls, expected in SIGNATURES:
        signature = inspect.signature(cls)
        shown = [
            p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...)
            for p in signature.parameters.values()
        ]
        assert str(inspect.Signature(shown)).replace("Ellipsis", "") == expected
        assert signature.return_annotation == inspect.signature(cls.__init__).return_annotation


def test_defaults_are_shared_and_factories_are_called():
    """A default is one object, also a Module; a factory makes one for each instance, if asked."""
    made = pm.field(default=trees.Affine(3.0, 4.0))
    outer = new(fields={"inner": Any, "made": Any}, inner=trees.Affine(1.0, 2.0), made=made)
    assert jax.tree.leaves(outer()) == [1.0, 2.0, 3.0, 4.0]
    assert outer().inner is outer().inner
    assert trees.Defaults(1.0).inner is trees.Defaults(2.0).inner
    assert trees.Factories().parts is not trees.Factories().parts
    assert trees.Factories([1]).parts == [1]
    assert trees.Defaults(1.0, 5.0).scale == 5.0
    # Also a field that an own `__init__` does not set; a function is no method of the class.
    made = trees.DefaultsUnderOwnInit(2)
    assert (made.scale, made.act, len(jax.tree.leaves(made))) == (2.0, double, 2)
    own = new(fields={"act": object}, act=pm.field(default=double), __init__=lambda self: None)
    assert own().act is own.act is trees.DefaultsUnderOwnInit.act is double


def test_a_class_attribute_that_is_assigned_later_hides_no_field():
    """Instances from before and after, built or returned by JAX, have their own value."""
    base = new(fields={"act": object, "size": int})
    sub, same = new(base), pm.filter_jit(lambda m: m)
    before, waiting = sub(double, 1), same(sub(double, 1))
    base.act, base.size = lambda self, x: x, 2
    assert (base.act(None, 3), sub.size) == (3, 2)
    for made in (before, waiting, same(sub(double, 1)), sub(double, 1)):
        assert (made.act, made.size) == (double, 1)


def test_converters_are_inherited_and_can_be_overridden():
    """The annotation of a parameter is not the field's, because it describes the result."""

    def convert(value: list[int]) -> jax.Array:
        return jnp.asarray(value)

    functions = {"weight": convert, "other": lambda x: x, "third": str}
    declared = {name: pm.field(converter=function) for name, function in functions.items()}
    base = new(fields=dict.fromkeys(functions, object), **declared)
    other = new(base, fields={"third": str})
    hints = other.__init__.__annotations__
    assert (hints["weight"], hints["other"], hints["third"]) == (Any, Any, str)
    made = other([1], 2, 3)
    assert (made.weight.shape, made.other, made.third) == ((1,), 2, 3)
    assert new(base)([1], 2, 3).third == "3"


def test_checks_run_after_converters_and_refuse_instances():
    """From the class up to its bases, when the instance is finished; `replace` checks again."""
    made = trees.Prepared(2.0, ramp(2))
    assert (made.scaled.tolist(), hasattr(made, "scale")) == ([2.0, 4.0], False)
    seen = []
    x = pm.field(converter=lambda v: seen.append("converter") or v)
    base = new(fields={"x": int}, x=x, __check_init__=lambda self: seen.append("base check"))
    init = lambda self, x: seen.append("init") or setattr(self, "x", x)  # noqa: E731
    check = lambda self: seen.append((self.x, jax.tree.leaves(self)))  # noqa: E731
    new(base, __init__=init, __check_init__=check)(1)
    assert seen == ["init", "converter", (1, [1]), "base check"]
    with pytest.raises(ValueError, match="low 2 is above high 1"):
        trees.Checked(2, 1)
    with pytest.raises(ValueError, match="low 5"):
        trees.Checked(1, 2).replace(low=5)
    assert jax.tree.map(lambda x: -x, trees.Checked(1, 2)).low == -1


def test_replace_converts_checks_and_divides_again():
    """It is construction with the other fields unchanged, whatever the class's __init__ is."""
    assert trees.Converted([1.0]).replace(weight=[3.0]).weight.tolist() == [3.0]
    layer = trees.Child("a", 2).replace(name="b", offset=1)
    assert (layer.name, layer.size) == ("b", 2)
    assert isinstance(layer.offset, jax.Array)
    for first, then, leaves in ((affine(), double, 0), (double, "text", 0), (double, 1.0, 1)):
        holder = trees.Holder(first)
        for made in (holder.replace(content=then), pm.tree_at("content", holder, then)):
            assert len(jax.tree.leaves(made)) == leaves
    assert layer.__replace__(name="c").name == "c"  # Of Python 3.13: `copy.replace`.
    with pytest.raises(FieldError, match=r"Affine\.replace.*wieght.*weight"):
        affine().replace(wieght=ramp(2))


def test_an_instance_that_is_being_built_is_an_ordinary_object():
    """It is read, called, assigned again, deleted from; an error leaves nothing behind."""

    class Busy(pm.Module):
        first: jax.Array
        second: jax.Array

        def __init__(self, number):
            self.first = ramp(2) * (1 // number)
            assert not hasattr(self, "second")
            self.second = jax.jit(lambda m: m.first * 3)(self) + self.twice()
            self.second += 1
            if number > 1:
                del self.first

        def twice(self):
            return self.first * 2

    for wrong, error, text in (
        (0, ZeroDivisionError, "by zero"),
        (2, FieldError, "Field 'first' was not initialized"),
    ):
        with pytest.raises(error, match=text):
            Busy(wrong)
        assert Busy(1).second.tolist() == [6.0, 11.0]
