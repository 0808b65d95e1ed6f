"""Whole programs under value semantics: of NNX's first README (X), and of Mielke's text (S).

"From PyTorch to JAX" prints numbers, which these programs print, too. Its language model is
`examples/lstm_language_model.py`, which has its own tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FrozenError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import ramp

# ---- NNX 0.0.2


class Counted(pm.Module):
    """A layer with a count of its calls."""

    weight: jax.Array
    count: jax.Array = pm.buffer()

    def __call__(self, x):
        return x @ self.weight, self.replace(count=self.count + 1)


class Net(pm.Module):
    """A layer inside of another Module."""

    layer: Counted

    def __call__(self, x):
        y, layer = self.layer(x)
        return y, self.replace(layer=layer)


NET = Net(Counted(ramp(3, 2), jnp.asarray(0)))
X = ramp(4, 3)


def loss_fn(model, x):
    y, model = model(x)
    return jnp.mean(y**2), model


def descend(weight, grad):
    return weight - 0.01 * grad


@pm.filter_jit
def filtered(model, x):
    """The first style: whole models in, whole models out."""
    (_, model), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(model, x)
    return pm.apply_updates(model, jax.tree.map(lambda grad: -0.01 * grad, grads))


def test_a_partition_goes_through_plain_jit_and_grad():
    """X8: the halves of a model are trees for jax.jit and jax.grad, which know of nothing else."""
    model = NET
    params, rest = pm.partition(model, pm.select.role("param"))

    @jax.jit
    def step(params, rest, x):
        loss = lambda params: loss_fn(pm.combine(params, rest), x)  # noqa: E731
        grads, model = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(descend, params, grads)
        return params, pm.partition(model, pm.select.role("param"))[1]

    for _ in range(3):
        params, rest = step(params, rest, X)
        model = filtered(model, X)
    assert_close(pm.combine(params, rest), model)
    assert int(model.layer.count) == 3


def test_the_parameters_are_read_and_written_as_one():
    """X5: `model["params"]` is the selection by the role, and its update is combined."""
    params = pm.filter(NET, pm.select.role("param"))
    changed = pm.combine(jax.tree.map(lambda leaf: 2 * leaf, params), NET)
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(3, 2)]
    assert_same(changed, Net(Counted(2 * ramp(3, 2), jnp.asarray(0))))


def test_the_styles_are_one_program():
    """X7, X9: a step of a whole model, one of a bundled net, one by hand: equal numbers."""

    class Stateful(pm.Module):
        weight: jax.Array
        count: pm.StateIndex

        def __init__(self):
            self.weight, self.count = ramp(3, 2), pm.StateIndex(jnp.asarray(0))

        def __call__(self, x, state):
            return x @ self.weight, state.set(self.count, state.get(self.count) + 1)

    @jax.jit
    def by_hand(weight, count, x):
        grad = jax.grad(lambda weight: jnp.mean((x @ weight) ** 2))(weight)
        return descend(weight, grad), count + 1

    model, pair, carried = NET, pm.stateful(Stateful()), (ramp(3, 2), jnp.asarray(0))
    for _ in range(3):
        model, pair, carried = filtered(model, X), filtered(pair, X), by_hand(*carried, X)

    assert_close(model.layer.weight, carried[0])
    assert_close(pair.model.weight, carried[0])
    counts = model.layer.count, pair.state.get(pair.model.count), carried[1]
    assert [int(count) for count in counts] == [3, 3, 3]


def test_a_model_is_a_tree_and_frozen():
    """X1: the model is its leaves; neither its attributes nor inner ones can be set."""
    assert [leaf.shape for leaf in jax.tree.leaves(NET)] == [(3, 2), ()]
    for place, name in ((NET, "layer"), (NET.layer, "weight"), (NET.layer, "other")):
        with pytest.raises(FrozenError, match=name):
            setattr(place, name, 0)


def test_keys_are_arguments():
    """X3, S7: the same key makes the same layer, at any time; a key is required."""
    key = jax.random.key(0)
    first = nn.Linear(12, 2, key=key)
    nn.Linear(12, 2, key=jax.random.key(1))

    assert_same(nn.Linear(12, 2, key=key), first)
    with pytest.raises(TypeError, match="key"):
        nn.Linear(12, 2)
    x, dropout = jnp.ones(100), nn.Dropout(0.5)
    assert_same(dropout(x, key=key), dropout(x, key=key))
    assert not np.array_equal(dropout(x, key=key), dropout(x, key=jax.random.key(1)))


# ---- From PyTorch to JAX


class LinearRegressor(pm.Module):
    """Her first class. Nothing says how it is flattened."""

    w: jax.Array
    b: jax.Array

    def predict(self, x):
        return self.w * x + self.b

    @jax.jit
    def rms(self, xs, ys):
        return jnp.sqrt(jnp.sum(jnp.square(self.predict(xs) - ys)))


REGRESSOR = LinearRegressor(jnp.asarray(13.0), jnp.asarray(0.0))
POINT = jnp.asarray([42.0]), jnp.asarray([500.0])
LOSSES = [
    46.0, 42.47003, 38.940002, 35.410034, 31.880066, 28.350098, 24.820068, 21.2901, 17.760132,
    14.230164, 10.700165, 7.170166, 3.6401978, 0.110198975, 3.4197998,
]  # fmt: skip


def trained(params, rms):
    """Fifteen steps: the losses before each, and the results."""
    losses = []
    for _ in range(15):
        losses.append(float(rms(params, *POINT)))
        grads = jax.grad(rms)(params, *POINT)
        params = jax.tree.map(lambda param, grad: param - 0.002 * grad, params, grads)
    return losses, params


def test_linear_regression_has_her_numbers():
    """S3, S4: with a dict of parameters, and with a class, whose gradient is of the class."""

    def rms(params, xs, ys):
        return jnp.sqrt(jnp.sum(jnp.square(params["w"] * xs + params["b"] - ys)))

    by_dict, params = trained({"w": jnp.asarray(13.0), "b": jnp.asarray(0.0)}, rms)
    by_class, model = trained(REGRESSOR, LinearRegressor.rms)

    np.testing.assert_allclose([by_dict, by_class], [LOSSES, LOSSES], rtol=1e-6)
    np.testing.assert_allclose(model.predict(42.0), 500.1102, rtol=1e-6)
    assert_same((model.w, model.b), (params["w"], params["b"]))
    grads = jax.grad(LinearRegressor.rms)(REGRESSOR, *POINT)
    assert_same(grads, LinearRegressor(jnp.asarray(42.0), jnp.asarray(1.0)))


@pytest.mark.parametrize("jit", [jax.jit, pm.filter_jit])
def test_jit_on_a_method(jit):
    """S5: the instance is an argument like others: one trace for two of them."""
    traces = []

    class Scaled(LinearRegressor):
        @jit
        def __call__(self, x):
            traces.append(1)
            return self.predict(x)

    values = [float(Scaled(jnp.asarray(w), jnp.asarray(1.0))(3.0)) for w in (2.0, 3.0)]
    assert (values, traces) == ([7.0, 10.0], [1])


def test_methods_are_pure():
    """S2: the same arguments give the same result; a method that writes into its object is refused.

    It is refused when called, jitted and differentiated.
    """

    class Impure(LinearRegressor):
        def predict(self, x):
            self.b = self.b + x
            return self.w * x + self.b

    before = jax.tree.leaves(REGRESSOR)
    assert_same(REGRESSOR.rms(*POINT), REGRESSOR.rms(*POINT))
    assert_same(jax.tree.leaves(REGRESSOR), before)

    impure = Impure(*before)
    for call in (impure.predict, jax.jit(impure.predict), jax.grad(impure.predict)):
        with pytest.raises(FrozenError, match=r"Impure\.b"):
            call(42.0)
    assert_same(jax.tree.leaves(impure), before)


class Cell(pm.Module):
    """Her cell, by the names that she gave."""

    weight_ih: jax.Array
    weight_hh: jax.Array
    bias: jax.Array

    def __call__(self, x, hc):
        h, c = hc
        i, f, g, o = jnp.split(self.weight_ih @ x + self.weight_hh @ h + self.bias, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


class LanguageModel(pm.Module):
    """The language model of the blog: its initial state is a parameter."""

    c_0: jax.Array
    embeddings: jax.Array
    lstmcell: Cell

    @property
    def hc_0(self):
        return jnp.tanh(self.c_0), self.c_0

    def loss(self, tokens, hc):
        total = jnp.zeros(())
        for token in tokens:
            total -= jax.nn.log_softmax(self.embeddings @ hc[0])[token]
            hc = self.lstmcell(self.embeddings[token], hc)
        return total


LANGUAGE = LanguageModel(ramp(2), ramp(5, 2), Cell(ramp(8, 2), ramp(8, 2), ramp(8)))
TOKENS = (4, 2)


def test_what_depends_on_parameters_is_computed_inside():
    """S6: `hc_0` computed outside of the differentiated function has no gradient; inside it has."""
    hc = LANGUAGE.hc_0
    inside = jax.jit(jax.grad(lambda model: model.loss(TOKENS, model.hc_0)))(LANGUAGE)
    outside = jax.jit(jax.grad(lambda model: model.loss(TOKENS, hc)))(LANGUAGE)

    assert np.all(inside.c_0 != 0)
    assert_same(outside.c_0, jnp.zeros(2))
    assert_close(inside.lstmcell, outside.lstmcell)
    both = jax.jit(jax.grad(lambda hc: LANGUAGE.loss(TOKENS, (jnp.tanh(hc), hc))))(hc[1])
    assert_close(inside.c_0, both)


def test_her_names_of_parameters():
    """S10, S13: with slashes, there and back; fields give them, and no stack of frames."""
    named = pm.named_leaves(LANGUAGE, sep="/")
    cell = ["lstmcell/weight_ih", "lstmcell/weight_hh", "lstmcell/bias"]
    assert [*named] == ["c_0", "embeddings", *cell]
    doubled = pm.from_named(LANGUAGE, {name: 2 * leaf for name, leaf in named.items()}, sep="/")
    assert_same(doubled, jax.tree.map(lambda leaf: 2 * leaf, LANGUAGE))
    del named["lstmcell/bias"]
    with pytest.raises(pm.errors.StructureError, match="lstmcell/bias"):
        pm.from_named(LANGUAGE, named, sep="/")


def test_a_method_of_the_class_is_the_pure_function():
    """S8: `LanguageModel.loss` takes the parameters first, like a purified method there."""
    hc, leaves = LANGUAGE.hc_0, jax.tree.leaves(LANGUAGE)
    value = jax.jit(LanguageModel.loss, static_argnums=1)(LANGUAGE, TOKENS, hc)
    assert_close(value, LANGUAGE.loss(TOKENS, hc))
    changed = jax.tree.map(jnp.zeros_like, LANGUAGE)
    assert_close(LanguageModel.loss(changed, TOKENS, hc), 2 * jnp.log(5.0))
    assert_same(jax.tree.leaves(LANGUAGE), leaves)


def test_init_and_apply_are_two_lines():
    """S9, L4: the pair of functions that other libraries ask for, made of a class."""

    def init(key):
        return pm.partition(nn.MLP(2, 1, 3, 1, key=key), pm.is_array)[0]

    static = pm.partition(nn.MLP(2, 1, 3, 1, key=jax.random.key(0)), pm.is_array)[1]
    apply = lambda params, x: pm.combine(params, static)(x)  # noqa: E731

    model = nn.MLP(2, 1, 3, 1, key=jax.random.key(1))
    params = jax.jit(init)(jax.random.key(1))
    assert_close(jax.jit(apply)(params, ramp(2)), model(ramp(2)))
    several = jax.vmap(init)(jax.random.split(jax.random.key(0), 4))
    assert jax.vmap(apply, in_axes=(0, None))(several, ramp(2)).shape == (4, 1)
