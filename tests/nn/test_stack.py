"""`Stack`: its results, its behavior as a sequence, and its use of State and keys."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.helpers.equations import equations, operations
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

DEPTH = 3
KEEP_DOTS = jax.checkpoint_policies.dots_saveable


class Block(pm.Module):
    """A residual layer without State: a Linear, and a gate that is given by name."""

    linear: nn.Linear
    dropout: nn.Dropout

    def __init__(self, *, key):
        self.linear = nn.Linear(2, 2, key=key)
        self.dropout = nn.Dropout(0.5, inference=True)

    def __call__(self, x, *, gate=1.0, key=None):
        return x + gate * jnp.tanh(self.dropout(self.linear(x), key=key))


@ft.cache
def make_blocks(depth):
    return nn.Stack(Block, depth, key=jax.random.key(0))


def blocks(depth=DEPTH, **options):
    return make_blocks(depth).replace(**options)


def one_by_one(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def mean_square(layer, x):
    return jnp.mean(layer(x) ** 2)


X = jnp.asarray(wave(5, 2))


@pytest.mark.parametrize(
    ("unroll", "remat"),
    [(1, False), (2, True), (True, False), (1, True), (2, KEEP_DOTS)],
    ids=label,
)
@pytest.mark.sampled
def test_stack_is_its_layers_one_after_the_other(unroll, remat):
    """Value and gradient are those of the loop, however it is unrolled and recomputed."""
    stack = blocks(unroll=unroll, remat=remat)

    value, grads = pm.filter_jit(pm.filter_value_and_grad(mean_square))(stack, X)

    def by_loop(layers, x):
        return jnp.mean(one_by_one(layers, x) ** 2)

    expected, by_layer = pm.filter_jit(pm.filter_value_and_grad(by_loop))(list(stack), X)
    assert_close(value, expected)
    for i in range(DEPTH):
        assert_close(grads.layer.linear.weight[i], by_layer[i].linear.weight)
        assert_close(grads.layer.linear.bias[i], by_layer[i].linear.bias)


def test_no_layers_are_the_identity():
    stack = blocks(0)

    assert_close(stack(X), X)
    assert list(stack) == []
    assert stack.layer.linear.weight.shape == (0, 2, 2)


def test_each_layer_gets_a_key_of_its_own(key):
    class Drawing(pm.Module):
        def __call__(self, x, *, key=None):
            return x if key is None else jnp.roll(x, 1).at[0].set(jax.random.uniform(key))

    stack = nn.Stack(Drawing, DEPTH)
    drawn = stack(jnp.zeros(DEPTH), key=key)

    expected = [jax.random.uniform(own) for own in jax.random.split(key, DEPTH)]
    assert_close(drawn, jnp.stack(expected[::-1]))
    assert_close(stack(jnp.ones(DEPTH)), jnp.ones(DEPTH))


def test_arguments_by_name_are_the_same_for_all_layers_or_one_for_each():
    """`per_layer` is taken apart as the layers are; a number is part of the program."""
    stack, gates = blocks(), jnp.arange(1.0, DEPTH + 1)

    for given, each in [
        ({"gate": jnp.asarray(0.5)}, [0.5] * DEPTH),
        ({"gate": 0.5}, [0.5] * DEPTH),
        ({"per_layer": {"gate": gates}}, gates),
    ]:
        expected = one_by_one([ft.partial(f, gate=g) for f, g in zip(stack, each, strict=True)], X)
        assert_close(stack(X, **given), expected)


# ---- a sequence, as an Ensemble is


@pytest.mark.parametrize("kind", [nn.Stack, nn.Ensemble])
def test_it_is_a_sequence_of_what_was_made(kind, key):
    """Each with a key of one split; index, slice and list, and what is made of the list again."""
    made = kind(Block, 4, key=key, axis_name="blocks")
    each = [Block(key=own) for own in jax.random.split(key, 4)]
    collected = kind.from_layers if kind is nn.Stack else kind.from_members

    for one, other in zip(made, each, strict=True):
        jax.tree.map(assert_close, one, other)
    assert len(made) == len(kind(Block, 4, key=pm.init_keys(key))) == 4
    assert made[-1] == made[np.int64(3)] == made.unstack()[3]
    for part in (slice(1, 3), slice(None), slice(None, None, -1), slice(2, 2)):
        assert made[part].axis_name == "blocks"
        assert [*made[part]] == [*made][part]
    assert collected(iter(made), axis_name="blocks") == made
    assert pm.filter_jit(lambda made: collected(iter(made), axis_name="blocks"))(made) == made


def test_weakly_typed_inputs_are_promoted():
    """A Python number is a valid first input: the output of the layers has the type."""
    stack = nn.Stack(lambda: nn.Lambda(lambda x: x * jnp.asarray(2.0, jnp.float32)), DEPTH)

    assert float(stack(1.0)) == 2**DEPTH


@ft.cache
def make_nested():
    return nn.Stack(
        lambda key: nn.Stack(Block, 2, key=key, remat=True),
        DEPTH,
        key=jax.random.key(0),
        remat=True,
    )


def test_stacks_nest():
    stack = make_nested().replace(remat=False)
    net = nn.Sequential([nn.Lambda(jnp.sin), stack, nn.Identity()])

    assert stack.layer.layer.linear.weight.shape == (DEPTH, 2, 2, 2)
    layers = [layer for inner in stack for layer in inner]
    assert_close(net(X, key=jax.random.key(1)), one_by_one(layers, jnp.sin(X)))


# ---- the program


def layer_by_hand(params, x):
    weight, bias = params
    product = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
    return x + 0.5 * jnp.tanh(product + jnp.broadcast_to(bias, product.shape))


def by_hand(arrays, x, wrap=lambda f: f, **options):
    step = wrap(lambda x, params: (layer_by_hand(params, x), None))
    return jax.lax.scan(step, x, tuple(arrays), **options)[0]


STRUCTURE = jax.tree.structure(blocks())


def by_stack(arrays, x, **options):
    return jax.tree.unflatten(STRUCTURE, arrays).replace(**options)(x, gate=0.5)


remat_by_hand = ft.partial(jax.checkpoint, prevent_cse=False)
PROGRAMS = {
    "plain": ({}, {}),
    "unrolled": ({"unroll": 2}, {"unroll": 2}),
    "remat": ({"remat": True}, {"wrap": remat_by_hand}),
    "policy": ({"remat": KEEP_DOTS}, {"wrap": ft.partial(remat_by_hand, policy=KEEP_DOTS)}),
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled
def test_the_program_is_that_of_a_scan_by_hand(name):
    """Forward and gradient have the same equations, and the same operations once compiled."""
    ours, hands = (
        ft.partial(f, **options)
        for f, options in zip((by_stack, by_hand), PROGRAMS[name], strict=True)
    )
    arrays = jax.tree.leaves(blocks())

    for of in (
        lambda f: f,
        lambda f: jax.grad(lambda a, x: jnp.mean(f(a, x) ** 2), argnums=(0, 1)),
    ):
        assert equations(of(ours), arrays, X) == equations(of(hands), arrays, X)
        assert operations(of(ours), arrays, X) == operations(of(hands), arrays, X)


def test_a_stack_that_is_written_out_recomputes_nevertheless():
    """Without a loop, XLA would notice that the same is computed twice, and undo it."""

    def barriers(**options):
        jaxpr = jax.make_jaxpr(lambda x: blocks(remat=True, **options)(x))(X)
        return "prevent_cse=True" in str(jaxpr)

    def tanhs(**options):
        grad = pm.filter_jit(pm.filter_grad(mean_square))
        return grad.lower(blocks(**options), X).compile().as_text().count(" tanh(")

    assert tanhs(unroll=True, remat=True) > tanhs(unroll=True)
    assert [barriers(unroll=n) for n in (1, 2, DEPTH, True)] == [False, False, True, True]


def test_an_error_in_a_layer_says_so():
    """Where it is in a deep model: by number in a Sequential; a scan has no numbers."""
    net = nn.Sequential([nn.Identity(), blocks()])

    with pytest.raises(ShapeError, match="in_features=2") as info:
        net(jnp.ones(3))
    notes = [note for note in info.value.__notes__ if note.startswith("in ")]
    assert notes == ["in layer: Block of a Stack", "in layers[1]: Stack"]


class Optional(pm.Module):
    """Takes a State, and has no token if it has no norm; its number is data."""

    norm: nn.BatchNorm | None = None
    size: int = 2

    def __call__(self, x, state):
        return (x * self.size, state) if self.norm is None else self.norm(x, state)


def test_a_layer_that_takes_a_state_gets_it_without_tokens():
    """Its number is the same for all, also where a plain transform has made an array of it."""
    stack, expected = nn.Stack(Optional, DEPTH), X * 2**DEPTH
    call = lambda stack, x: stack(x, pm.State(stack))[0]  # noqa: E731

    assert_close(call(stack, X), expected)
    assert_close(jax.jit(call)(stack, X), expected)
    assert_close(call(nn.Sequential([Optional()] * DEPTH), X), expected)
