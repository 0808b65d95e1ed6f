"""Intended differences to Equinox: of each small program, what either library makes.

Every other file of this folder holds programs that must agree. A program that has to change when
the import changes belongs here. `docs/how-to/come-from-equinox.md` names each test.
"""

import dataclasses
import io
import tempfile
from pathlib import Path
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod
from tests.parity.helpers import deviation, outcome, raises, ramp, with_known_weights

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow

KEY = jax.random.key(0)


def linear(eqx, n_in=2, n_out=3):
    """A Linear with the same weights in both libraries."""
    return with_known_weights(eqx.nn.Linear(n_in, n_out, key=KEY))


def close(a, b):
    return bool(jnp.allclose(a, b, rtol=1e-4, atol=1e-6))


def activated(eqx):
    """A Module with an array, a function and a string in fields that are not static."""

    class Activated(eqx.Module):
        weight: jax.Array
        activation: Any
        mode: str

        def __call__(self, x):
            return jnp.sum(self.activation(self.weight * x))

    return Activated(ramp(2), jnp.tanh, "train")


# ---- leaves and configuration


@deviation(theirs=3, ours=1)
def test_functions_and_strings_in_fields_are_configuration(eqx):
    """Equinox makes leaves of them; in pytreemod the arrays are the only leaves."""
    return len(jtu.tree_leaves(activated(eqx)))


@deviation(theirs=raises(TypeError, "abstract array"), ours=2 * (1 - jnp.tanh(2 * ramp(2)) ** 2))
def test_a_module_with_a_function_goes_through_plain_jit(eqx):
    """Equinox's is refused by `jax.jit` and `jax.grad`; pytreemod's needs no filter."""
    return jax.jit(jax.grad(lambda m: m(2.0)))(activated(eqx)).weight


@deviation(theirs=None, ours=jnp.tanh)
def test_a_gradient_keeps_the_configuration(eqx):
    """Equinox's gradient has None for a function; pytreemod's has the function."""
    return eqx.filter_grad(lambda m: m(2.0))(activated(eqx)).activation


@deviation(theirs=raises(TypeError, "array"), ours=(2, 3, 2))
def test_networks_can_be_stacked(eqx):
    """Stacking two MLPs fails in Equinox, for their functions; in pytreemod it is one line."""
    mlps = [eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(seed)) for seed in (0, 1)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *mlps).layers[0].weight.shape


@deviation(theirs=[True, True], ours=[False, False])
def test_flags_of_layers_are_configuration(eqx):
    """Numbers and flags are leaves in Equinox; in pytreemod a layer's leaves are arrays only."""
    return [jtu.tree_leaves(layer) != [] for layer in (eqx.nn.Dropout(0.5), eqx.nn.MaxPool2d(2))]


@deviation(theirs=raises(TypeError, "not a leaf"), ours=False)
def test_tree_at_reaches_configuration(eqx):
    """Equinox cannot edit a static field; pytreemod's `tree_at` edits every field."""
    return eqx.tree_at(lambda m: m.use_bias, linear(eqx), False).use_bias


@deviation(theirs=[1], ours=[1, 2.0])
def test_class_defaults_stay_in_the_tree(eqx):
    """A default that `__init__` does not set is not a leaf in Equinox; in pytreemod it is."""

    class Layer(eqx.Module):
        weight: int
        scale: float = 2.0

        def __init__(self):
            self.weight = 1

    return jtu.tree_leaves(Layer())


# ---- calls, comparing, printing


@deviation(theirs=False, ours=True)
def test_filter_jit_is_asynchronous(eqx):
    """Equinox waits for the device on every call; pytreemod returns as `jax.jit` does."""
    spin = lambda _, y: jnp.tanh(y @ y)  # noqa: E731
    busy = eqx.filter_jit(lambda x: jax.lax.fori_loop(0, 1000, spin, x))
    jax.block_until_ready(busy(jnp.eye(200)))
    result = busy(jnp.eye(200))
    is_early = not result.is_ready()
    jax.block_until_ready(result)
    return is_early


@deviation(theirs=False, ours=True)
def test_equality_is_a_bool(eqx):
    """With arrays inside, `==` is an array in Equinox and a bool in pytreemod."""
    return (linear(eqx) == linear(eqx)) is True


@deviation(theirs=False, ours=raises(dataclasses.FrozenInstanceError, "weight"))
def test_deletion_is_refused(eqx):
    """Equinox lets a field be deleted from a frozen Module; pytreemod does not."""
    layer = linear(eqx)
    del layer.weight
    return "weight" in vars(layer)


@deviation(theirs=True, ours=False)
def test_a_finished_module_is_not_changed_by_object_setattr(eqx):
    """Equinox's tree changes; pytreemod's is the one that was flattened first."""
    layer = linear(eqx)
    jtu.tree_leaves(layer)
    object.__setattr__(layer, "weight", ramp(3, 2) + 1)
    return jtu.tree_leaves(layer)[0] is layer.weight


@deviation(theirs=True, ours=False)
def test_a_bound_method_is_no_module(eqx):
    """Equinox's is a Module; pytreemod's is a `functools.partial`, which is cheaper to make."""

    class Model(eqx.Module):
        def method(self):
            return 0

    return isinstance(Model().method, eqx.Module)


@deviation(theirs=[False, False], ours=[True, True])
def test_jitted_functions_print_without_their_address(eqx):
    """Equinox shows the address of a function under `jax.jit`; pytreemod shows its name alone."""
    names = {jax.nn.relu: "relu", jnp.tanh: "tanh"}
    return [eqx.tree_pformat(fn) == f"<function {name}>" for fn, name in names.items()]


@deviation(theirs=True, ours=False)
def test_repr_leaves_out_defaults(eqx):
    """Equinox shows every field; here `tree_pformat` does."""
    layer = eqx.nn.Linear(2, 3, use_bias=False, key=KEY)
    assert "bias=None" in eqx.tree_pformat(layer)
    return "bias=None" in repr(layer)


# ---- State


@deviation(theirs=raises(ValueError, "different structures"), ours=[False, False])
def test_initial_values_of_tokens_have_no_weak_type(eqx):
    """Equinox keeps it, and refuses a strong value later; in pytreemod both fit, compiled once."""
    token, state = eqx.nn.make_with_state(lambda: eqx.nn.StateIndex(jnp.asarray(0.5)))()
    after = state.set(token, jnp.float32(1)).set(token, 2.0)
    _, state = eqx.nn.make_with_state(lambda: eqx.nn.StateIndex(jnp.asarray(0.5)))()
    return [jtu.tree_leaves(s)[0].weak_type for s in (state, after)]


@deviation(theirs=1, ours=raises(ValueError, "path"))
def test_a_token_in_two_places_is_refused_by_state(eqx):
    """Equinox's State(model) has one value for both; pytreemod asks to name them by path."""
    token = eqx.nn.StateIndex(jnp.zeros(2))
    return len(jtu.tree_leaves(eqx.nn.State([token, token])))


def updated(eqx, in_state, in_part):
    """Values of a State that was changed beside its substate, after that was put back."""
    tokens = [eqx.nn.StateIndex(jnp.zeros(())) for _ in range(2)]
    state = eqx.nn.State(tokens)
    part = state.substate(tokens).set(tokens[in_part], jnp.ones(()))
    state = state.set(tokens[in_state], jnp.float32(2)).update(part)
    return [float(state.get(token)) for token in tokens]


@deviation(theirs=[[0.0, 1.0], [1.0, 0.0]], ours=["refused", "refused"])
def test_update_refuses_a_substate_of_an_older_state(eqx):
    """Equinox's update goes back to the value that the substate took."""
    return [outcome(lambda part=part: updated(eqx, 0, part), ValueError) for part in (1, 0)]


@deviation(theirs=(3,), ours=(2,))
def test_containers_from_a_state_are_the_callers_own(eqx):
    """Equinox returns its own container."""
    token = eqx.nn.StateIndex({"a": jnp.zeros(2)})
    state = eqx.nn.State(token)
    state.get(token)["a"] = jnp.ones(3)
    return state.get(token)["a"].shape


@deviation(theirs=(3,), ours=raises(ValueError, "axes"))
def test_a_value_with_the_axis_of_a_map_is_set_inside_of_one(eqx):
    """Equinox continues with the broadcast value."""
    token, state = eqx.nn.make_with_state(lambda: eqx.nn.StateIndex(jnp.asarray(0)))()

    def add(x, state):
        return x, state.set(token, state.get(token) + 1)

    _, state = jax.vmap(add, in_axes=(0, None))(jnp.ones(3), state)
    assert state.get(token).tolist() == [1, 1, 1]
    return add(1.0, state)[1].get(token).shape


# ---- BatchNorm


def apply_batch_norm(layer, state, *batches):
    """A BatchNorm over the first axis of each batch in turn: the last output, and the State."""
    mapped = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    jitted = jax.jit(mapped) if len(batches) > 1 else mapped
    for x in batches:
        y, state = jitted(x, state)
    return y, state


@pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm")
@deviation(theirs=False, ours=True)
def test_batch_norm_is_the_standard_one_by_default(eqx):
    """Equinox warns and uses running statistics in training; pytreemod does as `mode="batch"`."""
    batches = [jnp.sin(5 * ramp(4, 3)) + 1, 3 * jnp.cos(7 * ramp(4, 3))]
    default = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch")
    standard = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    return close(apply_batch_norm(*default, *batches)[0], apply_batch_norm(*standard, *batches)[0])


def running_statistics(eqx, batches, momentum):
    """Mean and variance that a BatchNorm uses for inference, read off two outputs."""
    mode = {"mode": "batch"} if eqx is equinox else {}
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        2, "batch", **mode, momentum=momentum, channelwise_affine=False, eps=0.0
    )
    _, state = apply_batch_norm(layer, state, *batches)
    zeros_and_ones = jnp.array([[0.0, 0.0], [1.0, 1.0]])
    (at_0, at_1), _ = apply_batch_norm(eqx.nn.inference_mode(layer), state, zeros_and_ones)
    deviation = 1 / (at_1 - at_0)
    return -at_0 * deviation, deviation**2


def test_running_statistics_of_batch_norm_are_those_of_pytorch():
    """Equinox divides statistics by 1 - momentum**n; pytreemod follows PyTorch."""
    x, momentum = jnp.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]), 0.9
    mean, biased, unbiased = x.mean(0), x.var(0), x.var(0, ddof=1)

    def check(found, expected):
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4)

    theirs = running_statistics(equinox, [x], momentum)
    check(theirs, (mean, (0.9 + 0.1 * biased) / (1 - 0.9)))
    ours = running_statistics(pytreemod, [x], momentum)
    check(ours, (0.1 * mean, 0.9 + 0.1 * unbiased))
    # On one batch again and again both forget where they started.
    check(running_statistics(equinox, [x] * 10, 0.3), (mean, biased))
    check(running_statistics(pytreemod, [x] * 10, 0.3), (mean, unbiased))


@deviation(theirs="StateIndex", ours="NoneType")
def test_batch_norm_does_not_count_batches(eqx):
    """Equinox's counter corrects running numbers for their start; ours has none by default."""
    mode = {"mode": "batch"} if eqx is equinox else {}
    return type(eqx.nn.BatchNorm(3, "batch", **mode).batch_counter).__name__


@deviation(theirs=raises(TypeError, "axis_name"), ours=True)
def test_batch_norm_applies_to_a_batch(eqx):
    """Outside `vmap` Equinox's has no axis to average over; pytreemod's takes the batch itself."""
    x = jnp.sin(5 * ramp(4, 3)) + 1
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, channelwise_affine=False)
    expected = (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)
    return close(layer(x, state)[0], expected)


# ---- layers and shapes


@deviation(theirs=raises(Exception, "axis"), ours=jnp.float32(1.0))
def test_a_function_as_activation_gets_the_whole_array(eqx):
    """Equinox maps it over the neurons; in pytreemod it may read neighboring neurons."""
    return eqx.nn.MLP(2, 3, 4, 1, final_activation=jax.nn.softmax, key=KEY)(ramp(2)).sum()


@deviation(theirs=False, ours=True)
def test_the_final_activation_of_an_mlp_without_hidden_layers_is_applied(eqx):
    """Equinox drops it where depth is 0."""
    mlp = eqx.nn.MLP(2, 3, 4, 0, final_activation=jnp.exp, key=KEY)
    return close(mlp(ramp(2)), jnp.exp(mlp.layers[0](ramp(2))))


@deviation(theirs=[[2.0, 2.0]], ours=[[-2.0, -2.0]])
def test_an_operation_of_an_adaptive_pool_is_applied_once(eqx):
    """In Equinox twice, where the sizes divide."""
    pool = eqx.nn.AdaptivePool(2, 1, lambda window: -jnp.sum(window))
    return pool(jnp.ones((1, 4))).tolist()


@deviation(theirs=["refused"] * 6, ours=[True] * 6)
def test_layers_broadcast_over_leading_axes(eqx):
    """Equinox's layers take one example and need `vmap`; pytreemod's take leading axes too."""
    layers = [
        (eqx.nn.Linear(2, 3, key=KEY), ramp(5, 2)),
        (eqx.nn.Conv1d(2, 3, 2, key=KEY), ramp(5, 2, 4)),
        (eqx.nn.LayerNorm((3,)), ramp(5, 3)),
        (eqx.nn.MaxPool2d(2), ramp(5, 2, 3, 3)),
        (eqx.nn.MLP(2, 3, 4, 1, key=KEY), ramp(5, 2)),
        (eqx.nn.Embedding(4, 3, key=KEY), jnp.arange(5, dtype=jnp.int32) % 4),
    ]

    errors = TypeError, ValueError, AssertionError
    return [
        outcome(lambda f=layer, x=x: close(f(x), jax.vmap(f)(x)), *errors) for layer, x in layers
    ]


@deviation(theirs=(3, 3), ours=raises(ValueError, r"Linear\("))
def test_a_forgotten_batch_axis_is_no_broadcast_bias(eqx):
    """With 4 features in and 3 out, Equinox multiplies a (4, 3) batch; pytreemod refuses it."""
    with jax.numpy_rank_promotion("allow"):
        return linear(eqx, 4, 3)(ramp(4, 3)).shape


@deviation(theirs=raises(TypeError, "dot_general"), ours=raises(ValueError, r"Linear\("))
def test_a_wrong_feature_size_is_a_shape_error(eqx):
    """Equinox hands the mistake to JAX, a TypeError; pytreemod's own is a ValueError."""
    return linear(eqx)(ramp(7))


@deviation(theirs=(5,), ours=raises(ValueError, "weight"))
def test_an_array_that_does_not_fit_its_layer_is_refused(eqx):
    """Equinox computes with any array; pytreemod checks its shape."""
    layer = eqx.nn.Linear(2, 3, use_bias=False, key=KEY)
    return eqx.tree_at(lambda m: m.weight, layer, ramp(5, 2))(ramp(2)).shape


@deviation(theirs=(3, 3), ours=raises(ValueError, r"Linear\("))
def test_layers_that_are_stacked_are_not_called_as_one(eqx):
    """Equinox broadcasts a bias-free layer over its members; pytreemod refuses."""
    make = lambda key: eqx.nn.Linear(3, 3, use_bias=False, key=key)  # noqa: E731
    return eqx.filter_vmap(make)(jax.random.split(KEY, 3))(ramp(3)).shape


@deviation(theirs=1, ours=raises(ValueError, "num_heads"))
def test_heads_that_do_not_divide_are_refused(eqx):
    """Equinox rounds their size down; pytreemod wants it said."""
    return eqx.nn.MultiheadAttention(3, 4, key=KEY).qk_size


@deviation(theirs=True, ours=raises(TypeError, "mask"))
def test_a_mask_of_numbers_is_refused(eqx):
    """Equinox takes all but 0 for True, also if you meant a bias; pytreemod needs booleans."""
    x, added = ramp(2, 4), jnp.asarray([[0.0, -1e9], [0.0, 0.0]])
    layer = eqx.nn.MultiheadAttention(2, 4, key=KEY)
    return close(layer(x, x, x, added), layer(x, x, x, added != 0))


@deviation(theirs=["int32"] * 3, ours=["refused"] * 3)
def test_norms_and_rotary_embeddings_refuse_integers(eqx):
    """Equinox rounds their outputs to integers; the other layers accept integers in both."""
    x = jnp.arange(8).reshape(2, 4)
    rotary = eqx.nn.RotaryPositionalEmbedding(4)
    calls = [(eqx.nn.LayerNorm(4), x[0]), (eqx.nn.RMSNorm(4), x[0]), (rotary, x)]
    with jax.numpy_dtype_promotion("standard"):
        return [outcome(lambda f=layer, x=x: f(x).dtype.name, TypeError) for layer, x in calls]


@deviation(theirs=True, ours=False)
def test_every_base_of_rotary_embeddings_has_its_own_angles(eqx):
    """Equinox keeps one table for each size and dtype, whatever the base; pytreemod keeps none."""
    x = ramp(5, 10)  # A size that no other test has.
    return close(*[eqx.nn.RotaryPositionalEmbedding(10, base)(x) for base in (100.0, 1e4)])


@deviation(theirs=raises(TypeError, "missing 2 required positional"), ours=True)
def test_an_attention_of_one_input_attends_to_itself(eqx):
    """Equinox wants all three, and no batch axes."""
    layer, x = eqx.nn.MultiheadAttention(2, 4, key=KEY), ramp(2, 3, 4)
    return close(layer(x), jax.vmap(lambda x: layer(x, x, x))(x))


@deviation(theirs=raises(TypeError, "key"), ours=2 * ramp(2))
def test_sequential_takes_layers_without_a_key(eqx):
    """Equinox passes `key` to every layer; pytreemod to those that have such a parameter."""

    class Double(eqx.Module):
        def __call__(self, x):
            return 2 * x

    return eqx.nn.Sequential([Double(), eqx.nn.Identity()])(ramp(2), key=KEY)


# ---- surgery


@deviation(theirs={"a": 4, "b": 2}, ours=raises(ValueError, "a"))
def test_tree_at_refuses_the_same_node_twice(eqx):
    """Equinox keeps the last of two replacements; pytreemod refuses to choose."""
    return eqx.tree_at(lambda t: (t["a"], t["a"]), {"a": 1.0, "b": 2}, (3, 4))


@deviation(theirs=raises(ValueError, "uniquely"), ours={"a": None, "b": 1})
def test_tree_at_tells_two_nones_apart(eqx):
    """Equinox finds nodes by identity, and all Nones are one; pytreemod finds them by path."""
    return eqx.tree_at(lambda t: t["b"], {"a": None, "b": None}, 1)


@deviation(theirs=["float32", (3, 2)], ours=["bfloat16", "refused"])
def test_an_update_changes_no_shape_and_no_dtype(eqx):
    """Equinox adds as JAX does: it broadcasts the model, and widens half precision."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return [
            eqx.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.ones(2)).dtype.name,
            outcome(lambda: eqx.apply_updates(jnp.ones(2), jnp.ones((3, 2))).shape, ValueError),
        ]


# ---- classes


@deviation(theirs=jnp.tanh, ours=raises(AttributeError, "Swish"))
def test_a_method_in_the_place_of_a_field_is_not_hidden(eqx):
    """In Equinox the field's value hides the method, unseen; pytreemod asks which is meant."""

    class Layer(eqx.Module):
        activation: Any

        def __init__(self, activation=jnp.tanh):
            self.activation = activation

    class Swish(Layer):
        def activation(self, x):
            return x * jax.nn.sigmoid(x)

    return Swish().activation


@deviation(theirs="made", ours=raises(TypeError, "size"))
def test_a_field_and_a_property_of_one_name_are_refused_with_the_class(eqx):
    """Equinox's `__init__` assigns to the property, which fails unless it has a setter."""

    class Config(eqx.Module):
        size: int

        @property
        def size(self):
            return 1

    assert outcome(Config, AttributeError) == "refused"
    return "made"


@deviation(theirs="made", ours=raises(TypeError, "lay-out conflict"))
def test_a_base_with_content_is_refused_with_the_class(eqx):
    """Equinox takes it, and its instances fail in the first transform."""

    class Table(eqx.Module, dict):
        x: float

    assert outcome(lambda: jax.tree.map(lambda x: x, Table(1.0)), TypeError) == "refused"
    return "made"


@deviation(theirs=0, ours=2)
def test_bound_special_methods_are_trees(eqx):
    """`m.__call__` hides its arrays from Equinox; in pytreemod it is a tree like `m.method`."""
    return len([x for x in jtu.tree_leaves(linear(eqx).__call__) if eqx.is_array(x)])


# ---- transforms


@deviation(theirs=raises(RuntimeError, "keyword"), ours=2 * ramp(3))
def test_filter_vmap_takes_keyword_arguments(eqx):
    """Equinox refuses them; in pytreemod they are mapped like the others."""
    return eqx.filter_vmap(lambda x, y: x + y)(ramp(3), y=ramp(3))


@deviation(theirs=raises(ValueError, "prefix"), ours=ramp(3, 2).sum(1))
def test_filter_vmap_takes_a_bare_spec_for_one_argument(eqx):
    """Equinox needs a tuple of one; pytreemod takes the spec of the only argument."""

    class Pair(eqx.Module):
        first: Any
        second: Any

    add = lambda pair: pair.first.sum() + pair.second.sum()  # noqa: E731
    return eqx.filter_vmap(add, in_axes=Pair(0, None))(Pair(ramp(3, 2), jnp.zeros(2)))


@deviation(theirs=(None, None), ours=(jnp.zeros(2), jnp.zeros(2)))
def test_what_does_not_move_has_a_tangent_of_zeros(eqx):
    """Equinox returns None for it; pytreemod an array, as `jax.jvp` does."""
    f = lambda x, y: (2 * y, jax.lax.stop_gradient(x))  # noqa: E731
    return eqx.filter_jvp(f, (ramp(2), ramp(2)), (ramp(2), None))[1]


@deviation(theirs=[None, None], ours=raises(ValueError, "filter_grad"))
def test_nothing_to_differentiate_is_an_error(eqx):
    """Equinox returns Nones; pytreemod says that no leaf is an inexact array."""
    return eqx.filter_grad(lambda t: jnp.float32(1.0))([jnp.int32(1), 2.0])


@deviation(theirs="traced", ours=raises(ValueError, "while tracing"))
def test_a_traced_item_has_no_message_yet(eqx):
    """Equinox returns the text "traced"; pytreemod raises, because the message is not known."""
    results = type(eqx.Enumeration)("Results", (eqx.Enumeration,), {"good": "well"})
    return eqx.filter_jit(lambda item: results[item])(results.good)


@deviation(theirs=raises(RuntimeError, "swapped"), ours=raises(ValueError, "pred"))
def test_a_float_is_no_predicate(eqx):
    """Equinox takes any number but 0 for a failure; pytreemod refuses numbers."""
    return eqx.error_if(ramp(2), jnp.asarray(0.5), "swapped")


# ---- files


def in_file(eqx, tree):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    return file.getvalue()


def from_file(eqx, data, like):
    return eqx.tree_deserialise_leaves(io.BytesIO(data), like)


@deviation(theirs=[1.0], ours=raises(RuntimeError, "more leaves"))
def test_a_file_that_goes_on_is_refused(eqx):
    """Equinox ignores content after the last leaf; in pytreemod only an open file may have more."""
    data = in_file(equinox, [1.0, 2.0])
    assert from_file(eqx, data, [0.0]) == [1.0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.eqx"
        path.write_bytes(data)
        return eqx.tree_deserialise_leaves(path, [0.0])


@deviation(theirs=[2, True], ours=["refused"] * 2)
def test_numbers_in_files_are_not_rounded(eqx):
    """Equinox converts to the type of `like`; pytreemod does if nothing is lost."""
    cases = [(2.5, 0), (7, True)]

    def read(value, like):
        data = in_file(equinox, np.asarray(value))
        return outcome(lambda: from_file(eqx, data, like), RuntimeError)

    return [read(value, like) for value, like in cases]


@deviation(theirs=[True] * 2, ours=["refused"] * 2)
def test_what_cannot_be_read_back_is_not_written(eqx):
    """Equinox writes a pickle, which it does not read, or nothing."""
    leaves = [np.array([None]), jax.ShapeDtypeStruct((2,), jnp.float32)]
    return [outcome(lambda x=x: in_file(eqx, [x]) is not None, RuntimeError) for x in leaves]
