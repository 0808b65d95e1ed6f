"""intervene: changes the outputs of selected Modules, in every transform, with values as data."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import (
    ArgumentError,
    CaptureError,
    ShapeError,
    SpecError,
)
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

DEPTH = 3
X, OTHER = ramp(2, 4) / 8, ramp(2, 4) / -4


class Block(pm.Module):
    """Two layers, added to the input."""

    up: nn.Linear
    down: nn.Linear

    def __init__(self, *, key):
        one, two = jax.random.split(key)
        self.up, self.down = nn.Linear(4, 3, key=one), nn.Linear(3, 4, key=two)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(pm.Module):
    """A Stack, and one layer that is called twice."""

    blocks: nn.Stack
    head: nn.Linear

    def __init__(self, *, remat=False, key):
        one, two = jax.random.split(key)
        self.blocks = nn.Stack(Block, DEPTH, remat=remat, key=one)
        self.head = nn.Linear(4, 4, key=two)

    def __call__(self, x):
        return self.head(self.head(self.blocks(x)))


NET = Net(key=jax.random.key(0))


def real(number):
    return number.astype(jnp.float32)


def same(out, at, value):
    return out


def patched(out, at, value):
    return value


def without_layer(number):
    """`NET(X)` where `down` of one layer gives zeros, by surgery."""

    def cut(leaf):
        return leaf.at[number].set(0)

    cutting = pm.tree_at(
        lambda n: (n.blocks.layer.down.weight, n.blocks.layer.down.bias), NET, replace_fn=cut
    )
    return cutting(X)


def zero_at(number, out, at, value):
    return jnp.where(at.layer == number, 0, out)


def ablated(number):
    rule = pm.by({"blocks.layer.down": pm.Partial(zero_at, number)})
    return pm.intervene(NET, rule)(X)


def loss(fn):
    return lambda *args: jnp.sum(fn(*args) ** 2)


def scanned(model):
    return pm.filter_scan(lambda c, x: (model(c), x), X, jnp.arange(2))[0]


WAYS = {
    "as it is": lambda model: model(X),
    "remat": lambda model: pm.tree_at(lambda m: m.blocks.remat, model, True)(X),
    "jit": lambda model: pm.filter_jit(model)(X),
    "grad of the model": lambda model: pm.filter_grad(loss(lambda m: m(X)))(model).head.weight,
    "scan": scanned,
    "cond": lambda model: pm.filter_cond(X[0, 0] > -9, model, model, X),
    "jit of vmap of grad": lambda model: pm.filter_jit(
        pm.filter_vmap(pm.filter_grad(loss(lambda x: model(x))))
    )(X),
    "precision": lambda model: pm.with_precision(model, "compute=bfloat16")(X),
}
CHOSEN = "blocks.layer.down"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_identity_changes_nothing(way):
    """Law: with `lambda out, at, value: out` it equals fn."""
    rule = pm.by({CHOSEN: same, "head": same})

    assert_close(pm.intervene(way, rule)(NET), way(NET))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_was_captured_changes_nothing(way):
    """Law: with the values that were seen in the same call, patching with them equals fn."""
    out, seen = pm.capture(way, pm.select.path(CHOSEN) | pm.select.path("head"))(NET)

    assert {CHOSEN, "head", "head#2"} == set(seen)
    found = pm.intervene(way, pm.by({CHOSEN: patched, "head": patched}), values=seen)(NET)
    if "grad" in str(way.__code__.co_names):
        # The patched leaf has no gradient.
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, out)
    else:
        assert_close(found, out)


def test_one_call_of_several_is_changed():
    """Values have the names of the calls; others are None; `at.call` counts."""
    calls = []

    def change(out, at, value):
        calls.append((at.path, at.call, value is None))
        return out if value is None else value

    given = {"head#2": jnp.ones((2, 4))}
    assert_close(pm.intervene(NET, pm.by({"head": change}), values=given)(X), jnp.ones((2, 4)))
    assert calls == [("head", 0, True), ("head", 1, False)]


def test_every_layer_by_itself_in_one_program():
    """filter_vmap over the number of the layer; the numbers are those of surgery."""
    traces = []

    @pm.filter_jit
    def sweep(numbers):
        traces.append(0)
        return pm.filter_vmap(ablated)(numbers)

    expected = jnp.stack([without_layer(i) for i in range(DEPTH)])
    assert_close(sweep(jnp.arange(DEPTH)), expected)
    assert len(traces) == 1


def test_what_differs_is_another_program():
    """Numbers of another kind, other defaults, other code: never the last one's program."""
    compiled = pm.filter_jit(lambda model, x: model(x))

    def run(f):
        return np.asarray(pm.intervene(compiled, pm.by({"head": f}))(NET, X))

    for number, expected in ((1.0, 1.0), (True, 5.0), (1, 1.0), (2.0, 2.0)):
        # 1.0, True and 1 are equal to Python, and no programs are.
        found = run(lambda out, at, value: 0 * out + (5 if number is True else number))  # noqa: B023
        assert_close(found, jnp.full((2, 4), expected))
    for number in (1.0, 2.0):
        assert_close(run(lambda out, at, value: 0 * out + number), jnp.full((2, 4), number))  # noqa: B023
        assert_close(
            run(lambda out, at, value, number=number: 0 * out - number), jnp.full((2, 4), -number)
        )
    array = jnp.ones((2, 4))
    for _ in range(2):
        array = array + 1
        assert_close(run(lambda out, at, value: 0 * out + array), array)  # noqa: B023


def test_the_patch_can_be_differentiated():
    """Data may be a tracer: a patch, the number of a Partial."""

    def of_patch(patch):
        rule = pm.by({"head": lambda out, at, value: out if value is None else value})
        return jnp.sum(pm.intervene(NET, rule, values={"head#2": patch})(X) ** 2)

    def of_factor(factor):
        rule = pm.by({"head": pm.Partial(lambda n, out, at, value: n * out, factor)})
        return jnp.sum(pm.intervene(NET, rule)(X))

    patch = ramp(2, 4)
    assert_close(jax.grad(of_patch)(patch), 2 * patch)
    step = (of_factor(1.01) - of_factor(0.99)) / 0.02
    np.testing.assert_allclose(jax.jit(jax.grad(of_factor))(1.0), step, rtol=1e-2)


def test_inputs_are_changed():
    """With inputs=True functions are given, and return, (args, kwargs)."""

    def change(given, at, value):
        (x,), kwargs = given
        return (x + value,), kwargs

    found = pm.intervene(NET, pm.by({"head": change}), values={"head": X, "head#2": X}, inputs=True)
    assert_close(found(X), NET.head(NET.head(NET.blocks(X) + X) + X))


def test_state_is_left_out():
    """A stateful layer's `out` is without its State, which goes on."""
    model, state = pm.make_with_state(nn.BatchNorm)(2, axis_name=None)
    x = ramp(3, 2)
    rule = pm.by({...: lambda out, at, value: out * 0 + jnp.sum(out) * 0 + 7})

    out, new = pm.intervene(model, rule)(x, state)
    assert_close(out, jnp.full((3, 2), 7.0))
    expected = model(x, pm.make_with_state(nn.BatchNorm)(2, axis_name=None)[1])[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b)), new, expected))


def test_transforms_in_a_function_take_nothing():
    """They are not among the transforms that values enter."""

    def fn(model, x):
        return pm.filter_vmap(model.head)(model.head(x))

    def change(out, at, value):
        out = pm.filter_vmap(lambda row: row + 0)(out[None])[0]
        return out if value is None else 0 * out + value

    rows = jnp.array([[1.0], [2.0]]) * jnp.ones((1, 4))
    found = pm.intervene(fn, pm.by({"head": change}), values={"head#2": rows})(NET, X)
    assert_close(found, rows)


# ---- numbers


def test_numbers_of_members():
    """`at.member` in an Ensemble."""
    nets = nn.Ensemble(lambda key: nn.Linear(4, 4, key=key), 3, key=jax.random.key(1))

    def change(out, at, value):
        return 0 * out + real(at.member)

    rule = pm.by({"member": change})
    assert_close(pm.intervene(nets, rule)(X)[:, 0, 0], jnp.arange(3.0))


@pytest.mark.parametrize("through", [lambda f: f, pm.filter_vmap])
def test_numbers_of_steps(through):
    """`at.step` in filter_scan, for a captured or passed Module, through inner transforms."""

    def change(out, at, value):
        return out * 0 + real(at.step)

    def fn(model):
        apply = through(lambda x: model(x))
        return pm.filter_scan(lambda c, x: (c, apply(x)), 0.0, jnp.stack([X, X, X]))[1]

    found = pm.intervene(fn, pm.by({...: change}))(NET.head)
    assert_close(found[:, 0, 0], jnp.arange(3.0))


# ---- transforms of plain JAX


def test_an_exception_leaves_nothing_behind():
    """The next call is as ever."""

    def fail(out, at, value):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pm.intervene(NET, pm.by({CHOSEN: fail}), values={CHOSEN: jnp.ones(DEPTH)})(X)
    assert_close(ablated(1), without_layer(1))
    assert_close(pm.filter_jit(NET)(X), NET(X))


def test_two_threads():
    """Each has its own."""
    found = {}

    def run(number):
        for _ in range(3):
            found[number] = ablated(jnp.asarray(number))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close((found[0], found[1]), (without_layer(0), without_layer(1)))


SEEN = pm.capture(NET, nn.Linear)(X)[1]


def mapped_by_jax(model, x):
    return jax.vmap(model)(x)


REFUSED = {
    "a path of no Module": (
        lambda: pm.intervene(NET, pm.by({"blocks.layer.downn": same}))(X),
        SpecError,
        "blocks.layer.downn",
    ),
    "values by names that nothing chose": (
        lambda: pm.intervene(NET, pm.by({CHOSEN: patched, ...: None}), values=SEEN)(X),
        ArgumentError,
        "head#2",
    ),
    "too few values": (
        lambda: pm.intervene(NET, pm.by({CHOSEN: patched}), values={CHOSEN: X})(X),
        ShapeError,
        r"blocks.layer.down: f32\[2,4\]",
    ),
    "a value through jax.vmap": (
        lambda: pm.intervene(mapped_by_jax, pm.by({"head": patched}), values={"head": X})(NET, X),
        CaptureError,
        "head",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_change_nothing_or_something_else_is_refused(call, error, match):
    """Instead of a call without the change that was asked for."""
    with pytest.raises(error, match=match):
        call()
