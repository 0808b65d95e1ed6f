"""Ties: one path of a model reads its value at another."""

import copy
import functools as ft
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError, SpecError
from tests.helpers.computing import Scaled
from tests.helpers.counting_calls import is_linear
from tests.helpers.equations import operations
from tests.helpers.trees import Affine, ramp


class Language(pm.Module):
    """An embedding, and a head of the same shape."""

    embed: nn.Embedding
    head: nn.Linear

    def __call__(self, token):
        return self.head(self.embed(token))


class Coder(pm.Module):
    """An encoder, and a decoder of the transposed shape."""

    encoder: nn.Linear
    decoder: nn.Linear

    def __call__(self, x):
        return self.decoder(jax.nn.tanh(self.encoder(x)))


class Pair(pm.Module):
    """Two of anything."""

    a: object
    b: object


class Blocks(pm.Module):
    """Layers in a list, in a dict, and one more."""

    items: list
    table: dict
    last: nn.Linear


def linear(seed=0):
    """Square."""
    return nn.Linear(3, 3, key=jax.random.key(seed))


def language():
    """Untied."""
    keys = jax.random.split(jax.random.key(0))
    return Language(nn.Embedding(5, 3, key=keys[0]), nn.Linear(3, 5, key=keys[1]))


def tied_language():
    """Tied."""
    return pm.tie(language(), "head.weight", to="embed.weight")


def coder_untied(key=None):
    """Before it is tied."""
    keys = jax.random.split(jax.random.key(0) if key is None else key)
    return Coder(nn.Linear(4, 2, key=keys[0]), nn.Linear(2, 4, key=keys[1]))


def coder(key=None):
    """Tied through a function."""
    return pm.tie(coder_untied(key), "decoder.weight", to="encoder.weight", through=jnp.transpose)


def blocks():
    """Untied."""
    return Blocks([linear(0), linear(1)], {"a": linear(2)}, linear(3))


MODELS = {"plain": tied_language, "through a function": coder}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def read(model):
    """The values at the tied path, and at its source."""
    if isinstance(model, Language):
        return model.head.weight, model.embed.weight
    return model.decoder.weight, model.encoder.weight.T


@every_model
def test_the_place_reads_as_the_source(make):
    """There is one leaf for both."""
    model = make()

    np.testing.assert_array_equal(*read(model))
    assert len(jax.tree.leaves(model)) == 3 - isinstance(model, Language)


@every_model
def test_it_reads_the_same_after_every_journey(make):
    """Flattening, jit, surgery, copies, pickles and files keep the tie."""
    model = make()
    source = next(name for name in pm.named_leaves(model) if name.endswith("weight"))
    journeys = [
        jax.tree.map(lambda x: x + 1, model),
        jax.jit(lambda m: m)(model),
        pm.filter_jit(lambda m: m)(model),
        pm.tree_at(source, model, replace_fn=lambda w: 2 * w),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pm.combine(*pm.partition(model, pm.is_array)),
        pm.filter_scan(lambda m, _: (m, None), model, None, length=2)[0],
        pm.unstack(pm.stack([model, model]))[1],
    ]

    for found in journeys:
        np.testing.assert_array_equal(*read(found))
        assert jax.tree.structure(found) == jax.tree.structure(model)


@every_model
def test_files_have_one_array_and_the_tie(make, tmp_path):
    """The array of a tie is written once, and is read at both places."""
    model = make()
    pm.save(tmp_path / "model", model)

    found = pm.load(tmp_path / "model", model)
    assert found == model
    assert jax.tree.structure(found) == jax.tree.structure(model)
    np.testing.assert_array_equal(*read(found))


@every_model
def test_untie_gives_each_place_a_value_of_its_own(make):
    """The values do not change."""
    model = make()
    free = pm.untie(model)

    np.testing.assert_array_equal(*read(free))
    assert len(jax.tree.leaves(free)) == len(jax.tree.leaves(model)) + 1
    assert pm.untie(free) is free


def test_the_gradient_is_the_sum():
    """Of the gradients at both paths of the untied model."""
    model = tied_language()

    def loss(m, token):
        return jnp.sum(m(token) ** 2)

    grads = pm.filter_grad(loss)(model, 1)
    with pytest.warns(pm.SharedParameterWarning, match=r"embed\.weight and .*head\.weight"):
        free = pm.filter_grad(loss)(pm.untie(model), 1)
    np.testing.assert_allclose(grads.embed.weight, free.embed.weight + free.head.weight, rtol=1e-6)
    grads = pm.filter_grad(lambda m, x: jnp.sum(m(x) ** 2))(coder(), ramp(4))
    free = pm.filter_grad(lambda m, x: jnp.sum(m(x) ** 2))(pm.untie(coder()), ramp(4))
    np.testing.assert_allclose(
        grads.encoder.weight, free.encoder.weight + free.decoder.weight.T, rtol=1e-5
    )


@pytest.mark.usefixtures("optimized")
def test_the_program_is_the_hand_written_one():
    """A tie inside jit costs nothing."""
    model, x = coder(), ramp(4)
    parts = (model.encoder.weight, model.encoder.bias, model.decoder.bias)

    def by_hand(parts, x):
        weight, first, second = parts
        return jnp.transpose(weight) @ jax.nn.tanh(weight @ x + first) + second

    assert operations(lambda m, x: m(x), model, x) == operations(by_hand, parts, x)


def test_what_is_taken_out_has_the_value():
    """Untied, and of the class itself."""
    head = tied_language().head

    assert type(head) is nn.Linear
    assert len(jax.tree.leaves(head)) == 2
    decoder = coder().decoder
    np.testing.assert_array_equal(decoder.weight, coder().encoder.weight.T)


def test_layers_are_tied_whole():
    """In lists and dicts, too."""
    model = pm.tie(blocks(), "items[1]", to="items[0]")
    model = pm.tie(model, "table['a']", to="items[0]")
    model = pm.tie(model, lambda m: m.last, to=lambda m: m.items[0])

    assert model.items[1] is model.items[0]
    assert model.table["a"] is model.items[0]
    assert model.last is model.items[0]
    assert len(jax.tree.leaves(model)) == 2


def test_a_pattern_names_several_places():
    """Each is tied."""
    model = pm.tie(blocks(), "items.*.bias", to="last.bias")

    assert model.items[0].bias is model.last.bias
    assert model.items[1].bias is model.last.bias


def test_a_tied_layer_has_one_entry_of_the_state():
    """Its tokens are tied, too: both paths update the same statistics."""

    class Norms(pm.Module):
        first: nn.BatchNorm
        second: nn.BatchNorm

        def __call__(self, x, state):
            x, state = self.first(x, state)
            return self.second(x, state)

    def make():
        return pm.tie(Norms(nn.BatchNorm(2), nn.BatchNorm(2)), "second", to="first")

    model, state = pm.make_with_state(make)()
    x = ramp(4, 2)

    assert len(jax.tree.leaves((model, state))) == 4
    out, after = model(x, state)
    layer, state = pm.make_with_state(nn.BatchNorm)(2)
    expected, state = layer(x, state)
    expected, state = layer(expected, state)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    found, known = jax.tree.leaves(after), jax.tree.leaves(state)
    for a, b in zip(found, known, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_there_are_no_chains():
    """In whatever order they are tied; nor circles, of layers that contain each other's paths."""
    model = blocks()
    first = pm.tie(model, "last.weight", to="items[1].weight")
    with pytest.raises(SpecError, match=r"last\.weight is tied to items\[1\]\.weight"):
        pm.tie(first, "items[1].weight", to="items[0].weight")
    first = pm.tie(model, "items[1].weight", to="items[0].weight")
    with pytest.raises(SpecError, match=r"items\[1\]\.weight is tied to items\[0\]\.weight"):
        pm.tie(first, "last.weight", to="items[1].weight")
    crossed = Pair(Pair(ramp(2), ramp(2)), Pair(ramp(2), Pair(ramp(2), ramp(2))))
    crossed = pm.tie(crossed, "b.b", to="a")
    with pytest.raises(SpecError, match=r"b\.b is tied to a"):
        pm.tie(crossed, "a.a", to="b.a")
    with pytest.raises(SpecError, match=r"b\.b is tied to a"):
        pm.tie(crossed, "a", to="b")


def test_a_tie_inside_of_a_tied_layer():
    """The source of one lies in a part that another fills."""

    class Pair(pm.Module):
        one: nn.Linear
        two: nn.Linear

    class Outer(pm.Module):
        left: Pair
        right: Pair
        extra: nn.Linear

    model = Outer(Pair(linear(0), linear(1)), Pair(linear(2), linear(3)), linear(4))
    model = pm.tie(model, "left.two.weight", to="left.one.weight")
    model = pm.tie(model, "right", to="left")
    model = pm.tie(model, "extra.weight", to="left.one.weight")

    assert model.extra.weight is model.left.one.weight
    assert model.right.two.weight is model.left.one.weight
    assert len(jax.tree.leaves(model)) == 4
    assert len(jax.tree.leaves(pm.untie(model))) == 10


def test_the_source_may_be_computed():
    """Both paths read it, and gradients reach its source fields."""
    model = tied_language()
    model = pm.tree_at("embed.weight", model, replace_fn=lambda w: Scaled(w, jnp.asarray(2.0)))

    np.testing.assert_array_equal(model.head.weight, 2 * language().embed.weight)
    grads = pm.filter_grad(lambda m: jnp.sum(m.head.weight + m.embed.weight))(model)
    factor = pm.named_leaves(grads)["embed.weight.factor"]
    np.testing.assert_allclose(factor, 2 * jnp.sum(language().embed.weight), rtol=1e-5)


def test_in_a_stack():
    """Each layer has its tie, inside of the scan."""

    class Square(pm.Module):
        up: nn.Linear
        down: nn.Linear

        def __call__(self, x):
            return self.down(jax.nn.tanh(self.up(x)))

    def make(*, key):
        keys = jax.random.split(key)
        model = Square(nn.Linear(3, 2, key=keys[0]), nn.Linear(2, 3, key=keys[1]))
        return pm.tie(model, "down.weight", to="up.weight", through=jnp.transpose)

    stack = nn.Stack(make, 2, key=jax.random.key(0))

    x = ramp(3)
    np.testing.assert_allclose(stack(x), stack[1](stack[0](x)), rtol=1e-6)
    np.testing.assert_array_equal(stack[0].down.weight, stack[0].up.weight.T)


def two_linear(*, key):
    """Two layers that may be tied."""
    keys = jax.random.split(key)
    return nn.Sequential([nn.Linear(3, 2, key=keys[0]), nn.Linear(2, 3, key=keys[1])])


def transposed(model, below=""):
    """Tied through a function, below a path."""
    places = (f"{below}layers[{i}].weight" for i in (1, 0))
    return pm.tie(model, next(places), to=next(places), through=jnp.transpose)


@pytest.mark.parametrize(
    ("several", "below"),
    [(nn.Stack, "layer."), (nn.Ensemble, "member.")],
    ids=["Stack", "Ensemble"],
)
def test_layers_that_are_held_as_one_are_tied_as_each_alone(several, below, key):
    """The function gets one layer's array: with all axes the tie could be made, and not called."""
    whole = several(two_linear, 2, key=key)
    each = several(lambda *, key: transposed(two_linear(key=key)), 2, key=key)
    x = ramp(3)

    tied = transposed(whole, below)
    assert jax.tree.structure(tied) == jax.tree.structure(each)
    np.testing.assert_array_equal(tied(x), each(x))
    adapted = transposed(pm.lora(whole, f"{below}layers[0]", 1, key=key), below)
    np.testing.assert_allclose(adapted(x), each(x), rtol=1e-6)
    np.testing.assert_allclose(pm.resolve(adapted)(x), each(x), rtol=1e-6)


def test_what_is_beside_a_tied_place_is_edited():
    """As anywhere."""
    model = pm.tree_at(lambda m: m.head.bias, tied_language(), jnp.zeros(5))

    np.testing.assert_array_equal(model.head.bias, jnp.zeros(5))
    np.testing.assert_array_equal(*read(model))


def test_the_text_shows_the_tie():
    """The path of the tie, and its source."""
    assert "weight=f32[5,3] tied to embed.weight" in repr(tied_language())


def test_a_pattern_that_names_a_tied_place_alone_does_nothing():
    """And so is an error: the leaf is elsewhere."""
    model = tied_language()

    for rule in (pm.select.path("head.weight"), pm.by({"head.weight": 0, ...: 1})):
        with pytest.raises(SpecError, match=r"(?s)head\.weight.*embed\.weight"):
            rule(model)
    assert jax.tree.leaves(pm.select.path("head.**")(model)) == [False, True]


def test_a_computed_leaf_and_an_array_are_tied_like_two_arrays():
    """Either may be the source: they read alike."""
    plain = Affine(ramp(2), ramp(2))
    model = plain.replace(bias=pm.computed(jnp.negative, ramp(2)))

    assert pm.tie(model, "bias", to="weight").bias.tolist() == [1.0, 2.0]
    assert pm.tie(model, "weight", to="bias").weight.tolist() == [-1.0, -2.0]


class Act(pm.Module):
    """A layer with a function as configuration."""

    w: jax.Array
    act: object = pm.field(static=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm(2),
        lambda: Act(ramp(2), lambda x: x),
        lambda: Act(ramp(2), ft.partial(jnp.add, 1)),
        lambda: Act(ramp(2), float("nan")),
        lambda: pm.tie(Pair(linear(), linear()), "b", to="a"),
    ],
)
def test_layers_that_are_made_alike_are_tied(make):
    """Also layers that make new functions, and those whose tokens have other names."""
    model, _ = pm.make_with_state(lambda: Pair(make(), make()))()
    tied = pm.tie(model, "b", to="a")
    assert tied.b is tied.a


@pytest.mark.parametrize("end", [pm.untie, pm.resolve])
def test_untying_many_is_linear(end):
    """No tie is compared with all others."""
    models = {n: Blocks([linear() for _ in range(n)], {}, linear()) for n in (10, 20, 40)}
    for n in models:
        for i in range(1, n):
            models[n] = pm.tie(models[n], f"items[{i}].weight", to="items[0].weight")

    assert is_linear(lambda n: lambda: end(models[n]), 10)


def test_equal_ties_of_two_nodes_are_no_circle():
    """They are distinguished by the node that stores them."""
    inner = pm.tie(Pair(ramp(2), Pair(ramp(2), ramp(2))), "a", to="b.a")
    outer = pm.tie(Pair(ramp(2), inner), "a", to="b.b.a")

    assert outer.a is outer.b.b.a is outer.b.a


def test_a_model_is_tied_when_it_is_finished():
    """`tie` returns a new model, which would be lost in `__init__`; and it goes through maps."""

    class Own(Language):
        def __init__(self, *, key, is_tied=False):
            keys = jax.random.split(key)
            self.embed = nn.Embedding(5, 3, key=keys[0])
            self.head = nn.Linear(3, 5, use_bias=False, key=keys[1])
            if is_tied:
                pm.tie(self, "head.weight", to="embed.weight")

    def make(key):
        return pm.tie(Own(key=key), "head.weight", to="embed.weight")

    with pytest.raises(SpecError, match="being built"):
        Own(key=jax.random.key(0), is_tied=True)
    model = make(jax.random.key(0))
    several = pm.filter_vmap(make)(jax.random.split(jax.random.key(0), 2))
    for found in (model, jax.jit(lambda m: m)(model), pm.unstack(several)[0]):
        assert list(pm.named_leaves(found)) == ["embed.weight"]
        np.testing.assert_array_equal(*read(found))


def test_reading_above_many_ties_is_linear():
    """Each is followed once, and none is looked for among the others."""
    models = {n: Blocks([linear() for _ in range(n)], {}, linear()) for n in (10, 20, 40)}
    for n in models:
        for i in range(1, n):
            models[n] = pm.tie(models[n], f"items[{i}].weight", to="items[0].weight")

    assert is_linear(lambda n: lambda: models[n].items, 10)


EDITS = [
    lambda: pm.tree_at(lambda m: m.head.weight, tied_language(), ramp(5, 3)),
    lambda: pm.tree_at("head", tied_language(), language().head),
    lambda: tied_language().replace(head=language().head),
    lambda: pm.tie(tied_language(), "head.weight", to="embed.weight"),
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_tied_place_is_not_edited(edit):
    """The new value would be lost: the source is the place to change."""
    with pytest.raises(SpecError, match=r"(?s)head\.weight.*embed\.weight"):
        edit()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: pm.tie(language(), "embed", to="embed"), "embed"),
        (lambda: pm.tie(language(), "embed.weight", to="embed"), r"embed\.weight"),
        # In a circle.
        (lambda: pm.tie(tied_language(), "embed.weight", to="head.weight"), r"weight|circle"),
        (lambda: pm.tie(language(), "head.bias", to="embed.weight"), r"\(5, 3\)"),
        (
            lambda: pm.tie(language(), "head.weight", to="embed.weight", through=jnp.transpose),
            r"\(3, 5\)|f32\[3,5\]",
        ),
        (lambda: pm.tie(language(), "head", to="embed"), "head"),
        (lambda: pm.tie(blocks(), "last.weight", to="items.*.weight"), r"items\[1\]\.weight"),
        (lambda: pm.tie(language(), "tail.weight", to="embed.weight"), r"tail\.weight"),
        (lambda: pm.tie([linear(0), linear(1)], "[0].weight", to="[1].weight"), "Module"),
        (lambda: pm.untie(tied_language(), "head.bias"), r"head\.bias"),
    ],
)
def test_ties_that_cannot_be_are_refused(use, text):
    """A node in itself, a circle, another shape, no Module above both."""
    with pytest.raises((SpecError, ShapeError), match=text):
        use()
