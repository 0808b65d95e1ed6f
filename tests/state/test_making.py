"""make_with_state and delete_init_state."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import StateError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import affine, ramp


class Counter(pm.Module):
    """Counts its calls."""

    count: pm.StateIndex
    step: int = pm.field(static=True)

    def __init__(self, step: int = 1) -> None:
        self.count = pm.StateIndex(jnp.asarray(0))
        self.step = step

    def __call__(self, x: jax.Array, state: pm.State) -> tuple[jax.Array, pm.State]:
        n = state.get(self.count) + self.step
        return x * n.astype(x.dtype), state.set(self.count, n)


class Net(pm.Module):
    """Counters at several depths."""

    first: Counter
    rest: dict
    weight: jax.Array

    def __init__(self, *, size: int) -> None:
        self.first = Counter()
        self.rest = {"a": [Counter(2), Counter(3)]}
        self.weight = ramp(size)


def test_model_and_state_come_together():
    """The State has every token's value under its path; the model has none."""
    model, state = pm.make_with_state(Net)(size=2)

    assert pm.tree_pformat(state, width=200) == (
        "State(first.count=i32[], rest['a'][0].count=i32[], "
        "rest['a'][1].count=i32[])"
    )
    assert [leaf.shape for leaf in jax.tree.leaves(model)] == [(2,)]
    assert [int(leaf) for leaf in jax.tree.leaves(state)] == [0, 0, 0]


def test_each_layer_finds_its_own_value():
    """Layers of one class count apart."""
    model, state = pm.make_with_state(Net)(size=2)
    x = ramp(1)
    _, state = model.first(x, state)
    for layer in model.rest["a"] * 2:
        _, state = layer(x, state)

    counts = [state.get(layer.count) for layer in (model.first, *model.rest["a"])]
    assert [int(n) for n in counts] == [1, 4, 6]


def test_any_function_that_builds_a_model():
    """A function, a partial, a class method; its signature and name are kept."""

    def build(size, *, scale=1.0):
        """Builds."""
        return [Counter(), ramp(size) * scale]

    maker = pm.make_with_state(build)
    model, state = maker(2, scale=2.0)
    assert_same(model[1], ramp(2) * 2)
    assert len(jax.tree.leaves(state)) == 1
    assert (maker.__name__, maker.__doc__) == ("build", "Builds.")
    assert list(inspect.signature(maker).parameters) == ["size", "scale"]


def test_two_models_of_one_class_have_interchangeable_states():
    """A State belongs to paths, not to objects: that of another model of the class fits."""
    model, _ = pm.make_with_state(Counter)()
    other, state = pm.make_with_state(Counter)()
    _, state = other(ramp(1), state)

    assert int(state.get(model.count)) == 1


def test_a_model_without_tokens():
    """The State is empty, and the model is as it was built."""
    model, state = pm.make_with_state(affine)()

    assert_same(model, affine())
    assert repr(state) == "State()"


def test_under_jit_and_vmap():
    """Models with State may be made inside transforms: an ensemble has a stacked State."""

    def make(scale):
        model, state = pm.make_with_state(Net)(size=2)
        return jax.tree.map(lambda w: w * scale, model), state

    models, states = pm.filter_vmap(make)(ramp(3))
    assert models.weight.shape == (3, 2)
    assert [leaf.shape for leaf in jax.tree.leaves(states)] == [(3,)] * 3
    jitted_model, jitted_state = pm.filter_jit(make)(jnp.asarray(2.0))
    assert_same(jitted_model.weight, ramp(2) * 2)
    _, after = jitted_model.first(ramp(1), jitted_state)
    assert int(after.get(jitted_model.first.count)) == 1


def test_a_shared_token_has_one_name():
    """One token in two places is one entry, named by the first."""

    def build():
        token = pm.StateIndex(ramp(1))
        return {"b": token, "a": [token]}

    model, state = pm.make_with_state(build)()
    assert repr(state) == "State(['a'][0]=f32[1])"
    state = state.set(model["b"], ramp(1) * 3)
    assert_same(state.get(model["a"][0]), ramp(1) * 3)


def test_a_model_whose_values_are_gone_is_refused():
    """make_with_state of a model that has a State already says which token it is."""
    model, _ = pm.make_with_state(Net)(size=2)
    for make in (lambda: pm.State(model), lambda: pm.make_with_state(lambda: model)()):
        with pytest.raises(
            StateError,
            match=r"^State\(model\): expected tokens with their initial values, got one whose "
            r"value was "
            r"moved into another State\.\n  at first\.count\n  make both at once, and keep that "
            r"State; or give the values back first:\n"
            r"      model, state = pm\.make_with_state\(Model\)\(\.\.\.\)\n"
            r"      model, state = pm\.make_with_state\(state\.fill\)\(model\)$",
        ):
            make()


def test_delete_init_state():
    """Takes the values out of the tokens and leaves all else as it is."""
    model = Net(size=2)
    state = pm.State(model)
    bare = pm.nn.delete_init_state(model)

    assert [leaf.shape for leaf in jax.tree.leaves(bare)] == [(2,)]
    assert int(state.get(bare.first.count)) == 0
    assert bare.rest["a"][1].step == 3
    assert model.first.count.init is not None
