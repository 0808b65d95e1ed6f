"""Roles that single instances were given."""

import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import pytreemod as pm
from pytreemod import nn
from pytreemod.tree.nodes import locations
from tests.helpers.laws import law, trees
from tests.helpers.trees import Boxed, Buffered, affine, double, ramp


def roles(tree):
    """The role of each leaf."""
    return [loc.role for loc in locations(tree)]


# A Module is above every leaf, and there are two leaves at least.
models = trees.map(lambda tree: Boxed([tree, ramp(1), {"a": affine()}]))


def mlp():
    """Three layers of two arrays each."""
    return nn.MLP(2, 3, width_size=4, depth=2, key=jax.random.key(0))


# ---- laws


@law
@given(models, st.data(), st.sampled_from(["param", "buffer", "lora", "mine"]))
def test_picked_leaves_have_the_role_and_others_the_one_they_had(tree, data, role):
    """With None, the structure is the old one again."""
    before = roles(tree)
    mask = [data.draw(st.booleans()) for _ in before[1:]] + [True]
    spec = jax.tree.structure(tree).unflatten(mask)

    new = pm.with_role(tree, spec, role)

    assert roles(new) == [role if m else old for m, old in zip(mask, before, strict=True)]
    assert all(a is b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(tree), strict=True))
    back = pm.with_role(new, spec, None)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.structure(pm.with_role(new, spec, role)) == jax.tree.structure(new)


@law
@given(models, st.data())
def test_param_is_the_way_back(tree, data):
    """After freezing and unfreezing, the structure equals the original."""
    mask = [data.draw(st.booleans()) and role == "param" for role in roles(tree)[:-1]] + [True]
    spec = jax.tree.structure(tree).unflatten(mask)

    back = pm.with_role(pm.with_role(tree, spec, "buffer"), spec, "param")

    assert jax.tree.structure(back) == jax.tree.structure(tree)


@law
@given(models, st.data())
def test_the_order_in_which_roles_are_given_is_no_matter(tree, data):
    """Two disjoint choices commute."""
    choice = [data.draw(st.integers(0, 2)) for _ in roles(tree)[2:]] + [0, 1]
    structure = jax.tree.structure(tree)
    first, second = (structure.unflatten([c == i for c in choice]) for i in (0, 1))

    one = pm.with_role(pm.with_role(tree, first, "buffer"), second, "mine")
    other = pm.with_role(pm.with_role(tree, second, "mine"), first, "buffer")

    assert jax.tree.structure(one) == jax.tree.structure(other)


# ---- who asks for roles


def test_gradients_trainable_and_selectors_agree():
    """You set the roles once."""
    model = pm.with_role(mlp(), "layers.0", "buffer")

    params, rest = pm.trainable(model)
    grads = pm.filter_grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)

    assert params.layers[0].weight is None
    assert rest.layers[0].weight is model.layers[0].weight
    assert grads.layers[0].weight is None
    assert grads.layers[1].weight is not None
    assert pm.select.role("buffer").mask(model) == [True, True, False, False, False, False]


def test_places_in_the_containers_of_a_field_are_told_apart():
    """One array of a list in a field is frozen, and its sibling is not."""
    box = Boxed({"a": [ramp(1), ramp(2)], "b": (ramp(3), [ramp(4)])})

    box = pm.with_role(box, "content.a[1]", "buffer")
    box = pm.with_role(box, "content.b", "mine")

    assert roles(box) == ["param", "buffer", "mine", "mine"]


def test_inner_roles_win():
    """A role that was given is the innermost: it wins over those of the fields around it."""
    model = Buffered(ramp(1), ramp(2), ramp(3), affine())
    assert roles(model) == ["param", "buffer", "lora", "lora", "lora"]

    model = pm.with_role(model, "inner.bias", "param")

    assert roles(model) == ["param", "buffer", "lora", "lora", "param"]


def test_a_place_keeps_its_role_when_a_module_is_put_there():
    """As a field does: an inner declaration still wins."""
    box = pm.with_role(Boxed(ramp(1)), "content", "mine")

    box = pm.tree_at("content", box, Buffered(ramp(1), ramp(2), ramp(3)))

    assert roles(box) == ["mine", "buffer", "lora"]
    assert roles(pm.with_role(box, "content.mean", None)) == ["mine", "buffer", "lora"]


def test_a_buffer_can_be_trained():
    """ "param" is a role like others, where the class declares another."""
    model = pm.with_role(Buffered(ramp(1), ramp(2), ramp(3)), "mean", "param")

    assert pm.trainable(model)[0].mean is not None
    assert roles(pm.with_role(model, "mean", None)) == ["param", "buffer", "lora"]
    assert pm.with_role(model, "mean", "buffer") == Buffered(*jax.tree.leaves(model))


# ---- where it goes


def test_transforms_copies_and_surgery_keep_roles():
    """It is configuration like any other."""
    model = pm.with_role(mlp(), "layers.*.bias", "buffer")
    structure = jax.tree.structure(model)
    stacked = pm.filter_vmap(lambda _: model)(jnp.arange(2))
    scanned, _ = pm.filter_scan(lambda carry, _: (carry, None), model, length=2)
    returned = pm.filter_jit(lambda m: m)(model)

    news = [
        jax.tree.map(lambda x: 2 * x, model),
        jax.jit(lambda m: m)(model),
        returned,
        stacked,
        scanned,
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pm.combine(*pm.trainable(model)),
        pm.apply_updates(model, pm.trainable(model)[0]),
        pm.tree_at(lambda m: m.layers[0].weight, model, ramp(4, 2)),
        # The argument of `where` is flattened here.
        pm.tree_at(lambda m: jax.tree.leaves(m.layers[0]), model, replace_fn=double),
        pm.inference_mode(model),
        model.replace(layers=model.layers),
    ]

    assert all(jax.tree.structure(new) == structure for new in news)
    assert roles(model.layers[0].replace(use_bias=True)) == ["param", "buffer"]
    assert roles(returned.layers[0]) == ["param", "buffer"]


class Reduced(pm.Module):
    """Has a custom `__reduce__`."""

    weight: jax.Array
    bias: jax.Array

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_class_with_a_state_of_its_own_keeps_roles():
    """Its state has the roles."""
    model = pm.with_role(Reduced(ramp(1), ramp(2)), "bias", "buffer")

    new = pickle.loads(pickle.dumps(model))

    assert roles(new) == ["param", "buffer"]
    assert jax.tree.structure(new) == jax.tree.structure(model)


def test_a_stack_has_roles_for_all_its_layers():
    """And so does each layer of it."""
    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))

    stack = pm.with_role(stack, "**.bias", "buffer")

    assert pm.trainable(stack)[0].layer.bias is None
    assert roles(stack[1]) == ["param", "buffer"]
    assert stack(jnp.ones(3)).shape == (3,)


def test_other_roles_are_other_programs():
    """A compiled function is traced anew, once."""
    traces = []

    @pm.filter_jit
    def step(model):
        traces.append(1)
        return pm.trainable(model)[0]

    model = affine()
    frozen = pm.with_role(model, "bias", "buffer")

    assert [step(m).bias is None for m in (model, frozen, frozen, model)] == [
        False,
        True,
        True,
        False,
    ]
    assert len(traces) == 2


def test_modules_are_chosen_by_the_roles_of_their_places():
    """`capture` matches Modules by selector, with the role of the path of each."""
    model = pm.tree_at("content", pm.with_role(Boxed(ramp(1)), "content", "mine"), affine())

    _, seen = pm.capture(lambda m: m.content(ramp(3)), pm.select.role("mine"))(model)

    assert list(seen) == ["content"]


@jax.tree_util.register_pytree_with_keys_class
class Alike:
    """A node whose children have keys that read the same."""

    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten_with_keys(self) -> Any:
        """One key is an attribute's, and the other a dict's."""
        keys = (jax.tree_util.GetAttrKey("a"), jax.tree_util.DictKey("a"))
        return tuple(zip(keys, self.children, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        """Back."""
        return cls(*children)


# ---- files


def test_files_have_no_roles(tmp_path):
    """The model that loads a file decides: fine-tuning freezes, then loads."""
    path = tmp_path / "model.safetensors"
    model, frozen = mlp(), pm.with_role(mlp(), "layers.0.bias", "buffer")
    for tree in (model, frozen):
        pm.save(path, tree)
        assert pm.load(path, frozen) == frozen
        assert pm.load(path, model) == model


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: pm.with_role(affine(), "wieght", "buffer"), "wieght.*weight"),
        (lambda: pm.with_role(affine(), nn.Linear, "buffer"), "Linear"),
        # There is nothing that could keep their role.
        (lambda: pm.with_role({"a": ramp(1), "b": affine()}, ..., "buffer"), r"\['a'\]"),
        # As roles of their own they would train what was to be frozen.
        (lambda: pm.with_role(affine(), ..., True), "True"),
        (lambda: pm.with_role(affine(), ..., ""), "role"),
    ],
)
def test_roles_that_would_be_lost_are_refused(use, text):
    """A selector that picks nothing, leaves of no Module, no words."""
    with pytest.raises(pm.PytreemodError, match=f"(?s){text}"):
        use()


def test_what_is_not_picked_is_the_very_same():
    """Only the nodes between the root and the leaves are made anew."""
    model = mlp()
    new = pm.with_role(model, "layers.0.bias", "buffer")

    assert new.layers[1] is model.layers[1]
    assert new != model
    assert repr(new).replace(" (buffer)", "") == repr(model)
