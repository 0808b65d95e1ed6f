"""The gradient of a batch in parts is that of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.meshes import EXPLICIT, MESH

X, Y = (jnp.cos(jnp.arange(32.0 * k)).reshape(32, k) for k in (4, 2))
MODEL = nn.MLP(4, 2, 8, 1, jnp.tanh, key=jax.random.key(0))


def errors(model, x, y):
    return ((model(x) - y) ** 2).mean(axis=1)


def numbers(tree):
    """The arrays of a tree, those of keys as numbers."""
    arrays = [x for x in jax.tree.leaves(tree) if pm.is_array(x)]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [jax.random.key_data(x) if is_key(x) else x for x in arrays]


def mean(model, x, y, scale=1.0):
    return errors(model, x, y).mean() * scale


@pytest.mark.parametrize("n", [1, 2, 8, 32])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.sampled
def test_value_and_gradient_are_those_of_the_batch(n, jit):
    """For a mean, and for a sum; with arrays by keyword, and numbers."""

    def total(model, x, y):
        return errors(model, x, y).sum()

    for loss, reduce in ((mean, "mean"), (total, "sum")):
        parts = pm.filter_value_and_grad(loss, microbatches=n, reduce=reduce)
        found = (pm.filter_jit(parts) if jit else parts)(MODEL, X, y=Y)
        assert_close(found, pm.filter_value_and_grad(loss)(MODEL, X, Y), rtol=1e-5, atol=1e-6)
    grad = pm.filter_grad(mean, microbatches=n)(MODEL, X, Y, jnp.asarray(2.0))
    assert_close(grad, pm.filter_grad(mean)(MODEL, X, Y, 2.0), rtol=1e-5, atol=1e-6)


def test_one_part_is_the_same_program_as_none():
    one, none = pm.filter_grad(mean, microbatches=1), pm.filter_grad(mean)
    assert equations(one, MODEL, X, Y) == equations(none, MODEL, X, Y)


def test_what_is_returned_beside_the_loss_is_that_of_the_batch():
    """Examples in their order; means; unchanged arguments and texts."""

    count = jnp.asarray(3)

    def loss(model, x, y, count):
        each = errors(model, x, y)
        aux = {"each": each, "mean": each.mean(), "model": model, "x": x, "name": "a"}
        return each.mean(), {**aux, "count": count}

    parts, whole = (
        pm.filter_value_and_grad(loss, has_aux=True, microbatches=n)(MODEL, X, Y, count)
        for n in (4, 1)
    )
    aux = parts[0][1]
    assert_close(numbers(parts), numbers(whole), rtol=1e-5, atol=1e-6)
    assert_same((aux["model"], aux["x"]), (MODEL, X))
    assert aux["name"] == "a"
    assert jax.tree.structure(parts) == jax.tree.structure(whole)
    sums = pm.filter_grad(lambda m, x: (m(x).sum(), m(x).sum()), has_aux=True)
    several = pm.filter_grad(sums.fn, has_aux=True, microbatches=4, reduce="sum")
    assert_close(several(MODEL, X), sums(MODEL, X), rtol=1e-5, atol=1e-5)


def by_hand(loss, model, state, n):
    """Every n-th example, one part after the other; the State goes along."""
    grads = []
    for i in range(n):
        (_, state), grad = pm.filter_value_and_grad(loss, has_aux=True)(model, state, X[i::n])
        grads.append(grad)
    return state, jax.tree.map(lambda *g: sum(g) / n, *grads)


def stateful_loss(model, state, x):
    out, state = model(x, state)
    return (out**2).mean(), state


def make_stateful():
    key = jax.random.key(1)
    layers = [nn.Linear(4, 4, key=key), nn.BatchNorm(4), nn.Dropout(0.5, stream=pm.RngStream())]
    return nn.Sequential(layers)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.sampled
def test_a_state_goes_from_part_to_part(jit):
    """As an argument, or in a net that comes back; streams and statistics move n times."""
    model, state = pm.make_with_state(make_stateful)()
    state = state.seed(jax.random.key(2))
    last, grads = by_hand(stateful_loss, model, state.restored(), 4)
    wrap = pm.filter_jit if jit else lambda fn: fn

    parts = wrap(pm.filter_value_and_grad(stateful_loss, has_aux=True, microbatches=4))
    (_, found), mine = parts(model, state.restored(), X)
    assert_close(numbers((found, mine)), numbers((last, grads)), rtol=1e-5, atol=1e-6)

    def net_loss(net, x):
        out, net = net(x)
        return (out**2).mean(), net

    net = pm.stateful(model, state.restored())
    parts = wrap(pm.filter_value_and_grad(net_loss, has_aux=True, microbatches=4))
    (_, after), mine = parts(net, X)
    assert_close(numbers(after.state), numbers(last), rtol=1e-5, atol=1e-6)
    assert_same(pm.trainable(after)[0], pm.trainable(net)[0])
    assert jax.tree.structure(after) == jax.tree.structure(net)
    assert_close(numbers(mine), numbers(grads), rtol=1e-5, atol=1e-6)


def test_a_state_that_does_not_come_back_is_the_same_for_all_parts():
    """As the running statistics that inference reads."""
    model, state = pm.make_with_state(make_stateful)()
    model = pm.inference_mode(model)

    def loss(model, state, x):
        return (model(x, state)[0] ** 2).mean()

    found = pm.filter_value_and_grad(loss, microbatches=4)(model, state.restored(), X)
    right = pm.filter_value_and_grad(loss)(model, state.restored(), X)
    assert_close(numbers(found), numbers(right), rtol=1e-5, atol=1e-6)


def test_a_key_is_split():
    """Each part has its own."""

    def loss(model, x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
        return (model(x * mask) ** 2).mean(), mask

    key = jax.random.key(3)
    _, masks = pm.filter_grad(loss, has_aux=True, microbatches=4)(MODEL, X, key)
    for i, each in enumerate(jax.random.split(key, 4)):
        assert_same(masks[i::4], jax.random.bernoulli(each, 0.5, (8, 4)).astype(X.dtype))


def test_a_loss_that_is_an_argument_is_added_up():
    """Each part has it."""
    grad = pm.filter_value_and_grad(lambda w, x, s: s, microbatches=4, reduce="sum")
    assert float(grad(jnp.asarray(1.0), jnp.ones(8), jnp.asarray(3.0))[0]) == 12


def test_half_precision_is_added_in_float32():
    """A thousand small gradients are not lost beside their sum."""
    w = jnp.ones((), jnp.bfloat16)
    x = jnp.full((1024,), 0.01, jnp.bfloat16)
    grad = pm.filter_grad(lambda w, x: (w * x).sum(), microbatches=1024, reduce="sum")(w, x)
    assert grad.dtype == jnp.bfloat16
    assert float(grad) == pytest.approx(10.24, rel=0.01)


def test_sown_values_are_stacked():
    """As those of any scan."""
    parts = pm.filter_grad(lambda m, x: (m(x) ** 2).mean(), microbatches=4)
    _, seen = pm.capture(parts, "layers.0")(MODEL, X)
    (values,) = seen.values()
    assert values.shape == (4, 8, 8)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.sampled
def test_a_batch_on_a_mesh_stays_where_it_is(mesh):
    """No part is gathered: each device computes its examples alone."""
    spec = jax.sharding.PartitionSpec("data")
    split = jax.device_put((X, Y), jax.sharding.NamedSharding(mesh, spec))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = jax.tree.map(lambda x: jax.device_put(x, whole) if pm.is_array(x) else x, MODEL)
    parts = pm.filter_jit(pm.filter_value_and_grad(mean, microbatches=4))
    with jax.set_mesh(mesh):
        found = parts(model, *split)
        text = parts.lower(model, *split).compile().as_text()
    assert_close(found, pm.filter_value_and_grad(mean)(MODEL, X, Y), rtol=1e-5, atol=1e-6)
    assert "all-gather" not in text
    assert "all-to-all" not in text


@pytest.mark.slow
def test_memory_is_that_of_a_part():
    """Temporaries of 16 parts are a fraction of those of the batch."""
    model = nn.MLP(64, 64, 512, 3, key=jax.random.key(0))
    x = jnp.ones((1024, 64))

    def temporaries(n):
        fn = pm.filter_grad(lambda m, x: (m(x) ** 2).mean(), microbatches=n)
        analysis = pm.filter_jit(fn).lower(model, x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 2


REFUSED = {
    "two sizes": (lambda: pm.filter_grad(mean, microbatches=2)(MODEL, X, Y[:8]), ShapeError, "f32"),
    "no multiple": (
        lambda: pm.filter_grad(mean, microbatches=5)(MODEL, X, Y),
        ShapeError,
        "multiple of 5",
    ),
    "no batch": (
        lambda: pm.filter_grad(lambda m: m(X).sum(), microbatches=2)(MODEL),
        ShapeError,
        "multiple of 2",
    ),
    "a gradient by what is split": (
        lambda: pm.filter_grad(mean, microbatches=2, argnums=1)(MODEL, X, Y),
        ArgumentError,
        "argument 0",
    ),
    "a count": (
        lambda: pm.filter_grad(
            lambda m, x: (m(x).sum(), (m(x) > 0).sum()), has_aux=True, microbatches=2
        )(MODEL, X),
        ArgumentError,
        "aux",
    ),
    "no parts": (
        lambda: pm.filter_grad(mean, microbatches=0)(MODEL, X, Y),
        ArgumentError,
        "microbatches",
    ),
    "another way": (
        lambda: pm.filter_grad(mean, microbatches=2, reduce="max")(MODEL, X, Y),
        ArgumentError,
        "reduce",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_parts_is_refused(call, error, match):
    """By the paths."""
    with pytest.raises(error, match=match):
        call()


def test_traces_do_not_grow_with_calls():
    """Nor with the number of parts."""
    traces = []

    def loss(model, x, y):
        traces.append(1)
        return mean(model, x, y)

    parts = pm.filter_jit(pm.filter_value_and_grad(loss, microbatches=4))
    for _ in range(3):
        parts(MODEL, X, Y)
    np.testing.assert_array_less(len(traces), 4)
