"""Intended differences to Equinox: each test shows both sides.

Every other file of this folder holds programs that must agree. A program that has to change when
the import changes belongs here, with the line that a person coming from Equinox would write.
"""

import dataclasses
import io
from typing import Any, Protocol, runtime_checkable

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod
from pytreemod.io import equinox_files
from tests.parity.helpers import assert_same, caught, module_from, ramp, with_known_weights

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow

KEY = jax.random.key(0)


def assert_close(values, expected):
    """Both pairs of arrays agree to four digits."""
    np.testing.assert_allclose(np.array(values), np.array(expected), rtol=1e-4)


def linear(eqx, n_in=2, n_out=3):
    """A Linear with the same weights in both libraries."""
    return with_known_weights(eqx.nn.Linear(n_in, n_out, key=KEY))


def activated(eqx):
    """A Module with an array, a function and a string in fields that are not static."""

    class Activated(eqx.Module):
        weight: jax.Array
        activation: Any
        mode: str

        def __call__(self, x):
            return jnp.sum(self.activation(self.weight * x))

    return Activated(ramp(2), jnp.tanh, "train")


def test_repr_leaves_out_defaults():
    """Equinox shows every field; here `tree_pformat` does."""
    ours, theirs = (eqx.nn.Linear(2, 3, use_bias=False, key=KEY) for eqx in (pytreemod, equinox))
    assert "bias=None" in repr(theirs)

    assert repr(ours) == "Linear(weight=f32[3,2], in_features=2, out_features=3, use_bias=False)"
    assert "bias=None" in pytreemod.tree_pformat(ours)


def test_functions_and_strings_in_fields_are_configuration():
    """Equinox makes leaves of them; in pytreemod the arrays are the only leaves."""
    assert len(jtu.tree_leaves(activated(equinox))) == 3

    assert len(jtu.tree_leaves(activated(pytreemod))) == 1


def test_a_module_with_a_function_goes_through_plain_jit():
    """Equinox's is refused by `jax.jit` and `jax.grad`; pytreemod's needs no filter."""
    call = lambda m: m(2.0)  # noqa: E731
    with pytest.raises(TypeError, match="abstract array"):
        jax.jit(call)(activated(equinox))

    expected = equinox.filter_grad(call)(activated(equinox)).weight
    assert_same(expected, jax.jit(jax.grad(call))(activated(pytreemod)).weight)


def test_a_gradient_keeps_the_configuration():
    """Equinox's gradient has None for a function; pytreemod's has the function."""
    call = lambda m: m(2.0)  # noqa: E731
    assert equinox.filter_grad(call)(activated(equinox)).activation is None

    assert pytreemod.filter_grad(call)(activated(pytreemod)).activation is jnp.tanh


def test_networks_can_be_stacked():
    """Stacking two MLPs fails in Equinox, for their functions; in pytreemod it is one line."""
    stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
    mlps = {
        eqx: [eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(seed)) for seed in (0, 1)]
        for eqx in (equinox, pytreemod)
    }
    with pytest.raises(TypeError, match="array"):
        jax.tree.map(stack, *mlps[equinox])

    assert jax.tree.map(stack, *mlps[pytreemod]).layers[0].weight.shape == (2, 3, 2)


@pytest.mark.parametrize(("name", "args"), [("Dropout", (0.5,)), ("MaxPool2d", (2,))])
def test_flags_of_layers_are_configuration(name, args):
    """Numbers and flags are leaves in Equinox; in pytreemod a layer's leaves are arrays only."""
    assert jtu.tree_leaves(getattr(equinox.nn, name)(*args)) != []

    assert jtu.tree_leaves(getattr(pytreemod.nn, name)(*args)) == []


def test_tree_at_reaches_configuration():
    """Equinox cannot edit a static field; pytreemod's `tree_at` edits every field."""
    edit = lambda eqx: eqx.tree_at(lambda m: m.use_bias, linear(eqx), False)  # noqa: E731
    with pytest.raises(TypeError, match="not a leaf"):
        edit(equinox)

    assert edit(pytreemod).use_bias is False
    assert pytreemod.tree_at(lambda d: d.p, pytreemod.nn.Dropout(0.5), 0.1).p == 0.1
    assert equinox.tree_at(lambda d: d.p, equinox.nn.Dropout(0.5), 0.1).p == 0.1


def returns_before_it_has_finished(eqx):
    """Whether a compiled call of about 0.1 s comes back before its result is there."""
    spin = lambda _, y: jnp.tanh(y @ y)  # noqa: E731
    busy = eqx.filter_jit(lambda x: jax.lax.fori_loop(0, 1000, spin, x))
    jax.block_until_ready(busy(jnp.eye(200)))
    result = busy(jnp.eye(200))
    early = not result.is_ready()
    jax.block_until_ready(result)
    return early


def test_filter_jit_is_asynchronous():
    """Equinox waits for the device on every call; pytreemod returns as `jax.jit` does."""
    assert not returns_before_it_has_finished(equinox)

    assert returns_before_it_has_finished(pytreemod)


def test_equality_is_a_bool():
    """With arrays inside, `==` is an array in Equinox and a bool in pytreemod."""
    assert isinstance(linear(equinox) == linear(equinox), jax.Array)

    assert (linear(pytreemod) == linear(pytreemod)) is True
    assert (linear(pytreemod) != linear(pytreemod)) is False


def test_deletion_is_refused():
    """Equinox lets a field be deleted from a frozen Module; pytreemod does not."""
    theirs, ours = linear(equinox), linear(pytreemod)
    del theirs.weight
    assert "weight" not in vars(theirs)

    with pytest.raises(dataclasses.FrozenInstanceError, match="weight"):
        del ours.weight


def test_a_finished_module_is_not_changed_by_object_setattr():
    """Equinox's tree changes; pytreemod's is the one that was flattened first."""
    theirs, ours = linear(equinox), linear(pytreemod)
    for layer in (theirs, ours):
        jtu.tree_leaves(layer)
        object.__setattr__(layer, "weight", ramp(3, 2) + 1)

    assert jtu.tree_leaves(theirs)[0] is theirs.weight
    assert jtu.tree_leaves(ours)[0] is not ours.weight


def test_names_of_other_libraries_are_found_in_the_class():
    """`hasattr` is False in both; a protocol, which inspects classes, accepts it in pytreemod."""

    @runtime_checkable
    class Trained(Protocol):
        def state_dict(self) -> dict[str, Any]: ...

    theirs, ours = linear(equinox), linear(pytreemod)
    assert not hasattr(theirs, "state_dict")
    assert not hasattr(ours, "state_dict")
    assert not isinstance(theirs, Trained)
    assert isinstance(ours, Trained)
    with pytest.raises(AttributeError, match=r"pm\.to_torch\(model\)"):
        ours.state_dict()


def test_what_was_tied_or_computed_is_not_rebuilt_from_attributes():
    """`dataclasses.replace` would lose that; `replace` does not."""
    ours = pytreemod.tie(activated(pytreemod).replace(activation=ramp(2)), "weight", "activation")

    with pytest.raises(TypeError, match=r"model\.replace\(field=new\)"):
        dataclasses.replace(ours, mode="test")
    assert len(jtu.tree_leaves(ours.replace(mode="test"))) == 1


def test_initial_values_of_tokens_have_no_weak_type():
    """Equinox keeps it, and refuses a strong value later; in pytreemod both fit, compiled once."""
    make = lambda eqx: eqx.nn.make_with_state(lambda: eqx.nn.StateIndex(jnp.asarray(0.5)))()  # noqa: E731
    token, state = make(equinox)
    assert (jnp.bfloat16(2) * state.get(token)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="different structures"):
        state.set(token, jnp.float32(1))

    token, state = make(pytreemod)
    assert state.get(token).dtype == jnp.float32
    assert not state.get(token).weak_type
    state = state.set(token, jnp.float32(1)).set(token, 2.0)
    assert not state.get(token).weak_type


def test_a_token_in_two_places_is_refused_by_state():
    """Equinox's State(model) has one value for both; pytreemod asks to name them by path."""
    token = equinox.nn.StateIndex(jnp.zeros(2))
    assert len(jtu.tree_leaves(equinox.nn.State([token, token]))) == 1

    token = pytreemod.nn.StateIndex(jnp.zeros(2))
    with pytest.raises(
        ValueError, match=r"(?s)each token at one path, got a token at 2.*make_with"
    ):
        pytreemod.nn.State([token, token])
    (one, other), state = pytreemod.nn.make_with_state(lambda: [token, token])()
    assert state.set(one, jnp.ones(2)).get(other).tolist() == [0.0, 0.0]


def updated(eqx, in_state, in_part):
    """Values of a State that was changed beside its substate, after that was put back."""
    tokens = [eqx.nn.StateIndex(jnp.zeros(())) for _ in range(2)]
    state = eqx.nn.State(tokens)
    part = state.substate(tokens)
    for number in in_part:
        part = part.set(tokens[number], jnp.ones(()))
    for number in in_state:
        state = state.set(tokens[number], jnp.float32(2))
    state = state.update(part)
    return [float(state.get(token)) for token in tokens]


def test_update_keeps_what_the_substate_left_alone():
    """Equinox's update goes back to the value that the substate took."""
    assert updated(equinox, in_state=[0], in_part=[1]) == [0, 1]
    assert updated(equinox, in_state=[0], in_part=[0]) == [1, 0]

    assert updated(pytreemod, in_state=[0], in_part=[1]) == [2, 1]
    with pytest.raises(ValueError, match="changed in both"):
        updated(pytreemod, in_state=[0], in_part=[0])


def test_containers_from_a_state_are_the_callers_own():
    """Equinox returns its own container."""

    def after_a_change(eqx):
        token = eqx.nn.StateIndex({"a": jnp.zeros(2)})
        state = eqx.nn.State(token)
        state.get(token)["a"] = jnp.ones(3)
        return state.get(token)["a"].shape

    assert after_a_change(equinox) == (3,)
    assert after_a_change(pytreemod) == (2,)


def test_a_value_with_the_axis_of_a_map_is_set_inside_of_one():
    """Equinox continues with the broadcast value."""

    def count_twice(eqx):
        token, state = eqx.nn.make_with_state(lambda: eqx.nn.StateIndex(jnp.asarray(0)))()

        def add(x, state):
            return x, state.set(token, state.get(token) + 1)

        _, state = jax.vmap(add, in_axes=(0, None))(jnp.ones(3), state)
        assert state.get(token).tolist() == [1, 1, 1]
        return add(1.0, state)[1].get(token).shape

    assert count_twice(equinox) == (3,)
    with pytest.raises(ValueError, match="the original number of axes"):
        count_twice(pytreemod)


def apply_batch_norm(layer, state, *batches):
    """A BatchNorm over the first axis of each batch in turn: the last output, and the State."""
    mapped = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    jitted = jax.jit(mapped) if len(batches) > 1 else mapped
    for x in batches:
        y, state = jitted(x, state)
    return y, state


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


def test_a_function_as_activation_gets_the_whole_array():
    """Equinox maps it over the neurons; in pytreemod it may read neighboring neurons."""
    mlp = lambda eqx: eqx.nn.MLP(2, 3, 4, 1, final_activation=jax.nn.softmax, key=KEY)  # noqa: E731
    assert "axis" in str(caught(lambda: mlp(equinox)(ramp(2))))

    assert_close(mlp(pytreemod)(ramp(2)).sum(), 1.0)


def test_the_final_activation_of_an_mlp_without_hidden_layers_is_applied():
    """Equinox drops it where depth is 0."""
    mlp = lambda eqx: with_known_weights(  # noqa: E731
        eqx.nn.MLP(2, 3, 4, 0, final_activation=jnp.exp, key=KEY)
    )
    raw = mlp(equinox)(ramp(2))
    assert_same(raw, mlp(equinox).layers[0](ramp(2)))

    assert_same(jnp.exp(raw), mlp(pytreemod)(ramp(2)))


def test_batch_norm_is_the_standard_one_by_default():
    """Equinox warns and uses running statistics in training; pytreemod does as `mode="batch"`."""
    batches = [jnp.sin(5 * ramp(4, 3)) + 1, 3 * jnp.cos(7 * ramp(4, 3))]
    with pytest.warns(UserWarning, match="mode"):
        default = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch")
    standard = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch", mode="batch")
    ours = pytreemod.nn.make_with_state(pytreemod.nn.BatchNorm)(3, "batch")

    expected, _ = apply_batch_norm(*standard, *batches)
    assert not np.allclose(apply_batch_norm(*default, *batches)[0], expected, atol=1e-3)
    assert_same(expected, apply_batch_norm(*ours, *batches)[0])


def test_running_statistics_of_batch_norm_are_those_of_pytorch():
    """Equinox divides statistics by 1 - momentum**n; pytreemod follows PyTorch."""
    x, momentum = jnp.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]), 0.9
    mean, biased, unbiased = x.mean(0), x.var(0), x.var(0, ddof=1)

    theirs = running_statistics(equinox, [x], momentum)
    assert_close(theirs, (mean, (0.9 + 0.1 * biased) / (1 - 0.9)))
    ours = running_statistics(pytreemod, [x], momentum)
    assert_close(ours, (0.1 * mean, 0.9 + 0.1 * unbiased))

    # On one batch again and again both forget where they started.
    assert_close(running_statistics(equinox, [x] * 10, 0.3), (mean, biased))
    assert_close(running_statistics(pytreemod, [x] * 10, 0.3), (mean, unbiased))


def test_batch_norm_does_not_count_batches():
    """Equinox's counter corrects running numbers for their start; ours has none by default."""
    theirs = equinox.nn.BatchNorm(3, "batch", mode="batch")
    assert isinstance(theirs.batch_counter, equinox.nn.StateIndex)

    assert pytreemod.nn.BatchNorm(3, "batch").batch_counter is None
    # Before the first batch, Equinox's mode="ema" has whatever is in memory.
    layer, state = pytreemod.nn.make_with_state(pytreemod.nn.BatchNorm)(3, mode="ema")
    assert_close(state.get(layer.ema_state_index), (jnp.zeros(3), jnp.ones(3)))


def test_an_axis_of_batch_norm_that_is_not_mapped_is_a_value_error():
    """Equinox passes on JAX's NameError; ours names the layer and the axis."""
    x = ramp(3)
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch", mode="batch")
    with pytest.raises(NameError, match="batch"):
        layer(x, state)

    layer, state = pytreemod.nn.make_with_state(pytreemod.nn.BatchNorm)(3, "batch", mode="batch")
    with pytest.raises(ValueError, match="expected 'batch' to name mapped axes"):
        layer(x, state)


def test_batch_norm_applies_to_a_batch():
    """Outside `vmap` Equinox's has no axis to average over; pytreemod's takes the batch itself."""
    x = jnp.sin(5 * ramp(4, 3)) + 1
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch", mode="batch")
    with pytest.raises(NameError, match="batch"):
        layer(x[0], state)

    direct, direct_state = pytreemod.nn.make_with_state(pytreemod.nn.BatchNorm)(3)
    assert_same(apply_batch_norm(layer, state, x)[0], direct(x, direct_state)[0])


def test_an_operation_of_an_adaptive_pool_is_applied_once():
    """In Equinox twice, where the sizes divide."""
    pool = lambda eqx: eqx.nn.AdaptivePool(2, 1, lambda window: -jnp.sum(window))  # noqa: E731
    assert pool(equinox)(jnp.ones((1, 4))).tolist() == [[2, 2]]
    assert pool(pytreemod)(jnp.ones((1, 4))).tolist() == [[-2, -2]]
    assert pool(equinox)(jnp.ones((1, 5))).tolist() == pool(pytreemod)(jnp.ones((1, 5))).tolist()


BATCHED = {
    "Linear": (linear, (5, 2)),
    "Conv1d": (lambda eqx: with_known_weights(eqx.nn.Conv1d(2, 3, 2, key=KEY)), (5, 2, 4)),
    "LayerNorm": (lambda eqx: with_known_weights(eqx.nn.LayerNorm((3,))), (5, 3)),
    "MaxPool2d": (lambda eqx: eqx.nn.MaxPool2d(2), (5, 2, 3, 3)),
    "MLP": (lambda eqx: with_known_weights(eqx.nn.MLP(2, 3, 4, 1, key=KEY)), (5, 2)),
    "Embedding": (lambda eqx: with_known_weights(eqx.nn.Embedding(4, 3, key=KEY)), (5,)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_layers_broadcast_over_leading_axes(name):
    """Equinox's layers take one example and need `vmap`; pytreemod's take leading axes too."""
    make, shape = BATCHED[name]
    x = jnp.arange(5, dtype=jnp.int32) % 4 if name == "Embedding" else ramp(*shape)
    theirs = caught(lambda: make(equinox)(x))
    assert isinstance(theirs, (TypeError, ValueError, AssertionError))

    assert_same(jax.vmap(make(equinox))(x), make(pytreemod)(x))


def test_a_forgotten_batch_axis_is_no_broadcast_bias():
    """With 4 features in and 3 out, Equinox multiplies a (4, 3) batch; pytreemod refuses it."""
    with jax.numpy_rank_promotion("allow"):
        assert linear(equinox, 4, 3)(ramp(4, 3)).shape == (3, 3)

        with pytest.raises(ValueError, match=r"Linear\("):
            linear(pytreemod, 4, 3)(ramp(4, 3))


def test_a_wrong_feature_size_is_a_shape_error():
    """Equinox hands the mistake to JAX, a TypeError; pytreemod's own is a ValueError."""
    with pytest.raises(TypeError, match="dot_general"):
        linear(equinox)(ramp(7))

    with pytest.raises(ValueError, match=r"Linear\("):
        linear(pytreemod)(ramp(7))


def test_heads_that_do_not_divide_are_refused():
    """Equinox rounds their size down; pytreemod wants it said."""
    assert equinox.nn.MultiheadAttention(3, 4, key=KEY).qk_size == 1

    with pytest.raises(ValueError, match=r"expected num_heads to divide query_size=4, or an"):
        pytreemod.nn.MultiheadAttention(3, 4, key=KEY)
    assert pytreemod.nn.MultiheadAttention(3, 4, qk_size=1, vo_size=1, key=KEY).qk_size == 1


def test_a_mask_of_numbers_is_refused():
    """Equinox takes all but 0 for True, also if you meant a bias; pytreemod needs booleans."""
    x, added = ramp(2, 4), jnp.asarray([[0.0, -1e9], [0.0, 0.0]])
    theirs, ours = (lib.nn.MultiheadAttention(2, 4, key=KEY) for lib in (equinox, pytreemod))
    np.testing.assert_allclose(theirs(x, x, x, added), theirs(x, x, x, added != 0), rtol=1e-6)

    with pytest.raises(TypeError, match=r"expected mask of booleans, got f32\[2,2\]"):
        ours(x, x, x, added)
    assert_close(ours(x, x, x, added == 0), theirs(x, x, x, added == 0))


def test_norms_and_rotary_embeddings_refuse_integers():
    """Equinox rounds their outputs to integers; the other layers accept integers in both."""
    x = jnp.arange(8).reshape(2, 4)
    cases = {
        "LayerNorm": ((4,), x[0]),
        "RMSNorm": ((4,), x[0]),
        "RotaryPositionalEmbedding": ((4,), x),
    }
    for name, (sizes, one) in cases.items():
        theirs, ours = (getattr(lib.nn, name)(*sizes) for lib in (equinox, pytreemod))
        with jax.numpy_dtype_promotion("standard"):
            assert theirs(one).dtype == jnp.int32

        with pytest.raises(TypeError, match=r"expected x of a floating dtype, got i32"):
            ours(one)
    with jax.numpy_dtype_promotion("standard"):
        theirs, ours = (lib.nn.MultiheadAttention(2, 4, key=KEY) for lib in (equinox, pytreemod))
        assert_close(ours(x, x, x), theirs(x, x, x))
        assert_close(pytreemod.nn.PReLU()(x - 4), equinox.nn.PReLU()(x - 4))


def test_every_base_of_rotary_embeddings_has_its_own_angles():
    """Equinox keeps one table for each size and dtype, whatever the base; pytreemod keeps none."""
    x = ramp(5, 10)  # A size that no other test has.
    first, second = (
        [lib.nn.RotaryPositionalEmbedding(10, theta)(x) for theta in (100.0, 1e4)]
        for lib in (equinox, pytreemod)
    )

    assert_close(first[0], first[1])
    assert_close(first[0], second[0])
    assert float(jnp.abs(second[0] - second[1]).max()) > 0.1


def test_an_attention_of_one_input_attends_to_itself():
    """Equinox wants all three, and no batch axes."""
    x = ramp(2, 3, 4)
    theirs, ours = (lib.nn.MultiheadAttention(2, 4, key=KEY) for lib in (equinox, pytreemod))
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        theirs(x[0])

    assert_close(ours(x), jax.vmap(theirs)(x, x, x))


def test_an_array_that_does_not_fit_its_layer_is_refused():
    """Equinox computes with any array; pytreemod checks its shape."""

    def widened(eqx):
        return eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(2, 3, False, key=KEY), ramp(5, 2))

    assert widened(equinox)(ramp(2)).shape == (5,)

    with pytest.raises(ValueError, match=r"Linear\(.*\): expected weight of shape \(3, 2\)"):
        widened(pytreemod)(ramp(2))
    meant = widened(pytreemod).replace(out_features=5)
    assert_same(widened(equinox)(ramp(2)), meant(ramp(2)))


def test_layers_that_are_stacked_are_not_called_as_one():
    """Equinox broadcasts a bias-free MLP over its members; pytreemod refuses, and says `vmap`."""

    def stacked(eqx):
        make = lambda key: eqx.nn.Linear(3, 3, use_bias=False, key=key)  # noqa: E731
        return eqx.filter_vmap(make)(jax.random.split(KEY, 3))

    assert stacked(equinox)(ramp(3)).shape == (3, 3)

    with pytest.raises(ValueError, match="filter_vmap"):
        stacked(pytreemod)(ramp(3))


def test_tree_at_refuses_the_same_node_twice():
    """Equinox keeps the last of two replacements; pytreemod refuses to choose."""
    edit = lambda eqx: eqx.tree_at(lambda t: (t["a"], t["a"]), {"a": 1.0, "b": 2}, (3, 4))  # noqa: E731
    assert edit(equinox) == {"a": 4, "b": 2}

    with pytest.raises(ValueError, match="a"):
        edit(pytreemod)


def test_tree_at_tells_two_nones_apart():
    """Equinox finds nodes by identity, and all Nones are one; pytreemod finds them by path."""
    edit = lambda eqx: eqx.tree_at(lambda t: t["b"], {"a": None, "b": None}, 1)  # noqa: E731
    with pytest.raises(ValueError, match="uniquely"):
        edit(equinox)

    assert edit(pytreemod) == {"a": None, "b": 1}


def test_an_update_changes_no_shape_and_no_dtype():
    """Equinox adds as JAX does: it broadcasts the model, and widens half precision."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        half = jnp.ones(2, jnp.bfloat16)
        assert equinox.apply_updates(half, jnp.ones(2)).dtype == jnp.float32
        assert pytreemod.apply_updates(half, jnp.ones(2)).dtype == jnp.bfloat16

        assert equinox.apply_updates(jnp.ones(2), jnp.ones((3, 2))).shape == (3, 2)
        with pytest.raises(ValueError, match=r"an update of shape \(2,\), got f32\[3,2\]"):
            pytreemod.apply_updates(jnp.ones(2), jnp.ones((3, 2)))


def test_class_defaults_stay_in_the_tree():
    """A default that `__init__` does not set is not a leaf in Equinox; in pytreemod it is."""

    def leaves(eqx):
        class Layer(eqx.Module):
            weight: int
            scale: float = 2.0

            def __init__(self):
                self.weight = 1

        return jtu.tree_leaves(Layer())

    assert leaves(equinox) == [1]
    assert leaves(pytreemod) == [1, 2.0]


def overridden(eqx):
    """A class with a method that overrides a field of its base."""

    class Layer(eqx.Module):
        activation: Any

        def __init__(self, activation=jnp.tanh):
            self.activation = activation

    class Swish(Layer):
        def activation(self, x):
            return x * jax.nn.sigmoid(x)

    return Swish


def test_a_method_in_the_place_of_a_field_is_not_hidden():
    """In Equinox the field's value hides the method, unseen; pytreemod asks which is meant."""
    assert overridden(equinox)().activation is jnp.tanh

    with pytest.raises(TypeError, match=r"a method of .*Swish replaces the field"):
        overridden(pytreemod)()


def test_a_field_and_a_property_of_one_name_are_refused_with_the_class():
    """Equinox's `__init__` assigns to the property, which fails unless it has a setter."""

    def make(eqx):
        class Config(eqx.Module):
            size: int

            @property
            def size(self):
                return 1

        return Config

    theirs = make(equinox)
    with pytest.raises(AttributeError, match="no setter"):
        theirs()

    with pytest.raises(TypeError, match="either a field or a property"):
        make(pytreemod)


def test_a_base_with_content_is_refused_with_the_class():
    """Equinox takes it, and its instances fail in the first transform."""

    def make(eqx):
        class Table(eqx.Module, dict):
            x: float

        return Table

    theirs = make(equinox)(1.0)
    with pytest.raises(TypeError, match="is not safe"):
        jax.tree.map(lambda x: x, theirs)

    with pytest.raises(TypeError, match="bases whose instances only have attributes"):
        make(pytreemod)


def test_kw_only_is_a_class_option():
    """Equinox passes it to `__init_subclass__`, which fails; pytreemod makes keywords of fields."""

    def make(eqx):
        class Layer(eqx.Module, kw_only=True):
            first: int = 1
            second: int

        return Layer

    with pytest.raises(TypeError, match="keyword"):
        make(equinox)

    layer = make(pytreemod)(second=2)
    assert (layer.first, layer.second) == (1, 2)
    with pytest.raises(TypeError, match="positional"):
        make(pytreemod)(1, 2)


ABSTRACT_STRINGS = """
    from __future__ import annotations

    class Base(eqx.Module):
        size: eqx.AbstractVar[int]

    class Final(Base):
        size: int
"""


def test_abstract_var_in_a_string_annotation():
    """Equinox takes it for a field; pytreemod evaluates it."""
    theirs = module_from(ABSTRACT_STRINGS, equinox, "abstract_strings")
    ours = module_from(ABSTRACT_STRINGS, pytreemod, "abstract_strings")
    assert [field.name for field in dataclasses.fields(theirs.Base)] == ["size"]

    assert dataclasses.fields(ours.Base) == ()
    with pytest.raises(TypeError, match="size"):
        ours.Base()
    assert ours.Final(3).size == 3


def test_bound_special_methods_are_trees():
    """`m.__call__` hides its arrays from Equinox; in pytreemod it is a tree like `m.method`."""
    count = lambda eqx: len([x for x in jtu.tree_leaves(linear(eqx).__call__) if eqx.is_array(x)])  # noqa: E731
    assert count(equinox) == 0

    assert count(pytreemod) == 2


def test_a_bound_method_is_no_module():
    """Equinox's is a Module; pytreemod's is a `functools.partial`, which is cheaper to make."""

    def method_of(eqx):
        class Model(eqx.Module):
            def method(self):
                return 0

        return Model().method

    assert isinstance(method_of(equinox), equinox.Module)

    assert not isinstance(method_of(pytreemod), pytreemod.Module)
    assert isinstance(method_of(pytreemod), pytreemod.BoundMethod)


def test_filter_vmap_takes_keyword_arguments():
    """Equinox refuses them; in pytreemod they are mapped like the others."""
    call = lambda eqx: eqx.filter_vmap(lambda x, y: x + y)(ramp(3), y=ramp(3))  # noqa: E731
    with pytest.raises(RuntimeError, match="keyword"):
        call(equinox)

    assert_same(2 * ramp(3), call(pytreemod))


def test_filter_vmap_takes_a_bare_spec_for_one_argument():
    """Equinox needs a tuple of one; pytreemod takes the spec of the only argument."""

    def call(eqx, wrap):
        class Pair(eqx.Module):
            first: Any
            second: Any

        add = lambda pair: pair.first.sum() + pair.second.sum()  # noqa: E731
        spec = Pair(0, None)
        return eqx.filter_vmap(add, in_axes=wrap(spec))(Pair(ramp(3, 2), ramp(2)))

    tupled = call(equinox, lambda spec: (spec,))
    caught(lambda: call(equinox, lambda spec: spec))

    assert_same(tupled, call(pytreemod, lambda spec: spec))
    assert_same(tupled, call(pytreemod, lambda spec: (spec,)))


def test_nothing_to_differentiate_is_an_error():
    """Equinox returns Nones; pytreemod says that no leaf is an inexact array."""
    call = lambda eqx: eqx.filter_grad(lambda t: jnp.float32(1.0))([jnp.int32(1), 2.0])  # noqa: E731
    assert call(equinox) == [None, None]

    with pytest.raises((TypeError, ValueError), match="filter_grad"):
        call(pytreemod)


def test_sequential_takes_layers_without_a_key():
    """Equinox passes `key` to every layer; pytreemod to those that have such a parameter."""

    def call(eqx):
        class Double(eqx.Module):
            def __call__(self, x):
                return 2 * x

        return eqx.nn.Sequential([Double(), eqx.nn.Identity()])(ramp(2), key=jax.random.key(0))

    with pytest.raises(TypeError, match="key"):
        call(equinox)

    assert_same(2 * ramp(2), call(pytreemod))


@pytest.mark.parametrize("option", ["broadcast_dims", "stream"])
def test_dropout_takes_axes_and_a_stream(option):
    """Equinox has neither option."""
    given = {"broadcast_dims": (0,), "stream": pytreemod.RngStream()}[option]
    with pytest.raises(TypeError, match=option):
        equinox.nn.Dropout(0.5, **{option: given})

    assert hasattr(pytreemod.nn.Dropout(0.5, **{option: given}), option)


def test_a_traced_item_has_no_message_yet():
    """Equinox returns the text "traced"; pytreemod raises, because the message is not known."""

    def call(eqx):
        results = type(eqx.Enumeration)("Results", (eqx.Enumeration,), {"good": "well"})
        return eqx.filter_jit(lambda item: results[item])(results.good)

    assert call(equinox) == "traced"
    with pytest.raises(ValueError, match="outside transforms"):
        call(pytreemod)


def test_a_float_is_no_predicate():
    """Equinox takes any number but 0 for a failure; pytreemod refuses numbers."""
    call = lambda eqx: eqx.error_if(ramp(2), jnp.asarray(0.5), "swapped")  # noqa: E731
    with pytest.raises(RuntimeError, match="swapped"):
        call(equinox)

    with pytest.raises(ValueError, match=r"error_if\(pred\)"):
        call(pytreemod)


def test_argnums_chooses_what_is_differentiated():
    """Equinox refuses `argnums`; pytreemod takes it as `jax.grad` does."""
    call = lambda eqx: eqx.filter_grad(lambda x, y: jnp.sum(x * y), argnums=1)(2.0, ramp(2))  # noqa: E731
    with pytest.raises(ValueError, match="argnums"):
        call(equinox)

    assert_same(jnp.array([2.0, 2.0]), call(pytreemod))


def test_donation_by_argument_name():
    """Equinox knows its strings alone; pytreemod takes names of arguments besides."""

    def call(eqx):
        x, y = ramp(4), ramp(4) + 1
        eqx.filter_jit(lambda x, y: (x + 1, y + 1), donate=("y",))(x, y)
        return x.is_deleted(), y.is_deleted()

    with pytest.raises(ValueError, match="donate"):
        call(equinox)

    assert call(pytreemod) == (False, True)


def test_shardings_are_options_of_filter_jit():
    """Equinox refuses them; pytreemod passes them on."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    call = lambda eqx: eqx.filter_jit(lambda x: x + 1, out_shardings=sharding)(ramp(2))  # noqa: E731
    with pytest.raises(ValueError, match="out_shardings"):
        call(equinox)

    assert call(pytreemod).sharding == sharding


def test_methods_that_are_jitted_can_be_lowered():
    """Equinox's decorated method has no `lower` once bound; pytreemod's has."""

    def call(eqx):
        class Layer(eqx.Module):
            weight: jax.Array

            @eqx.filter_jit
            def apply(self, x):
                return self.weight * x

        return Layer(ramp(2)).apply.lower(ramp(2)).compile()(ramp(2))

    with pytest.raises(AttributeError, match="lower"):
        call(equinox)

    assert_same(ramp(2) ** 2, call(pytreemod))


@pytest.mark.parametrize("function", [jax.nn.relu, jnp.tanh])
def test_jitted_functions_print_without_their_address(function):
    """Equinox shows the address of a function under `jax.jit`; pytreemod shows its name alone."""
    assert "PjitFunction" in equinox.tree_pformat(function)
    assert pytreemod.tree_pformat(function) == f"<function {function.__name__}>"


@pytest.mark.filterwarnings("ignore")
def test_filter_pmap_is_filter_vmap():
    """Equinox's filter_pmap refuses keywords, negative axes and bare specs."""

    def call(library):
        fn = library.filter_pmap(lambda x, *, y: x + y, in_axes=-1, out_axes=-1)
        return fn(ramp(2, 4), y=ramp(2, 4))

    with pytest.raises(RuntimeError, match="keyword arguments"):
        call(equinox)

    np.testing.assert_array_equal(call(pytreemod), 2 * ramp(2, 4))


def test_shard_takes_rules_and_nones():
    """Equinox's filter_shard accepts shardings only; pytreemod's skips leaves with None."""
    device = jax.devices()[1]
    tree = {"a": ramp(2), "b": ramp(2)}
    with pytest.raises(ValueError, match="sharding None"):
        equinox.filter_shard(tree, {"a": jax.sharding.SingleDeviceSharding(device), "b": None})

    moved = pytreemod.filter_shard(tree, pytreemod.by({"a": device, ...: None}))
    assert moved["a"].devices() == {device}
    assert moved["b"].devices() == tree["b"].devices()


def test_a_callback_may_be_a_traced_module():
    """Equinox sends the arguments' arrays to the host; pytreemod the callback's own, too."""

    def call(library):
        class OnHost(library.Module):
            weight: jax.Array

            def __call__(self, x):
                return np.asarray(self.weight) + np.asarray(x)

        @library.filter_jit
        def fn(module, x):
            return library.filter_pure_callback(module, x, result_shape_dtypes=x)

        return fn(OnHost(ramp(2)), ramp(2))

    with pytest.raises(jax.errors.JaxRuntimeError, match="TracerArrayConversionError"):
        call(equinox)

    np.testing.assert_array_equal(call(pytreemod), 2 * ramp(2))


def in_file(library, tree):
    """The bytes of a tree in Equinox's format."""
    file = io.BytesIO()
    library.tree_serialise_leaves(file, tree)
    return file.getvalue()


def from_file(library, data, like):
    """A tree from them."""
    return library.tree_deserialise_leaves(io.BytesIO(data), like)


def test_a_file_that_goes_on_is_refused(tmp_path):
    """Equinox ignores content after the last leaf; in pytreemod only an open file may have more."""
    path = tmp_path / "model.eqx"
    equinox.tree_serialise_leaves(path, [1.0, 2.0])
    assert equinox.tree_deserialise_leaves(path, [0.0]) == [1.0]

    with pytest.raises(RuntimeError, match="got a file with more leaves"):
        equinox_files.tree_deserialise_leaves(path, [0.0])
    with open(path, "rb") as file:
        assert equinox_files.tree_deserialise_leaves(file, [0.0]) == [1.0]


@pytest.mark.parametrize(
    ("value", "like", "theirs"),
    [(2.5, 0, 2), (7, True, True), (np.ones(1), jnp.zeros(1), jnp.ones(1))],
    ids=["int", "bool", "64 bits"],
)
def test_numbers_in_files_are_not_rounded(value, like, theirs):
    """Equinox converts to the type of `like`; pytreemod does if nothing is lost."""
    data = in_file(equinox, np.asarray(value))
    assert from_file(equinox, data, like) == theirs

    with pytest.raises(RuntimeError, match="expected"):
        from_file(equinox_files, data, like)


@pytest.mark.parametrize(
    "leaf",
    [jnp.ones(2, jnp.float8_e4m3fn), np.array([None]), jax.ShapeDtypeStruct((2,), jnp.float32)],
    ids=["float8", "objects", "abstract"],
)
def test_what_cannot_be_read_back_is_not_written(leaf):
    """Equinox writes something, or nothing, and the reading fails."""
    data = in_file(equinox, [leaf])
    with pytest.raises(RuntimeError, match=r"Error at leaf|changed type"):
        from_file(equinox, data, [leaf])

    with pytest.raises(RuntimeError, match="expected"):
        in_file(equinox_files, [leaf])


def test_a_class_default_is_in_the_file():
    """Where it is a leaf: Equinox drops a default that `__init__` does not set."""

    def made(library):
        class Scaled(library.Module):
            weight: jax.Array
            gain: float = 2.0

            def __init__(self):
                self.weight = ramp(2)

        return Scaled()

    assert len(in_file(equinox, made(equinox))) == len(in_file(equinox, ramp(2)))

    assert in_file(equinox_files, made(pytreemod)) == in_file(equinox, [ramp(2), 2.0])


def test_files_have_no_counts_of_batches():
    """Equinox's statistics are corrected when they are read, and pytreemod's need no correction."""
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(
        1, "b", momentum=0.5, mode="batch"
    )
    state = state.set(layer.batch_counter, jnp.asarray(1))
    state = state.set(layer.batch_state_index, (jnp.asarray([2.0]), jnp.asarray([0.5])))
    norm, own = pytreemod.make_with_state(pytreemod.nn.BatchNorm)(1, "b", momentum=0.5)

    norm, own = from_file(equinox_files, in_file(equinox, (layer, state)), (norm, own))
    assert_close(own.get(norm.state_index), ([4.0], [1.0]))
    layer, state = from_file(equinox, in_file(equinox_files, (norm, own)), (layer, state))
    assert int(state.get(layer.batch_counter)) == 2**30
    assert_close(state.get(layer.batch_state_index), ([4.0], [1.0]))
