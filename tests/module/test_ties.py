"""Ties: one path of a model reads its value at another."""

import copy
import functools as ft
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import (
    AccessError,
    SpecError,
)
from pytreemod.module.ties import Tied
from pytreemod.tree.stored_fields import reading_stored
from tests.goldens import refusals
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


def test_untie_is_the_way_back():
    """To the structure that the model had."""
    model = language()
    assert jax.tree.structure(pm.untie(tied_language())) == jax.tree.structure(model)
    assert type(pm.untie(tied_language())) is Language


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


def test_a_chain_has_the_value_at_its_end():
    """In whatever order it is tied."""
    model = blocks()
    one = pm.tie(
        pm.tie(model, "last.weight", to="items[1].weight"), "items[1].weight", to="items[0].weight"
    )
    other = pm.tie(
        pm.tie(model, "items[1].weight", to="items[0].weight"), "last.weight", to="items[1].weight"
    )

    for found in (one, other):
        assert found.last.weight is model.items[0].weight
        assert found.items[1].weight is model.items[0].weight
    # A link is taken out: the rest follows it.
    found = pm.untie(other, "items[1].weight")
    found = pm.tree_at("items[1].weight", found, jnp.zeros((3, 3)))
    np.testing.assert_array_equal(found.last.weight, jnp.zeros((3, 3)))


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
    model = pm.tie(model, "extra.weight", to="left.two.weight")
    model = pm.tie(model, "left.one.bias", to="extra.bias")

    assert model.extra.weight is model.left.one.weight
    assert model.right.two.weight is model.left.one.weight
    assert model.right.one.bias is model.extra.bias
    assert len(jax.tree.leaves(model)) == 3
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


def test_a_step_below_a_tied_layer_names_the_source():
    """There is nothing below the tied path."""
    model = pm.tie(blocks(), "last", to="items[0]")

    with reading_stored():
        assert isinstance(model.last, Tied)
        assert not hasattr(model.last, "__array__")


def test_the_text_shows_the_tie():
    """The path of the tie, and its source."""
    assert "weight=tied to embed.weight" in repr(tied_language())


def test_a_pattern_that_names_a_tied_place_alone_does_nothing():
    """And so is an error: the leaf is elsewhere."""
    model = tied_language()

    for rule in (pm.select.path("head.weight"), pm.by({"head.weight": 0, ...: 1})):
        with pytest.raises(
            SpecError,
            match=r"got a path that is tied to another\.\n  at head\.weight: tied to embed\.weight",
        ):
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


def test_what_is_computed_of_a_whole_stack_is_resolved():
    """The text said to map over several models, where one layer of them was read."""
    model = pm.filter_vmap(lambda key: Coder(linear(), linear(1)))(
        jax.random.split(jax.random.key(0))
    )
    tied = pm.tie(
        model, "decoder.weight", to="encoder.weight", through=lambda w: jnp.swapaxes(w, -1, -2)
    )

    found = pm.filter_vmap(lambda m: m.decoder.weight)(pm.resolve(tied))
    assert np.array_equal(found, np.swapaxes(model.encoder.weight, -1, -2))


class Own(Language):
    """Ties itself in its own `__init__`, before a subclass has set its fields."""

    def __init__(self, size=3, is_tied=True, *, key):
        keys = jax.random.split(key)
        self.embed = nn.Embedding(5, 3, key=keys[0])
        self.head = nn.Linear(size, 5, use_bias=False, key=keys[1])
        if is_tied:
            pm.tie(self, "head.weight", to="embed.weight")


class More(Own):
    """Has a field more, with a default, and one that its `__init__` sets last."""

    rate: float = 0.5
    scale: jax.Array = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = jnp.ones(2)


class Written(Language):
    """Ties itself, by functions that pick nodes, where `__init__` is written for it."""

    def __post_init__(self):
        self.tie_head()

    def tie_head(self):
        """In another method."""
        assert pm.tie(self, lambda m: m.head.weight, to=lambda m: m.embed.weight) is self


class Turned(Coder):
    """Ties itself through a function."""

    def __init__(self, size=4, *, key):
        keys = jax.random.split(key)
        self.encoder = nn.Linear(size, 2, key=keys[0])
        self.decoder = nn.Linear(2, 4, key=keys[1])
        pm.tie(self, "decoder.weight", to="encoder.weight", through=jnp.transpose)


def written(key):
    """A `Written`."""
    keys = jax.random.split(key)
    return Written(nn.Embedding(5, 3, key=keys[0]), nn.Linear(3, 5, use_bias=False, key=keys[1]))


KEY = jax.random.key(0)
TIED_INSIDE = {
    "own __init__": lambda key: Own(key=key),
    "subclass": lambda key: More(key=key),
    "__post_init__": written,
    "through": lambda key: Turned(key=key),
    "sizes that follow": lambda key: pm.materialize(Own(None, key=key), jnp.array(1)),
    "through, sizes that follow": lambda key: pm.materialize(Turned(None, key=key), jnp.ones(4)),
    "given the layer by surgery": lambda key: pm.materialize(
        pm.tree_at("head", Own(None, key=key), linear_head(key)), jnp.array(1)
    ),
}
every_inside = pytest.mark.parametrize("make", TIED_INSIDE.values(), ids=TIED_INSIDE)


def linear_head(key):
    """The head of `Own`."""
    return nn.Linear(3, 5, use_bias=False, key=jax.random.split(key)[1])


@every_inside
def test_a_class_ties_itself(make, tmp_path):
    """As from outside: one leaf, which every journey, map, file and pickle keeps."""
    model = make(KEY)
    place = "decoder.weight" if isinstance(model, Coder) else "head.weight"

    free = pm.untie(model)
    assert place in pm.named_leaves(free)
    assert place not in pm.named_leaves(model)
    np.testing.assert_array_equal(*read(model))
    jax.tree.map(np.testing.assert_array_equal, make(KEY), model)
    several = pm.filter_vmap(make)(jax.random.split(KEY, 2))
    again, _ = pm.make_with_state(make)(KEY)
    pm.save(tmp_path / "model.safetensors", model)
    for found in (
        jax.jit(lambda m: m)(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        pm.unstack(several)[0],
        again,
        pm.load(tmp_path / "model.safetensors", make(jax.random.key(1))),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(model)
        np.testing.assert_array_equal(*read(found))


@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("kind", [nn.Stack, nn.Ensemble])
def test_layers_of_a_stack_tie_themselves(kind, size):
    """Each has its own, also where a size follows."""
    made = kind(lambda key: Turned(size, key=key), 2, key=KEY)
    model = pm.materialize(made, jnp.ones(4))

    x, outs = jnp.ones(4), []
    for key in jax.random.split(KEY, 2):
        layer = Turned(key=key)
        outs.append(layer(x))
        x = x if kind is nn.Ensemble else outs[-1]
    expected = jnp.stack(outs) if kind is nn.Ensemble else outs[-1]
    np.testing.assert_allclose(model(jnp.ones(4)), expected, rtol=1e-5)
    assert "decoder.weight" not in " ".join(pm.named_leaves(model))


def test_a_check_sees_the_ties():
    """They are made before; and made there, they would be lost."""

    class Checked(Written):
        def __check_init__(self):
            assert self.head.weight is self.embed.weight

    class Late(Language):
        def __check_init__(self):
            pm.tie(self, "head.weight", to="embed.weight")

    assert Checked(*vars(pm.untie(written(KEY))).values()).head.weight.shape == (5, 3)
    with pytest.raises(AccessError, match=r"Late\.__check_init__: expected no tie, .*\n.*__post"):
        Late(*vars(language()).values())


def test_the_untied_form_is_an_option_of_the_class():
    """A missing value is not removed."""

    class Untied(Own):
        def __init__(self, *, key):
            super().__init__(key=key)
            pm.untie(self)

    assert len(jax.tree.leaves(Own(is_tied=False, key=KEY))) == 2
    with pytest.raises(AccessError, match=r"untie\(.*Untied\): expected a finished model"):
        Untied(key=KEY)


def test_an_instance_that_was_put_together_by_hand_is_tied_at_once():
    """Nothing ends its construction."""

    class By(Language):
        @staticmethod
        def __init__(*args):
            raise AssertionError

    made = object.__new__(By)
    for name, value in vars(language()).items():
        object.__setattr__(made, name, value)
    assert len(jax.tree.leaves(pm.tie(made, "head.weight", to="embed.weight"))) == 2


def steps_of_reading(count, chained):
    """How many lines of Python run when a list is read of which all items but one are tied."""
    model = Blocks([linear() for _ in range(count)], {}, linear())
    for i in range(1, count):
        source = i - 1 if chained else 0
        model = pm.tie(model, f"items[{i}].weight", to=f"items[{source}].weight")
    assert model.items[-1].weight is model.items[0].weight
    lines = []

    def note(frame, event, arg):
        frame.f_trace_opcodes = True
        lines.append(event)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        model.items
    finally:
        sys.settrace(before)
    return len(lines)


@pytest.mark.parametrize("chained", [False, True])
def test_reading_above_many_ties_is_linear(chained):
    """Each is followed once, and none is looked for among the others."""
    few, many = (steps_of_reading(count, chained) for count in (6, 24))

    assert many < 4.5 * few


@pytest.mark.parametrize("end", [pm.untie, pm.resolve])
def test_untying_many_is_linear(end):
    """No tie is compared with all others."""
    models = {n: Blocks([linear() for _ in range(n)], {}, linear()) for n in (10, 20, 40)}
    for n in models:
        for i in range(1, n):
            models[n] = pm.tie(models[n], f"items[{i}].weight", to="items[0].weight")

    assert is_linear(lambda n: lambda: end(models[n]), 10)


def test_what_was_worked_out_of_ties_is_not_pickled():
    """It is worked out again."""
    model = tied_language()
    before = pickle.dumps(model)

    assert model.head.weight is model.embed.weight
    assert pickle.dumps(model) == before


def test_equal_ties_of_two_nodes_are_no_circle():
    """They are distinguished by the node that stores them."""
    inner = pm.tie(Pair(ramp(2), Pair(ramp(2), ramp(2))), "a", to="b.a")
    outer = pm.tie(Pair(ramp(2), inner), "a", to="b.a")

    assert outer.a is outer.b.b.a


test_refusals = refusals(globals())
