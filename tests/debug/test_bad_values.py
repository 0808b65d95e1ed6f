"""first_bad: which of all calls is named, in Stacks, loops and maps; and that nothing changes."""

import functools as ft

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, CaptureError

first_bad = pm.debug.first_bad


class Divide(pm.Module):
    """Not finite where its parameter is zero."""

    by: jax.Array

    def __call__(self, x):
        return x / self.by


class Pair(pm.Module):
    """A layer of two."""

    one: pm.Module
    two: pm.Module

    def __call__(self, x):
        return self.two(self.one(x))


def divides(n, *zeros):
    """Layers of two Divides, of which some have a zero."""
    by = jnp.ones((2, n))
    for which, i in zeros:
        by = by.at[which, i].set(0.0)
    return [Pair(Divide(by[0, i]), Divide(by[1, i])) for i in range(n)]


def stack(n, *zeros, remat=False):
    """The layers as a Stack."""
    return nn.Stack.from_layers(divides(n, *zeros), remat=remat)


X = jnp.asarray([1.0, 2.0])


def total(model, x):
    """A loss."""
    return jnp.sum(model(x))


def what(found):
    """The kind of a value, its path and index."""
    return found.kind, found.path, found.index


def test_nothing_is_false_and_says_what_was_looked_at():
    """Forward, and around a gradient."""
    for fn in (total, pm.filter_jit(pm.filter_value_and_grad(total))):
        found = first_bad(fn)(stack(3), X)
        assert not found
        # The Stack, and its layer of three Modules.
        assert (*what(found), found.checked) == (None, "", (), 4)
        assert str(found) == "FirstBad: none in 4 calls of Modules"


@pytest.mark.parametrize("make", [stack, ft.partial(stack, remat=True)], ids=["stack", "remat"])
@pytest.mark.parametrize("fn", [total, pm.filter_jit(pm.filter_grad(total))], ids=["call", "grad"])
def test_in_a_stack_the_earlier_layer_counts_and_then_the_location(make, fn):
    """The second Module of layer 3 comes before the first one of layer 4."""
    found = first_bad(fn)(make(6, (1, 3), (0, 4)), X)
    assert what(found) == ("output", "layer.two", (3,))
    assert str(found) == "FirstBad: the output of layer.two, number 3"


def over(model, xs, reverse=False):
    """A Module in the steps of a scan; its input is divided by each number."""
    step = lambda carry, x: (model(carry / x), None)  # noqa: E731
    return pm.filter_scan(step, X, xs, reverse=reverse)[0]


def mapped(model, xs):
    """A Module over members."""
    return pm.filter_vmap(model)(xs)


ZERO = jnp.asarray([1.0, 1.0, 0.0, 1.0])
BAD = stack(3, (0, 1))
# A model, a function of it, its input; and which Module, at which index.
CALLS = {
    "the second of two Stacks": (
        [stack(3), BAD],
        lambda m, x: m[1](m[0](x)),
        X,
        "[1].layer.one",
        (1,),
    ),
    "the second of two calls": (divides(1)[0], lambda m, x: m(m(x) / 0), X, "one", ()),
    "steps": (divides(1)[0], over, ZERO, "one", (2,)),
    "from the last step": (divides(1)[0], ft.partial(over, reverse=True), 1 - ZERO, "one", (3,)),
    "a Stack in steps": (stack(3), over, ZERO, "layer.one", (2, 0)),
    "members": (nn.Lambda(jnp.log), mapped, -X[:1], "<root>", (0,)),
    "a Stack in a map": (stack(4, (1, 2), (0, 3)), mapped, jnp.ones((2, 2)), "layer.two", (0, 2)),
    "an Ensemble": (nn.Ensemble.from_members([stack(3), BAD]), total, X, "layer.one", (1, 1)),
    "branches": (BAD, lambda m, x: pm.filter_cond(x[0] > 0, m, m, x), X, "layer.one", (1,)),
    "a precision": (pm.with_precision(BAD, "compute=bfloat16"), total, X, "layer.one", (1,)),
    "beside sown values": (BAD, lambda m, x: m(pm.sow("x", [x, 3])[0]), X, "layer.one", (1,)),
    "an intervention": (
        pm.intervene(stack(3), "layer.two", jnp.divide, jnp.asarray([1.0, 0.0, 1.0])),
        total,
        X,
        "layer.two",
        (1,),
    ),
}


@pytest.mark.parametrize(("model", "fn", "x", "path", "index"), CALLS.values(), ids=CALLS)
def test_the_first_bad_output_is_named(model, fn, x, path, index):
    """Of nested Modules the innermost, and where it is along each axis."""
    found = first_bad(pm.filter_jit(lambda model, x: fn(model, x)))(model, x)
    assert (found.kind, found.index) == ("output", index)
    assert found.path.endswith(path)


class Count(pm.Module):
    """Adds one; not finite at a number."""

    bad: jax.Array

    def __call__(self, x):
        return jnp.where(x + 1 == self.bad, jnp.nan, x + 1)


class Loop(pm.Module):
    """Two steps of a Module."""

    inner: pm.Module
    reverse: bool = pm.field(static=True)

    def __call__(self, x):
        step = lambda carry, _: (self.inner(carry), None)  # noqa: E731
        return pm.filter_scan(step, x, jnp.arange(2), reverse=self.reverse)[0]


def twice(layer):
    """A Stack of two."""
    return nn.Stack.from_layers([layer, layer])


def calls(model, path=(), index=()):
    """The path and index of each call of a Count, in the order of the calls."""
    if isinstance(model, Count):
        yield ".".join(path).replace(".[", "["), index
    elif isinstance(model, Loop):
        for i in (1, 0) if model.reverse else (0, 1):
            yield from calls(model.inner, (*path, "inner"), (*index, i))
    elif isinstance(model, nn.Stack):
        for i in range(2):
            yield from calls(model[i], (*path, "layer"), (*index, i))
    else:
        for i, layer in enumerate(model.layers):
            yield from calls(layer, (*path, f"layers[{i}]"), index)


COUNT = Count(jnp.float32(0))
PARTS = nn.Sequential([COUNT, COUNT])
MIXED = nn.Sequential([COUNT, Loop(PARTS, False), twice(PARTS), Loop(COUNT, True), COUNT])
NESTED = {
    "one after the other": MIXED,
    "in a Stack": twice(MIXED),
    "in a loop": Loop(MIXED, False),
    "in a reversed loop": Loop(MIXED, True),
    "loops and Stacks": Loop(twice(Loop(nn.Sequential([twice(PARTS), COUNT]), True)), False),
}


@pytest.mark.parametrize("model", NESTED.values(), ids=NESTED)
def test_whichever_call_is_bad_is_named(model):
    """Law: the first in the order of the calls, in Stacks and loops in each other."""
    find = first_bad(pm.filter_jit(lambda model, x: model(x)))
    assert what(find(model, jnp.float32(0))) == (None, "", ())
    for number, (path, index) in enumerate(calls(model), 1):
        bad = jax.tree.map(lambda x, n=number: jnp.full_like(x, n), model)
        assert what(find(bad, jnp.float32(0))) == ("output", path, index)


def test_an_argument_is_named_first_and_the_result_last():
    """By path; keyword arguments, too; and values that no Module made."""
    model = divides(1, (0, 0))[0]
    bad = model.replace(two=Divide(jnp.float32(jnp.nan)))
    assert what(first_bad(total)(bad, X)) == ("argument", "model.two.by", ())
    assert first_bad(total)(model, x=X / 0).path == "x"
    assert first_bad(bad)(X).path == "Pair.two.by"
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
    """As the usual step has."""
    net, state = pm.make_with_state(lambda: nn.Sequential([nn.BatchNorm(2), nn.Lambda(jnp.log)]))()

    def loss(net):
        out, after = net(jnp.eye(2), state)
        return jnp.sum(out), after

    found = first_bad(lambda net: pm.filter_value_and_grad(loss, has_aux=True)(net))(net)
    assert what(found) == ("output", "layers[1]", ())


def with_optimizer(model, opt):
    """A step."""
    return opt.update(model, pm.filter_grad(total)(model, X))


OPT = pm.Optimizer(optax.sgd(0.1, 0.9)).init(BAD)
REFUSED = {
    "a plain transform": (lambda m: jax.vmap(m)(X), (divides(1)[0],), CaptureError, "one"),
    "a step of an optimizer": (with_optimizer, (BAD, OPT), CaptureError, "optimizer"),
    "traced arguments": (jax.jit(first_bad(total)), (BAD, X), ArgumentError, "traced"),
}


@pytest.mark.parametrize(("fn", "args", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_found_is_refused(fn, args, error, match):
    """It would be reported as finite."""
    with pytest.raises(error, match=match):
        first_bad(fn)(*args)
