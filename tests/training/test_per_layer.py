"""Rules over stacked arrays: the same as for each layer and member by itself, or refused."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_same

contrib = optax.contrib


pytestmark = pytest.mark.usefixtures("usual_promotion")


class Layer(pm.Module):
    weight: jax.Array
    bias: jax.Array
    scale: jax.Array

    def __init__(self, key):
        self.weight, self.bias, self.scale = (
            jax.random.normal(k, shape)
            for k, shape in zip(jax.random.split(key, 3), ((3, 4), (4,), ()), strict=True)
        )

    def __call__(self, x):
        return x


class Held(pm.Module):
    """A model as a member; it is never called."""

    tree: dict[str, object]

    def __call__(self, x):
        return x


@ft.cache
def listed(seed=0):
    """Four layers in two lists, and a matrix."""
    *keys, last = jax.random.split(jax.random.key(seed), 5)
    layers = [Layer(key) for key in keys]
    return {"blocks": [layers[:2], layers[2:]], "head": jax.random.normal(last, (4, 3))}


@ft.cache
def stacked(seed=0):
    model = listed(seed)
    return {**model, "blocks": [nn.Stack.from_layers(each) for each in model["blocks"]]}


@ft.cache
def nested(seed=0):
    model = stacked(seed)
    return {**model, "blocks": nn.Stack.from_layers(model["blocks"])}


def ensemble(make):
    return {
        "nets": nn.Ensemble.from_members([Held(make(seed)) for seed in range(2)]),
        "other": jnp.ones((2, 2)),
    }


def in_lists(model):
    """The same, with lists instead of Stacks and Ensembles."""
    if isinstance(model, (nn.Stack, nn.Ensemble)):
        return [in_lists(layer) for layer in model.unstack()]
    if isinstance(model, Held):
        return in_lists(model.tree)
    if isinstance(model, dict):
        return {name: in_lists(part) for name, part in model.items()}
    return [in_lists(part) for part in model] if isinstance(model, list) else model


def slopes(model, number):
    return jax.tree.map(lambda x: jnp.sin(3 * x + number), model)


@ft.partial(jax.jit, static_argnums=0)
def by_hand(rule, model):
    def step(carry, number):
        model, state = carry
        updates, state = rule.update(slopes(model, number), state, model)
        return (optax.apply_updates(model, updates), state), None

    return jax.lax.scan(step, (model, rule.init(model)), jnp.arange(3.0))[0][0]


@pm.filter_jit
def _trained(opt, model):
    def step(carry, number):
        model, opt = carry
        return opt.update(model, grads=slopes(model, number)), None

    return pm.filter_scan(step, (model, opt), jnp.arange(3.0))[0][0]


def trained(rule, model):
    return _trained(pm.Optimizer(rule).init(model), model)


@ft.cache
def expected(name):
    """Two members in lists, each trained alone, and the array outside of them."""
    rule, _ = RULES[name]
    members = [by_hand(rule, listed(seed)) for seed in range(2)]
    return members, by_hand(rule, {"other": jnp.ones((2, 2))})["other"]


def _has_axes(tree):
    return jax.tree.map(lambda x, n: jnp.ndim(x) > n, tree, pm.layer_axes(tree))


def _each(change):
    """A rule that changes each array, given its number and all of them."""

    def update(updates, params):
        leaves, structure = jax.tree.flatten(updates)
        return structure.unflatten([change(i, x, leaves) for i, x in enumerate(leaves)])

    return optax.chain(optax.stateless(update), optax.sgd(0.1))


def _branching(updates, state, params=None):
    if sum(jnp.sum(x) for x in jax.tree.leaves(updates)) > 0:
        return updates, state
    return jax.tree.map(jnp.negative, updates), state


def _decided_at_first():
    def init(params):
        return jax.tree.map(lambda x: jnp.sum(jnp.abs(x)), params)

    def update(updates, state, params=None):
        return jax.tree.map(jnp.multiply, updates, state), state

    return optax.GradientTransformation(init, update)


CLIP = optax.clip_by_global_norm(0.5)
HALF = optax.scale(-0.5)
# In a list of Stacks, in a Stack of Stacks, in an Ensemble, in an Ensemble of these: the same,
# right with per_layer, right with per_member, or refused.
RULES = {
    "adam": (optax.adam(0.1), "ssss"),
    "adamw, schedule": (optax.adamw(optax.linear_schedule(0.1, 0, 4), weight_decay=0.1), "ssss"),
    "sgd": (optax.sgd(0.1, momentum=0.9), "ssss"),
    "flatten": (optax.flatten(optax.adam(0.1)), "ssss"),
    "injected": (optax.inject_hyperparams(optax.adam)(0.1), "ssss"),
    "finite": (optax.apply_if_finite(optax.adam(0.1), 2), "ssss"),
    "some steps": (optax.MultiSteps(optax.adam(0.1), 2), "ssss"),
    "schedule-free": (contrib.schedule_free_sgd(0.1), "ssss"),
    "clipped adam": (optax.chain(CLIP, optax.adam(0.1)), "ssmm"),
    "prodigy": (contrib.prodigy(), "ssmm"),
    "muon": (contrib.muon(0.1), "llml"),
    "lars": (optax.lars(0.1), "llml"),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), "llml"),
    "novograd": (optax.novograd(0.1), "llml"),
    "adaptive clipping": (optax.chain(optax.adaptive_grad_clip(0.01), HALF), "llml"),
    "block norm": (optax.chain(optax.scale_by_param_block_norm(), HALF), "llml"),
    "lamb, some steps": (optax.MultiSteps(optax.lamb(0.1), 2), "llml"),
    "masked": (optax.masked(contrib.muon(0.1), pm.select.type(Layer)), "llml"),
    "sm3": (optax.masked(optax.sm3(0.1), lambda tree: _has_axes(tree)), "llml"),
    "clip, muon": (optax.chain(CLIP, contrib.muon(0.1)), "--m-"),
    "clip, mapped muon": (optax.chain(CLIP, pm.per_layer(contrib.muon(0.1))), "ssmm"),
    "many steps": (optax.MultiSteps(optax.adam(0.1), 9), "----"),
    "their number": (_each(lambda i, x, leaves: x / len(leaves)), "--m-"),
    "the sum of an array": (_each(lambda i, x, leaves: jnp.full_like(x, x.sum())), "llml"),
    "an `if` on a number": (
        optax.GradientTransformation(optax.init_empty_state, _branching),
        "----",
    ),
    "decided at first": (_decided_at_first(), "llml"),
}
FORMS = {
    "stacked": stacked,
    "nested": nested,
    "ensemble": lambda: ensemble(listed),
    "ensemble of stacks": lambda: ensemble(nested),
}
CURES = {"l": "per_layer", "m": "per_member"}


# One of each outcome; the whole table runs with the slow tests.
BY_DEFAULT = [("sgd", "nested"), ("clipped adam", "ensemble"), ("lars", "stacked")]
CASES = [
    pytest.param(name, form, marks=[] if (name, form) in BY_DEFAULT else pytest.mark.slow)
    for name, (_, outcomes) in RULES.items()
    for form in FORMS
    # What is right everywhere is right in parts of an Ensemble of Stacks.
    if outcomes != "ssss" or form in ("nested", "ensemble of stacks")
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_layers_train_as_in_a_list_and_members_as_alone_or_the_rule_is_refused(name, form):
    """However they are stored, and whatever the rule reads; what is to be written is right."""
    (rule, outcomes), model = RULES[name], FORMS[form]()
    outcome = outcomes[[*FORMS].index(form)]
    if outcome != "s":
        with pytest.raises(ArgumentError, match="does not do the same") as caught:
            pm.Optimizer(rule).init(model)
        named = [cure for cure in CURES if f"\n  pm.{CURES[cure]}(" in str(caught.value)]
        assert (named or ["-"])[0] == outcome
        if outcome == "-":
            return
        rule = getattr(pm, CURES[outcome])(rule)

    found, (members, other) = in_lists(trained(rule, model)), expected(name)
    right = {"nets": members, "other": other} if "nets" in model else members[0]
    jax.tree.map(_assert_close, found, right)
    assert not np.allclose(jax.tree.leaves(found)[0], jax.tree.leaves(in_lists(model))[0])


def _assert_close(one, two):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_a_rule_that_keeps_less_for_long_axes_is_tried_at_their_length():
    """Adafactor's rows may be the layers, if there are many."""
    rule = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    for depth, size in ((8, 4), (16, 8)):
        stack = nn.Stack(ft.partial(nn.Linear, size, 16), depth, key=jax.random.key(0))
        with pytest.raises(ArgumentError, match="per_layer"):
            pm.Optimizer(rule).init(stack)


def test_a_mask_that_picks_by_selector_is_never_taken_for_elementwise():
    """On arrays in a plain list it would pick nothing, and train the layers wrongly."""
    stack = nn.Stack(ft.partial(nn.Linear, 4, 4), 3, key=jax.random.key(0))
    for rule in (
        optax.masked(contrib.muon(0.1), pm.select.type(nn.Linear)),
        optax.lamb(0.1, mask=pm.select.path("layer.weight")),
    ):
        with pytest.raises(ArgumentError, match="does not do the same"):
            pm.Optimizer(rule).init(stack)


@pytest.mark.parametrize(
    "map_rule", [pm.per_layer, pytest.param(pm.per_member, marks=pytest.mark.slow)]
)
def test_one_key_for_all_layers_is_refused(map_rule):
    """Each would get the same noise."""
    model = stacked() if map_rule is pm.per_layer else ensemble(listed)
    for key in (0, jax.random.key(0)):
        rule = optax.add_noise(0.1, 0.5, key=key)
        with pytest.raises(ArgumentError, match="the same random numbers"):
            map_rule(rule).init(model)
    with pytest.raises(ArgumentError, match="as one"):
        pm.Optimizer(rule).init(model)
    # There is one for arrays without layers.
    new, _ = pm.Optimizer(map_rule(rule)).init(listed()).update(listed(), grads=listed())
    assert not np.allclose(new["head"], listed()["head"])


def test_stacked_as_one_is_plain_optax():
    model, rule = stacked(), optax.scale_by_trust_ratio()
    new, _ = pm.Optimizer(rule, stacked="as one").init(model).update(model, grads=model)
    updates, _ = rule.update(model, rule.init(model), model)
    assert_same(new, optax.apply_updates(model, updates))


@pytest.mark.slow
def test_plain_optax_takes_them():
    """In a chain, with extra arguments, and inside of themselves."""
    model = nested()
    for lars in (
        pm.per_layer(optax.lars(0.1)),
        pm.per_layer(pm.per_layer(optax.lars(0.1))),
        pm.per_member(pm.per_layer(optax.lars(0.1))),
        pm.per_layer(pm.per_member(optax.lars(0.1))),
    ):
        rule = optax.chain(lars, contrib.reduce_on_plateau())
        updates, _ = rule.update(model, rule.init(model), model, value=jnp.ones(()))
        right, _ = optax.lars(0.1).update(listed(), optax.lars(0.1).init(listed()), listed())
        jax.tree.map(_assert_close, in_lists(updates), right)


def test_arguments_for_the_whole_model_are_refused_by_mapped_rules():
    """A number is the same for each layer; a tree, or a function of the model, is not."""
    rule = pm.per_layer(optax.contrib.reduce_on_plateau())
    state = rule.init(stacked())
    updates, _ = rule.update(stacked(), state, value=jnp.ones(()))
    assert_same(updates, stacked())
    for value in (jnp.ones(4), stacked(), jnp.sum):
        with pytest.raises(ArgumentError, match="'value'"):
            rule.update(stacked(), state, value=value)


@pytest.mark.slow
def test_members_of_two_ensembles_are_not_one_model():
    """Though they are as many: the norm is that of one member of one of them."""
    one = ensemble(listed)["nets"]
    model = {"a": one, "b": jax.tree.map(lambda x: 5 * x, one)}
    updates, _ = pm.per_member(CLIP).update(model, pm.per_member(CLIP).init(model))
    for name in "ab":
        for member in updates[name].unstack():
            assert float(optax.tree.norm(member)) == pytest.approx(0.5, rel=1e-5)


def test_rates_may_be_traced():
    """Any number is tried; nothing of the trace is kept."""
    model = stacked()

    @jax.jit
    def run(rate):
        opt = pm.Optimizer(optax.adam(rate)).init(model)
        return opt.update(model, grads=model)[0]["head"]

    with jax.checking_leaks():
        new = run(0.1)
    right = pm.Optimizer(optax.adam(0.1)).init(model).update(model, grads=model)[0]["head"]
    _assert_close(new, right)
    several = pm.filter_vmap(lambda r: pm.Optimizer(optax.adam(r)).init(model).states)
    assert several(jnp.asarray([0.1, 0.2]))[0][0].count.shape == (2,)


@pytest.mark.slow
def test_rules_by_selector_and_before():
    """Each rule is tried on its own part of the model."""
    muon = contrib.muon(0.1, ns_steps=1)
    rules = {"head": None, pm.matrices: pm.per_layer(muon), ...: optax.sgd(0.1)}
    opt = pm.Optimizer(pm.by(rules), before=CLIP).init(nested())
    new, _ = opt.update(nested(), grads=nested())
    plain = pm.Optimizer(pm.by({**rules, pm.matrices: muon}), before=CLIP).init(listed())
    right, _ = plain.update(listed(), grads=listed())

    assert new["head"] is nested()["head"]
    jax.tree.map(_assert_close, in_lists(new), right)
    with pytest.raises(ArgumentError, match=r"select\.type|matrices"):
        pm.Optimizer(pm.by({**rules, pm.matrices: muon})).init(nested())
    with pytest.raises(ArgumentError, match="`before`"):
        pm.Optimizer(optax.sgd(0.1), before=CLIP).init(ensemble(listed))
