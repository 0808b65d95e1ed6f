"""Law: a program over all features computes what plain JAX and optax compute on dicts.

The model has a tie, a computed leaf, a `Stack`, an `Ensemble`, a stream of keys and a counter, and
is trained by an optimizer with two rules. Programs are drawn at random, and run in two halves:
between them the model and its State are written to a file, and read again.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_close
from tests.helpers.racing import race

# Slow: each program is compiled twice. (Ninety others were run, on two versions of JAX.)
PROGRAMS = 40


pytestmark = pytest.mark.usefixtures("usual_promotion")


class Exp(pm.Computed):
    """A positive number by its logarithm."""

    log: jax.Array

    def value(self):
        return jnp.exp(self.log)


class Net(pm.Module):
    """Every kind of field."""

    weight: jax.Array
    mirror: jax.Array
    scale: jax.Array
    stack: nn.Stack
    members: nn.Ensemble
    count: pm.StateIndex
    noise: pm.RngStream

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.weight = 0.5 * jax.random.normal(keys[0], (2, 2))
        self.mirror = self.weight.T
        self.scale = Exp(jnp.asarray(0.3))
        self.stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 2, key=keys[1])
        self.members = nn.Ensemble(lambda key: nn.Linear(2, 2, key=key), 3, key=keys[2])
        self.count = pm.StateIndex(jnp.asarray(0.0))
        self.noise = pm.RngStream()

    def __call__(self, x):
        x = self.stack(self.scale * jnp.tanh(self.weight @ x))
        return self.mirror @ jnp.mean(self.members(x), 0)


class Trained(pm.Module):
    """A net with its optimizer."""

    net: Net
    opt: pm.Optimizer


@dataclass
class Both:
    """One step in both forms: from (model, state, x) and from (params, numbers, x)."""

    ours: Callable[..., Any]
    plain: Callable[..., Any]


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)


def start():
    """The values that every program starts from, in both forms."""
    net, state = pm.make_with_state(Net)(jax.random.key(0))
    net, state = (
        pm.tie(net, "mirror", to="weight", through=jnp.transpose),
        state.seed(jax.random.key(1)),
    )
    opt = pm.Optimizer(pm.by({"stack.**": ADAM, ...: SGD})).init(net)
    x = jnp.asarray([0.5, -1.0])
    params = params_of(net)
    ours = {
        "net": params,
        "adam": ADAM.init(params["stack"]),
        "sgd": SGD.init(without_stack(params)),
    }
    return (Trained(net, opt), state, x), (ours, numbers_of(state), x)


def params_of(net):
    """The parameters of a net, as a dict."""
    layers = {"stack": net.stack.layer, "members": net.members.member}
    pairs = {name: {"weight": each.weight, "bias": each.bias} for name, each in layers.items()}
    return {"weight": net.weight, "log": pm.named_leaves(net)["scale.log"], **pairs}


def without_stack(params):
    """The parameters that the second rule trains."""
    return {name: value for name, value in params.items() if name != "stack"}


def numbers_of(state):
    """The numbers in a State: a counter, a key, and how often it was used."""
    key, used, count = None, None, None
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = leaf
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            count = leaf
        else:
            used = leaf
    return {"count": count, "key": key, "used": used}


def called(p, x):
    """What a `Net` computes, on a dict."""
    x = jnp.exp(p["log"]) * jnp.tanh(p["weight"] @ x)
    for i in range(2):
        x = p["stack"]["weight"][i] @ x + p["stack"]["bias"][i]
    x = jnp.mean(p["members"]["weight"] @ x + p["members"]["bias"], 0)
    return p["weight"].T @ x


# ---- steps


def apply(_, __):
    return Both(lambda m, s, x: (m, s, m.net(x)), lambda p, n, x: (p, n, called(p["net"], x)))


def counted(_, __):
    def ours(m, s, x):
        n = s.get(m.net.count)
        return m, s.set(m.net.count, n + 1), x + 0.1 * n

    def plain(p, n, x):
        return p, {**n, "count": n["count"] + 1}, x + 0.1 * n["count"]

    return Both(ours, plain)


def noisy(_, __):
    def ours(m, s, x):
        key, s = s.next_key(m.net.noise)
        return m, s, x + 0.1 * jax.random.normal(key, (2,))

    def plain(p, n, x):
        key = jax.random.fold_in(n["key"], n["used"])
        return p, {**n, "used": n["used"] + 1}, x + 0.1 * jax.random.normal(key, (2,))

    return Both(ours, plain)


def edited(_, draw):
    """The source of the tie is edited, in every spelling, and one layer of the stack."""
    where = draw.choice(["net.weight", lambda m: m.net.weight, pm.select.path("net.weight")])

    def ours(m, s, x):
        m = pm.tree_at(where, m, replace_fn=lambda w: 0.9 * w)
        return pm.tree_at("net.stack.layer.bias", m, replace_fn=lambda b: b.at[1].add(0.1)), s, x

    def plain(p, n, x):
        net, stack = p["net"], p["net"]["stack"]
        stack = {**stack, "bias": stack["bias"].at[1].add(0.1)}
        return {**p, "net": {**net, "weight": 0.9 * net["weight"], "stack": stack}}, n, x

    return Both(ours, plain)


def trained(_, draw):
    """A step of the optimizer, for the whole batch or in parts."""
    parts = draw.choice([1, 2])

    def ours(m, s, x):
        def loss(net, xs):
            return jnp.mean(pm.filter_vmap(lambda x: jnp.sum((net(x) - 1) ** 2))(xs))

        grads = pm.filter_grad(loss, microbatches=parts)(m.net, jnp.stack([x, -x]))
        net, opt = m.opt.update(m.net, grads=grads)
        return Trained(net, opt), s, x

    def plain(p, n, x):
        def loss(net):
            return jnp.mean(
                jax.vmap(lambda x: jnp.sum((called(net, x) - 1) ** 2))(jnp.stack([x, -x]))
            )

        net, grads = p["net"], jax.grad(loss)(p["net"])
        of_stack, adam = ADAM.update(grads["stack"], p["adam"], net["stack"])
        of_rest, sgd = SGD.update(without_stack(grads), p["sgd"], without_stack(net))
        net = optax.apply_updates(net, {**of_rest, "stack": of_stack})
        return {"net": net, "adam": adam, "sgd": sgd}, n, x

    return Both(ours, plain)


def mapped(_, __):
    return Both(
        lambda m, s, x: (m, s, jnp.sum(pm.filter_vmap(m.net)(jnp.stack([x, -2 * x])), 0)),
        lambda p, n, x: (p, n, called(p["net"], x) + called(p["net"], -2 * x)),
    )


def looked_at(_, draw):
    """A result inside is captured, and changed: layers by a value each, members by a number."""
    name = draw.choice(["stack", "members"])

    def ours(m, s, x):
        _, seen = pm.capture(m.net, name)(x)
        changed = pm.intervene(
            m.net, "stack.layer", lambda out, v: out + v, jnp.asarray([0.0, 0.1])
        )
        return m, s, changed(x) + 0.1 * jnp.sum(seen[name])

    def plain(p, n, x):
        net = p["net"]
        h = jnp.exp(net["log"]) * jnp.tanh(net["weight"] @ x)
        for i in range(2):
            h = net["stack"]["weight"][i] @ h + net["stack"]["bias"][i]
        of_members = net["members"]["weight"] @ h + net["members"]["bias"]
        seen = h if name == "stack" else of_members
        bias = net["stack"]["bias"].at[1].add(0.1)
        changed = {**net, "stack": {**net["stack"], "bias": bias}}
        return p, n, called(changed, x) + 0.1 * jnp.sum(seen)

    return Both(ours, plain)


def resolved(_, __):
    """Without ties and computed leaves, layer by layer, it computes the same."""

    def ours(m, s, x):
        net = pm.resolve(m.net)
        h = net.scale * jnp.tanh(net.weight @ x)
        for layer in net.stack:
            h = layer(h)
        return m, s, net.mirror @ jnp.mean(net.members(h), 0)

    return Both(ours, lambda p, n, x: (p, n, called(p["net"], x)))


def along(_, __):
    """The derivative along a direction, by jvp or by the transposed vjp; and all of them."""

    def ours(m, s, x):
        y, dy = pm.filter_jvp(lambda net, x: net(x), (m.net, x), (None, jnp.ones(2)))
        _, back = pm.filter_vjp(lambda x, net: net(x), x, m.net)
        jacobian = pm.filter_jacfwd(lambda x, net: net(x))(x, m.net)
        return m, s, y + 0.1 * dy + 0.1 * back(jnp.ones(2))[0] + 0.1 * jnp.sum(jacobian, 0)

    def plain(p, n, x):
        call = lambda x: called(p["net"], x)  # noqa: E731
        y, dy = jax.jvp(call, (x,), (jnp.ones(2),))
        # The transposed product is the sum of the Jacobian's rows.
        return p, n, y + 0.1 * dy + 0.2 * jax.vjp(call, x)[1](jnp.ones(2))[0]

    return Both(ours, plain)


def folded(_, __):
    """A scan over members of a stacked model, whose values are used and not kept."""

    def ours(m, s, x):
        nets = pm.stack([m.net, jax.tree.map(lambda w: 0.5 * w, m.net)])
        return m, s, pm.filter_scan(lambda x, net: (net(x), None), x, nets)[0]

    def plain(p, n, x):
        return p, n, called(jax.tree.map(lambda w: 0.5 * w, p["net"]), called(p["net"], x))

    return Both(ours, plain)


# ---- transforms around a step


def in_jit(step, _):
    return Both(pm.filter_jit(step.ours), jax.jit(step.plain))


def in_checkpoint(step, _):
    return Both(pm.filter_checkpoint(step.ours), jax.checkpoint(step.plain))


def in_scan(step, draw):
    length = draw.randint(1, 3)

    def ours(*values):
        return pm.filter_scan(lambda c, _: (step.ours(*c), None), values, length=length)[0]

    def plain(*values):
        return jax.lax.scan(lambda c, _: (step.plain(*c), None), values, length=length)[0]

    return Both(ours, plain)


def in_fori(step, draw):
    count = draw.randint(0, 2)
    return Both(
        lambda *v: pm.filter_fori_loop(0, count, lambda _, v: step.ours(*v), v),
        lambda *v: jax.lax.fori_loop(0, count, lambda _, v: step.plain(*v), v),
    )


def in_while(step, _):
    def ours(*v):
        def body(c):
            return c[0] + 1, step.ours(*c[1])

        return pm.filter_while_loop(lambda c: c[0] < 2, body, (0, v))[1]

    def plain(*v):
        return jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, step.plain(*c[1])), (0, v)
        )[1]

    return Both(ours, plain)


def in_cond(step, _):
    return Both(
        lambda m, s, x: pm.filter_cond(x[0] > 0, step.ours, lambda *v: v, m, s, x),
        lambda p, n, x: jax.lax.cond(x[0] > 0, step.plain, lambda *v: v, p, n, x),
    )


def in_switch(step, draw):
    index = draw.randint(-1, 2)
    return Both(
        lambda *v: pm.filter_switch(jnp.asarray(index), [step.ours, lambda *v: v], *v),
        lambda *v: jax.lax.switch(jnp.asarray(index), [step.plain, lambda *v: v], *v),
    )


def in_value_and_grad(step, _):
    """The step inside a loss: what it returns comes out as aux, and the gradient moves x."""

    def ours(m, s, x):
        def loss(x, m, s):
            m, s, y = step.ours(m, s, x)
            return jnp.sum(y**2), (m, s, y)

        (_, (m, s, y)), g = pm.filter_value_and_grad(loss, has_aux=True)(x, m, s)
        return m, s, y - 0.1 * g

    def plain(p, n, x):
        def loss(x):
            p2, n2, y = step.plain(p, n, x)
            return jnp.sum(y**2), (p2, n2, y)

        (_, (p2, n2, y)), g = jax.value_and_grad(loss, has_aux=True)(x)
        return p2, n2, y - 0.1 * g

    return Both(ours, plain)


def in_vmap(step, _):
    """The step for three vectors with one model; each member counts, and the first is kept."""

    def ours(m, s, x):
        run = pm.filter_vmap(step.ours, in_axes=(None, None, 0))
        return jax.tree.map(lambda leaf: leaf[0], run(m, s, jnp.stack([x, -x, 2 * x])))

    def plain(p, n, x):
        run = jax.vmap(step.plain, in_axes=(None, None, 0))
        return jax.tree.map(lambda leaf: leaf[0], run(p, n, jnp.stack([x, -x, 2 * x])))

    return Both(ours, plain)


STEPS = [apply, counted, edited, trained, mapped, along, folded, looked_at, resolved]
AROUND = [in_jit, in_checkpoint, in_scan, in_fori, in_cond, in_switch, in_value_and_grad, in_vmap]
# Reverse mode does not pass a loop with a condition.
FORWARD_ALONE = [in_while, in_fori]
INNER = [wrap for wrap in AROUND if wrap not in FORWARD_ALONE]


def in_order(steps):
    def run(kind):
        def call(*values):
            for step in steps:
                values = getattr(step, kind)(*values)
            return values

        return call

    return Both(run("ours"), run("plain"))


def drawn(draw, depth, is_differentiated=False, is_mapped=False):
    """A program: a few steps, some of them nested in transforms."""
    steps = []
    for _ in range(draw.randint(1, 3)):
        if depth == 0 or draw.random() < 0.5:
            # The members of a map must not draw the same numbers.
            step = draw.choice(STEPS if is_mapped else [*STEPS, noisy])
            steps.append(step(None, draw))
            continue
        wrap = draw.choice(INNER if is_differentiated else [*AROUND, in_while])
        inside = is_differentiated or wrap.__name__ == "in_value_and_grad"
        steps.append(wrap(drawn(draw, depth - 1, inside, is_mapped or wrap is in_vmap), draw))
    return in_order(steps)


def saved_and_loaded(values, path):
    """The same values, by way of a file."""
    pm.save(path, values)
    return pm.load(path, values)


def without_keys(values):
    """With plain arrays for random keys, which NumPy does not know."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, values)


@pytest.mark.parametrize("seed", [3, 5, 6])
def test_a_program_means_the_same_in_every_way(seed):
    """f(*args) == filter_jit(f)(*args), the second time, from threads, and of its own results."""
    run = drawn(random.Random(seed), depth=1).ours
    once, jitted = run(*start()[0]), pm.filter_jit(run)
    found = race(lambda _: jitted(*start()[0]), threads=3)
    for values in (jitted(*start()[0]), *found, pm.filter_jit(lambda *v: run(*v))(*start()[0])):
        assert_close(without_keys(values), without_keys(once))
    assert_close(without_keys(jitted(*found[0])), without_keys(run(*once)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_program_over_all_features_is_that_of_plain_jax(part, tmp_path):
    """Parameters, the optimizer's result, the State and x after random programs."""
    for seed in range(part, PROGRAMS, 4):
        draw = random.Random(seed)
        halves = [drawn(draw, depth=2), drawn(draw, depth=2)]
        ours, plain = start()
        for program in halves:
            ours = pm.filter_jit(program.ours)(*ours)
            plain = jax.jit(program.plain)(*plain)
            ours = saved_and_loaded(ours, tmp_path / f"{seed}.safetensors")
        (model, state, x), (expected, numbers, y) = ours, plain
        found = params_of(model.net), numbers_of(state), x
        keyed = lambda n: {**n, "key": jax.random.key_data(n["key"])}  # noqa: E731
        assert_close(
            (found[0], keyed(found[1]), found[2]),
            (expected["net"], keyed(numbers), y),
            rtol=2e-4,
            atol=2e-5,
        )
