"""`Stack`: its results, its behavior as a sequence, and its use of State and keys."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import (
    ArgumentError,
    ShapeError,
)
from tests.helpers.equations import equations, operations
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

DEPTH = 3


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
    """A Stack is made once for each depth."""
    return nn.Stack(Block, depth, key=jax.random.key(0))


def blocks(depth=DEPTH, **options):
    """A Stack without State."""
    return make_blocks(depth).replace(**options)


def one_by_one(layers, x):
    """The definition of a Stack."""
    for layer in layers:
        x = layer(x)
    return x


def mean_square(layer, x):
    """A scalar to differentiate."""
    return jnp.mean(layer(x) ** 2)


X = jnp.asarray(wave(5, 2))


# ---- results


@pytest.mark.parametrize(
    ("unroll", "remat"),
    [(1, False), (2, True), (True, False), (1, True), (2, jax.checkpoint_policies.dots_saveable)],
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


def test_each_layer_is_made_with_a_key_of_its_own(key):
    """The keys are those of one split: the layers are those that a list would hold."""
    stack = nn.Stack(ft.partial(nn.Linear, 2, 2), DEPTH, key=key)

    for layer, own in zip(stack, jax.random.split(key, DEPTH), strict=True):
        assert_close(layer.weight, nn.Linear(2, 2, key=own).weight)


@pytest.mark.parametrize(
    ("make_layer", "given", "keyed"),
    [
        (lambda key: nn.LayerNorm(2), True, True),
        (lambda **arguments: nn.LayerNorm(2, use_bias="key" in arguments), True, True),
        (lambda **arguments: nn.LayerNorm(2, use_bias="key" in arguments), False, False),
        (lambda key=None: nn.LayerNorm(2, use_bias=key is not None), True, True),
        (lambda key=None: nn.LayerNorm(2, use_bias=key is not None), False, False),
        (lambda: nn.LayerNorm(2, use_bias=False), True, False),
        (ft.partial(nn.LayerNorm, 2, use_bias=False), False, False),
    ],
)
def test_a_layer_is_made_with_a_key_if_it_takes_one(make_layer, given, keyed, key):
    """`make_layer(key=k)` if it takes key and there is one, `make_layer()` otherwise."""
    stack = nn.Stack(make_layer, DEPTH, key=key if given else None)

    assert stack(X).shape == X.shape
    assert stack.layer.weight.shape == (DEPTH, 2)
    assert (stack.layer.bias is not None) == keyed


def test_a_layer_without_arrays_is_stacked():
    """No array has a leading axis; the depth is known nevertheless."""
    stack = nn.Stack(ft.partial(nn.Lambda, jnp.sin), DEPTH)

    assert jax.tree.leaves(stack) == []
    assert [type(layer) for layer in stack] == [nn.Lambda] * DEPTH
    assert_close(stack(X), jnp.sin(jnp.sin(jnp.sin(X))))


def test_keys_come_from_init_keys(key):
    """A Stack takes one for each layer, past those that were taken before."""
    keys, same = pm.init_keys(key), pm.init_keys(key)

    _, stack = next(keys), nn.Stack(ft.partial(nn.Linear, 2, 2), DEPTH, key=keys)

    next(same)
    for layer, own in zip(stack, same.take(DEPTH), strict=True):
        assert_close(layer.weight, nn.Linear(2, 2, key=own).weight)


def test_no_layers_are_the_identity():
    """With depth 0, the output is the input."""
    stack = blocks(0)

    assert_close(stack(X), X)
    assert list(stack) == []
    assert stack.layer.linear.weight.shape == (0, 2, 2)


def test_the_input_may_be_any_tree():
    """A layer may return several arrays, and other leaves."""
    linear = nn.Linear(2, 2, key=jax.random.key(0))

    def layer(x):
        return {"h": linear(x["h"]) + x["skip"], "skip": x["skip"], "name": x["name"]}

    stack = nn.Stack(lambda: nn.Lambda(layer), DEPTH)
    out = stack({"h": X, "skip": X, "name": "encoder"})

    expected = {"h": X, "skip": X, "name": "encoder"}
    for _ in range(DEPTH):
        expected = layer(expected)
    assert out["name"] == "encoder"
    assert_close(out["h"], expected["h"])


# ---- arguments


def test_each_layer_gets_a_key_of_its_own(key):
    """One split of the key for all layers; without a key, they are called without one."""

    class Drawing(pm.Module):
        def __call__(self, x, *, key=None):
            return x if key is None else jnp.roll(x, 1).at[0].set(jax.random.uniform(key))

    stack = nn.Stack(Drawing, DEPTH)
    drawn = stack(jnp.zeros(DEPTH), key=key)

    expected = [jax.random.uniform(own) for own in jax.random.split(key, DEPTH)]
    assert_close(drawn, jnp.stack(expected[::-1]))
    assert_close(stack(jnp.ones(DEPTH)), jnp.ones(DEPTH))


def test_layers_that_use_no_key_get_none(key):
    """A key for the model is not an error: it is not split."""

    def apply(stack, key):
        return stack(X, key=key)

    plain = nn.Stack(lambda: nn.Lambda(jnp.sin), DEPTH)

    assert_close(apply(plain, key), plain(X))
    assert "random_split" not in equations(lambda key: apply(plain, key), key)
    assert "random_split" in equations(lambda key: apply(blocks(), key), key)


def test_arguments_by_name_are_the_same_for_all_layers():
    """Arrays are closed over, anything else is part of the program."""
    stack, gate = blocks(), jnp.asarray(0.5)

    expected = one_by_one([ft.partial(layer, gate=gate) for layer in stack], X)
    assert_close(stack(X, gate=gate), expected)
    assert_close(stack(X, gate=0.5), expected)


def test_arguments_for_each_layer_have_a_leading_axis():
    """`per_layer` is taken apart as the layers are."""
    stack, gates = blocks(), jnp.arange(1.0, DEPTH + 1)

    expected = one_by_one([ft.partial(f, gate=g) for f, g in zip(stack, gates, strict=True)], X)
    assert_close(stack(X, per_layer={"gate": gates}), expected)


# ---- a sequence


@pytest.mark.parametrize("second", [jnp.ones(3), None, jax.random.key(0)], ids=label)
@pytest.mark.parametrize("depth", [0, 2])
def test_further_arguments_by_position_are_refused(second, depth):
    """They would not reach the layers, and come back beside the result as if they were State."""
    make_layer = ft.partial(nn.Dropout, 0.5, inference=True)
    stack = nn.Stack(make_layer, depth)

    for calling in (stack, jax.jit(stack)):
        with pytest.raises(ArgumentError, match=r"^Stack\(Dropout, depth=") as error:
            calling(jnp.ones(3), second)
    assert str(error.value).endswith(
        "  Pass further arguments for the layers, and a key, by name:\n"
        "      stack(x, mask=mask, key=key)"
    )


def test_stack_is_a_sequence():
    """Length, iteration, index and slice."""
    stack = blocks(4)

    assert len(stack) == 4
    assert [type(layer) for layer in stack] == [Block] * 4
    assert_close(stack[1].linear.weight, stack.layer.linear.weight[1])
    assert pm.tree_equal(stack[-1], stack[3])
    assert pm.tree_equal(list(stack)[2], stack[np.int64(2)])


@pytest.mark.parametrize("part", [slice(1, 3), slice(None), slice(None, None, -1), slice(2, 2)])
def test_a_slice_is_a_stack(part):
    """stack[part] has the layers that list(stack)[part] has, and the same options."""
    stack = blocks(4, remat=True)

    assert stack[part].remat is True
    assert pm.tree_equal(list(stack[part]), list(stack)[part])
    assert_close(stack[part](X), one_by_one(list(stack)[part], X))


def test_list_and_stack_become_one_another():
    """from_layers(unstack()) gives the Stack back, and the other way round, for plain layers."""
    stack = blocks(remat=True, unroll=2)

    again = nn.Stack.from_layers(stack.unstack(), remat=True, unroll=2)

    assert pm.tree_equal(again, stack)
    assert pm.tree_equal(nn.Stack.from_layers(iter(stack)).unstack(), stack.unstack())


def test_leaves_of_the_list_are_slices_of_the_stack_by_path():
    """`[i].linear.weight` of the list is `layer.linear.weight[i]`: checkpoints can be converted."""
    stack = blocks()
    of_stack = dict(jax.tree_util.tree_leaves_with_path(stack.layer))

    of_list = jax.tree_util.tree_leaves_with_path(stack.unstack())

    assert len(of_list) == DEPTH * len(of_stack)
    for (number, *path), leaf in of_list:
        assert_close(leaf, of_stack[tuple(path)][number.idx])


# ---- mistakes


def wide(x):
    """Changes shapes and dtypes in several ways, as asked for by its input."""
    return {
        "shape": {"x": x.get("x", 0), "shape": jnp.ones(3)},
        "dtype": {**x, "dtype": jnp.ones(2, jnp.float16)},
        "more": {**x, "extra": jnp.ones(2)},
        "name": {**x, "name": "b"},
    }[next(iter(x.keys() - {"x"}))]


def test_weakly_typed_inputs_are_promoted():
    """A Python number is a valid first input: the output of the layers has the type."""
    stack = nn.Stack(lambda: nn.Lambda(lambda x: x * jnp.asarray(2.0, jnp.float32)), DEPTH)

    assert float(stack(1.0)) == 2**DEPTH


def test_arrays_without_the_leading_axis_are_refused():
    """By path; for an ensemble of Stacks the error shows how to call it."""
    stacks = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), blocks())
    text = (
        r"got 2 without one\.\n  at layer\.linear\.weight: f32\[2,3,2,2\]\n(.|\n)*pm\.filter_vmap\("
    )

    for use in (lambda: stacks(X), lambda: stacks[0], lambda: stacks.unstack()):
        with pytest.raises(ShapeError, match=rf"^Stack\(Block, depth=3\): (.|\n)*{text}"):
            use()


# ---- as part of a model


def test_modes_reach_the_layers():
    """inference_mode sets the flags inside, for all layers at once."""
    training = nn.inference_mode(blocks(), False)

    assert not training.layer.dropout.inference
    assert not pm.tree_equal(training(X, key=jax.random.key(1)), blocks()(X))
    assert pm.tree_equal(nn.inference_mode(training), blocks())


def test_one_layer_is_edited_inside():
    """tree_at reaches the stacked weight, of which one layer's part is set."""
    edited = pm.tree_at(
        lambda s: s.layer.linear.weight, blocks(), replace_fn=lambda w: w.at[1].set(0.0)
    )

    layers = list(blocks())
    layers[1] = pm.tree_at(lambda layer: layer.linear.weight, layers[1], jnp.zeros((2, 2)))
    assert pm.tree_equal(edited, nn.Stack.from_layers(layers))


def test_the_gradient_of_chosen_leaves():
    """wrt chooses among the stacked arrays, for all layers at once."""
    grads = pm.filter_grad(mean_square, wrt="layer.linear.bias")(blocks(), X)

    everything = pm.filter_grad(mean_square)(blocks(), X)
    assert grads.layer.linear.weight is None
    assert_close(grads.layer.linear.bias, everything.layer.linear.bias)
    assert len(grads) == DEPTH


def test_a_training_step_gives_its_memory_away():
    """Donated through filter_jit, every array of the old Stack is gone, and nothing is retraced."""
    traces = []

    @pm.filter_jit(donate="stack")
    def step(stack, x):
        traces.append(None)
        grads = pm.filter_grad(mean_square)(stack, x)
        return pm.apply_updates(stack, jax.tree.map(lambda g: -0.1 * g, grads))

    stack = first = jax.tree.map(jnp.copy, blocks())
    for _ in range(3):
        stack = step(stack, X)
    assert len(traces) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert float(mean_square(stack, X)) < float(mean_square(blocks(), X))


@pytest.mark.slow
def test_an_ensemble_of_stacks():
    """Made and called by filter_vmap, along any axis, it is the stack of single calls."""
    keys = jax.random.split(jax.random.key(0), 2)

    def make(key):
        return nn.Stack(Block, DEPTH, key=key)

    for axis in (0, 1):
        stacks = pm.filter_vmap(make, out_axes=axis)(keys)
        out = pm.filter_vmap(lambda s, x: s(x), in_axes=(axis, None))(stacks, X)
        assert_close(out, jnp.stack([make(key)(X) for key in keys]))


@ft.cache
def make_nested():
    """A Stack of Stacks, both of which recompute."""
    return nn.Stack(
        lambda key: nn.Stack(Block, 2, key=key, remat=True),
        DEPTH,
        key=jax.random.key(0),
        remat=True,
    )


def test_stacks_nest():
    """A Stack of Stacks, in a Sequential: two leading axes, applied outer by outer."""
    stack = make_nested().replace(remat=False)
    net = nn.Sequential([nn.Lambda(jnp.sin), stack, nn.Identity()])

    assert stack.layer.layer.linear.weight.shape == (DEPTH, 2, 2, 2)
    layers = [layer for inner in stack for layer in inner]
    assert_close(net(X, key=jax.random.key(1)), one_by_one(layers, jnp.sin(X)))


def test_a_sequential_is_stacked():
    """Layers with a different configuration in turn: a Stack of pairs."""

    def pair(key):
        one, two = jax.random.split(key)
        return nn.Sequential(
            [nn.Linear(2, 4, key=one), nn.Lambda(jnp.tanh), nn.Linear(4, 2, key=two)]
        )

    stack = nn.Stack(pair, DEPTH, key=jax.random.key(0))

    assert_close(stack(X, key=jax.random.key(1)), one_by_one(stack, X))


def test_shapes_alone_are_enough():
    """Under eval_shape a Stack is made, indexed and called without any array."""
    make = ft.partial(nn.Stack, Block, 100)

    stack = pm.filter_eval_shape(make, key=jax.random.key(0))
    assert stack.layer.linear.weight.shape == (100, 2, 2)
    assert pm.filter_eval_shape(lambda stack, x: stack(x), stack, X).shape == X.shape


# ---- the program


def layer_by_hand(params, x):
    """A Block as a function of a tuple of arrays."""
    weight, bias = params
    return x + 0.5 * jnp.tanh(nn.functional.linear(x, weight, bias))


def by_hand(arrays, x, wrap=lambda f: f, **options):
    """The scan that one would write without the library."""
    step = wrap(lambda x, params: (layer_by_hand(params, x), None))
    return jax.lax.scan(step, x, tuple(arrays), **options)[0]


STRUCTURE = jax.tree.structure(blocks())


def by_stack(arrays, x, **options):
    """The same by a Stack of these arrays."""
    return jax.tree.unflatten(STRUCTURE, arrays).replace(**options)(x, gate=0.5)


remat_by_hand = ft.partial(jax.checkpoint, prevent_cse=False)
PROGRAMS = {
    "plain": ({}, {}),
    "unrolled": ({"unroll": 2}, {"unroll": 2}),
    "remat": ({"remat": True}, {"wrap": remat_by_hand}),
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
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


def test_the_program_does_not_grow_with_the_depth():
    """Depth 100 has the equations of depth 2."""

    def gradient(depth):
        structure = jax.tree.structure(blocks(depth))
        grad = jax.grad(lambda arrays: mean_square(jax.tree.unflatten(structure, arrays), X))
        return equations(grad, jax.tree.leaves(blocks(depth)))

    assert gradient(2) == gradient(100)


def test_a_call_without_jit_traces_its_layers_once():
    """The scan is compiled by the first call, and found again by the others."""
    traces = []

    def layer(x):
        traces.append(None)
        return jnp.sin(x)

    stack = nn.Stack(lambda: nn.Lambda(layer), DEPTH)
    stack(X)
    first = len(traces)
    stack(2 * X)

    assert first > 0
    assert len(traces) == first


def test_a_recomputing_stack_stores_less():
    """remat lowers the temporary memory of the gradient, and a policy gives it back in part."""
    x = jnp.ones((64, 2))

    def memory(remat):
        grad = pm.filter_jit(pm.filter_grad(mean_square))
        compiled = grad.lower(blocks(100, remat=remat), x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_of_it, none, policy = map(
        memory, (False, True, jax.checkpoint_policies.everything_saveable)
    )
    assert none < 0.7 * all_of_it
    assert policy > none


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


def test_a_scan_of_scans_that_recompute():
    """Linen's remat_scan: Stacks nest, and each level recomputes its inner levels."""

    @jax.jit
    def gradient(arrays):
        stack = jax.tree.unflatten(jax.tree.structure(make_nested()), arrays)
        return jax.tree.leaves(pm.filter_grad(mean_square)(stack, X))

    @jax.jit
    def flat_gradient(arrays):
        flat = [leaf.reshape(DEPTH * 2, *leaf.shape[2:]) for leaf in arrays]
        stack = jax.tree.unflatten(jax.tree.structure(blocks(DEPTH * 2)), flat)
        return jax.tree.leaves(pm.filter_grad(mean_square)(stack, X))

    arrays = jax.tree.leaves(make_nested())
    for found, expected in zip(gradient(arrays), flat_gradient(arrays), strict=True):
        assert_close(found, expected.reshape(found.shape))
