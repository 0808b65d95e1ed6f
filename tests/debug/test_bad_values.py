"""first_bad: which of all calls is named, in Stacks, loops and maps; and that nothing changes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError

first_bad = pm.debug.first_bad


class Divide(pm.Module):
    by: jax.Array

    def __call__(self, x):
        return x / self.by


def divides(n, *zeros):
    """Layers of two Divides, of which some have a zero."""
    by = jnp.ones((2, n))
    for which, i in zeros:
        by = by.at[which, i].set(0.0)
    return [nn.Sequential([Divide(by[0, i]), Divide(by[1, i])]) for i in range(n)]


def stack(n, *zeros):
    return nn.Stack.from_layers(divides(n, *zeros))


X = jnp.asarray([1.0, 2.0])


def total(model, x):
    return jnp.sum(model(x))


def what(found):
    return found.kind, found.path, found.index


def test_nothing_is_false_and_says_what_was_looked_at():
    for fn in (total, pm.filter_jit(pm.filter_value_and_grad(total))):
        found = first_bad(fn)(stack(3), X)
        assert not found
        # The Stack, and its layer of three Modules.
        assert (*what(found), found.checked) == (None, "", (), 4)
        assert str(found) == "FirstBad: none in 4 calls of Modules"


def over(model, xs):
    """A Module in the steps of a scan; its input is divided by each number."""
    return pm.filter_scan(lambda carry, x: (model(carry / x), None), X, xs)[0]


def mapped(model, xs):
    return pm.filter_vmap(model)(xs)


ZERO = jnp.asarray([1.0, 1.0, 0.0, 1.0])
BAD = stack(3, (0, 1))
CUT = pm.intervene(stack(3), "layer.layers[1]", jnp.divide, jnp.asarray([1.0, 0.0, 1.0]))
# A model, a function of it, its input; and which of two Modules, at which index.
CALLS = {
    "the second of two calls": (divides(1)[0], lambda m, x: m(m(x) / 0), X, 0, ()),
    "steps": (divides(1)[0], over, ZERO, 0, (2,)),
    "members": (divides(1, (1, 0))[0], mapped, X, 1, (0,)),
    "a Stack in a map": (stack(4, (1, 2), (0, 3)), mapped, jnp.ones((2, 2)), 1, (0, 2)),
    "an Ensemble": (nn.Ensemble.from_members([stack(3), BAD]), total, X, 0, (1, 1)),
    "branches": (BAD, lambda m, x: pm.filter_cond(x[0] > 0, m, m, x), X, 0, (1,)),
    "a precision": (pm.with_precision(BAD, "compute=bfloat16"), total, X, 0, (1,)),
    "beside sown values": (BAD, lambda m, x: m(pm.sow("x", [x, 3])[0]), X, 0, (1,)),
    "an intervention": (CUT, total, X, 1, (1,)),
}


@pytest.mark.parametrize(("model", "fn", "x", "which", "index"), CALLS.values(), ids=CALLS)
def test_the_first_bad_output_is_named(model, fn, x, which, index):
    """Of nested Modules the innermost, and where it is along each axis."""
    found = first_bad(pm.filter_jit(lambda model, x: fn(model, x)))(model, x)
    assert (found.kind, found.index) == ("output", index)
    assert found.path.endswith(f"layers[{which}]")
    number = f", number {', '.join(map(str, index))}" if index else ""
    assert str(found) == f"FirstBad: the output of {found.path}{number}"


class Count(pm.Module):
    bad: jax.Array

    def __call__(self, x):
        return jnp.where(x + 1 == self.bad, jnp.nan, x + 1)


class Loop(pm.Module):
    inner: pm.Module
    reverse: bool = pm.field(static=True)

    def __call__(self, x):
        step = lambda carry, _: (self.inner(carry), None)  # noqa: E731
        return pm.filter_scan(step, x, jnp.arange(2), reverse=self.reverse)[0]


def twice(layer):
    return nn.Stack.from_layers([layer, layer])


def calls(model, path="", index=()):
    """The path and index of each call of a Count, in the order of the calls."""
    if isinstance(model, Count):
        yield path.removeprefix("."), index
    elif isinstance(model, Loop):
        for i in (1, 0) if model.reverse else (0, 1):
            yield from calls(model.inner, path + ".inner", (*index, i))
    elif isinstance(model, nn.Stack):
        for i in range(2):
            yield from calls(model[i], path + ".layer", (*index, i))
    else:
        for i, layer in enumerate(model.layers):
            yield from calls(layer, f"{path}.layers[{i}]", index)


COUNT = Count(jnp.float32(0))
PARTS = nn.Sequential([COUNT, COUNT])
MIXED = nn.Sequential([COUNT, Loop(PARTS, False), twice(PARTS), Loop(COUNT, True), COUNT])
NESTED = {
    "one after the other": MIXED,
    "in a Stack": twice(MIXED),
    "in a Stack that computes again": nn.Stack.from_layers([PARTS, PARTS], remat=True),
    "in a loop": Loop(MIXED, False),
    "in a reversed loop": Loop(MIXED, True),
    "loops and Stacks": Loop(twice(Loop(nn.Sequential([twice(PARTS), COUNT]), True)), False),
}


@pytest.mark.parametrize("model", NESTED.values(), ids=NESTED)
def test_whichever_call_is_bad_is_named(model):
    """Law: the first in the order of the calls, in Stacks and loops in each other."""
    find = first_bad(pm.filter_jit(pm.filter_value_and_grad(lambda model, x: model(x))))
    assert what(find(model, jnp.float32(0))) == (None, "", ())
    for number, (path, index) in enumerate(calls(model), 1):
        bad = jax.tree.map(lambda x, n=number: jnp.full_like(x, n), model)
        assert what(find(bad, jnp.float32(0))) == ("output", path, index)


def test_an_argument_is_named_first_and_the_result_last():
    """By path; keyword arguments, too; and values that no Module made."""
    model = divides(1, (0, 0))[0]
    bad = pm.tree_at(lambda m: m.layers[1].by, model, jnp.float32(jnp.nan))
    assert what(first_bad(total)(bad, X)) == ("argument", "model.layers[1].by", ())
    assert first_bad(total)(model, x=X / 0).path == "x"
    assert first_bad(bad)(X).path == "Sequential.layers[1].by"
    found = first_bad(lambda model, x: {"y": model(x) / 0})(divides(1)[0], X)
    assert what(found) == ("result", "result['y']", ())
    assert first_bad(jnp.log)(jnp.zeros(2)).path == "result"
    assert not first_bad(jnp.log)(jnp.ones(2))


def test_arguments_can_be_used_afterwards():
    """No State in them is used up, and a step that donates them donates copies."""
    model, state = pm.make_with_state(
        lambda: nn.Sequential([Divide(jnp.ones(())), nn.BatchNorm(2)])
    )()

    @pm.filter_jit(donate=("model", "state"))
    def step(model, n, state):
        def loss(model):
            out, after = model(jnp.eye(2), state)
            return jnp.sum(out) * n, after

        return pm.filter_grad(loss, has_aux=True)(model)

    assert not first_bad(step)(model, jnp.asarray(3), state)
    assert not any(x.is_deleted() for x in jax.tree.leaves((model, state)))
    assert isinstance(step(model, jnp.asarray(3), state)[1], pm.State)
    assert jax.tree.leaves(model)[0].is_deleted()


def test_a_loss_may_have_a_state_in_its_closure():
    net, state = pm.make_with_state(lambda: nn.Sequential([nn.BatchNorm(2), nn.Lambda(jnp.log)]))()

    def loss(net):
        out, after = net(jnp.eye(2), state)
        return jnp.sum(out), after

    found = first_bad(lambda net: pm.filter_value_and_grad(loss, has_aux=True)(net))(net)
    assert what(found) == ("output", "layers[1]", ())


def with_optimizer(model, opt):
    return opt.update(model, grads=pm.filter_grad(total)(model, X))


TRACED = jax.errors.TracerBoolConversionError
OPT = pm.Optimizer(optax.sgd(0.1, 0.9)).init(BAD)
REFUSED = {
    "a plain transform": (lambda m: jax.vmap(m)(X), (divides(1)[0],), StateError, "layers"),
    "a step of an optimizer": (with_optimizer, (BAD, OPT), StateError, "optimizer"),
    "traced arguments": (jax.jit(first_bad(total)), (BAD, X), TRACED, "traced"),
}


@pytest.mark.parametrize(("fn", "args", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_found_is_refused(fn, args, error, match):
    """It would be reported as finite."""
    with pytest.raises(error, match=match):
        first_bad(fn)(*args)
