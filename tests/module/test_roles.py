"""Roles that single instances were given."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import pytreemod as pm
from pytreemod import nn
from tests.helpers.laws import law, trees
from tests.helpers.trees import Boxed, Buffered, affine, double, ramp

# A Module is above every leaf, and there are two leaves at least.
models = trees.map(lambda tree: Boxed([tree, ramp(1), {"a": affine()}]))


def roles(tree):
    """The role of each leaf."""
    masks = {role: pm.select.role(role).mask(tree) for role in ("param", "buffer", "lora", "mine")}
    leaves = zip(*masks.values(), strict=True)
    return [role for leaf in leaves for role, has in zip(masks, leaf, strict=True) if has]


def mlp():
    return nn.MLP(2, 3, width_size=4, depth=2, key=jax.random.key(0))


@law
@given(models, st.data(), st.sampled_from(["param", "buffer", "lora", "mine"]))
def test_picked_leaves_have_the_role_and_others_the_one_they_had(tree, data, role):
    """Undone by None, and by "param" where that was the role; disjoint choices commute."""
    before, structure = roles(tree), jax.tree.structure(tree)
    choice = [data.draw(st.integers(0, 2)) for _ in before[2:]] + [0, 1]
    first, second = (structure.unflatten([c == i for c in choice]) for i in (0, 1))
    new = pm.with_role(tree, first, role)
    assert roles(new) == [old if c else role for c, old in zip(choice, before, strict=True)]
    assert all(a is b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(tree), strict=True))
    assert jax.tree.structure(pm.with_role(new, first, None)) == structure
    assert jax.tree.structure(pm.with_role(new, first, role)) == jax.tree.structure(new)
    other = pm.with_role(pm.with_role(tree, second, "mine"), first, role)
    assert jax.tree.structure(pm.with_role(new, second, "mine")) == jax.tree.structure(other)
    params = [c == 0 and old == "param" for c, old in zip(choice, before, strict=True)]
    params = structure.unflatten(params)
    back = pm.with_role(pm.with_role(tree, params, "buffer"), params, "param")
    assert jax.tree.structure(back) == structure


def test_gradients_trainable_and_selectors_agree():
    """You set the roles once, also for all layers of a Stack; only nodes above a leaf are new."""
    before = mlp()
    model = pm.with_role(before, "layers.0", "buffer")
    params, rest = pm.trainable(model)
    grads = pm.filter_grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
    assert params.layers[0].weight is grads.layers[0].weight is None
    assert rest.layers[0].weight is model.layers[0].weight
    assert grads.layers[1].weight is not None
    assert pm.select.role("buffer").mask(model) == [True, True, False, False, False, False]
    assert model.layers[1] is before.layers[1]
    assert model != before
    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))
    stack = pm.with_role(stack, "**.bias", "buffer")
    assert pm.trainable(stack)[0].layer.bias is None
    assert roles(stack[1]) == ["param", "buffer"]


def test_the_innermost_role_counts():
    """In containers of a field, too; a place keeps its role when a Module is put there."""
    buffered = Buffered(ramp(1), ramp(2), ramp(3))
    deep = buffered.replace(inner=affine())
    box = pm.tree_at("content", pm.with_role(Boxed(ramp(1)), "content", "mine"), buffered)
    places = Boxed({"a": [ramp(1), ramp(2)], "b": (ramp(3), [ramp(4)])})
    places = pm.with_role(pm.with_role(places, "content.a[1]", "buffer"), "content.b", "mine")
    assert roles(places) == ["param", "buffer", "mine", "mine"]
    assert roles(deep) == ["param", "buffer", "lora", "lora", "lora"]
    assert roles(pm.with_role(deep, "inner.bias", "param")) == [*roles(deep)[:4], "param"]
    assert roles(box) == ["mine", "buffer", "lora"]
    assert roles(pm.with_role(box, "content.mean", None)) == roles(box)
    # "param" is a role like others, where the class declares another.
    trained = pm.with_role(buffered, "mean", "param")
    assert pm.trainable(trained)[0].mean is not None
    assert roles(pm.with_role(trained, "mean", None)) == ["param", "buffer", "lora"]


def test_transforms_surgery_and_programs_keep_roles_apart(tmp_path):
    """It is configuration like any other; but a file has none: the model that loads it decides."""
    model = pm.with_role(mlp(), "layers.*.bias", "buffer")
    kept = [
        pm.filter_scan(lambda carry, _: (carry, None), model, length=2)[0],
        pm.combine(*pm.trainable(model)),
        pm.apply_updates(model, pm.trainable(model)[0]),
        # The argument of `where` is flattened here.
        pm.tree_at(lambda m: jax.tree.leaves(m.layers[0]), model, replace_fn=double),
        model.replace(layers=model.layers),
    ]
    assert all(jax.tree.structure(new) == jax.tree.structure(model) for new in kept)
    for same in (model.replace(depth=2), pm.filter_jit(lambda m: m)(model)):
        assert roles(same) == ["param", "buffer"] * 3
    plain, frozen = affine(), pm.with_role(affine(), "bias", "buffer")
    step = pm.filter_jit(lambda model: pm.trainable(model)[0])
    assert [step(m).bias is None for m in (plain, frozen, plain)] == [False, True, False]
    pm.save(tmp_path / "model", frozen)
    assert pm.load(tmp_path / "model", frozen) == frozen
    assert pm.load(tmp_path / "model", plain) == plain


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: pm.with_role(affine(), "wieght", "buffer"), "wieght.*weight"),
        (lambda: pm.with_role(affine(), lambda leaf: False, "buffer"), "picks no leaf.*weight"),
        # There is nothing that could keep their role.
        (lambda: pm.with_role({"a": ramp(1), "b": affine()}, ..., "buffer"), r"\['a'\]"),
        # As a role of its own it would train what was to be frozen.
        (lambda: pm.with_role(affine(), ..., True), "True"),
    ],
)
def test_roles_that_would_be_lost_are_refused(use, text):
    """A selector that picks nothing, leaves of no Module, no words."""
    with pytest.raises(pm.PytreemodError, match=f"(?s){text}"):
        use()
