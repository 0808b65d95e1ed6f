"""Instances: data and configuration, flattening, immutability, and what `vars` shows."""

import abc
import copy
import dataclasses
import enum
import functools as ft
import inspect
import operator
import subprocess
import sys
from typing import Generic, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FieldWarning, FrozenError
from tests.helpers import trees
from tests.helpers.comparing import assert_same
from tests.helpers.racing import race
from tests.helpers.trees import affine, double, new, ramp

T = TypeVar("T")

CONFIGURATION = [
    *(double, lambda x: x, max, [].append, operator.itemgetter(1), optax.sgd(0.1).init),
    *(jax.jit(double), jax.nn.relu, jax.vmap(double), jax.grad(double)),
    *(jax.custom_jvp(double), jax.custom_vjp(double), np.exp, jnp.add),
    *(ft.partial(double, 1), ft.partial(str.join, ","), int, trees.Affine),
    *("text", enum.StrEnum("Mode", ["TRAIN"]).TRAIN),
]
DATA = [
    *(1, 1.0, 1j, True, None, np.float32(1), b"bytes", object(), frozenset({1})),
    *(ramp(2), np.ones(2), jax.random.key(0), jax.ShapeDtypeStruct((), jnp.float32)),
    *([1], (double, 1), {"a": "b"}, trees.Pair(1, 2), enum.Enum("Color", ["RED"]).RED),
    *(affine(), trees.OwnInit(2), affine().scaled, pm.Partial(double, 1), pm.filter_jit(double)),
    *(pm.filter_jit(affine()), jax.tree_util.Partial(double, 1), optax.sgd(0.1)),
]


def test_callables_strings_and_classes_are_configuration_and_everything_else_is_data():
    """Without a declaration: JAX cannot have them as data; unknown objects are children."""
    for value in CONFIGURATION:
        assert jax.tree.leaves(trees.Holder(value)) == []
        assert jax.tree.map(lambda x: 1 / 0, trees.Holder(value)).content is value
    for value in DATA:
        found = jax.tree.structure(trees.Holder(value)).num_leaves
        assert found == jax.tree.structure(value).num_leaves
        children, _ = pm.tree_flatten_one_level(trees.Holder(value))
        assert children == [value] if not pm.is_array(value) else children[0] is value


def assign(self, weight, size):
    self.weight, self.size = weight, size


Assigning = new(trees.Static, __init__=assign)


def test_an_array_in_a_static_field_is_told():
    """By construction, replace and under a trace, at the line that makes the instance."""
    for make in (trees.Static, Assigning):
        with pytest.warns(FieldWarning, match=rf"(?s){make.__name__}\.size.*f32\[2\]") as told:
            make(ramp(2), ramp(2))
        assert told[0].filename == __file__
    with pytest.warns(FieldWarning, match=r"(?s)Static\.size.*key"):
        trees.Static(1.0, 2).replace(size=jax.random.key(0))
    with pytest.warns(FieldWarning, match=r"Static\.size"):
        assert_same(jax.jit(lambda x: trees.Static(1.0, x).size * 2)(ramp(2)), 2 * ramp(2))
    # NumPy's scalars have a hash and an `==`: there is no warning.
    for value in (np.prod((2, 3)), np.bool_(True), np.float32(1), (np.int8(1),)):
        made = trees.Static(ramp(2), value)
        assert jax.tree.structure(made) == jax.tree.structure(
            trees.Static(ramp(2), copy.copy(value))
        )
        assert_same(jax.jit(lambda m: m.weight)(made), ramp(2))


def test_a_function_of_jax_around_a_module_is_told():
    """Its arrays would be constants that nothing trains; also after a plain function."""
    trees.Holder(double)
    for hidden in (jax.jit(affine()), jax.vmap(affine().scaled)):
        with pytest.warns(FieldWarning, match=r"Holder\.content"):
            assert jax.tree.leaves(trees.Holder(hidden)) == []
    for value in (pm.filter_jit(affine()), pm.Partial(double, ramp(2)), jax.jit(double)):
        trees.Holder(value)


def test_construction_never_flattens_field_values():
    """A node of an unknown kind is stored unopened, beside data and configuration."""
    opened = []

    @jtu.register_pytree_node_class
    class Touchy:
        def tree_flatten(self):
            opened.append(self)
            raise RuntimeError("do not touch")

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    thing = Touchy()
    for value in (thing, [thing], {"a": thing}, trees.Holder(thing), trees.Affine(thing, thing)):
        trees.Holder(value)
        Assigning(value, 2)
    assert opened == []


def test_flatten_gives_the_fields_in_order():
    """The children are the data fields in the order of declaration, by attribute."""
    for make in trees.MODULES.values():
        module = make()
        pairs, _ = jtu.tree_flatten_with_path(module, is_leaf=lambda x, m=module: x is not m)
        names = [path[0].name for path, _ in pairs]
        assert names == [f.name for f in dataclasses.fields(module) if f.name in names]
        assert all(child is getattr(module, path[0].name) for path, child in pairs)


def test_unflatten_runs_nothing_of_the_class():
    """Neither __init__ nor __new__, __post_init__, converters, checks or __setattr__."""
    calls = []
    body = {
        "__new__": lambda cls, x: calls.append("new") or object.__new__(cls),
        "__init__": lambda self, x: calls.append("init") or setattr(self, "x", x),
        "__check_init__": lambda self: calls.append("check"),
        "x": pm.field(converter=lambda v: calls.append("converter") or v),
    }
    loud = new(fields={"x": int}, **body)(1)
    assert calls == ["new", "init", "converter", "check"]
    jax.tree.map(lambda x: x, loud)
    pm.filter_jit(lambda m: m)(loud).x
    pm.tree_at(lambda m: m.x, loud, 3)
    assert len(calls) == 4


def test_structures_tell_classes_and_configuration_apart():
    """Two classes with the same fields differ; so do two configurations, by type and value."""
    twin = new(fields=inspect.get_annotations(trees.Affine))
    sizes = (1, 2, "1", (1,), True, 1.0, (True,))
    made = [trees.Affine(1, 2), twin(1, 2), *(trees.Static(1, size) for size in sizes)]
    made += [trees.Holder(value) for value in (double, max, 1, [1])]
    structures = [jax.tree.structure(tree) for tree in made]
    for each in (made, structures):
        for i, a in enumerate(each):
            assert [a == b for b in each] == [i == j for j in range(len(made))]
    added = jax.tree.map(lambda x, y: x + y, affine(), affine())
    np.testing.assert_array_equal(added.weight, 2 * affine().weight)
    with pytest.raises(ValueError, match=r"[Mm]ismatch|structure"):
        jax.tree.map(lambda x, y: x, trees.Static(1, 2), trees.Static(1, 3))


NAMES = ["layout", "node", "cls", "self", "aux", "children", "_", "schema"]


def test_fields_may_bear_any_name_and_be_many():
    """Our own code does not collide with the names of fields; there may be hundreds."""
    for name in NAMES:
        odd = new(fields={name: int, "size": int}, size=pm.field(static=True))(ramp(1), 5)
        for other in (jax.tree.map(lambda x: x, odd), pm.filter_jit(lambda m: m)(odd)):
            assert getattr(other, name).shape == (1,)
        assert getattr(odd.replace(**{name: 7}), name) == 7
    names = [f"field_{i}" for i in range(300)]
    wide = new(fields=dict.fromkeys(names, int))(*range(300))
    assert jax.tree.leaves(wide) == list(range(300))
    assert jax.tree.map(lambda x: x, wide) == wide
    assert wide.field_299 == 299


FINISHED = [
    affine,
    lambda: trees.OwnInit(2),
    lambda: trees.Child("a", 2),
    lambda: jax.tree.map(lambda x: x, affine()),
    lambda: pm.tree_at(lambda m: m.bias, affine(), 0),
    lambda: affine().replace(bias=0),
    lambda: copy.copy(affine()),
    lambda: copy.deepcopy(affine()),
    lambda: jax.jit(lambda m: m)(affine()),
]


@pytest.mark.parametrize("make", FINISHED)
def test_a_finished_instance_is_immutable(make):
    """Neither assignment, plain or augmented, nor deletion, nor a new attribute, nor __init__."""
    module = make()
    weight = rf"{type(module).__name__}\.weight"
    for change, text in (
        (lambda: setattr(module, "weight", ramp(2)), weight),
        (lambda: delattr(module, "weight"), weight),
        (lambda: setattr(module, "cache", 1), "cache"),
        (lambda: setattr(module, "__dict__", {}), "__dict__"),
        (lambda: trees.OwnInit(2).__init__(3), "OwnInit"),
    ):
        with pytest.raises(FrozenError, match=text):
            change()
    with pytest.raises(FrozenError, match=weight):
        module.weight += 1
    assert_same(module, make())
    assert issubclass(FrozenError, pm.PytreemodError)
    assert issubclass(FrozenError, dataclasses.FrozenInstanceError)


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit, pm.filter_vmap])
def test_a_transformed_init_is_refused(transform):
    """It gets a copy, which is finished; a decorator that only calls it is no transform."""

    def init(self, weight):
        self.weight = 2 * weight

    def layer(decorate):
        return new(fields={"weight": object}, __init__=decorate(init))

    logged = layer(lambda init: ft.wraps(init)(lambda *args: init(*args)))
    with pytest.raises(pm.PytreemodError, match=r"(?s)Made.*weight"):
        layer(transform)(ramp(2))
    assert_same(logged(ramp(2)).weight, 2 * ramp(2))
    assert list(inspect.signature(logged).parameters) == ["weight"]


@pytest.mark.parametrize("name", ["wieght", "kind", "method", "computed"])
def test_init_sets_declared_fields_alone(name):
    """A misspelt field would be lost in the first transform; so would what hides a class's own."""
    body = {"kind": "layer", "method": lambda self: 1, "computed": property(lambda self: 1)}
    layer = new(fields={"x": int}, **body, __init__=lambda self, name: setattr(self, name, 1))
    assert layer("x").x == 1
    for _ in range(2):
        with pytest.raises(AttributeError, match=f"{name}|no setter"):
            layer(name)


CYCLES = {
    "method": lambda self: self.step,
    "dunder method": lambda self: self.__call__,
    "filter_jit": lambda self: pm.filter_jit(self.step),
    "in a list": lambda self: [self.step],
    "in a dict": lambda self: {"fn": self.step},
    "in a Partial": lambda self: pm.Partial(self.step, 1),
    "itself": lambda self: self,
    "in a Module": lambda self: trees.Holder(self.step),
}


class Loop(pm.Module):
    fn: object

    def __init__(self, make):
        self.fn = make(self)

    def step(self, x):
        """To be stored."""

    __call__ = step


def try_all_cycles():
    """Prints the names of those that are refused, each also for a second instance."""
    for name, make in CYCLES.items():
        for _ in range(2):
            try:
                jax.tree.leaves(Loop(make))
            except FieldError as error:
                print(name if "Loop.fn" in str(error) else error)


def test_an_own_method_in_a_field_is_refused():
    """In a separate process: JAX does not survive a tree that contains itself."""
    source = f"from {__name__} import try_all_cycles; try_all_cycles()"
    command = [sys.executable, "-c", source]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == [name for name in CYCLES for _ in range(2)]
    # Not those of another instance, also of an equal one.
    other = affine()
    assert trees.Holder(other.scaled).content.__self__ is other
    assert trees.Holder(trees.Holder(1).replace).content.__self__ == trees.Holder(1)


def test_an_own_setattr_stays():
    """A custom __setattr__ of a class remains, also in its subclasses, and beside other bases."""
    noted = []

    class Noting(pm.Module):
        x: int

        def __setattr__(self, name, value):
            noted.append(name)
            super().__setattr__(name, value)

    def setting(x, *bases):
        return new(*bases, fields={"x": int}, __init__=lambda self: setattr(self, "x", x))

    first, base = setting(1, Noting), setting(3)
    below, both = setting(2, first), setting(3, base, Noting)
    made = [cls().x for cls in (first, first, below, both, base, both)]
    assert made == [1, 1, 2, 3, 3, 3]
    assert noted == ["x"] * 5


def test_threads_build_the_first_instances_of_a_class():
    """Whichever comes first, all get the right ones."""
    for _ in range(20):

        class Fresh(pm.Module):
            x: int
            y: int = pm.field(static=True)

            def __init__(self, x):
                self.x, self.y = x, -x

        made = race(lambda i, cls=Fresh: [cls(8 * i + j) for j in range(8)])
        assert [(m.x, m.y) for some in made for m in some] == [(i, -i) for i in range(64)]


class Mixin: ...


class Described(pm.Module):
    weight: jax.Array
    n: int = 3

    @ft.cached_property
    def total(self):
        return self.weight.sum() * self.n

    def to_dict(self):
        return dict(self.__dict__)


class GenericFirst(Generic[T], Described): ...  # A base without a dict: Python adds one.


STYLES = [Described, GenericFirst, new(Mixin, Described), new(abc.ABC, Described)]
CHANGES = [
    lambda m: m.replace(weight=2 * m.weight),
    lambda m: pm.tree_at(lambda m: m.weight, m, 2 * m.weight),
    lambda m: pm.combine(jax.tree.map(lambda x: 2 * x, pm.filter(m, pm.is_array)), m),
    pm.filter_jit(lambda m: pm.apply_updates(m, pm.filter(m, pm.is_array))),
    lambda m: pm.apply_updates(m, jax.tree.map(lambda x: x, pm.filter(m, pm.is_array))),
    lambda m: pm.with_role(m.replace(weight=2 * m.weight), "weight", "buffer"),
    lambda m: m.replace(n=6),
    lambda m: copy.copy(m).replace(weight=2 * m.weight),
    lambda m: copy.deepcopy(m).replace(weight=2 * m.weight),
]


@pytest.mark.parametrize("cls", STYLES)
def test_vars_shows_the_fields_and_cached_values_are_of_one_instance(cls):
    """Wherever it comes from; a changed copy computes a cached property anew, and had the old."""
    model = cls(ramp(2))
    pm.filter_jit(lambda m: m)(model)
    for read in (False, True):
        assert not read or model.total is model.total
        for changed in (cls(ramp(2)), *(change(model) for change in CHANGES)):
            assert [*vars(changed)] == [*changed.to_dict()] == ["weight", "n"]
            assert vars(changed)["weight"] is changed.weight
            names = [name for name in dir(changed) if name[0] != "_"]
            assert names == ["n", "replace", "to_dict", "total", "weight"]
            if read:
                expected = changed.weight.sum() * changed.n
                assert changed.total == pm.filter_jit(lambda m: m.total)(changed) == expected
    assert jax.tree.structure(model) == jax.tree.structure(cls(ramp(2)))
    # What is no field can be kept there, as in a frozen dataclass, and is of no copy.
    vars(model)["note"] = 1
    assert (model.note, hasattr(model.replace(), "note")) == (1, False)


def test_vars_from_threads():
    """Whichever of them fills the instance, all see all of its fields."""
    model = pm.filter_jit(lambda m: m)(Described(ramp(2)))
    for shown in race(lambda _: (dict(vars(model)), model.total)):
        assert shown[0].keys() - {"total"} == {"weight", "n"}


def test_protocols_find_the_fields():
    """Of a class of which no instance has waited, too."""
    fields = {"weight": object, "bias": object}
    fresh = new(Mixin, pm.Module, fields=fields)
    both = runtime_checkable(type(Protocol)("Both", (Protocol,), {"__annotations__": fields}))
    assert isinstance(fresh(1, 1), both)
    assert not isinstance(Described(1), both)
    assert not hasattr(fresh, "bias")


def test_instances_put_together_in_part_hold_what_was_set():
    """Unset fields are not in the tree; a function is configuration in them, too."""
    made = object.__new__(trees.Static)
    object.__setattr__(made, "weight", ramp(2))
    holder = object.__new__(trees.Holder)
    object.__setattr__(holder, "content", max)
    assert (len(jax.tree.leaves(made)), len(jax.tree.leaves(holder))) == (1, 0)
    again = jax.tree.map(lambda x: x, made)
    assert not hasattr(again, "size")
    assert again.mode == "train"  # The class's own default, as for any Python object.
    assert_same(pm.filter_jit(lambda m: m.weight)(made), ramp(2))
    # What typing leaves on an instance is no part of it.
    assert trees.Boxed[int](1) == trees.Boxed(1) == jax.tree.map(lambda x: x, trees.Boxed[int](1))
