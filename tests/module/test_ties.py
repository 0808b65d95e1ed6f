"""Ties: one path of a model reads its value at another. Their laws: tests/laws/test_ties.py."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError, SpecError
from tests.helpers.counting_calls import is_linear
from tests.helpers.equations import operations
from tests.helpers.trees import Holder, new, ramp


class Pair(pm.Module):
    a: object
    b: object


class Blocks(pm.Module):
    items: list
    table: dict
    last: nn.Linear


def linear(seed=0):
    return nn.Linear(3, 3, key=jax.random.key(seed))


def language():
    keys = jax.random.split(jax.random.key(0))
    return Pair(nn.Embedding(5, 3, key=keys[0]), nn.Linear(3, 5, key=keys[1]))


def tied_language():
    return pm.tie(language(), "b.weight", to="a.weight")


def blocks():
    return Blocks([linear(0), linear(1)], {"a": linear(2)}, linear(3))


def crossed():
    model = Pair(Pair(ramp(2), ramp(2)), Pair(ramp(2), Pair(ramp(2), ramp(2))))
    return pm.tie(model, "b.b", to="a")


@pytest.mark.usefixtures("optimized")
def test_the_program_is_the_hand_written_one():
    """A tie inside jit costs nothing."""
    model, x = transposed(two_linear(key=jax.random.key(0))), ramp(3)
    first, second = model.layers

    def by_hand(parts, x):
        weight, first, second = parts
        return jnp.transpose(weight) @ (weight @ x + first) + second

    parts = (first.weight, first.bias, second.bias)
    assert operations(lambda m, x: m(x), model, x) == operations(by_hand, parts, x)


def test_layers_are_tied_whole():
    """In lists and dicts; a pattern names several; an array and a computed leaf read alike."""
    model = pm.tie(blocks(), "items[1]", to="items[0]")
    model = pm.tie(model, "table['a']", to="items[0]")
    model = pm.tie(model, lambda m: m.last, to=lambda m: m.items[0])
    assert all(other is model.items[0] for other in (model.items[1], model.table["a"], model.last))
    assert len(jax.tree.leaves(model)) == 2
    assert (type(model.last), len(jax.tree.leaves(model.last))) == (nn.Linear, 2)
    assert pm.untie(pm.untie(model)) == pm.untie(model) != model
    part = pm.untie(model, "table['a']")
    assert (part.table["a"], len(jax.tree.leaves(part))) == (model.table["a"], 4)
    model = pm.tie(blocks(), "items.*.bias", to="last.bias")
    assert all(layer.bias is model.last.bias for layer in model.items)
    assert jax.tree.leaves(pm.select.path("b.**")(tied_language())) == [False, True]
    model = Pair(ramp(2), pm.computed(jnp.negative, ramp(2)))
    assert pm.tie(model, "b", to="a").b.tolist() == [1.0, 2.0]
    assert pm.tie(model, "a", to="b").a.tolist() == [-1.0, -2.0]


Act = new(fields={"w": object, "act": object}, act=pm.field(static=True))
ALIKE = {
    "BatchNorm": lambda: nn.BatchNorm(2),
    "lambda": lambda: Act(ramp(2), lambda x: x),
    "partial": lambda: Act(ramp(2), ft.partial(jnp.add, 1)),
    "NaN": lambda: Act(ramp(2), float("nan")),
    "tied inside": lambda: pm.tie(Pair(linear(), linear()), "b", to="a"),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_layers_that_are_made_alike_are_tied(make):
    """Also layers that make new functions, and those whose tokens have other names."""
    model, _ = pm.make_with_state(lambda: Pair(make(), make()))()
    tied = pm.tie(model, "b", to="a")
    assert tied.b is tied.a


def test_a_tied_layer_has_one_entry_of_the_state():
    """Its tokens are tied, too: both paths update the same statistics."""
    make = lambda: pm.tie(Pair(nn.BatchNorm(2), nn.BatchNorm(2)), "b", to="a")  # noqa: E731
    model, state = pm.make_with_state(make)()
    layer, expected = pm.make_with_state(nn.BatchNorm)(2)
    x = y = ramp(4, 2)
    assert len(jax.tree.leaves((model, state))) == 4
    for tied in (model.a, model.b):
        x, state = tied(x, state)
        y, expected = layer(y, expected)
    np.testing.assert_allclose(x, y, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def two_linear(*, key):
    keys = jax.random.split(key)
    return nn.Sequential([nn.Linear(3, 2, key=keys[0]), nn.Linear(2, 3, key=keys[1])])


def transposed(model, below=""):
    places = (f"{below}layers[{i}].weight" for i in (1, 0))
    return pm.tie(model, next(places), to=next(places), through=jnp.transpose)


@pytest.mark.parametrize("several", [nn.Stack, nn.Ensemble])
def test_layers_that_are_held_as_one_are_tied_as_each_alone(several, key):
    """The function gets one layer's array: with all axes the tie could be made, and not called."""
    below = "layer." if several is nn.Stack else "member."
    whole = several(two_linear, 2, key=key)
    each = several(lambda *, key: transposed(two_linear(key=key)), 2, key=key)
    x = ramp(3)
    tied = transposed(whole, below)
    assert jax.tree.structure(tied) == jax.tree.structure(each)
    np.testing.assert_array_equal(tied(x), each(x))
    adapted = transposed(pm.lora(whole, f"{below}layers[0]", 1, key=key), below)
    np.testing.assert_allclose(adapted(x), each(x), rtol=1e-6)
    np.testing.assert_allclose(pm.resolve(adapted)(x), each(x), rtol=1e-6)
    alone = each[1](each[0](x)) if several is nn.Stack else jnp.stack([each[0](x), each[1](x)])
    np.testing.assert_allclose(each(x), alone, rtol=1e-6)


@pytest.mark.parametrize("use", [pm.untie, pm.resolve, lambda model: model.items])
def test_many_ties_take_linear_time(use):
    """No tie is compared with all others, and none is looked for among the others."""
    models = {n: Blocks([linear() for _ in range(n)], {}, linear()) for n in (10, 20, 40)}
    for n in models:
        for i in range(1, n):
            models[n] = pm.tie(models[n], f"items[{i}].weight", to="items[0].weight")
    assert is_linear(lambda n: lambda: use(models[n]), 10)


def test_a_tie_inside_of_a_tied_layer():
    """Its source is in a part that another fills; equal ties of two nodes are no circle."""
    model = Pair(Pair(linear(0), linear(1)), Pair(Pair(linear(2), linear(3)), linear(4)))
    model = pm.tie(model, "a.b.weight", to="a.a.weight")
    model = pm.tie(model, "b.a", to="a")
    model = pm.tie(model, "b.b.weight", to="a.a.weight")
    assert model.b.b.weight is model.a.a.weight is model.b.a.b.weight
    assert len(jax.tree.leaves(model)) == 4
    assert len(jax.tree.leaves(pm.untie(model))) == 10
    inner = pm.tie(Pair(ramp(2), Pair(ramp(2), ramp(2))), "a", to="b.a")
    outer = pm.tie(Pair(ramp(2), inner), "a", to="b.b.a")
    assert outer.a is outer.b.b.a is outer.b.a


def test_a_source_with_a_tie_inside_of_it_in_one_list():
    """The Module above keeps both, in whatever order they are made: the inner one comes first."""
    made = Holder([{"one": ramp(2), "two": 2 * ramp(2)} for _ in range(3)])
    pairs = [("content[1].two", "content[1].one"), ("content[2]", "content[1]")]
    for order in (pairs, pairs[::-1]):
        tied = made
        for place, source in order:
            tied = pm.tie(tied, place, to=source)
        for found in (tied, pm.untie(tied), pm.filter_jit(lambda m: m)(tied)):
            assert [x["two"].tolist() for x in found.content] == [[2, 4], [1, 2], [1, 2]]


class Early(Pair):
    def __init__(self):
        self.a, self.b = ramp(2), ramp(2)
        pm.tie(self, "a", to="b")


TIED = r"(?s)b\.weight.*a\.weight"
ZERO, FIRST, LAST = "items[0].weight", "items[1].weight", "last.weight"
REFUSED = [
    # The new value, or the result of `tie`, would be lost.
    (lambda: pm.tree_at(lambda m: m.b.weight, tied_language(), ramp(5, 3)), TIED),
    (lambda: tied_language().replace(b=language().b), TIED),
    (Early, "being built"),
    # A pattern that names a tied place alone: the leaf is elsewhere.
    (lambda: pm.select.path("b.weight")(tied_language()), TIED),
    # A second tie; chains, in whatever order they are tied; circles of layers.
    (lambda: pm.tie(tied_language(), "b.weight", to="a.weight"), TIED),
    (lambda: pm.tie(pm.tie(blocks(), LAST, to=FIRST), FIRST, to=ZERO), r"last.* is tied to"),
    (lambda: pm.tie(pm.tie(blocks(), FIRST, to=ZERO), LAST, to=FIRST), r"items\[1\].* is tied to"),
    (lambda: pm.tie(crossed(), "a.a", to="b.a"), r"b\.b is tied to a"),
    (lambda: pm.tie(crossed(), "a", to="b"), r"b\.b is tied to a"),
    # A node in itself, another shape, several sources, no Module above both, no tie.
    (lambda: pm.tie(language(), "a.weight", to="a"), "one contains the other"),
    (lambda: pm.tie(language(), "b.bias", to="a.weight"), r"\(5, 3\)"),
    (lambda: pm.tie(language(), "b.weight", to="a.weight", through=jnp.transpose), r"\(3, 5\)"),
    (lambda: pm.tie(blocks(), LAST, to="items.*.weight"), r"items\[1\]\.weight"),
    (lambda: pm.tie([linear(0), linear(1)], "[0].weight", to="[1].weight"), "Module"),
    (lambda: pm.untie(tied_language(), "b.bias"), r"of b\.weight, got 'b\.bias'"),
    (lambda: pm.untie(language(), "b.bias"), "of none"),
]


@pytest.mark.parametrize(("use", "text"), REFUSED)
def test_ties_that_cannot_be_and_edits_that_would_be_lost_are_refused(use, text):
    """Each says which paths."""
    with pytest.raises((SpecError, ShapeError), match=text):
        use()
