"""Rules around calls: when they are asked, in which order; everything else is unchanged."""

import copy
import functools as ft
import pickle
import subprocess
import sys
import threading
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    CallSite,
    own_rules,
    released,
    surround,
    surround_all,
    surrounding,
    with_own_rules,
)
from tests.goldens import refusals
from tests.helpers.trees import Affine, affine, ramp

X = ramp(2)

SEEN = threading.local()
"""Where rules of this file note that they were asked, in each thread."""


def asked(fn, *args):
    """The paths at which rules are asked while a function runs, in order."""
    SEEN.sites = sites = []
    fn(*args)
    return sites


class Times(AbstractCallRule):
    """Multiplies the output."""

    by: float = 2.0

    def around(self, call, args, kwargs, where):
        """Make the call, and note where."""
        if hasattr(SEEN, "sites"):
            SEEN.sites.append((self.by, where))
        return self.by * call(*args, **kwargs)


class Plus(AbstractCallRule):
    """Adds to the output."""

    by: float = 1.0
    uses_layer: ClassVar[bool] = False

    def around(self, call, args, kwargs, where):
        """Make the call, and note where."""
        if hasattr(SEEN, "sites"):
            SEEN.sites.append((self.by, where))
        return self.by + call(*args, **kwargs)


class Numbered(AbstractCallRule):
    """Adds the number of the layer, or of the call, so that a traced one is seen."""

    what: str = "layer"

    def around(self, call, args, kwargs, where):
        """Make the call."""
        return call(*args, **kwargs) + jnp.asarray(getattr(where, self.what), jnp.float32)


class Pair(pm.Module):
    """Two layers, of which the first is called twice."""

    first: Affine
    second: Affine

    def __call__(self, x):
        return self.second(self.first(self.first(x)))

    def encode(self, x, *, twice=False):
        """A method that is not a call."""
        return self.encode(self.first(x)) if twice else self.first(x)


PAIR = Pair(affine(2, 2), affine(2, 2, -1.0))
same = ft.partial(np.testing.assert_allclose, rtol=1e-5)


def test_a_rule_is_asked_at_each_call_of_what_is_chosen():
    """With the path, the method and the count; the number of calls before."""
    model = surround(PAIR, ..., Times(1.0))
    sites = [where for _, where in asked(model, X)]
    assert sites == [
        CallSite("<root>", "__call__", 0, ()),
        CallSite("first", "__call__", 0, ()),
        CallSite("first", "__call__", 1, ()),
        CallSite("second", "__call__", 0, ()),
    ]
    assert sites[0].layer is None


def test_a_rule_decides_what_comes_out():
    """And the arguments of the method, and whether it is called."""

    class Zero(AbstractCallRule):
        def around(self, call, args, kwargs, where):
            return 0 * args[0]

    same(surround(PAIR, "second", Times())(X), 2 * PAIR(X))
    same(surround(PAIR, "first", Zero())(X), PAIR.second.bias)


def test_rules_are_nested_the_latest_outermost():
    """As decorators are."""
    model = surround(surround(PAIR, "second", Times()), "second", Plus())
    same(model(X), 1 + 2 * PAIR(X))
    same(surround(surround(PAIR, "second", Plus()), "second", Times())(X), 2 * (1 + PAIR(X)))
    assert [by for by, _ in asked(model, X)] == [1.0, 2.0]


def test_rules_of_outer_calls_are_outside():
    """Whatever order they come in; those that stay are inside of all."""
    with surrounding() as outer, surrounding() as inner:
        (model,) = surround_all("f", [PAIR], "second", Times(3.0), level=inner)
        (model,) = surround_all("f", [model], "second", Times(5.0), level=outer)
        model = surround(model, "second", Times(7.0))
        assert [by for by, _ in asked(model, X)] == [5.0, 3.0, 7.0]
        assert [by for by, _ in asked(released(model, inner), X)] == [5.0, 7.0]
        rest = released(released(released(model, inner), outer), 0)
    assert type(rest.second) is Affine
    assert jax.tree.structure(rest) == jax.tree.structure(PAIR)


def test_any_method_can_be_named():
    """Alone, and beside the call; its arguments by name arrive."""
    encoding = surround(PAIR, Pair, Times(), "encode")
    assert asked(encoding, X) == []
    same(encoding.encode(X), 2 * PAIR.encode(X))
    sites = asked(ft.partial(encoding.encode, twice=True), X)
    assert [(where.method, where.call) for _, where in sites] == [("encode", 0), ("encode", 1)]
    both = surround(encoding, Pair, Plus())
    same(both(X), 1 + PAIR(X))
    same(both.encode(X), 2 * PAIR.encode(X))
    same(released(both, 0)(X), PAIR(X))


class Styles(pm.Module):
    """Methods of every kind."""

    weight: jax.Array

    @pm.filter_jit
    def jitted(self, x):
        """Compiled by us."""
        return self.weight * x

    @jax.jit
    def plainly(self, x):
        """Compiled by JAX."""
        return self.weight * x

    @jax.named_scope("scope")
    def scoped(self, x):
        """Under a decorator."""
        return self.weight * x

    def __matmul__(self, x):
        return self.weight * x

    @property
    def size(self):
        """No method."""
        return 2

    @staticmethod
    def static(x):
        """No method either."""
        return x


@pytest.mark.parametrize("name", ["jitted", "plainly", "scoped", "__matmul__"])
def test_methods_of_every_style_can_be_surrounded(name):
    """And are called through transforms as before."""
    model = surround(Styles(X), ..., Times(), name)
    same(getattr(model, name)(X), 2 * X * X)
    same(pm.filter_jit(getattr(model, name))(X), 2 * X * X)


def test_a_chosen_module_passes_for_what_it_was():
    """Its class, its repr, changes to it, results of its methods, and its use as a prefix."""
    model = surround(PAIR, Affine, Times())
    layer = model.first
    assert isinstance(layer, Affine)
    assert type(layer).__qualname__ == "Affine"
    assert repr(layer) == repr(PAIR.first)
    for one in (layer, jax.tree.map(lambda x: x, layer), pm.filter_jit(lambda m: m)(layer)):
        assert [*vars(one)] == [*vars(PAIR.first)]
    assert layer.__match_args__ == PAIR.first.__match_args__
    same(layer.replace(bias=layer.bias + 1)(X), 2 * (PAIR.first(X) + 1))
    assert type(type(layer)(layer.weight, layer.bias)) is Affine
    assert type(layer)(layer.weight, layer.bias) == PAIR.first
    axes = Affine(None, None)
    mapped = pm.filter_vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, ramp(3, 2))
    assert mapped.shape == (3, 2)
    assert len(jax.tree.leaves(model)) == len(jax.tree.leaves(PAIR))


def test_plain_jax_takes_it():
    """It is a tree like any other."""
    model = surround(PAIR, Affine, Times())
    gradient = jax.jit(jax.grad(lambda m, x: jnp.sum(m(x))))(model, X)
    assert jax.tree.structure(gradient) == jax.tree.structure(model)
    same(jax.jit(lambda m, x: m(x))(model, X), model(X))
    same(jax.vmap(model)(ramp(3, 2))[0], model(X))


COPIES = {
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "jit": pm.filter_jit(lambda tree: tree),
    "map": lambda tree: jax.tree.map(lambda leaf: leaf, tree),
}


@pytest.mark.parametrize("remade", COPIES.values(), ids=COPIES)
def test_rules_stay_on_copies(remade):
    """They equal their originals, are of the same class, and so are their methods."""
    model = surround(surround(PAIR, ..., Times()), "first", Plus(), "scaled")
    made = remade(model)
    assert made == model
    assert jax.tree.structure(made) == jax.tree.structure(model)
    assert type(made.first) is type(model.first)
    same(made(X), model(X))
    same(made.first.scaled(X), model.first.scaled(X))
    method = remade(model.encode)
    same(method(X), model.encode(X))


def test_bound_methods_are_pickled():
    """The name finds another method than that of the subclass."""
    method = surround(PAIR, ..., Times(), "encode").encode
    same(pickle.loads(pickle.dumps(method))(X), 2 * PAIR.encode(X))


@pytest.mark.slow
def test_another_process_reads_a_pickle(tmp_path):
    """Classes are found by name, and made there again."""
    file = tmp_path / "model"
    file.write_bytes(pickle.dumps(surround(nn.Linear(2, 2, key=jax.random.key(0)), ..., SHOWN)))
    program = (
        "import pickle, sys\n"
        "layer = pickle.load(open(sys.argv[1], 'rb'))\n"
        "from pytreemod import nn\n"
        "print(isinstance(layer, nn.Linear), type(layer).__name__)\n"
        "layer(layer.bias)\n"
    )
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "Linear", "asked", "<root>"]


class Shown(AbstractCallRule):
    """Prints its path."""

    def around(self, call, args, kwargs, where):
        """Make the call."""
        print("asked", where.path)
        return call(*args, **kwargs)


SHOWN = Shown()


def test_equal_rules_are_compiled_for_once():
    """Rules that Python calls equal, but a program distinguishes, are not taken for equal."""

    class Long(AbstractCallRule):
        value: Any

        def around(self, call, args, kwargs, where):
            return call(*args, **kwargs) + jnp.float32(len(repr(self.value)))

    traces = []

    @pm.filter_jit
    def call(model, x):
        traces.append(1)
        return model(x)

    for value in (2.0, 2.0, 3.0, 1, True, 1.0, 0.0, -0.0, 3.0, (1,), (True,)):
        long = jnp.float32(len(repr(value)))
        same(call(surround(PAIR, "second", Long(value)), X), PAIR(X) + long)
    assert len(traces) == 9


# ---- counting


def test_calls_are_counted_in_what_surrounds_them():
    """Outside of that, each outermost call counts for itself; and so after an error."""
    model = surround(PAIR, "first", Times(1.0))

    def counts():
        return [where.call for _, where in asked(model, X)]

    assert counts() == [0, 0]
    with surrounding():
        assert counts() == [0, 1]
        assert counts() == [2, 3]
        with surrounding():
            assert counts() == [0, 1]
        assert counts() == [4, 5]
    with pytest.raises(TypeError, match="argument"), surrounding():
        model()
    assert counts() == [0, 0]


def test_the_count_goes_on_after_what_was_traced_meanwhile():
    """The count of an ended trace does not continue, but that of the outer one does."""
    model = surround(PAIR, "first", Times(1.0))

    def call(model, x):
        return jax.jit(lambda model, x: model.first(model.first(x)))(model, model.first(x))

    with surrounding():
        sites = [*asked(call, model, X), *asked(call, model, X)]
    assert [where.call for _, where in sites] == [0, 0, 1, 1, 0, 1]


def test_each_thread_counts_for_itself():
    """Calls in other threads do not count."""
    model = surround(PAIR, "first", Times(1.0))
    found = {}

    def work(name):
        with surrounding():
            barrier.wait()
            found[name] = [where.call for _, where in asked(model, X)]

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": [0, 1], "b": [0, 1]}


@pytest.mark.parametrize("jit", [jax.jit, pm.filter_jit])
def test_a_compiled_function_counts_its_own_calls(jit):
    """So a trace of one call is correct for the next one, and for one that is not counted.

    A count that went on from outside would stay in the compiled function.
    """
    model = surround(PAIR, "first", Numbered("call"))
    fn = jit(lambda model, x: (model.first(x), model.first(x)))
    first = PAIR.first(X)

    for _ in range(2):
        with surrounding():
            for _ in range(2):
                same(fn(model, X), (first, first + 1))
            same(model.first(X), first)
            same(fn(model, X), (first, first + 1))
            same(model.first(X), first + 1)
        same(fn(model, X), (first, first))


def test_no_trace_is_kept_alive():
    """Counts belong to traces, but do not hold them."""
    model = surround(PAIR, "first", Times(1.0))
    with jax.checking_leaks(), surrounding():
        for _ in range(2):
            jax.jit(lambda model, x: jax.vmap(model)(x))(model, ramp(3, 2))


# ---- layers of a Stack

STACK = nn.Stack(ft.partial(nn.Linear, 2, 2), 3, key=jax.random.key(0))


def in_order(layers, x, first=0):
    """The output of a Stack of linear layers under `Numbered`."""
    for number, layer in enumerate(layers):
        x = layer(x) + jnp.float32(first + number)
    return x


CALLS: dict[str, Any] = {
    "as it is": lambda stack, x: stack(x),
    "jit": jax.jit(lambda stack, x: stack(x)),
    "remat": lambda stack, x: stack.replace(remat=True)(x),
    "unrolled": lambda stack, x: stack.replace(unroll=True)(x),
    "pickled": lambda stack, x: pickle.loads(pickle.dumps(stack))(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_stack_passes_the_number_of_the_layer(call):
    """It is traced: one rule for all layers."""
    stack = surround(STACK, nn.Linear, Numbered())
    same(call(stack, X), in_order(STACK, X))
    assert len(jax.tree.leaves(stack)) == len(jax.tree.leaves(STACK))


class Inside(pm.Module):
    """A layer that uses transforms."""

    linear: nn.Linear
    how: str = pm.field(static=True)

    def __call__(self, x):
        if self.how == "vmap":
            return jax.vmap(self.linear)(jnp.stack([x]))[0]
        if self.how == "filter_vmap":
            return pm.filter_vmap(lambda m, x: m(x), in_axes=(None, 0))(
                self.linear, jnp.stack([x])
            )[0]
        if self.how == "filter_checkpoint":
            return pm.filter_checkpoint(self.linear)(x)
        return pm.filter_jit(self.linear)(x)


@pytest.mark.parametrize("how", ["vmap", "filter_vmap", "filter_checkpoint", "filter_jit"])
@pytest.mark.sampled
def test_the_number_goes_into_transforms_of_the_layer(how):
    """Twice, because JAX caches the first trace."""
    inside = nn.Stack(lambda key: Inside(nn.Linear(2, 2, key=key), how), 3, key=jax.random.key(0))
    stack = surround(inside, nn.Linear, Numbered())
    for _ in range(2):
        same(jax.jit(lambda stack, x: stack(x))(stack, X), in_order(inside, X))


def nested():
    """A Stack of Stacks."""

    def make_stack(key):
        return nn.Stack(ft.partial(nn.Linear, 2, 2), 3, key=key)

    return nn.Stack(make_stack, 2, key=jax.random.key(0))


class Both(AbstractCallRule):
    """Adds a number made of those of both layers."""

    def around(self, call, args, kwargs, where):
        """Make the call."""
        outer, inner = where.layers
        return call(*args, **kwargs) + (3 * outer + inner).astype(jnp.float32)


def test_stacks_in_stacks_pass_both_numbers():
    """Outermost first."""
    expected = X
    for number, stack in enumerate(nested()):
        expected = in_order(stack, expected, 3 * number)
    same(surround(nested(), nn.Linear, Both())(X), expected)


class Taking(pm.Module):
    """A layer that takes its Stack apart."""

    inner: nn.Stack
    how: str = pm.field(static=True)

    def __call__(self, x):
        if self.how == "slice":
            return self.inner[1:](x)
        layers = self.inner.unstack() if self.how == "unstack" else [self.inner[1], self.inner[2]]
        return layers[-1](layers[-2](x))


@pytest.mark.parametrize(("how", "count"), [("slice", 2), ("unstack", 1), ("index", 1)])
def test_layers_that_are_taken_out_are_in_the_outer_stack(how, count):
    """They keep its number."""

    class Outer(AbstractCallRule):
        def around(self, call, args, kwargs, where):
            assert len(where.layers) == count
            return call(*args, **kwargs) + where.layers[0].astype(jnp.float32)

    outer = nn.Stack(
        lambda key: Taking(nn.Stack(ft.partial(nn.Linear, 2, 2), 3, key=key), how),
        2,
        key=jax.random.key(0),
    )
    expected = X
    for number, taking in enumerate(outer):
        for layer in list(taking.inner)[1:]:
            expected = layer(expected) + jnp.float32(number)
    same(surround(outer, nn.Linear, Outer())(X), expected)


class Releasing(pm.Module):
    """A layer that takes the rules off."""

    linear: nn.Linear

    def __call__(self, x):
        released_layer = released(self.linear, 0)
        assert type(released_layer) is nn.Linear
        assert jax.tree.structure(released_layer) == jax.tree.structure(STACK[0])
        return jax.jit(lambda layer, x: layer(x))(released_layer, x)


def test_a_layer_that_is_released_has_no_number():
    """It has its own class, which has no number."""
    plain = nn.Stack(lambda key: Releasing(nn.Linear(2, 2, key=key)), 3, key=jax.random.key(0))
    same(surround(plain, nn.Linear, Numbered())(X), plain(X))


def test_a_rule_that_does_not_use_the_number_gets_none():
    """And nothing is passed along for it; another rule gets its number."""
    plus = surround(STACK, nn.Linear, Plus())
    assert [where.layers for _, where in asked(plus, X)] == [()]
    assert _size(plus) == _size(STACK) + 1
    both = surround(plus, nn.Linear, Times(1.0))
    assert [len(where.layers) for _, where in asked(both, X)] == [1, 0]


def _size(stack):
    return len(str(jax.make_jaxpr(lambda stack, x: stack(x))(stack, X)).splitlines())


# ---- refusals


class Doubling(AbstractCallRule):
    """Lets a Module run whose bias is twice as large, so many times."""

    times: int = pm.field(default=1, static=True)
    uses_layer: ClassVar[bool] = False

    def entering(self, module):
        """The other Module."""
        return module.replace(bias=module.bias * 2**self.times)

    def around(self, call, args, kwargs, where):
        """Make the call."""
        assert (where.path, where.method) == ("", "__call__")
        return call(*args, **kwargs)


def test_a_rule_says_which_module_runs():
    """The method gets that Module; the called one is unchanged."""
    layer = affine(2, 2)
    ruled = with_own_rules(layer, Doubling, {"__call__": Doubling(2)})

    np.testing.assert_array_equal(ruled(X), layer.weight @ X + 4 * layer.bias)
    np.testing.assert_array_equal(ruled.bias, layer.bias)
    # Other rules are around it as before.
    np.testing.assert_array_equal(surround(ruled, ..., Times())(X), 2 * ruled(X))


def test_rules_of_a_kind_are_exchanged():
    """Those of other kinds stay, and stay where they are."""
    layer = surround(affine(2, 2), ..., Times())
    ruled = with_own_rules(layer, Doubling, {"__call__": Doubling(1)})
    outside = surround(ruled, ..., Plus())

    again = with_own_rules(outside, Doubling, {"__call__": Doubling(2)})

    assert own_rules(again, Doubling) == {"__call__": Doubling(2)}
    assert own_rules(layer, Doubling) == {}
    assert [by for by, _ in asked(again, X)] == [by for by, _ in asked(outside, X)] == [1.0, 2.0]
    assert with_own_rules(again, Doubling, {"__call__": Doubling(2)}) is again
    assert pm.tree_equal(with_own_rules(ruled, Doubling, {}), layer)
    assert own_rules(with_own_rules(again, Doubling, {}), Doubling) == {}


def test_rules_without_paths_leave_structures_alike():
    """Wherever two Modules are: they can still be mapped over together."""
    layers = [with_own_rules(affine(2, 2), Doubling, {"__call__": Doubling()}) for _ in range(2)]

    assert jax.tree.structure(layers[0]) == jax.tree.structure(layers[1])
    assert jax.tree.structure(layers[0]) != jax.tree.structure(affine(2, 2))


class Leaving(Doubling):
    """Adds, before anything around the call sees it, by how much the bias was changed."""

    def leaving(self, called, entered, out):
        """With both Modules at hand."""
        return out + (entered.bias - called.bias)


def test_a_rule_changes_what_the_method_gave_before_it_is_seen():
    """The surroundings of the call see the changed result."""
    layer = affine(2, 2)
    ruled = with_own_rules(layer, Leaving, {"__call__": Leaving()})

    expected = layer.weight @ X + 3 * layer.bias
    np.testing.assert_array_equal(surround(ruled, ..., Times())(X), 2 * expected)


test_refusals = refusals(globals())
