"""Instances: data and configuration, flattening, immutability, and what `vars` shows."""

import abc
import copy
import dataclasses
import enum
import functools as ft
import inspect
import operator

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
from tests.helpers.trees import affine, double, new, ramp

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


def test_an_array_in_a_static_field_is_told():
    """By construction, replace and under a trace, at the line that makes the instance."""
    for make in (trees.Static, new(trees.Static, __init__=assign)):
        with pytest.warns(FieldWarning, match=rf"(?s){make.__name__}\.size.*f32\[2\]") as told:
            make(ramp(2), ramp(2))
        assert told[0].filename == __file__
    with pytest.warns(FieldWarning, match=r"(?s)Static\.size.*key"):
        trees.Static(1.0, 2).replace(size=jax.random.key(0))
    with pytest.warns(FieldWarning, match=r"Static\.size"):
        assert_same(jax.jit(lambda x: trees.Static(1.0, x).size * 2)(ramp(2)), 2 * ramp(2))
    # NumPy's scalars have a hash and an `==`.
    for value in (np.prod((2, 3)), (np.int8(1),)):
        made, again = trees.Static(1, value), trees.Static(1, copy.copy(value))
        assert jax.tree.structure(made) == jax.tree.structure(again)


def test_a_function_of_jax_around_a_module_is_told():
    """Its arrays would be constants that nothing trains; also after a plain function."""
    trees.Holder(double)
    for hidden in (jax.jit(affine()), jax.vmap(affine().scaled)):
        with pytest.warns(FieldWarning, match=r"Holder\.content"):
            assert jax.tree.leaves(trees.Holder(hidden)) == []
    for value in (pm.filter_jit(affine()), pm.Partial(double, ramp(2)), jax.jit(double)):
        trees.Holder(value)


def test_flatten_gives_the_fields_in_order():
    """The children are the data fields in the order of declaration, by attribute."""
    for make in trees.MODULES.values():
        module = pm.resolve(make())
        pairs, _ = jtu.tree_flatten_with_path(module, is_leaf=lambda x, m=module: x is not m)
        names = [path[0].name for path, _ in pairs]
        assert names == [f.name for f in dataclasses.fields(module) if f.name in names]
        assert all(child is getattr(module, path[0].name) for path, child in pairs)


def test_unflatten_runs_nothing_of_the_class():
    """Neither `__init__` nor `__new__`, converters or checks."""
    calls = []
    body = {
        "__new__": lambda cls, x: calls.append("new") or object.__new__(cls),
        "__init__": lambda self, x: calls.append("init") or setattr(self, "x", x),
        "__check_init__": lambda self: calls.append("check"),
        "x": pm.field(converter=lambda v: calls.append("converter") or v),
    }
    loud = new(fields={"x": int}, **body)(1)
    jax.tree.map(lambda x: x, loud)
    pm.filter_jit(lambda m: m)(loud).x
    pm.tree_at(lambda m: m.x, loud, 3)
    assert calls == ["new", "init", "converter", "check"]


def test_classes_and_configuration_tell_instances_and_structures_apart():
    """By type and value. Where all leaves hash, instances may be keys; `jax.jit` takes none."""
    twin = new(fields=inspect.get_annotations(trees.Affine))
    sizes = (1, 2, "1", (1,), True, 1.0, (True,))
    make = lambda: [  # noqa: E731
        *(trees.Affine(1, 2), twin(1, 2), *(trees.Static(1, size) for size in sizes)),
        *(trees.Holder(value) for value in (double, max, 1)),
    ]
    for each in (make(), [jax.tree.structure(tree) for tree in make()]):
        for i, a in enumerate(each):
            assert [a == b for b in each] == [i == j for j in range(len(each))]
    # Python has one hash for 1 and True, and asks `==`.
    assert len({*make(), *make()}) == len(make())
    with pytest.raises(ValueError, match=r"[Mm]ismatch|structure"):
        jax.tree.map(lambda x, y: x, trees.Static(1, 2), trees.Static(1, 3))
    # JAX would take a model for a function by its hash, and compile once for all models.
    for use in (hash, lambda model: jax.jit(model)(1.0)):
        with pytest.raises(TypeError, match="hash"):
            use(affine())


def test_fields_may_bear_any_name_and_be_many():
    """Our own code does not collide with the names of fields; there may be hundreds."""
    for name in ("node", "cls", "self", "aux", "children", "_", "schema"):
        odd = new(fields={name: int, "size": int}, size=pm.field(static=True))(ramp(1), 5)
        for other in (jax.tree.map(lambda x: x, odd), pm.filter_jit(lambda m: m)(odd)):
            assert getattr(other, name).shape == (1,)
        assert getattr(odd.replace(**{name: 7}), name) == 7
    wide = new(fields=dict.fromkeys([f"field_{i}" for i in range(300)], int))(*range(300))
    assert jax.tree.leaves(wide) == list(range(300))
    assert jax.tree.map(lambda x: x, wide) == wide
    assert wide.field_299 == 299


def test_a_finished_instance_is_immutable():
    """Neither assignment, nor deletion, nor a new attribute, nor `__init__`."""
    for make in (
        affine,
        lambda: trees.Child("a", 2),
        lambda: pm.tree_at(lambda m: m.bias, affine(), 0),
        lambda: copy.deepcopy(affine()),
    ):
        module = make()
        weight = rf"{type(module).__name__}\.weight"
        for change, text in (
            (lambda m: setattr(m, "weight", ramp(2)), weight),
            (lambda m: delattr(m, "weight"), weight),
            (lambda m: setattr(m, "cache", 1), "cache"),
            (lambda m: setattr(m, "__dict__", {}), "__dict__"),
            (lambda _: trees.OwnInit(2).__init__(3), "OwnInit"),
        ):
            with pytest.raises(FrozenError, match=text):
                change(module)
        assert_same(module, make())
    assert issubclass(FrozenError, dataclasses.FrozenInstanceError)


def test_init_sets_declared_fields_alone():
    """A misspelt field would be lost in the first transform; so would what hides a class's own."""
    body = {"kind": "layer", "method": lambda self: 1, "computed": property(lambda self: 1)}
    layer = new(fields={"x": int}, **body, __init__=lambda self, name: setattr(self, name, 1))
    assert layer("x").x == 1
    # Also a dict that JAX could not sort, as configuration.
    init, odd = lambda self, table: setattr(self, "table", table), {1: "a", "b": 2}
    holder = new(fields={"table": dict}, table=pm.field(static=True), __init__=init)
    assert holder(odd).table == odd
    for name in ("wieght", *body):
        with pytest.raises(AttributeError, match=f"{name}|no setter"):
            layer(name)


CYCLES = [
    lambda self: self.step,
    lambda self: self.__call__,
    lambda self: pm.filter_jit(self.step),
    lambda self: [self.step],
    lambda self: {"fn": self.step},
    lambda self: pm.Partial(self.step, 1),
    lambda self: self,
]


@pytest.mark.parametrize("make", CYCLES)
def test_an_instance_in_itself_is_refused(make):
    """Flattening would never end (so none here does). A method of an equal instance is a value."""

    class Loop(pm.Module):
        fn: object

        def __init__(self, make):
            self.fn = make(self)

        def step(self, x):
            """To be stored."""

        __call__ = step

    for _ in range(2):
        with pytest.raises(FieldError, match=r"Loop\.fn"):
            Loop(make)
    assert trees.Holder(trees.Holder(1).replace).content.__self__ == trees.Holder(1)


def test_an_own_setattr_stays():
    """Of a class, of its subclasses, and beside other bases."""
    noted = []

    class Noting(pm.Module):
        x: int

        def __setattr__(self, name, value):
            noted.append(name)
            super().__setattr__(name, value)

    plain = new(fields={"x": int}, __init__=lambda self: setattr(self, "x", 3))
    init = {"__init__": plain.__init__}
    for cls in (plain, new(Noting, **init), new(new(Noting), **init), new(plain, Noting)):
        assert cls().x == 3
    assert noted == ["x"] * 3


class Described(pm.Module):
    weight: jax.Array
    n: int = 3

    @ft.cached_property
    def total(self):
        return self.weight.sum() * self.n


CHANGES = [
    lambda m: m.replace(n=6),
    lambda m: pm.tree_at(lambda m: m.weight, m, 2 * m.weight),
    pm.filter_jit(lambda m: pm.apply_updates(m, pm.filter(m, pm.is_array))),
    lambda m: copy.copy(m).replace(weight=2 * m.weight),
]


def test_what_an_instance_remembers_is_of_no_copy():
    """A cached property is computed once, and anew in a changed copy; a note in `vars` stays."""
    for cls in (Described, new(abc.ABC, Described)):
        model = cls(ramp(2))
        assert model.total is model.total
        vars(model)["note"] = 1
        assert (model.note, hasattr(model.replace(), "note")) == (1, False)
        for change in CHANGES:
            changed = change(model)
            assert [*vars(changed)] == ["weight", "n"]
            assert changed.total == changed.weight.sum() * changed.n != model.total
        assert jax.tree.structure(model) == jax.tree.structure(cls(ramp(2)))


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
