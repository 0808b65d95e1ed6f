"""Immutable instances: assignments during and after construction."""

import abc
import copy
import dataclasses
import functools as ft
import inspect
import pickle
import re
import subprocess
import sys
from typing import Generic, Protocol, TypeVar, runtime_checkable

import jax
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FrozenError
from tests.goldens import refusals
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
every_finished = pytest.mark.parametrize("make", FINISHED.values(), ids=FINISHED.keys())


@every_finished
def test_assignment_after_construction_is_refused(make):
    """The error names class, field and value, and shows both lines to write instead."""
    module = make()
    name = type(module).__name__
    with pytest.raises(
        FrozenError,
        match=rf"^{name}\.weight: expected no assignment, because a Module is immutable, got the "
        r"value f32\[2\]\. You cannot assign to field 'weight'\.\n"
        r"  make a new one; inside a larger model, name "
        r"the path:"
        r"\n      model = model\.replace\(weight=new\)\n      model = pm\.tree_at\(",
    ):
        module.weight = ramp(2)


@every_finished
def test_undeclared_attributes_cannot_be_added_later(make):
    """A finished instance takes no new attribute; the hint is not `replace`, which takes none."""
    with pytest.raises(
        FrozenError,
        match=r"no assignment, because a Module is immutable, .*\n  'cache' is not one of its "
        r"fields \(.*weight.*\); declare it in the class:\n      class \w+\(pm\.Module\):\n"
        r"          cache: int = pm\.field\(static=True\)$",
    ):
        make().cache = 1


@every_finished
def test_del_is_refused(make):
    """A field cannot be deleted; the hint is a copy without the value."""
    name = type(make()).__name__
    with pytest.raises(
        FrozenError,
        match=rf"^{name}\.weight: expected no deletion, because a Module is immutable, got del on "
        rf"'weight'\.\n"
        r"  create a copy without the value:\n      model = model\.replace\(weight=None\)$",
    ):
        del make().weight


@every_finished
def test_augmented_assignment_is_refused(make):
    """`model.weight += 1` is an assignment."""
    module = make()
    with pytest.raises(FrozenError, match="no assignment"):
        module.weight += 1

    assert_same(module.weight, make().weight)


def test_the_error_is_what_python_users_catch():
    """FrozenError is dataclasses' own, and so an AttributeError."""
    assert issubclass(FrozenError, dataclasses.FrozenInstanceError)
    assert issubclass(FrozenError, AttributeError)
    assert issubclass(FrozenError, pm.PytreemodError)


@pytest.mark.parametrize("args", [(1, 2), ()])
def test_init_again_is_refused(args):
    """Calling __init__ on a finished instance would change it."""
    with (
        pytest.raises(
            FrozenError,
            match=r"^Affine\.__init__: expected an instance that is being built, got a finished "
            r"instance, which is immutable\.\n  create another; a transform [^\n]*\n"
            r"      model = Affine\(\.\.\.\)\n      model = pm\.filter_jit\(Affine\)\(\.\.\.\)\n"
            r"      models = pm\.filter_vmap\(Affine\)\(\.\.\.\)$|missing 2 required",
        )
        if args
        else pytest.raises(TypeError, match="missing 2 required")
    ):
        affine().__init__(*args)
    layer = OwnInit(2)
    with pytest.raises(FrozenError, match=r"OwnInit\.__init__: expected an instance that is being"):
        layer.__init__(3)


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit, pm.filter_vmap, jax.vmap])
def test_a_transformed_init_is_refused(transform):
    """It gets a copy, which is finished; the hint is shown, and works."""

    class Layer(pm.Module):
        weight: jax.Array

        @transform
        def __init__(self, weight):
            self.weight = 2 * weight

    class Plain(pm.Module):
        weight: jax.Array

        def __init__(self, weight):
            self.weight = 2 * weight

    with pytest.raises(
        FrozenError,
        match=r"Layer\.__init__: expected an instance that is being built, got a finished "
        r"instance, "
        r"which is immutable \(cannot assign to field 'weight'\)\.\n  create another; "
        r"a transform of __init__ gets a copy",
    ):
        Layer(ramp(2))
    assert_same(pm.filter_jit(Plain)(ramp(2)).weight, 2 * ramp(2))


def test_a_wrapped_init_is_an_init():
    """A decorator that calls it is not a transform."""

    def logged(function):
        @ft.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        return call

    class Layer(pm.Module):
        weight: jax.Array

        @logged
        def __init__(self, weight):
            self.weight = weight

    assert_same(Layer(ramp(2)).weight, ramp(2))
    assert list(inspect.signature(Layer).parameters) == ["weight"]


def test_attributes_of_the_class_cannot_be_assigned_either():
    """A method, a class variable or a property is not a field."""

    class Layer(pm.Module):
        x: int
        kind = "layer"

        def __init__(self, name):
            setattr(self, name, 1)

        def method(self):
            """Nothing."""

        @property
        def computed(self):
            """Nothing."""

    for name in ("kind", "method", "computed"):
        with pytest.raises(
            AttributeError,
            match=rf"expected a declared field \(x\), got an undeclared attribute '{name}'|no "
            rf"setter",
        ):
            Layer(name)


CYCLES = {
    "method": lambda self: self.step,
    "dunder method": lambda self: self.__call__,
    "filter_jit": lambda self: pm.filter_jit(self.step),
    "filter_grad": lambda self: pm.filter_grad(self.step),
    "in a list": lambda self: [self.step],
    "in a dict": lambda self: {"fn": self.step},
    "in a tuple": lambda self: (1, self.step),
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
    """Prints the result of each, a line each."""
    for name, make in CYCLES.items():
        try:
            print(f"{name}: {jax.tree.leaves(Loop(make))}")
        except BaseException as error:
            print(f"{name}: {type(error).__name__} {error}".replace("\n", " "))


def test_an_own_method_in_a_field_is_refused():
    """A tree cannot contain itself: the method, and its wrapper, are refused with the hint.

    In a separate process: JAX does not survive a tree that contains itself.
    """
    source = "from tests.module.test_records import try_all_cycles; try_all_cycles()"
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )

    expected = (
        "FieldError Loop.fn: expected a value that does not contain the instance itself, got .*"
        r"\. Cannot assign methods in __init__\.   a tree cannot contain itself; write a method"
    )
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert [name for name in CYCLES if not re.match(expected, lines.get(name, ""))] == []


class Choosy(pm.Module):
    """Its `__init__` has options, so that the second instance can differ from the first.

    With the first instance of a class, its own `__setattr__` is written.
    """

    weight: jax.Array
    fn: object

    def __init__(self, then=lambda self: None, fn=None):
        self.weight = ramp(2)
        self.fn = fn
        then(self)

    def step(self):
        """To be stored."""


def test_the_second_instance_is_held_to_the_same_as_the_first():
    """The code that a class gets with its first instance refuses the same as before."""
    first = Choosy()
    with pytest.raises(FrozenError, match=r"Choosy\.wieght: expected a declared field"):
        Choosy(lambda self: setattr(self, "wieght", 1))
    for loop in (lambda self: self.step, lambda self: [self.step], lambda self: self):
        with pytest.raises(FieldError, match=r"Choosy\.fn: expected a value that does not contain"):
            Choosy(lambda self, loop=loop: setattr(self, "fn", loop(self)))
    handed_out = pm.filter_jit(lambda: Choosy(fn=1))()
    for finished in (first, Choosy(), handed_out):
        with pytest.raises(FrozenError, match=r"Choosy\.weight: expected no assignment"):
            finished.weight = ramp(3)
        assert_same(finished.weight, ramp(2))


def test_values_of_every_kind_are_assigned():
    """The first instance's, and those of later ones, which take another way."""
    values = [1, 1.5, 2j, True, None, "a", b"a", ramp(2), [1], (ramp(1),), affine(), max, {"a": 1}]
    for _ in range(2):
        for value in values:
            assert Choosy(fn=value).fn is value


def test_a_subclass_declares_more_than_its_base():
    """The code of the base does not refuse the subclass's fields."""
    Choosy()

    class More(Choosy):
        extra: int

        def __init__(self):
            super().__init__()
            self.extra = 1

    assert [(m.extra, m.fn) for m in (More(), More())] == [(1, None)] * 2


def test_an_own_setattr_stays():
    """A custom __setattr__ of a class remains, also in its subclasses."""
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

    assert [m.x for m in (Noting(), Noting(), Below(), Below())] == [1, 1, 2, 2]
    assert noted == ["x"] * 6


def test_a_setattr_beside_stays_when_a_base_gets_one():
    """The code of one class does not affect a sibling."""
    noted = []

    class Base(pm.Module):
        x: int

        def __init__(self):
            self.x = 1

    class Beside(pm.Module):
        def __setattr__(self, name, value):
            noted.append(name)
            super().__setattr__(name, value)

    class Both(Base, Beside):
        """Base comes first, and has no `__setattr__` in its body."""

    for cls in (Both, Base, Base, Both, Both):
        assert cls().x == 1
    assert noted == ["x"] * 3


@pytest.mark.parametrize("own", [True, False])
def test_nothing_of_a_class_is_exchanged_once_it_has_instances(own):
    """Threads may be calling it: on Python 3.11, exchanging a `__setattr__` then is a crash."""

    class Initialized(pm.Module):
        x: int

        def __init__(self, x):
            self.x = x

    class Prepared(pm.Module):
        y: dataclasses.InitVar[int]
        x: int = pm.field(init=False)

        def __post_init__(self, y):
            self.x = y

    cls = Initialized if own else Prepared
    before = dict(vars(cls))
    assert "__setattr__" in before
    assert [cls(i).x for i in range(3)] == [0, 1, 2]
    assert dict(vars(cls)) == before


def test_threads_build_the_first_instances_of_a_class():
    """The code for the first instance may be written twice, but is not replaced."""
    for _ in range(20):

        class Fresh(pm.Module):
            x: int
            y: int = pm.field(static=True)

            def __init__(self, x):
                self.x = x
                self.y = -x

        made = race(lambda i, cls=Fresh: [cls(8 * i + j) for j in range(8)])
        assert [(m.x, m.y) for some in made for m in some] == [(i, -i) for i in range(64)]


def test_a_setattr_that_wraps_a_written_one_stays():
    """It may have all attributes of the function that it wraps."""
    noted = []

    class Wrapped(pm.Module):
        x: int

        def __init__(self):
            self.x = 1

    written = Wrapped.__setattr__

    @ft.wraps(written)
    def noting(self, name, value):
        noted.append(name)
        written(self, name, value)

    Wrapped.__setattr__ = noting

    class Below(Wrapped):
        def __init__(self):
            self.x = 2

    assert (Wrapped().x, Below().x, noted) == (1, 2, ["x", "x"])


def test_what_typing_leaves_on_an_instance_in_init_stays():
    """The class of a generic alias, if it is noted before the instance is finished."""

    class Noted(pm.Module):
        x: int

        def __init__(self):
            self.x = 1
            self.__orig_class__ = "alias"

    assert [Noted().__orig_class__ for _ in range(2)] == ["alias", "alias"]


class Mixin:
    """Has a separate dict, before the Module's."""


class Protocolled(Protocol):
    """Is asked for members, from Python 3.12 on, without asking the instance."""

    weight: object
    bias: object


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


class Slotted:
    """Has no dict."""

    __slots__ = ()


class SlotsFirst(Slotted, Described):
    """A mixin without a dict comes first: Python gives the class one, and shows it unchanged."""


class GenericFirst(Generic[T], Described):
    """So does a generic base."""


class AbstractFirst(abc.ABC, Described):
    """So does an abstract mesh."""


class Subscripted(Described, Generic[T]):
    """A generic one."""


class FromInit(Mixin, Described):
    """Sets its fields past `__setattr__`."""

    def __init__(self, weight):
        self.__dict__.update(weight=weight)
        assert vars(self) == {"weight": weight}
        self.__dict__ = {"weight": weight, "n": 3}


DESCRIBED = [Described, MixedIn, Subscripted, Subscripted[int], FromInit]
DESCRIBED += [SlotsFirst, GenericFirst, AbstractFirst]
CHANGES = {
    "replace": lambda m: m.replace(weight=2 * m.weight),
    "tree_at": lambda m: pm.tree_at(lambda m: m.weight, m, 2 * m.weight),
    "tree_at by a function": lambda m: pm.tree_at(
        lambda m: m.weight, m, replace_fn=lambda x: 2 * x
    ),
    "tree_map": lambda m: pm.combine(jax.tree.map(lambda x: 2 * x, pm.filter(m, pm.is_array)), m),
    "jit": pm.filter_jit(lambda m: pm.apply_updates(m, pm.filter(m, pm.is_array))),
    "update": lambda m: pm.apply_updates(m, jax.tree.map(lambda x: x, pm.filter(m, pm.is_array))),
    "another structure": lambda m: pm.with_role(m.replace(weight=2 * m.weight), "weight", "buffer"),
    "configuration": lambda m: m.replace(n=6),
    "copy": lambda m: copy.copy(m).replace(weight=2 * m.weight),
    "deepcopy": lambda m: copy.deepcopy(m).replace(weight=2 * m.weight),
}


@pytest.mark.parametrize("cls", DESCRIBED)
def test_vars_shows_the_fields(cls):
    """And no cached values, wherever the instance comes from."""
    made = cls(ramp(2))
    pm.filter_jit(lambda m: m)(made)
    for model in [made, *(change(made) for change in CHANGES.values())]:
        assert [*vars(model)] == [*model.to_dict()] == ["weight", "n"]
        assert vars(model)["weight"] is model.weight
        assert [name for name in dir(model) if name[0] != "_"] == [
            *("n", "replace", "to_dict", "total", "weight")
        ]
        assert type(vars(model).copy()) is type(copy.copy(vars(model))) is dict
        assert pickle.loads(pickle.dumps(vars(model))).keys() == {"weight", "n"}
    assert FromInit(weight=1).replace(**vars(FromInit(2))) == FromInit(2)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("cls", DESCRIBED)
@pytest.mark.sampled
def test_what_a_cached_property_keeps_is_of_one_instance(cls, change):
    """A changed copy computes it anew; it had the old one's."""
    model = cls(ramp(2))
    assert model.total is model.total
    assert vars(model).keys() == {"weight", "n", "total"}

    changed = change(model)

    assert vars(changed).keys() == {"weight", "n"}
    assert changed.total == 2 * model.total
    assert pm.filter_jit(lambda m: m.total)(changed) == 2 * model.total
    assert jax.tree.structure(model) == jax.tree.structure(cls(ramp(2)))
    assert pickle.loads(pickle.dumps(changed)).total == changed.total


@pytest.mark.parametrize(
    "change",
    [
        lambda shown: shown.update(weight=1),
        lambda shown: shown.__setitem__("weight", 1),
        lambda shown: shown.__ior__({"weight": 1}),
        lambda shown: shown.pop("weight"),
        lambda shown: shown.__delitem__("weight"),
        lambda shown: shown.clear(),
        lambda shown: shown.popitem(),
        lambda shown: shown.update({"<layout>": None}),
    ],
)
@pytest.mark.parametrize("cls", DESCRIBED)
def test_no_field_is_changed_by_way_of_vars(cls, change):
    """Neither is it changed, nor is a change lost in silence."""
    model = cls(ramp(2))
    with pytest.raises(
        FrozenError, match=r"no (assignment|deletion), because a Module is immutable"
    ):
        change(vars(model))
    with pytest.raises(FrozenError, match=r"(?s)__dict__: expected no .*model.replace\(\*\*values"):
        model.__dict__ = {}
    with pytest.raises(FrozenError, match="no assignment, because a Module is immutable"):
        object.__setattr__(model, "__dict__", {})
    assert model == cls(ramp(2))


def test_vars_from_threads():
    """Whichever of them fills the instance, all see all of its fields."""
    model = pm.filter_jit(lambda m: m)(Described(ramp(2)))

    for shown in race(lambda _: (dict(vars(model)), model.total)):
        assert shown[0].keys() - {"total"} == {"weight", "n"}


def test_what_is_no_field_can_be_kept_in_the_dict():
    """As it can with a frozen dataclass; no part of the tree, and of no copy."""
    model = affine()
    vars(model)["note"] = 1
    assert (model.note, vars(model).setdefault("note", 2), vars(model)["note"]) == (1, 1, 1)
    assert not hasattr(model.replace(), "note")
    made = by_hand()
    object.__setattr__(made, "note", 1)
    assert (made.note, hasattr(made.replace(), "note")) == (1, False)
    assert vars(model).pop("note") == 1
    assert not hasattr(model, "note")


@pytest.mark.parametrize("base", [pm.Module, Described])
def test_protocols_find_the_fields(base):
    """Of a class of which no instance has waited, too."""
    checked = runtime_checkable(Protocolled)

    class Fresh(Mixin, base):
        weight: object
        bias: object

        def __init__(self):
            self.weight = self.bias = 1
            if base is Described:
                self.n = 2

    assert isinstance(Fresh(), checked)
    assert not isinstance(Described(1), checked)
    assert not hasattr(Fresh, "bias")


def test_a_method_of_another_instance_is_a_value():
    """Only the own methods make a cycle; also those of an equal instance do not."""
    other = affine()

    assert Holder(other.scaled).content.__self__ is other
    assert Holder(Holder(1).replace).content.__self__ == Holder(1)


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
    """Unset fields are not in the tree, and are returned from a transform as unset."""
    made = object.__new__(Static)
    object.__setattr__(made, "weight", ramp(2))

    assert len(jax.tree.leaves(made)) == 1
    again = jax.tree.map(lambda x: x, made)
    assert not hasattr(again, "size")
    assert again.mode == "train"  # The class's own default, as for any Python object.
    assert_same(pm.filter_jit(lambda m: m.weight)(made), ramp(2))


def test_hand_made_instances_divide_by_what_they_hold():
    """A function is configuration in them, too."""
    made = object.__new__(Holder)
    object.__setattr__(made, "content", max)

    assert jax.tree.leaves(made) == []
    assert jax.tree.map(lambda x: x, made).content is max


def test_generic_instances_keep_working():
    """Boxed[int](...) gets __orig_class__ from typing, and is a Module like others."""
    boxed = Boxed[int](1)

    assert boxed.__orig_class__ == Boxed[int]
    assert boxed == Boxed(1)
    assert jax.tree.map(lambda x: x, boxed) == boxed


def test_reading_is_plain_python():
    """There is no __getattribute__, and a class without jitted instances has no __getattr__."""

    class Plain(pm.Module):
        x: int

    assert Plain.__getattribute__ is object.__getattribute__
    assert not hasattr(Plain, "__getattr__")
    assert vars(Plain(1))["x"] == 1


def test_dir_shows_the_fields_and_what_the_class_has():
    """Of a new instance, one that was used in a jitted call, and one that waits to be filled in."""
    new, used = affine(), affine()
    waiting = pm.filter_jit(lambda model: model)(used)
    for model in (new, used, waiting):
        found = dir(model)
        assert {"weight", "bias", "scaled"} <= set(found)
        assert all(name.isidentifier() for name in found)


class Twice(pm.Module):
    bias: jax.Array
    copy: jax.Array


def test_an_instance_has_two_private_names():
    """After any use: one object beside the fields, and the flat form."""
    built = affine()
    flat, structure = jax.tree.flatten(built)
    made, pending = jax.tree.unflatten(structure, flat), pm.filter_jit(lambda m: m)(built)
    gradient = pm.filter_grad(lambda m, x: m(x).sum())(built, ramp(3))
    half = built.replace(bias=pm.computed(jax.numpy.multiply, built.bias, 0.5))
    tied = pm.tie(Twice(built.bias, built.bias), "copy", to="bias")
    noted = [half, tied, pm.with_role(built, "bias", "buffer"), pm.with_precision(built, "float16")]
    noted += [jax.tree.map(lambda leaf: leaf, node) for node in noted]
    for node in (affine(), built, made, pending, gradient, built.replace(bias=ramp(2)), *noted):
        for _ in range(2):
            private = node.__stored__.keys() - type(node).__record__.fields.keys()
            assert private <= {"__flat__", "<private>"}
            assert pm.filter_jit(lambda m: m.bias)(node).shape == (2,)
            assert node.bias.shape == (2,)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (ramp(3), "jax.Array"),
        (4, "int = pm.field(static=True)"),
        (Affine(ramp(2), ramp(2)), "Affine"),
    ],
    ids=["array", "int", "module"],
)
def test_a_declaration_is_of_the_value(value, kind):
    """The line to paste has the type of the value; a size is static."""

    class Layer(pm.Module):
        def __init__(self, value):
            self.part = value

    with pytest.raises(FrozenError, match=rf"\n          part: {re.escape(kind)}\Z"):
        Layer(value)


test_refusals = refusals(globals())
