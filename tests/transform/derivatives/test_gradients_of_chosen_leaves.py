"""filter_grad on leaves that the user names: by role, path, type, access, argument, container."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.trees import Affine, affine, ramp

BOTH = ["filter_grad", "filter_value_and_grad"]


class Adapted(pm.Module):
    """A layer with an adapter beside its own weights."""

    base: Affine
    down: jax.Array = pm.field(role="lora")
    up: jax.Array = pm.field(role="lora")
    scale: jax.Array = pm.buffer()

    def __call__(self, x):
        return self.base.weight @ x + self.base.bias + self.scale * (self.up @ (self.down @ x))


class Stacked(pm.Module):
    """Adapters in containers, one of which is used twice."""

    layers: list
    heads: dict
    name: str = "stacked"

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return {name: head(head(x)) for name, head in self.heads.items()}


def adapted(start=0.1):
    a = np.float32(start)
    base = affine(2, 2, a)
    return Adapted(base, ramp(1, 2, start=a), ramp(2, 1, start=-a), jnp.full(2, 0.5))


def stacked():
    return Stacked([adapted(0.1), adapted(0.2)], {"a": adapted(0.3), "b": affine_head()})


def affine_head():
    return adapted(-0.4)


def loss(model, x):
    return sum(jnp.sum(y**2) for y in model(x).values())


X = ramp(2, start=np.float32(0.3))


def named(tree):
    """The paths at which a tree has leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path).removeprefix(".") for path, _ in leaves}


SELECTORS = {
    "role": (pm.select.role("lora"), lambda p: p.endswith((".down", ".up"))),
    "path": (pm.select.path("layers.*.base"), lambda p: p.startswith("layers") and "base" in p),
    "string": ("heads.a.**.bias", lambda p: p == "heads['a'].base.bias"),
    "type": (pm.select.type(Affine), lambda p: "base" in p),
    "class": (Affine, lambda p: "base" in p),
    "access": (pm.select.at(lambda m: m.layers[1].up), lambda p: p == "layers[1].up"),
    "and": (
        pm.select.role("lora") & pm.select.path("heads"),
        lambda p: p[0] == "h" and "base" not in p and "scale" not in p,
    ),
    "not": (~pm.select.path("layers"), lambda p: p.startswith("heads")),
    "everything": (..., lambda p: True),
    "predicate": (lambda x: x.ndim == 1, lambda p: p.endswith((".bias", ".scale"))),
    "default": (None, lambda p: not p.endswith(".scale")),
}


@pytest.mark.parametrize(("wrt", "picked"), SELECTORS.values(), ids=SELECTORS)
@pytest.mark.sampled
def test_the_gradient_has_the_chosen_leaves_and_none_elsewhere(wrt, picked):
    """The model's structure, the full gradient's values where chosen, None everywhere else."""
    everything = pm.filter_grad(loss, wrt=True)(stacked(), X)
    found = pm.filter_grad(loss, wrt=wrt)(stacked(), X)

    assert named(found) == {path for path in named(stacked()) if picked(path)}
    assert_close(found, pm.filter(everything, jax.tree.map(pm.is_array, found, is_leaf=_is_none)))
    assert type(found) is Stacked
    assert found.name == "stacked"


def _is_none(x):
    return x is None


def test_the_chosen_gradient_is_jaxs():
    """It equals jax.grad of the function of the chosen arrays alone."""
    wrt = pm.select.role("lora")
    kept, rest = pm.partition(stacked(), wrt)
    expected = jax.grad(lambda kept: loss(pm.combine(kept, rest), X))(kept)

    assert_close(pm.filter_grad(loss, wrt=wrt)(stacked(), X), expected)


def test_trainable_is_the_matching_split():
    """trainable(m, wrt)[0] has the gradient's structure, for every way to say wrt."""
    for wrt, _ in SELECTORS.values():
        first, rest = pm.trainable(stacked(), wrt)
        gradient = pm.filter_grad(loss, wrt=wrt)(stacked(), X)
        assert jax.tree.structure(first) == jax.tree.structure(gradient)
        assert_close(pm.combine(first, rest), stacked())


def test_only_what_is_chosen_is_computed():
    """The program has the operations of jax.grad by these arrays alone."""
    model = affine()

    def f(model, x):
        return jnp.sum(jnp.tanh(model.weight @ x + model.bias) ** 2)

    def chosen(weight, bias, x):
        return pm.filter_grad(f, wrt=pm.select.path("bias"))(Affine(weight, bias), x).bias

    def by_hand(weight, bias, x):
        return jax.grad(lambda bias: f(Affine(weight, bias), x))(bias)

    arrays = (model.weight, model.bias, ramp(3))
    assert equations(chosen, *arrays) == equations(by_hand, *arrays)


@pytest.mark.parametrize("name", BOTH)
def test_one_leaf_used_several_times_has_the_sum(name):
    """Used twice, at two paths of a result and through two methods: the gradients add up."""
    shared = affine(2, 2)

    def twice(layer, x):
        return jnp.sum(layer.weight @ (layer.weight @ x)) + jnp.sum(layer.weight)

    def apart(first, second, third, x):
        return jnp.sum(first.weight @ (second.weight @ x)) + jnp.sum(third.weight)

    made = getattr(pm, name)
    found = made(twice, wrt="weight")(shared, X)
    parts = made(apart, argnums=(0, 1, 2), wrt="weight")(shared, shared, shared, X)
    if name == "filter_value_and_grad":
        (value, found), (_, parts) = found, parts
        assert_close(value, twice(shared, X))

    assert_close(found.weight, sum(part.weight for part in parts))
    assert found.bias is None


@pytest.mark.parametrize(
    ("wrt", "first", "second"),
    [
        (("weight", "bias"), (True, False), (False, True)),
        ([pm.select.path("bias"), True], (False, True), (True, True)),
        ({"m2": "bias"}, (True, True), (False, True)),
        ({"m1": "bias", "m2": False}, (False, True), (False, False)),
        (pm.select.path("weight"), (True, False), (True, False)),
        ("weight", (True, False), (True, False)),
        (Affine(True, False), (True, False), (True, False)),
        (lambda x: x.ndim == 1, (False, True), (False, True)),
    ],
    ids=["tuple", "list", "one by name", "by name", "selector", "string", "prefix", "predicate"],
)
def test_each_argument_has_its_own_leaves(wrt, first, second):
    """One spec for all arguments, one for each, or by name, where the rest has the default."""

    def f(m1, m2, x):
        return jnp.sum(m2(m1(x)))

    g1, g2 = pm.filter_grad(f, argnums=(0, 1), wrt=wrt)(affine(2, 2), affine(2, 2), X)

    assert (g1.weight is not None, g1.bias is not None) == first
    assert (g2.weight is not None, g2.bias is not None) == second


def test_a_path_need_only_be_in_one_of_the_arguments():
    """It is misspelt if no argument has it, not if one has not."""

    def f(a, b):
        return jnp.sum(a["x"]) * jnp.sum(b["y"])

    grads = pm.filter_grad(f, argnums=(0, 1), wrt=pm.select.path("y"))({"x": X}, {"y": X})
    assert grads[0] == {"x": None}
    assert_close(grads[1]["y"], jnp.full(2, jnp.sum(X)))
