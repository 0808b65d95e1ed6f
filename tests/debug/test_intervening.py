"""intervene: changes the outputs of selected Modules, in every transform, with values as data."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.goldens import refusals
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
    "vmap": lambda model: pm.filter_vmap(model)(X),
    "grad": lambda model: pm.filter_grad(loss(lambda x: model(x)))(X),
    "grad of the model": lambda model: pm.filter_grad(loss(lambda m: m(X)))(model).head.weight,
    "checkpoint": lambda model: pm.filter_checkpoint(model)(X),
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


def test_the_patch_of_another_run_is_that_run():
    """If all values pass through the patch, the rest equals the other run."""
    seen = pm.capture(NET, CHOSEN)(OTHER)[1]

    found = pm.intervene(NET, pm.by({CHOSEN: patched}), values=seen)(X)
    expected = NET.head(NET.head(X + seen[CHOSEN].sum(0)))
    assert_close(found, expected)


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


def test_values_for_each_layer_may_be_anything():
    """They need not look like captured values: here a factor for each layer."""
    scale = pm.by({CHOSEN: lambda out, at, value: out * value})

    found = pm.intervene(NET, scale, values={CHOSEN: jnp.array([1.0, 0.0, 1.0])})(X)
    assert_close(found, without_layer(1))


def test_another_patch_is_no_new_program():
    """Nor is the same lambda, made again; counted by get_num_traces."""
    fn = pm.debug.assert_max_traces(lambda model, x: model(x), max_traces=None)
    compiled = pm.filter_jit(fn)
    for i in range(4):
        seen = {CHOSEN: jnp.full((DEPTH, 2, 4), float(i))}
        rule = pm.by({CHOSEN: lambda out, at, value: out + value})
        out = pm.intervene(compiled, rule, values=seen)(NET, X)
        data = pm.by({CHOSEN: pm.Partial(lambda n, out, at, value: out + n, float(i) + X)})
        pm.intervene(compiled, data)(NET, X)
        fixed = 2.0
        pm.intervene(compiled, pm.by({CHOSEN: lambda out, at, value: fixed * out}))(NET, X)  # noqa: B023
    # One to plan the values, one to run with them, and one for each of the two others.
    assert pm.debug.get_num_traces(compiled) == 4
    assert_close(
        out,
        NET.head(
            NET.head(
                pm.intervene(NET.blocks, pm.by({"layer.down": lambda out, at, value: out + 3.0}))(X)
            )
        ),
    )


def test_what_differs_is_another_program():
    """Numbers of another kind, other defaults, other code: never the last one's program."""
    compiled = pm.filter_jit(lambda model, x: model(x))

    def run(f):
        return np.asarray(pm.intervene(compiled, pm.by({"head": f}))(NET, X))

    for number in (1.0, 2.0, 3.0):
        assert_close(run(lambda out, at, value: 0 * out + number), jnp.full((2, 4), number))  # noqa: B023
        assert_close(
            run(lambda out, at, value, number=number: 0 * out - number), jnp.full((2, 4), -number)
        )
    box = []
    for number in (1.0, 2.0):
        box[:] = [number]
        assert_close(
            run(lambda out, at, value, box=box: 0 * out + box[0]), jnp.full((2, 4), number)
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


def test_the_first_match_is_for_a_module():
    """As everywhere in `by`; None leaves alone."""
    ones = pm.by(
        {"blocks.layer.up": None, nn.Linear: lambda out, at, value: 0 * out + 1, ...: None}
    )

    assert_close(pm.intervene(NET, ones)(X), jnp.ones((2, 4)))
    seen = pm.capture(pm.intervene(NET, ones), "blocks.layer.up")(X)[1]
    assert_close(seen["blocks.layer.up"][0], NET.blocks[0].up(X))


def test_the_outer_one_sees_what_the_inner_one_changed():
    """And so does a capture around both; one inside sees the original."""

    def run(x):
        return pm.intervene(NET.head, pm.by({...: lambda out, at, value: 10 * out}))(x)

    both = pm.intervene(
        pm.intervene(NET.head, pm.by({...: lambda out, at, value: 10 * out})),
        pm.by({...: lambda out, at, value: out + 1}),
    )
    assert_close(run(X), 10 * NET.head(X))
    assert_close(both(X), 10 * NET.head(X) + 1)
    out, seen = pm.capture(both, ...)(X)
    assert_close(seen["<root>"], out)
    (_, seen) = pm.intervene(
        pm.capture(NET.head, ...), pm.by({...: lambda out, at, value: 0 * out})
    )(X)
    assert_close(seen["<root>"], NET.head(X))


def test_both_of_two_nested_ones_take_values():
    """To the same calls, by separate names, also compiled."""
    add = pm.by({CHOSEN: lambda out, at, value: out + value})
    one = {CHOSEN: jnp.arange(3.0)}

    def inner(model, x):
        return pm.intervene(lambda m, x: m(x), add, values=one)(model, x)

    twice = pm.intervene(pm.filter_jit(inner), add, values=one)(NET, X)
    expected = pm.intervene(NET, add, values={CHOSEN: 2 * jnp.arange(3.0)})(X)
    assert_close(twice, expected)


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


def test_a_capture_of_cotangents_inside_and_outside():
    """Both take values into the same calls."""
    add, given = pm.by({CHOSEN: lambda out, at, value: out + value}), {CHOSEN: jnp.arange(3.0)}

    def added(model):
        return loss(pm.intervene(lambda m: m(X), add, values=given))(model)

    expected = pm.filter_grad(added)(NET)
    outside, seen = pm.capture(pm.filter_grad(added), "head", cotangents=True)(NET)
    inner = pm.capture(pm.filter_grad(loss(lambda m: m(X))), "head", cotangents=True)
    inside, _ = pm.intervene(inner, add, values=given)(NET)
    assert_close((outside, inside), (expected, expected))
    assert [len(pair) for pair in seen.values()] == [2, 2]


def test_what_is_weak_goes_on_as_what_came():
    """Weak types are allowed, and a strong type remains strong."""

    def two(out, at, value):
        return jnp.broadcast_to(jnp.asarray(2.0), out.shape)

    found = pm.intervene(NET, pm.by({"head": two}))(X)
    assert_close(found, jnp.full((2, 4), 2.0))
    assert not jax.typeof(found).weak_type


# ---- numbers


def test_numbers_of_members():
    """`at.member` in an Ensemble, also in a Stack of them."""
    nets = nn.Ensemble(lambda key: nn.Linear(4, 4, key=key), 3, key=jax.random.key(1))

    def change(out, at, value):
        return 0 * out + real(at.member)

    rule = pm.by({"member": change})
    assert_close(pm.intervene(nets, rule)(X)[:, 0, 0], jnp.arange(3.0))

    class Mean(pm.Module):
        nets: nn.Ensemble

        def __init__(self, *, key):
            self.nets = nn.Ensemble(lambda key: nn.Linear(4, 4, key=key), 3, key=key)

        def __call__(self, x):
            return self.nets(x).sum(0)

    def both(out, at, value):
        return 0 * out + real(at.member + 10 * at.layer) + len(at.layers)

    stack = nn.Stack(Mean, 2, key=jax.random.key(2))
    found = pm.intervene(stack, pm.by({"layer.nets.member": both}))(X)
    assert_close(found, jnp.full((2, 4), 0 + 1 + 2 + 3 * 11.0))


def test_numbers_of_nested_stacks():
    """`at.layers` has all, the outermost first; `at.layer` the innermost."""
    layer = lambda key: nn.Linear(4, 4, use_bias=False, key=key)  # noqa: E731
    stack = nn.Stack(lambda key: nn.Stack(layer, 2, key=key), 2, key=jax.random.key(0))

    def change(out, at, value):
        outer, inner = at.layers
        return jnp.where((outer == 0) & (inner == 1) & (at.layer == 1), 5, out)

    found = pm.intervene(stack, pm.by({"layer.layer": change}))(X)
    weights = stack.layer.layer.weight[1]
    assert_close(found, jnp.full((2, 4), 5.0) @ weights[0].T @ weights[1].T)


@pytest.mark.parametrize("through", [lambda f: f, pm.filter_jit, pm.filter_vmap])
def test_numbers_of_steps(through):
    """`at.step` in filter_scan, for a captured or passed Module, through inner transforms."""

    def change(out, at, value):
        return out * 0 + real(at.step)

    def fn(model):
        apply = through(lambda x: model(x))
        return pm.filter_scan(lambda c, x: (c, apply(x)), 0.0, jnp.stack([X, X, X]))[1]

    found = pm.intervene(fn, pm.by({...: change}))(NET.head)
    assert_close(found[:, 0, 0], jnp.arange(3.0))


def test_steps_of_an_rnn():
    """In the cell; the layers of a Stack are not steps, and outside of loops there are none."""
    rnn = nn.RNN(nn.GRUCell(4, 4, key=jax.random.key(0)))

    found = pm.intervene(rnn, pm.by({"cell": lambda out, at, value: 0 * out + real(at.step)}))(
        X[None]
    )
    assert_close(found[0, :, 0], jnp.arange(2.0))

    def check(out, at, value):
        assert (at.step is None, at.member is None) == (True, True)
        assert (at.layer is None) == (at.path == "head")
        return out

    pm.intervene(NET, pm.by({nn.Linear: check}))(X)


def test_a_step_in_a_loop_around_a_stack():
    """Through the Stack's own loop."""

    def change(out, at, value):
        return jnp.where((at.step == 1) & (at.layer == 0), 0, out)

    found = pm.intervene(scanned, pm.by({CHOSEN: change}))(NET)
    middle = NET(X)
    expected = without_layer(0)
    assert_close(found, pm.intervene(NET, pm.by({CHOSEN: pm.Partial(zero_at, 0)}))(middle))
    assert expected.shape == found.shape


# ---- transforms of plain JAX


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_plain_jax_where_nothing_is_needed(transform):
    """Without values and numbers of steps, transforms of JAX may be inside and around."""
    rule = pm.by({CHOSEN: pm.Partial(lambda out, at, value: jnp.where(at.layer == 1, 0, out))})

    inside = pm.intervene(lambda model: transform(lambda x: model(x))(X), rule)(NET)
    around = transform(lambda x: pm.intervene(NET, rule)(x))(X)
    assert_close((inside, around), (without_layer(1), without_layer(1)))


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


def test_an_intervened_function_is_data():
    """Its values and arrays are leaves: others are no new program, as an argument or compiled."""
    traces = []

    @pm.filter_jit
    def apply(fn, x):
        traces.append(0)
        return fn(x)

    for i in range(2):
        rule = pm.by({CHOSEN: lambda out, at, value: out * value})
        fn = pm.intervene(NET, rule, values={CHOSEN: real(jnp.arange(DEPTH) != i)})
        assert_close(apply(fn, X), without_layer(i))
        assert_close(pm.filter_jit(fn)(X), without_layer(i))
    assert len(traces) == 1


test_refusals = refusals(globals())
