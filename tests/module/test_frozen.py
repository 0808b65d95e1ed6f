"""Instances are immutable once they are built; `vars`, `dir` and Protocols see their fields."""

import abc
import copy
import dataclasses
import functools as ft
import inspect
import subprocess
import sys
from typing import Generic, Protocol, TypeVar, runtime_checkable

import jax
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FrozenError
from tests.helpers.comparing import assert_same
from tests.helpers.racing import race
from tests.helpers.trees import Affine, Boxed, Child, Holder, OwnInit, Static, affine, by_hand, ramp

T = TypeVar("T")

FINISHED = {
    "generated init": affine,
    "own init": lambda: OwnInit(2),
    "inherited": lambda: Child("a", 2),
    "from tree_map": lambda: jax.tree.map(lambda x: x, affine()),
    "from tree_at": lambda: pm.tree_at(lambda m: m.bias, affine(), 0),
    "replaced": lambda: affine().replace(bias=0),
    "copied": lambda: copy.copy(affine()),
    "deep-copied": lambda: copy.deepcopy(affine()),
    "from jax.jit": lambda: jax.jit(lambda m: m)(affine()),
}


@pytest.mark.parametrize("make", FINISHED.values(), ids=FINISHED)
def test_a_finished_instance_is_immutable(make):
    """Neither assignment, plain or augmented, nor deletion, nor a new attribute."""
    module = make()
    name = type(module).__name__
    with pytest.raises(FrozenError, match=rf"{name}\.weight"):
        module.weight = ramp(2)
    with pytest.raises(FrozenError, match=rf"{name}\.weight"):
        module.weight += 1
    with pytest.raises(FrozenError, match=rf"{name}\.weight"):
        del module.weight
    with pytest.raises(FrozenError, match="cache"):
        module.cache = 1
    with pytest.raises(FrozenError, match="__dict__"):
        module.__dict__ = {}

    assert_same(module, make())


def test_the_error_is_what_python_users_catch():
    """FrozenError is dataclasses' own, and so an AttributeError."""
    assert issubclass(FrozenError, dataclasses.FrozenInstanceError)
    assert issubclass(FrozenError, AttributeError)
    assert issubclass(FrozenError, pm.PytreemodError)


def test_init_again_is_refused():
    """Calling __init__ on a finished instance would change it."""
    with pytest.raises(FrozenError, match="OwnInit"):
        OwnInit(2).__init__(3)


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit, pm.filter_vmap])
def test_a_transformed_init_is_refused(transform):
    """It gets a copy, which is finished; a decorator that only calls it is no transform."""

    class Layer(pm.Module):
        weight: jax.Array

        @transform
        def __init__(self, weight):
            self.weight = 2 * weight

    with pytest.raises(pm.PytreemodError, match=r"(?s)Layer.*weight"):
        Layer(ramp(2))

    def logged(function):
        @ft.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        return call

    class Logged(pm.Module):
        weight: jax.Array

        @logged
        def __init__(self, weight):
            self.weight = weight

    assert_same(Logged(ramp(2)).weight, ramp(2))
    assert list(inspect.signature(Logged).parameters) == ["weight"]


@pytest.mark.parametrize("name", ["wieght", "kind", "method", "computed"])
def test_init_sets_declared_fields_alone(name):
    """A misspelt field would be lost in the first transform; so would what hides a class's own."""

    class Layer(pm.Module):
        x: int
        kind = "layer"

        def __init__(self, name):
            self.x = 1
            setattr(self, name, 1)

        def method(self):
            """Nothing."""

        @property
        def computed(self):
            """Nothing."""

    for _ in range(2):
        with pytest.raises(AttributeError, match=f"{name}|no setter"):
            Layer(name)


CYCLES = {
    "method": lambda self: self.step,
    "dunder method": lambda self: self.__call__,
    "filter_jit": lambda self: pm.filter_jit(self.step),
    "in a list": lambda self: [self.step],
    "in a dict": lambda self: {"fn": self.step},
    "in a Partial": lambda self: pm.Partial(self.step, 1),
    "itself": lambda self: self,
    "in a Module": lambda self: Holder(self.step),
}


class Loop(pm.Module):
    """Assigns to a field a value that contains the instance."""

    weight: float
    fn: object

    def __init__(self, make):
        self.weight = 1.0
        self.fn = make(self)

    def step(self, x):
        """To be stored."""
        return x

    def __call__(self, x):
        return x


def try_all_cycles():
    """Prints the names of those that are refused, each also for a second instance."""
    for name, make in CYCLES.items():
        for _ in range(2):
            try:
                jax.tree.leaves(Loop(make))
            except FieldError as error:
                print(name if "Loop.fn" in str(error) else error)


def test_an_own_method_in_a_field_is_refused():
    """A tree cannot contain itself.

    In a separate process: JAX does not survive a tree that contains itself.
    """
    source = "from tests.module.test_frozen import try_all_cycles; try_all_cycles()"
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )

    assert run.stdout.splitlines() == [name for name in CYCLES for _ in range(2)]


def test_a_method_of_another_instance_is_a_value():
    """Only the own methods make a cycle; also those of an equal instance do not."""
    other = affine()

    assert Holder(other.scaled).content.__self__ is other
    assert Holder(Holder(1).replace).content.__self__ == Holder(1)


def test_an_own_setattr_stays():
    """A custom __setattr__ of a class remains, also in its subclasses, and beside other bases."""
    noted = []

    class Noting(pm.Module):
        x: int

        def __init__(self):
            self.x = 1

        def __setattr__(self, name, value):
            noted.append(name)
            super().__setattr__(name, value)

    class Below(Noting):
        def __init__(self):
            super().__init__()
            self.x = 2

    class Base(pm.Module):
        x: int

        def __init__(self):
            self.x = 3

    class Both(Base, Noting):
        """Base comes first, and has no `__setattr__` in its body."""

    assert [m.x for m in (Noting(), Noting(), Below(), Both(), Base(), Both())] == [
        1,
        1,
        2,
        3,
        3,
        3,
    ]
    assert noted == ["x"] * 6


def test_threads_build_the_first_instances_of_a_class():
    """Whichever comes first, all get the right ones."""
    for _ in range(20):

        class Fresh(pm.Module):
            x: int
            y: int = pm.field(static=True)

            def __init__(self, x):
                self.x = x
                self.y = -x

        made = race(lambda i, cls=Fresh: [cls(8 * i + j) for j in range(8)])
        assert [(m.x, m.y) for some in made for m in some] == [(i, -i) for i in range(64)]


# ---- vars, dir, Protocols


class Mixin:
    """Has a separate dict, before the Module's."""


class Described(pm.Module):
    """Reads its own dict, and caches a value there."""

    weight: jax.Array
    n: int = 3

    @ft.cached_property
    def total(self):
        return self.weight.sum() * self.n

    def to_dict(self):
        return dict(self.__dict__)


class MixedIn(Mixin, Described):
    """A mixin comes first."""


class GenericFirst(Generic[T], Described):
    """A base without a dict comes first: Python gives the class one."""


class AbstractFirst(abc.ABC, Described):
    """So does an abstract mesh."""


CHANGES = {
    "replace": lambda m: m.replace(weight=2 * m.weight),
    "tree_at": lambda m: pm.tree_at(lambda m: m.weight, m, 2 * m.weight),
    "tree_map": lambda m: pm.combine(jax.tree.map(lambda x: 2 * x, pm.filter(m, pm.is_array)), m),
    "jit": pm.filter_jit(lambda m: pm.apply_updates(m, pm.filter(m, pm.is_array))),
    "update": lambda m: pm.apply_updates(m, jax.tree.map(lambda x: x, pm.filter(m, pm.is_array))),
    "another structure": lambda m: pm.with_role(m.replace(weight=2 * m.weight), "weight", "buffer"),
    "configuration": lambda m: m.replace(n=6),
    "copy": lambda m: copy.copy(m).replace(weight=2 * m.weight),
    "deepcopy": lambda m: copy.deepcopy(m).replace(weight=2 * m.weight),
}


@pytest.mark.parametrize("cls", [Described, MixedIn, GenericFirst, AbstractFirst])
def test_vars_shows_the_fields(cls):
    """And no cached values, wherever the instance comes from; what changed it is no matter."""
    made = cls(ramp(2))
    pm.filter_jit(lambda m: m)(made)
    for model in [made, *(change(made) for change in CHANGES.values())]:
        assert [*vars(model)] == [*model.to_dict()] == ["weight", "n"]
        assert vars(model)["weight"] is model.weight
        assert [name for name in dir(model) if name[0] != "_"] == [
            *("n", "replace", "to_dict", "total", "weight")
        ]


@pytest.mark.parametrize("cls", [Described, MixedIn, GenericFirst, AbstractFirst])
def test_what_a_cached_property_keeps_is_of_one_instance(cls):
    """A changed copy computes it anew; it had the old one's."""
    model = cls(ramp(2))
    assert model.total is model.total
    for change in CHANGES.values():
        changed = change(model)
        assert vars(changed).keys() == {"weight", "n"}
        assert changed.total == 2 * model.total
        assert pm.filter_jit(lambda m: m.total)(changed) == 2 * model.total
    assert jax.tree.structure(model) == jax.tree.structure(cls(ramp(2)))


def test_vars_from_threads():
    """Whichever of them fills the instance, all see all of its fields."""
    model = pm.filter_jit(lambda m: m)(Described(ramp(2)))

    for shown in race(lambda _: (dict(vars(model)), model.total)):
        assert shown[0].keys() - {"total"} == {"weight", "n"}


def test_what_is_no_field_can_be_kept_in_the_dict():
    """As it can with a frozen dataclass; no part of the tree, and of no copy."""
    model = affine()
    vars(model)["note"] = 1

    assert (model.note, vars(model)["note"]) == (1, 1)
    assert not hasattr(model.replace(), "note")


def test_protocols_find_the_fields():
    """Of a class of which no instance has waited, too."""

    @runtime_checkable
    class HasBoth(Protocol):
        weight: object
        bias: object

    class Fresh(Mixin, pm.Module):
        weight: object
        bias: object

    assert isinstance(Fresh(1, 1), HasBoth)
    assert not isinstance(Described(1), HasBoth)
    assert not hasattr(Fresh, "bias")


# ---- instances put together by hand


def test_instances_put_together_by_hand_are_modules():
    """object.__new__ and object.__setattr__ give an instance that flattens, compares and copies."""
    made = by_hand()

    assert_same(jax.tree.leaves(made), jax.tree.leaves(Affine(ramp(2, 3), ramp(2))))
    assert made == Affine(ramp(2, 3), ramp(2))
    assert_same(copy.copy(made), made)
    assert made.replace(bias=1).bias == 1
    assert pm.tree_at(lambda m: m.weight, made, 1).weight == 1
    assert repr(made) == "Affine(weight=f32[2,3], bias=f32[2])"
    assert_same(jax.jit(lambda m: m)(made), made)
    assert_same(pm.filter_jit(lambda m: m(ramp(3)))(made), made(ramp(3)))


def test_instances_put_together_in_part_hold_what_was_set():
    """Unset fields are not in the tree; a function is configuration in them, too."""
    made = object.__new__(Static)
    object.__setattr__(made, "weight", ramp(2))

    assert len(jax.tree.leaves(made)) == 1
    again = jax.tree.map(lambda x: x, made)
    assert not hasattr(again, "size")
    assert again.mode == "train"  # The class's own default, as for any Python object.
    assert_same(pm.filter_jit(lambda m: m.weight)(made), ramp(2))
    made = object.__new__(Holder)
    object.__setattr__(made, "content", max)
    assert jax.tree.leaves(made) == []


def test_generic_instances_keep_working():
    """What typing leaves on an instance is no part of it."""
    boxed = Boxed[int](1)

    assert boxed == Boxed(1)
    assert jax.tree.map(lambda x: x, boxed) == boxed
