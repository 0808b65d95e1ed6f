"""Unfinished Modules: in every style that classes are written in, and as values."""

import copy
import dataclasses
import pickle
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, SpecError, UnfinishedError
from pytreemod.module.unfinished import is_unfinished
from tests.goldens import refusals
from tests.helpers.racing import race
from tests.labels import label

T = TypeVar("T")
KEY = jax.random.key(0)
X = jnp.ones(3)


class Scale(pm.Module):
    """An own `__init__`, a default, and a check."""

    factor: jax.Array
    start: float = pm.field(static=True)

    @pm.sizes_follow(size=lambda x: x.shape[-1])
    def __init__(self, size: Any = None, start: float = 1.0):
        self.factor, self.start = jnp.full(size, start), start

    def __check_init__(self):
        if self.factor.ndim != 1:
            raise ValueError("one axis")

    def __call__(self, x):
        return self.factor * x

    @property
    def twice(self):
        """Of a field."""
        return 2 * self.start


class Inheriting(Scale):
    """No custom `__init__`: the rules of its base."""

    def __call__(self, x):
        return super().__call__(x) + 1


class Plain:
    """A mixin that is not a Module."""

    def shown(self):
        """Of a field that it has not."""
        return self.start


class Mixed(Plain, Scale):
    """With that mixin."""


class Typed(Scale, Generic[T]):
    """A generic class."""


class Own(Scale):
    """A custom `__init__`, marked again, for another name."""

    @pm.sizes_follow(width=lambda x: x.shape[-1])
    def __init__(self, start: float, *, width: Any):
        super().__init__(width, start)


class WithNew(Scale):
    """A custom `__new__`."""

    def __new__(cls, *args, **kwargs):
        del args, kwargs
        return super().__new__(cls)


STYLES = {
    "by position": (lambda n: Scale(n, 2.0)),
    "by name": (lambda n: Scale(start=2.0, size=n)),
    "inherited": (lambda n: Inheriting(n, 2.0)),
    "mixin": (lambda n: Mixed(n, 2.0)),
    "generic": (lambda n: Typed[int](n, 2.0)),
    "own": (lambda n: Own(2.0, width=n)),
}


@pytest.mark.parametrize("make", STYLES.values(), ids=STYLES.keys())
def test_classes_in_every_style(make):
    """Each is finished to the same result as directly, and is of its class before."""
    unfinished, finished = make(None), make(3)
    assert is_unfinished(unfinished)
    assert isinstance(unfinished, type(finished))
    made = pm.materialize(unfinished, X)
    assert type(made) is type(finished)
    assert made == finished
    assert not is_unfinished(finished)


@pytest.mark.parametrize("make", STYLES.values(), ids=STYLES.keys())
def test_dataclasses_finds_the_fields_of_the_class(make):
    """Not those that store the call."""
    unfinished, finished = make(None), make(3)

    assert dataclasses.fields(unfinished) == dataclasses.fields(finished)
    with pytest.raises(UnfinishedError, match="to be known before it is read"):
        dataclasses.replace(unfinished)


def test_a_default_of_none_is_one_that_follows():
    """`Scale()` is `Scale(None)`."""
    assert pm.materialize(Scale(), X) == Scale(3)


def test_a_new_of_the_users_need_not_hand_arguments_on():
    """Missing arguments of its base were not passed to it."""
    assert not is_unfinished(WithNew(3))
    assert pm.materialize(WithNew(None), X) == WithNew(3)


def test_a_rule_may_ask_for_other_arguments():
    """Of the call, and of `__init__`, defaults of both."""

    class Axis(pm.Module):
        n: int

        @pm.sizes_follow(n=lambda x, axis, shift: x.shape[axis - 1] + shift)
        def __init__(self, n: Any, axis: int = 0):
            self.n = n

        def __call__(self, x, shift=10):
            return x

    assert pm.materialize(Axis(None), X).n == 13
    assert pm.materialize(Axis(None, axis=1), jnp.ones((2, 3)), 20).n == 22


@pytest.mark.parametrize("rule", [3, None, "x"], ids=label)
def test_a_rule_that_is_no_function_is_refused(rule):
    """At once."""
    with pytest.raises(
        ArgumentError, match=r"sizes_follow\(n\): expected a function of the call's"
    ):
        pm.sizes_follow(n=rule)


def test_what_does_not_depend_on_the_size_can_be_read():
    """Fields, properties and methods of them; arrays as their shapes."""
    layer = pm.nn.LSTMCell(None, 4, key=KEY)
    assert layer.hidden_size == 4
    assert layer.weight_hh.shape == (16, 4)
    assert Mixed(None, 2.0).shown() == 2.0
    assert Scale(None, 2.0).twice == 4.0


@pytest.mark.parametrize("name", ["weight_ih", "input_size"])
def test_what_depends_on_the_size_cannot_be_read(name):
    """Nor found: `hasattr` returns False."""
    layer = pm.nn.LSTMCell(None, 4, key=KEY)
    with pytest.raises(UnfinishedError, match=rf"LSTMCell.{name}: expected input_size to be known"):
        getattr(layer, name)
    assert not hasattr(layer, name)


def test_what_cannot_be_made_with_another_size_cannot_be_read():
    """The error of the class is the cause."""

    class OfThree(Scale):
        def __check_init__(self):
            if self.factor.shape != (3,):
                raise ValueError("three numbers")

    layer = OfThree(None)
    with pytest.raises(UnfinishedError, match=r"factor: expected size to be known") as caught:
        _ = layer.factor
    assert str(caught.value.__cause__) == "three numbers"
    assert pm.materialize(layer, X).factor.shape == (3,)


def test_what_follows_from_the_size_is_checked_when_it_is_known():
    """The size of a head was taken for that of our own trial, and asked for by the error."""
    rotary = pm.nn.RotaryPositionalEmbedding
    layer = pm.nn.MultiheadAttention(2, None, rotary=rotary(2), key=KEY)
    written_out = pm.nn.MultiheadAttention(2, 4, rotary=rotary(2), key=KEY)

    assert bool(pm.tree_equal(pm.materialize(layer, jnp.ones((3, 4))), written_out))
    with pytest.raises(
        ArgumentError, match="an embedding with embedding_size=4, got embedding_size=2"
    ):
        pm.materialize(layer, jnp.ones((3, 8)))
    with pytest.raises(
        ArgumentError, match="an embedding with embedding_size=4, got embedding_size=2"
    ):
        pm.nn.MultiheadAttention(2, None, qk_size=4, rotary=rotary(2), key=KEY)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: pm.lora(model, pm.nn.Linear, 1, key=KEY),
        lambda model: pm.map_parameters(jnp.tanh, model, "**.weight"),
        lambda model: pm.reinitialize(model, "**", jax.nn.initializers.zeros, KEY),
    ],
    ids=["lora", "map_parameters", "reinitialize"],
)
def test_what_changes_parameters_wants_them(change):
    """It found the keys that they will be made with."""
    model = pm.nn.Sequential([pm.nn.Linear(2, 3, key=KEY), pm.nn.Linear(None, 2, key=KEY)])

    with pytest.raises(UnfinishedError, match=r"\[1\]: Linear(.|\n)*model = pm.materialize\(model"):
        change(model)
    change(pm.materialize(model, jnp.ones(2)))


def test_it_is_a_tree_as_any_other():
    """Keys are leaves, the rest configuration; copies are equal."""
    layer = pm.nn.Linear(None, 2, key=KEY)
    assert [leaf.dtype for leaf in jax.tree.leaves(layer)] == [jnp.bool_, KEY.dtype]
    for other in (
        jax.tree.map(lambda leaf: leaf, layer),
        copy.copy(layer),
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(Scale(None, 2.0))),
    ):
        assert is_unfinished(other)
    assert copy.deepcopy(layer) == layer
    assert pickle.loads(pickle.dumps(Scale(None, 2.0))) == Scale(None, 2.0)
    assert layer != pm.nn.Linear(None, 3, key=KEY)


def test_it_prints_as_it_was_called():
    """Without keys, and without defaults."""
    layer = pm.nn.Linear(None, 2, use_bias=False, key=KEY)
    assert repr(layer) == "Linear(in_features=None, out_features=2, use_bias=False)"
    assert repr([Scale()]) == "[Scale(size=None)]"


def test_arguments_that_cannot_be_hashed_come_back_as_they_were():
    """A list stays a list."""
    seen: list[Any] = []

    class Listing(pm.Module):
        n: int

        @pm.sizes_follow(n=lambda x: x.shape[-1])
        def __init__(self, n: Any, names: list[str], *more: int, **options: Any):
            seen.append((names, more, options))
            self.n = n

        def __call__(self, x):
            return x

    made = pm.materialize(Listing(None, ["a"], 1, 2, o=KEY), X)
    assert made.n == 3
    names, more, options = seen[-1]
    assert (names, more) == (["a"], (1, 2))
    assert options["o"] is KEY


class Greedy(pm.Module):
    """Takes as many keys as its size says."""

    n: int

    @pm.sizes_follow(n=lambda x: x.shape[-1])
    def __init__(self, n: Any, key: Any):
        keys = pm.init_keys(key)
        for _ in range(min(n, 4)):
            next(keys)
        self.n = n

    def __call__(self, x):
        return x


def test_keys_that_depend_on_the_size_are_refused():
    """Layers after it would have got others than in the model written out."""
    with pytest.raises(UnfinishedError, match="to take the same number of keys for every size"):
        pm.materialize(Greedy(None, pm.init_keys(KEY)), X)
    assert pm.materialize(Greedy(None, KEY), X).n == 3


def test_an_init_that_cannot_be_tried_needs_a_key_of_its_own():
    """The number of its keys is not known."""

    class Table(pm.Module):
        n: int

        @pm.sizes_follow(n=lambda x: x.shape[-1])
        def __init__(self, n: Any, key: Any):
            self.n = {3: 30}[n]

        def __call__(self, x):
            return x

    with pytest.raises(UnfinishedError, match=r"Table\(key\): (.|\n)*key=next\(keys\)"):
        Table(None, pm.init_keys(KEY))
    assert pm.materialize(Table(None, KEY), X).n == 30


def test_under_jaxtyping():
    """The class decorator wraps `__init__`, and the rules come along."""
    beartype = pytest.importorskip("beartype", reason="needs the run-time type checker beartype")
    from jaxtyping import Float, jaxtyped

    @jaxtyped(typechecker=beartype.beartype)
    class Checked(pm.Module):
        factor: Float[jax.Array, " n"]

        @pm.sizes_follow(n=lambda x: x.shape[-1])
        def __init__(self, n: int | None):
            self.factor = jnp.ones(n)

        def __call__(self, x: Float[jax.Array, " n"]) -> Float[jax.Array, " n"]:
            return x * self.factor

    assert pm.materialize(Checked(None), jnp.ones(3)) == Checked(3)


def test_classes_are_made_once_from_threads():
    """Threads that come at once get instances of one class: they are equal."""

    class Fresh(Scale):
        pass

    assert len(set(race(lambda i: type(Fresh(None))))) == 1


def test_ten_thousand_instances_need_one_class():
    """Only the class of unfinished instances is cached."""
    layer = Scale(None, 2.0)
    before = len(Scale.__subclasses__())
    for _ in range(10_000):
        layer = copy.copy(layer)
    assert type(Scale()) is type(layer)
    assert len(Scale.__subclasses__()) == before


def test_a_field_is_not_replaced_and_paths_say_what_is_unfinished():
    """No name of a field of ours is asked for."""
    layer = pm.nn.Linear(None, 2, key=KEY)

    with pytest.raises(UnfinishedError, match=r"Linear\.replace: (.|\n)*pm\.materialize"):
        layer.replace(weight=X)
    for use in (
        lambda: pm.tree_at("layers[0].weight", pm.nn.Sequential([layer]), X),
        lambda: pm.select.path("layers[0].weight")(pm.nn.Sequential([layer])),
        lambda: pm.with_role(pm.nn.Sequential([layer]), "layers[0].weight", "buffer"),
    ):
        with pytest.raises(SpecError, match=r"has no size: pass it, or(.|\n)*materialize"):
            use()
    names = [name.partition(".")[0] for name in (*pm.named_leaves(layer), *vars(layer))]
    assert {*names} == {"unfinished_arguments", "unfinished_sizes"}


test_refusals = refusals(globals())
