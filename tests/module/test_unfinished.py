"""Unfinished Modules: in every style that classes are written in, and as values."""

import copy
import pickle
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, SpecError, UnfinishedError

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


STYLES = {
    "by position": (lambda n: Scale(n, 2.0)),
    "by name": (lambda n: Scale(start=2.0, size=n)),
    "inherited": (lambda n: Inheriting(n, 2.0)),
    "mixin": (lambda n: Mixed(n, 2.0)),
    "generic": (lambda n: Typed[int](n, 2.0)),
}


def test_a_default_of_none_is_one_that_follows():
    """`Scale()` is `Scale(None)`."""
    assert pm.materialize(Scale(), X) == Scale(3)


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
        assert type(other).__name__ in ("Linear", "Scale")
    assert copy.deepcopy(layer) == layer
    assert pickle.loads(pickle.dumps(Scale(None, 2.0))) == Scale(None, 2.0)
    assert layer != pm.nn.Linear(None, 3, key=KEY)


def test_it_prints_as_it_was_called():
    """Without keys, and without defaults."""
    layer = pm.nn.Linear(None, 2, use_bias=False, key=KEY)
    assert repr(layer) == "Linear(in_features=None, out_features=2, use_bias=False)"
    assert repr([Scale()]) == "[Scale(size=None)]"


@pytest.mark.parametrize("make", STYLES.values(), ids=STYLES.keys())
def test_classes_in_every_style(make):
    """Each is finished to the same result as directly."""
    made = pm.materialize(make(None), X)
    assert type(made) is type(make(3))
    assert made == make(3)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.weight,
        lambda layer: layer.replace(weight=X),
        lambda layer: layer(X),
        lambda layer: pm.lora(pm.nn.Sequential([layer]), pm.nn.Linear, 1, key=KEY),
        lambda layer: pm.tree_at("layers[0].weight", pm.nn.Sequential([layer]), X),
        lambda layer: pm.with_role(pm.nn.Sequential([layer]), "layers[0].weight", "buffer"),
    ],
)
def test_what_is_not_there_yet_is_asked_of_materialize(use):
    """Arrays that a size decides cannot be read, changed, adapted or chosen before."""
    with pytest.raises((UnfinishedError, SpecError), match="materialize"):
        use(pm.nn.Linear(None, 2, key=KEY))


def test_other_arguments_are_checked():
    """Those that have to do with the size when it is known."""
    with pytest.raises(ArgumentError, match=r"Linear\(out_features\)"):
        pm.nn.Linear(None, -1, key=KEY)
    with pytest.raises(ArgumentError, match=r"Conv1d\(groups\)"):
        pm.materialize(pm.nn.Conv1d(None, 17, 1, groups=17, key=KEY), jnp.ones((6, 4)))
    with pytest.raises(ArgumentError, match=r"sizes_follow\(m\)"):

        @pm.sizes_follow(m=lambda x: 1)
        def __init__(self, n): ...


def test_keys_that_depend_on_the_size_are_refused():
    """Layers after it would have got others than in the model written out."""

    class Greedy(pm.Module):
        n: int

        @pm.sizes_follow(n=lambda x: x.shape[-1])
        def __init__(self, n: Any, key: Any):
            keys = pm.init_keys(key)
            for _ in range(min(n, 4)):
                next(keys)
            self.n = n

        def __call__(self, x):
            return x

    with pytest.raises(UnfinishedError, match="keys"):
        pm.materialize(Greedy(None, pm.init_keys(KEY)), X)
    assert pm.materialize(Greedy(None, KEY), X).n == 3
