"""The kinds of a class's fields, which are decided once."""

import copy
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.module.field_kinds import (
    as_integer,
    as_number,
    check_choice,
    check_flag,
    check_number,
    check_size,
    check_sizes,
    checked,
    choice,
    flag,
    fraction,
    size,
    sizes,
)
from tests.goldens import refusals
from tests.labels import label


class Window(pm.Module):
    """A field of each kind, and a generated `__init__`."""

    dims: int = size(1)
    stride: tuple[int, ...] = sizes(1, count="dims")
    width: int | str | None = size(scalar=True, optional=True, default=None)
    mode: str = choice("ZEROS", "REFLECT", default="ZEROS")
    p: float = fraction(default=0.5)
    is_open: bool = flag(default=False)
    even: int = checked(lambda where, value: value - value % 2, default=3)


class Own(Window):
    """The same, with a custom `__init__` that leaves defaults to the class."""

    def __init__(self, dims, stride, **more):
        self.dims = dims
        self.stride = stride
        for name, value in more.items():
            setattr(self, name, value)


BAD = [
    ({"dims": 0}, r"\(dims\): expected an integer of at least 1, got 0"),
    ({"stride": (1, 2, 3)}, r"\(stride\): expected an integer .* sequence of 2 of them, got"),
    ({"width": "x"}, r"\(width\): expected an integer of at least 0 or 'scalar', got 'x'"),
    ({"mode": "other"}, r"\(mode\): expected one of 'ZEROS', 'REFLECT', got 'other'"),
    ({"p": 2.0}, r"\(p\): expected a number from 0 to 1, got 2\.0"),
    ({"is_open": 1}, r"\(is_open\): expected True or False, got 1"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=label)
@pytest.mark.parametrize("cls", [Window, Own])
def test_a_value_is_checked_wherever_it_comes_from(cls, change, text):
    """The class is that of the instance, and the name that of the field."""
    text = f"^{cls.__name__}{text}"
    good = cls(2, 1)
    if "is_open" not in change:  # Of flags `with_mode` speaks itself.
        with pytest.raises(ArgumentError, match=text):
            pm.with_mode([good], **change)


@pytest.mark.parametrize("cls", [Window, Own])
def test_what_is_stored_is_what_the_record_makes_of_a_value(cls):
    one = cls(np.int64(2), 3, mode="reflect", p=1)
    assert (one.dims, one.stride, one.mode, one.p) == (2, (3, 3), "REFLECT", 1.0)
    assert [type(value) for value in (one.dims, one.p)] == [int, float]
    assert one.even == 2
    assert pm.with_mode(one, stride=[1, 2], width="scalar").stride == (1, 2)
    both = one.replace(dims=3, stride=4)
    assert (both.dims, both.stride) == (3, (4, 4, 4))


def test_each_value_is_checked_once():
    seen = []

    def accept(where, value, model):
        seen.append((where, value))
        return value

    class Counted(pm.Module):
        x: tuple = pm.field(static=True, accepts=accept)
        y: int = pm.field(static=True)

        def __init__(self, x):
            self.x, self.y = x, 1

    class Generated(pm.Module):
        x: tuple = pm.field(static=True, accepts=accept)

    class More(Counted):
        pass

    Counted((1,)), Generated((2,)), More((3,))
    assert seen == [("Counted(x)", (1,)), ("Generated(x)", (2,)), ("More(x)", (3,))]
    one, _ = Counted((1,)), seen.clear()
    for copied in (one.replace(y=2), copy.deepcopy(one), jax.tree.map(lambda x: x, one)):
        assert copied.x == (1,)
    assert seen == []


def test_a_post_init_sees_what_was_accepted():
    class Posted(pm.Module):
        stride: tuple[int, ...] = sizes()
        total: int = pm.field(init=False, default=0)

        def __post_init__(self):
            self.total = sum(self.stride)

    assert Posted(3).total == 3


def test_a_class_with_a_setattr_of_its_own_checks_once():
    class Setting(pm.Module):
        width: int = size()

        def __init__(self, width):
            self.width = width

        def __setattr__(self, name, value):
            super().__setattr__(name, value)

    assert Setting(np.int64(3)).width == 3
    with pytest.raises(ArgumentError, match=r"^Setting\(width\)"):
        Setting(-1)


def test_a_field_that_a_pickle_lacks_gets_its_default_as_it_is_accepted():
    from pytreemod.module.pickling import restore

    made = restore(Window, {"dims": 2, "stride": (1, 1)}, ("dims", "stride"))
    assert (made.even, made.mode) == (2, "ZEROS")
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_class_that_is_pickled_by_value_keeps_its_records():
    class Local(pm.Module):
        stride: tuple[int, ...] = sizes(1)

        def __init__(self, stride):
            self.stride = stride

    cls, one = cloudpickle.loads(cloudpickle.dumps((Local, Local(2))))
    assert cls(3).stride == (3,)
    with pytest.raises(ArgumentError, match=r"Local\(stride\)"):
        one.replace(stride=0)


# ---- checks


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), jnp.array(3)], ids=label)
def test_whole_numbers_of_any_kind_are_sizes(value):
    """They become Python ints, so that configuration stays hashable."""
    size = check_size("f(n)", value)

    assert size == 3
    assert type(size) is int


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.bool_(True), jnp.ones(2, int), [3]])
def test_what_is_no_whole_number(value):
    """Fractions, strings, booleans and several numbers are not integers."""
    assert as_integer(value) is None


@pytest.mark.parametrize("given", [2, [2, 2], (np.int32(2), 2)], ids=label)
def test_one_size_or_one_for_each_axis(given):
    """Both give a tuple."""
    assert check_sizes("f(n)", given, 2) == (2, 2)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), jnp.array(0.5)], ids=label)
def test_real_numbers_of_any_kind_are_numbers(value):
    """They become Python floats."""
    assert check_number("f(p)", value, 0.0, 1.0) == 0.5
    assert type(check_number("f(p)", value, 0.0, 1.0)) is float


def test_the_range_of_a_number_is_shown():
    """Both ends, or the lower one if there is no upper one; the ends are included."""
    assert [check_number("f(p)", value, 0.0, 1.0) for value in (0, 1)] == [0, 1]
    assert check_number("f(eps)", 1e9, 0.0) == 1e9


@pytest.mark.parametrize("value", [1j, "1", None, True, jnp.ones(1)], ids=label)
def test_what_is_no_real_number(value):
    """Complex numbers, strings, booleans and arrays with axes are not real numbers."""
    assert as_number(value) is None


def test_words_are_accepted_in_either_case():
    """And given back in upper case."""
    assert check_choice("f(mode)", "same", ("SAME", "VALID")) == "SAME"


test_refusals = refusals(globals())


def test_a_flag_of_numpys_is_one_of_pythons():
    assert check_flag("f(on)", np.bool_(True)) is True
