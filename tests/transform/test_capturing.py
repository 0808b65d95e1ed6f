"""capture and intervene: what they show and change, and that nothing else changes."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError, SpecError, StateError
from tests.helpers.trees import ramp

DEPTH = 3
X, XS = ramp(4) / 4, ramp(3, 4) / 8


class Block(pm.Module):
    layer: nn.Linear

    def __call__(self, x):
        return x + jnp.tanh(self.layer(x))


class Net(pm.Module):
    blocks: nn.Stack
    head: nn.Linear
    scale: jax.Array = pm.buffer()

    def __call__(self, x):
        return self.scale * self.head(self.head(self.blocks(x)))


def make_stack(key):
    return nn.Stack(lambda key: Block(nn.Linear(4, 4, key=key)), DEPTH, key=key)


KEYS = jax.random.split(jax.random.key(0))
NET = Net(make_stack(KEYS[0]), nn.Linear(4, 4, key=KEYS[1]), jnp.float32(0.5))
LAYERS = ["blocks.layer.layer", "head", "head#2"]


def by_hand(x, inner=(0, 0, 0), outer=0, cut=None):
    """The result of `NET` and the values of its Linears, in plain JAX; shifts are added to them."""
    weight, bias, layers = NET.blocks.layer.layer.weight, NET.blocks.layer.layer.bias, []
    for i in range(DEPTH):
        layers.append((weight[i] @ x + bias[i] + inner[i]) * jnp.float32(cut != i))
        x = x + jnp.tanh(layers[i])
    one = NET.head.weight @ x + NET.head.bias + outer
    two = NET.head.weight @ one + NET.head.bias + outer
    return NET.scale * two, dict(zip(LAYERS, [jnp.stack(layers), one, two], strict=True))


def same(a, b):
    assert pm.tree_equal(a, b, rtol=1e-5, atol=1e-6), (a, b)


def loss(net, x):
    return jnp.sum(net(x) ** 2)


GRAD_BY_X = pm.filter_grad(loss, argnums=1)
MESH, SPEC = jax.sharding.Mesh(jax.devices()[:3], ("data",)), jax.P("data")
# Each calls a model at each of `XS`; values have one more axis.
MAPPED = {
    "jit of vmap of grad": pm.filter_jit(
        lambda net: pm.filter_vmap(GRAD_BY_X, in_axes=(None, 0))(net, XS)
    ),
    "pmap": lambda net: pm.filter_pmap(net)(XS),
    "shard_map": lambda net: pm.filter_shard_map(
        lambda x: net(x[0])[None], mesh=MESH, in_specs=SPEC, out_specs=SPEC
    )(XS),
    "map": lambda net: pm.filter_map(net, XS),
    "a reversed scan": lambda net: pm.filter_scan(lambda n, x: (n, n(x)), net, XS, reverse=True)[1],
    "grad of vmap": lambda net: pm.filter_grad(
        lambda bias: loss(pm.filter_vmap(pm.tree_at("head.bias", net, bias)), XS)
    )(net.head.bias),
}
# Each calls it at `X`, once.
ONCE = {
    "jit of cond of grad": pm.filter_jit(
        lambda net: pm.filter_cond(X[0] > 0, GRAD_BY_X, lambda net, x: net(x), net, X)
    ),
    "jit": pm.filter_jit(lambda net: net(X)),
    "a jitted method": lambda net: pm.filter_jit(net.__call__)(X),
    "remat": lambda net: pm.tree_at("blocks.remat", net, True)(X),
    "grad of checkpoint": lambda net: pm.filter_grad(
        lambda bias: jnp.sum(pm.filter_checkpoint(pm.tree_at("head.bias", net, bias))(X))
    )(net.head.bias),
    "vjp": lambda net: pm.filter_vjp(net, X)[1](X),
    "jvp": lambda net: pm.filter_jvp(net, (X,), (X,)),
    "linearize": lambda net: pm.filter_linearize(net, X)[1](X),
    "switch": lambda net: pm.filter_switch(jnp.int32(1), [net, lambda x: net(x)], X),
}
WAYS = {**MAPPED, **ONCE}
THROUGH = {"as it is": lambda f: f, "jit": pm.filter_jit, "checkpoint": pm.filter_checkpoint}

# ---- capture

SELECTORS = {
    "a class": (nn.Linear, LAYERS),
    "everything": (..., ["blocks.layer.layer", "blocks.layer", "blocks", *LAYERS[1:], "<root>"]),
    "access": (pm.select.at(lambda n: (n.blocks, n.head)), ["blocks", *LAYERS[1:]]),
    "a predicate": (lambda m: isinstance(m, nn.Linear) and m.weight.ndim == 2, LAYERS[1:]),
    "paths": (~pm.select.path("head") & "**.layer.layer", LAYERS[:1]),
}


@pytest.mark.parametrize(("selector", "expected"), SELECTORS.values(), ids=SELECTORS)
def test_a_selector_chooses_modules_themselves(selector, expected):
    """And not their submodules, however they are passed; values are in the order of the calls."""
    assert list(pm.capture(NET, selector)(X)[1]) == expected
    assert list(pm.capture(NET.__call__, selector)(X)[1]) == expected
    assert list(pm.capture(lambda x, *, net: net(x), selector)(X, net=NET)[1]) == expected


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sampled
def test_values_are_seen_through_a_transform(name):
    """Law: the result is that without a capture; values are those of plain JAX, maps stack them."""
    out, seen = pm.capture(WAYS[name], nn.Linear)(NET)
    same(out, WAYS[name](NET))
    same(seen, jax.vmap(lambda x: by_hand(x)[1])(XS) if name in MAPPED else by_hand(X)[1])


def make_stateful():
    layer = nn.Linear(4, 4, key=jax.random.key(0))
    stack = nn.Stack(lambda: nn.Sequential([layer, nn.BatchNorm(4)]), 2)
    return nn.Sequential([stack, nn.Lambda(jnp.tanh), nn.BatchNorm(4)])


ROWS = jnp.sin(ramp(3, 4) ** 2)


def loss_of_closure(net, state):
    def loss(net):
        out, after = net(ROWS, state)
        return jnp.sum(out**2), after

    return pm.filter_value_and_grad(loss, has_aux=True)(net)[0]


WITH_STATE = {
    "an argument": lambda net, state: net(ROWS, state),
    "in a closure, jitted": pm.filter_jit(loss_of_closure),
    "a carry": lambda net, state: pm.filter_scan(
        lambda state, x: net(x, state)[::-1], state, jnp.stack([ROWS, 2 * ROWS])
    ),
    "in its net": lambda net, state: pm.filter_jit(pm.stateful(net, state).__call__)(ROWS)[0],
}


@pytest.mark.parametrize("way", WITH_STATE.values(), ids=WITH_STATE)
@pytest.mark.sampled
def test_state_goes_on_and_is_not_shown(way):
    """Law: results and States are those without capture or intervention."""
    net, state = pm.make_with_state(make_stateful)()
    expected = way(net, jax.tree.map(jnp.copy, state))
    out, seen = pm.capture(way, nn.BatchNorm)(net, jax.tree.map(jnp.copy, state))
    same(out, expected)
    assert [jnp.shape(x)[-2:] for x in jax.tree.leaves(seen)] == [(3, 4)] * 2
    same(way(pm.intervene(net, nn.BatchNorm, jnp.positive), state), expected)


@pytest.mark.parametrize("make", [lambda x: (x, 2 * x), lambda x: ((x, 2 * x), pm.State(NET))])
def test_a_result_that_is_a_tuple_is_seen(make):
    """As it is; only State is left out, for an intervention too."""
    same(pm.capture(nn.Lambda(make), ...)(X)[1], {"<root>": (X, 2 * X)})
    changed = pm.intervene(nn.Lambda(make), ..., lambda out: jax.tree.map(jnp.negative, out))
    same(pm.capture(changed, ...)(X)[1], {"<root>": (-X, -2 * X)})


def test_a_chosen_module_is_what_it_was():
    """It is of its class and printed as it is; and what comes out has its own class again."""

    def fn(net, x):
        assert isinstance(net.head, nn.Linear)
        assert repr(net) == repr(NET)
        pm.sow("layer", net.head)
        return pm.tree_at("head.bias", net, replace_fn=lambda b: b + 1)

    net, seen = pm.capture(pm.filter_jit(fn), ...)(NET, X)
    same(net, pm.tree_at("head.bias", NET, NET.head.bias + 1))
    assert type(seen["layer"]) is type(net.head) is nn.Linear


@pytest.mark.parametrize("inside", [lambda f: f, pm.filter_jit], ids=["as it is", "jit inside"])
@pytest.mark.parametrize("around", THROUGH.values(), ids=THROUGH)
@pytest.mark.parametrize("selector", ["head", nn.Linear], ids=["a path", "a class"])
@pytest.mark.sampled
def test_nested_captures_get_their_own_values(inside, around, selector):
    """With the same selector too; sown values reach both."""
    inner = inside(lambda net, x: pm.sow("out", net(x)))
    outer = around(lambda net, x: pm.capture(inner, "head")(net, x))
    (out, mine), seen = pm.capture(outer, selector)(NET, X)
    expected, values = by_hand(X)
    values["out"] = expected
    same(out, expected)
    same(mine, {name: values[name] for name in (*LAYERS[1:], "out")})
    same(seen, {name: values[name] for name in (*LAYERS[selector == "head" :], "out")})


def test_a_capture_inside_of_a_transform_is_its_own():
    """Under a plain one too: its values are used there, and an outer capture gets its own."""
    plain = jax.vmap(lambda x: pm.capture(NET, nn.Linear)(x)[1])(XS)
    same(plain, jax.vmap(lambda x: by_hand(x)[1])(XS))
    mapped = lambda net: pm.filter_vmap(lambda x: pm.capture(net, "head")(x)[1])(XS)  # noqa: E731
    mine, seen = pm.capture(mapped, "head")(NET)
    same(mine, {name: plain[name] for name in LAYERS[1:]})
    same(seen, mine)


def counting(fn):
    traces = []
    return pm.filter_jit(lambda *args: (traces.append(1), fn(*args))[1]), traces


@pytest.mark.parametrize("inside", THROUGH.values(), ids=THROUGH)
def test_each_choice_is_traced_once(inside):
    """A call without a capture finds its own program; no value is that of an earlier call."""
    traces = []
    fn = pm.filter_jit(inside(lambda net, x: pm.sow("out", traces.append(1) or net(x))))
    for x in XS:
        expected, values = by_hand(x)
        values["out"] = expected
        for selector in (None, "head", nn.Linear):
            out, seen = pm.capture(fn, selector)(NET, x)
            same([out, fn(NET, x)], [expected, expected])
            same(seen, {name: values[name] for name in seen})
    assert len(traces) == 4


def test_an_exception_leaves_nothing_behind_and_threads_are_apart():
    """The next capture has its own values alone, and so has each thread."""

    def fail(net, x):
        raise KeyError(net(x).shape)

    with pytest.raises(KeyError, match="4"):
        pm.capture(fail, nn.Linear)(NET, X)
    selectors = ["head", "blocks"] * 10
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda s: list(pm.capture(ONCE["jit"], s)(NET)[1]), selectors)]
    assert found == [["head", "head#2"], ["blocks"]] * 10


OPT, HEAD = pm.Optimizer(optax.adam(0.1)).init(NET), pm.select.path("head")
UPDATE = lambda net, opt: opt.update(net, grads=pm.filter_grad(loss)(net, X))  # noqa: E731
OPTAX = lambda net, s: optax.adam(0.1).update(pm.filter_grad(loss)(net, X), s, net)  # noqa: E731
REFUSED = {
    "inside jax.jit": (jax.jit(lambda net: net(X)), (NET,), HEAD, "head"),
    "around one in jit": (pm.filter_jit(UPDATE), (NET, OPT), HEAD, "optimizer"),
    "around optax": (OPTAX, (NET, optax.adam(0.1).init(NET)), HEAD, "optimizer"),
    "a path of no Module": (NET, (X,), "scale", "scale"),
    "one of two that picks nothing": (NET, (X,), HEAD | pm.select.path("foo"), "foo"),
    "a closure": (lambda x: NET(x), (X,), nn.Linear, "Linear"),
}


@pytest.mark.parametrize(("fn", "args", "selector", "match"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_seen_is_refused(fn, args, selector, match):
    """Instead of a result in which it is missing. Another error of the function is its own."""
    with pytest.raises((StateError, SpecError), match=match):
        pm.capture(fn, selector)(*args)
    with pytest.raises(ValueError, match="'b'"):
        pm.capture(lambda n, x: jax.tree.map(jnp.add, {"a": n(x)}, {"b": x}), "head")(NET, X)


# ---- intervene

INNER, OUTER = ramp(DEPTH, 4) / 12, -ramp(4)


def shifted(net=NET, inner=INNER, outer=OUTER):
    net = pm.intervene(net, "blocks.layer.layer", jnp.add, inner)
    return pm.intervene(net, "head", jnp.add, outer)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.sampled
def test_an_intervention_goes_through_a_transform(way):
    """A shift of a result is one of the bias; law: the identity changes nothing."""
    biased = pm.tree_at("head.bias", NET, NET.head.bias + OUTER)
    biased = pm.tree_at("blocks.layer.layer.bias", biased, NET.blocks.layer.layer.bias + INNER)
    same(way(shifted()), way(biased))
    same(way(pm.intervene(NET, ..., lambda out: out)), way(NET))


def test_a_model_with_rules_goes_through_plain_jax():
    """Also values that are traced there."""
    for jit in (jax.jit, pm.filter_jit):
        same(jit(lambda net, x: net(x))(shifted(), X), by_hand(X, INNER, OUTER)[0])
        same(jit(lambda v: shifted(outer=v)(X))(OUTER), by_hand(X, INNER, OUTER)[0])
    same(jax.vmap(shifted())(XS), jax.vmap(lambda x: by_hand(x, INNER, OUTER)[0])(XS))


def test_values_are_data():
    """Other values are no new program; arrays in the function are values, too."""
    fn, traces = counting(lambda net, x: net(x))
    for x in XS:
        same(fn(pm.intervene(NET, Net, jnp.multiply, x), X), x * NET(X))
        same(fn(pm.intervene(NET, Net, pm.Partial(jnp.multiply, x)), X), x * NET(X))
    assert len(traces) == 2


def penalized(call, *args):
    out, seen = call(*args)
    return jnp.sum(out) + sum(jnp.sum(value**2) for value in seen.values())


@pytest.mark.parametrize("around", THROUGH.values(), ids=THROUGH)
@pytest.mark.sampled
def test_a_cotangent_is_the_gradient_by_zeros(around):
    """Of all layers and calls, as `jax.grad` finds it; also of values that a loss captures."""
    zeros = jnp.zeros((DEPTH, 4)), jnp.zeros(4)
    expected = jax.grad(lambda v: penalized(by_hand, X, *v))(zeros)
    fn = lambda v, net: penalized(pm.capture(shifted(net, *v), nn.Linear), X)  # noqa: E731
    for net in (NET, pm.tree_at("blocks.remat", NET, True)):
        same(around(pm.filter_grad(fn))(zeros, net), expected)


def test_a_number_chooses_the_layer_of_a_stack():
    """`jnp.arange(depth)` is a value; a sweep is one program; values of another run are put in."""

    def without(k):
        cut = lambda out, i: jnp.where(i == k, 0, out)  # noqa: E731
        return pm.intervene(NET, "blocks.layer.layer", cut, jnp.arange(DEPTH))(X)

    fn, traces = counting(pm.filter_vmap(without))
    same(fn(jnp.arange(DEPTH)), jnp.stack([by_hand(X, cut=k)[0] for k in range(DEPTH)]))
    fn(jnp.arange(DEPTH)[::-1])
    assert len(traces) == 1
    values = pm.capture(NET, "blocks.layer")(XS[0])[1]["blocks.layer"]
    put = lambda out, value, i: jnp.where(i == DEPTH - 1, value, out)  # noqa: E731
    patched = pm.intervene(NET, "blocks.layer", put, values, jnp.arange(DEPTH))
    same(patched(X), NET(XS[0]))


def test_a_stack_in_an_ensemble_has_values_with_both_axes():
    """The members first, for capture and intervene."""
    nets = nn.Ensemble(make_stack, 2, key=jax.random.key(1))
    changed = pm.intervene(nets, nn.Linear, jnp.add, jnp.stack([INNER, -INNER]))
    each = [pm.intervene(nets[i], nn.Linear, jnp.add, v) for i, v in enumerate((INNER, -INNER))]
    expected = [pm.capture(one, nn.Linear)(X) for one in each]
    out, seen = pm.capture(pm.filter_jit(changed), nn.Linear)(X)
    same(out, jnp.stack([out for out, _ in expected]))
    same(seen["member.layer.layer"], jnp.stack([seen["layer.layer"] for _, seen in expected]))
    same(changed[1](X), expected[1][0])


def test_rules_of_one_module_are_around_each_other():
    """The later one outside, also with captures; `inputs=True` changes arguments."""

    def add(given, value):
        (x,), kwargs = given
        return (x + value,), kwargs

    head, two = NET.head, jnp.float32(2)
    once = pm.intervene(head, ..., jnp.multiply, two)
    same(pm.intervene(once, ..., jnp.add, OUTER)(X), 2 * head(X) + OUTER)
    entered = pm.intervene(once, ..., add, OUTER, inputs=True)
    same(entered(X), 2 * head(X + OUTER))
    same(pm.intervene(entered, ..., add, X, inputs=True)(X), 2 * head(2 * X + OUTER))
    same(pm.capture(once, ...)(X)[1], {"<root>": 2 * head(X)})
    inside = pm.capture(lambda m: pm.intervene(m, ..., jnp.multiply, two)(X), ...)(head)
    same(inside, (2 * head(X), {"<root>": head(X)}))


def test_a_model_with_rules_is_a_model(tmp_path):
    """Printed, compared, copied, saved, edited."""
    one, two = shifted(), pickle.loads(pickle.dumps(shifted()))
    assert repr(one) == repr(NET)
    assert isinstance(one.head, nn.Linear)
    assert one == two != shifted(outer=-OUTER) != NET
    assert jax.tree.structure(one) == jax.tree.structure(two)
    same(two(X), one(X))
    pm.save(tmp_path / "net", one)
    same(pm.load(tmp_path / "net", jax.tree.map(jnp.zeros_like, one)), one)
    doubled = [pm.tree_at("head.bias", net, 2 * NET.head.bias) for net in (one, NET)]
    same(doubled[0](X), shifted(doubled[1])(X))
    whole = pm.intervene(NET, Net, jnp.multiply, jnp.float32(3)).replace(scale=jnp.float32(2))
    same(whole(X), 12 * NET(X))
    quiet = nn.Sequential([nn.Dropout(0.5), NET.head])
    quiet = pm.inference_mode(pm.intervene(quiet, nn.Dropout, jnp.add, OUTER))
    same(quiet(X), NET.head(X + OUTER))


def test_what_an_intervention_would_not_change_is_refused():
    """A value without the axis of layers (close over what is the same for all); a wrong path."""
    with pytest.raises(ShapeError, match="layer"):
        pm.intervene(NET, "blocks.layer", jnp.multiply, jnp.ones(4))(X)
    with pytest.raises(SpecError, match="haed"):
        pm.intervene(NET, "haed", jnp.negative)


@pytest.mark.slow
def test_thousands_of_interventions_make_no_classes():
    """A class with a rule is made once, whatever the values and functions."""
    first = type(pm.intervene(NET.head, ..., jnp.multiply, X))
    for number in range(10_000):
        one = pm.intervene(NET.head, ..., lambda out, v, n=number: out + v + n, X)
        assert type(one) is first
