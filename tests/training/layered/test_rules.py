"""A transformation sees each layer and each member alone, whatever arrays it reads."""

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
from tests.helpers.equations import equations

contrib = optax.contrib


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As JAX does by default: optax divides floats by counts, and broadcasts across ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def made_once(make):
    """A model for several tests, made by the first one."""

    @ft.cache
    def call(*args):
        with jax.ensure_compile_time_eval():
            return make(*args)

    return call


class Layer(pm.Module):
    """A matrix, a vector and a number."""

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


@made_once
def listed(seed=0):
    """Four layers in two lists, and a matrix."""
    *keys, last = jax.random.split(jax.random.key(seed), 5)
    layers = [Layer(key) for key in keys]
    return {"blocks": [layers[:2], layers[2:]], "head": jax.random.normal(last, (4, 3))}


@made_once
def stacked(seed=0):
    model = listed(seed)
    return {**model, "blocks": [nn.Stack.from_layers(each) for each in model["blocks"]]}


@made_once
def nested(seed=0):
    model = stacked(seed)
    return {**model, "blocks": nn.Stack.from_layers(model["blocks"])}


def layers_of(blocks):
    """Layers in lists, however they are held."""
    blocks = blocks.unstack() if isinstance(blocks, nn.Stack) else blocks
    return [each.unstack() if isinstance(each, nn.Stack) else each for each in blocks]


class Held(pm.Module):
    """A model as a member; it is never called."""

    tree: dict[str, object]

    def __call__(self, x):
        return x


@made_once
def together(make):
    return nn.Ensemble.from_members([Held(make(seed)) for seed in range(2)])


def trained(rule, model, steps=3, **options):
    """After some steps along gradients that depend on the model."""

    def step(carry, number):
        model, opt = carry
        grads = jax.tree.map(lambda x: jnp.sin(3 * x + number), model)
        return opt.update(model, grads), None

    opt = pm.Optimizer(rule, **options).init(model)
    return pm.filter_scan(step, (model, opt), jnp.arange(steps))[0]


@pm.filter_jit
def stepped(rule, model, **extra):
    """One step."""
    grads = jax.tree.map(lambda x: jnp.sin(3 * x), model)
    return pm.Optimizer(rule).init(model).update(model, grads, **extra)


@pm.filter_jit
def all_forms(rule):
    """Members alone, with lists of layers; the first one with a Stack in a Stack; an Ensemble."""
    alone = [listed(seed) for seed in range(2)]
    alone = pm.unstack(pm.filter_map(lambda one: trained(rule, one)[0], pm.stack(alone)))
    forms = [trained(rule, nested())[0]]
    several = trained(rule, {"nets": together(nested), "other": jnp.ones((2, 2))})[0]
    other = trained(rule, {"other": jnp.ones((2, 2))})[0]["other"]
    members = [m.tree for m in several["nets"].unstack()]
    forms, members = (
        [{**m, "blocks": layers_of(m["blocks"])} for m in ms] for ms in (forms, members)
    )
    return alone, forms, members, (several["other"], other)


def chained(*rules):
    return optax.chain(*rules, optax.sgd(0.1))


def _has_axes(tree):
    return jax.tree.map(lambda x, n: jnp.ndim(x) > n, tree, pm.layer_axes(tree))


def _by_norms(updates, params):
    """A rule that reads one array, and all arrays, at once."""
    del params
    whole = optax.tree.norm(updates)
    return jax.tree.map(lambda u: u * jnp.max(jnp.abs(u)) / whole, updates)


# One of each kind: all arrays, numbers, one array, a mixture.
KINDS = (optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.scale_by_trust_ratio())
NORMS = optax.chain(KINDS[0], KINDS[2])
RULES = {"each kind": chained(*KINDS, optax.stateless(_by_norms))}
MORE = {
    "lamb": optax.lamb(1e-1),
    "clipping, muon": optax.chain(optax.clip_by_global_norm(0.5), contrib.muon(1e-1)),
    "masked": optax.masked(contrib.muon(1e-1), pm.matrices),
    "named chain": optax.named_chain(("a", optax.clip_by_global_norm(0.5)), ("b", optax.lamb(0.1))),
    "some steps": optax.conditionally_transform(optax.lamb(0.1), lambda step: step % 2 == 0),
    "skipping": optax.MultiSteps(
        optax.lamb(0.1), 1, ft.partial(optax.skip_large_updates, max_squared_norm=30.0)
    ),
    "sam": contrib.sam(optax.lamb(0.1), chained(contrib.normalize())),
    "sm3": optax.masked(optax.sm3(0.1), lambda tree: _has_axes(tree)),
    "injected": optax.inject_hyperparams(contrib.muon)(optax.linear_schedule(0.1, 0.0, 4)),
    "finite": optax.apply_if_finite(contrib.muon(1e-1), 2),
    "adafactor": optax.adafactor(1e-1, min_dim_size_to_factor=2),
    "prodigy": contrib.prodigy(),
    "muon, some steps": optax.MultiSteps(contrib.muon(1e-1), 2),
    "adaptive clipping": chained(optax.adaptive_grad_clip(0.01)),
    "muon": contrib.muon(1e-1),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.1),
    "block norm": chained(optax.scale_by_param_block_norm()),
    "dadapt": contrib.dadapt_adamw(),
    # For arrays with axes: optax's result for a number has one.
    "distance": optax.masked(chained(optax.scale_by_distance_over_gradients()), _has_axes),
    "dog": contrib.dog(),
    "flatten": optax.flatten(optax.adam(0.1)),
    "lars": optax.lars(0.1),
    "mechanize": contrib.mechanize(optax.adam(0.1), s_init=0.1),
    "normalize": chained(contrib.normalize()),
    "novograd": optax.novograd(0.1),
    "schedule-free": contrib.schedule_free_sgd(0.1),
}
EVERY = [pytest.param(rule, id=name) for name, rule in RULES.items()]
EVERY += [pytest.param(rule, id=name, marks=pytest.mark.slow) for name, rule in MORE.items()]


@pytest.mark.parametrize("rule", EVERY)
def test_layers_train_as_in_a_list_and_members_as_alone(rule):
    """However the layers are stored, and whatever the transformation reads."""
    alone, forms, members, others = all_forms(rule)

    assert _differ(listed(), alone[0])
    for form in forms:
        jax.tree.map(_assert_close, form, alone[0])
    jax.tree.map(_assert_close, members, alone)
    _assert_close(*others)


def _differ(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return any(not np.allclose(a, b) for a, b in pairs)


def _assert_close(one, two):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_rules_by_selector_and_before_see_layers_alone():
    """Matrices per layer are the same leaves as in a list."""
    rules = pm.by({"head": None, pm.matrices: contrib.muon(0.1, ns_steps=1), ...: optax.sgd(0.1)})
    before = optax.clip_by_global_norm(0.5)

    models = [trained(rules, make(), 1, before=before)[0] for make in (listed, nested)]
    assert_same(models[1]["head"], nested()["head"])
    listed_, nested_ = [{**m, "blocks": layers_of(m["blocks"])} for m in models]
    jax.tree.map(_assert_close, nested_, listed_)


def test_counts_and_hyperparameters_are_one_number():
    """For all layers and members, so that they are changed as for one."""
    rule = optax.inject_hyperparams(optax.lars)(0.1)
    several = together(nested)
    opt = pm.filter_jit(pm.Optimizer(rule).init)(several)

    assert opt.states[0].count.shape == ()
    assert opt.states[0].hyperparams["learning_rate"].shape == ()
    still = opt.with_hyperparams(learning_rate=0.0)
    assert_same(pm.filter_jit(still.update)(several, several)[0], several)


def test_what_looks_at_numbers_is_the_same_program_as_without_layers():
    """One equation for each: nothing is mapped, and nothing grows."""

    def count(model, stacked):
        opt = pm.Optimizer(optax.adamw(0.1), stacked=stacked).init(model)
        return equations(lambda opt, m: opt.update(m, m), opt, model)

    model = together(nested)
    assert count(model, "per layer") == count(model, "as one")


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(contrib.muon(0.1), marks=pytest.mark.slow),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
    ],
    ids=["muon", "clipped lamb"],
)
def test_programs_do_not_grow_with_the_number_of_layers(rule):
    """Neither for mapped rules, nor for sums over all layers."""

    def count(depth):
        model = nn.Stack(Layer, depth, key=jax.random.key(0))
        opt = pm.Optimizer(rule).init(model)
        return equations(lambda opt, m: opt.update(m, m), opt, model)

    assert count(2) == count(9)


def test_stacked_as_one_shows_rules_the_arrays_as_they_are():
    """As optax alone does."""
    model, rule = stacked(), optax.scale_by_trust_ratio()
    grads = jax.tree.map(jnp.sin, model)
    opt = pm.Optimizer(rule, stacked="as one").init(model)
    updates, _ = rule.update(grads, rule.init(model), model)

    assert_same(opt.update(model, grads)[0], optax.apply_updates(model, updates))
    assert _differ(
        pm.Optimizer(rule).init(model).update(model, grads)[0], opt.update(model, grads)[0]
    )


def test_per_layer_is_the_same_for_plain_optax():
    """In a chain, and with extra arguments."""
    model = stacked()
    grads = jax.tree.map(jnp.sin, model)
    rules = pm.per_layer(optax.lars(0.1)), contrib.reduce_on_plateau()
    whole, state = optax.chain(*rules), None
    state = whole.init(model)
    updates, _ = whole.update(grads, state, model, value=jnp.ones(()))

    expected = pm.Optimizer(optax.lars(0.1)).init(model).update(model, grads)[0]
    assert_same(optax.apply_updates(model, updates), expected)
    # Mapping twice equals once: a removed axis is not removed again.
    again = pm.Optimizer(optax.chain(pm.per_layer(optax.lars(0.1)))).init(model)
    jax.tree.map(_assert_close, again.update(model, grads)[0], expected)


def _arrays_changed(change):
    """A rule that changes each array, given its number and all of them."""

    def update(updates, params):
        del params
        leaves, structure = jax.tree.flatten(updates)
        return structure.unflatten([change(i, x, leaves) for i, x in enumerate(leaves)])

    return optax.stateless(update)


@pytest.mark.parametrize(
    "change",
    [
        lambda i, x, leaves: x / len(leaves),
        lambda i, x, leaves: x * (i + 1),
        lambda i, x, leaves: x / jnp.max(jnp.abs(x)) / len(leaves),
        lambda i, x, leaves: x * optax.tree.norm(leaves) / len(leaves),
    ],
    ids=["their number", "their order", "one, and their number", "their mean"],
)
@pytest.mark.sampled
def test_rules_see_as_many_arrays_as_in_a_list(change):
    """Though the program for one layer is the same as that for a Stack."""
    rule = _arrays_changed(change)
    one, other = listed(), {"other": jnp.ones((4, 3))}
    expected = stepped(rule, one)[0]
    new = stepped(rule, nested())[0]
    jax.tree.map(_assert_close, {**new, "blocks": layers_of(new["blocks"])}, expected)

    several = stepped(rule, {"nets": together(nested), **other})[0]
    member = several["nets"].unstack()[0].tree
    jax.tree.map(_assert_close, {**member, "blocks": layers_of(member["blocks"])}, expected)
    _assert_close(several["other"], stepped(rule, other)[0]["other"])


def test_the_array_before_is_that_in_a_list():
    """Which may be of the layer before."""
    rule = _arrays_changed(lambda i, x, leaves: x + leaves[i - 1])
    stack = nn.Stack(lambda: nn.LayerNorm(2), 3)
    stack = jax.tree.map(lambda x: jnp.cumsum(x + 1, 0), stack)
    new, expected = (stepped(rule, model)[0] for model in (stack, stack.unstack()))
    _assert_layers_close(new, expected)


def _branching(updates, state, params=None):
    if sum(jnp.sum(x) for x in jax.tree.leaves(updates)) > 0:
        return updates, state
    return jax.tree.map(jnp.negative, updates), state


def test_random_numbers_differ_from_layer_to_layer():
    """As they would in a list."""
    model = nn.Stack(lambda: nn.LayerNorm(8), 4)
    new, _ = stepped(optax.noisy_sgd(0.1, key=0), model)
    moved = np.asarray(new.layer.weight - model.layer.weight)
    assert len({float(row.std()) for row in moved}) == 4


def test_what_is_decided_when_the_state_is_made_is_decided_layer_by_layer():
    """Even if each step is elementwise."""

    def init(params):
        return jax.tree.map(lambda x: jnp.sum(jnp.abs(x)), params)

    def update(updates, state, params=None):
        return jax.tree.map(jnp.multiply, updates, state), state

    rule = optax.GradientTransformation(init, update)
    model, one = nested(), listed()
    new = pm.Optimizer(rule).init(model).update(model, model)[0]
    alone = pm.Optimizer(rule).init(one).update(one, one)[0]

    jax.tree.map(_assert_close, {**new, "blocks": layers_of(new["blocks"])}, alone)


def _matrices(model):
    return jax.tree.map(lambda x, axes: x.ndim - axes == 2, model, pm.layer_axes(model))


def _kinds(model):
    return jax.tree.map(lambda is_one: "matrix" if is_one else "other", _matrices(model))


@pytest.mark.parametrize(
    "make_rule",
    [
        lambda model: optax.masked(optax.lars(0.1), _matrices(model)),
        lambda model: optax.partition(
            {"matrix": optax.lars(0.1), "other": optax.sgd(0.1)}, _kinds(model)
        ),
        lambda _: chained(optax.masked(optax.adaptive_grad_clip(0.1), _head_only)),
    ],
    ids=["mask", "labels", "function of the model"],
)
@pytest.mark.sampled
def test_masks_of_the_model_fit_what_a_rule_is_shown(make_rule):
    """A tree of the model's structure, or a function that reads the model's fields."""
    first, second = (stepped(make_rule(model), model)[0] for model in (listed(), nested()))
    jax.tree.map(_assert_close, {**second, "blocks": layers_of(second["blocks"])}, first)


def _head_only(model):
    blocks = model["blocks"]
    if not isinstance(blocks, list):
        # A field of the Stack, which a list of layers does not have.
        assert len(jax.tree.leaves(blocks.layer.layer.weight)) in (1, 4)
    return {"blocks": jax.tree.map(lambda _: False, blocks), "head": True}


def test_extra_arguments_that_are_trees_are_mapped_and_functions_of_the_model_refused():
    """Their value for one member, or layer, is not known."""

    def update(updates, state, params=None, *, value=1.0, like=None, fn=None):
        if fn is not None:
            fn(params)
        like = updates if like is None else like
        return jax.tree.map(lambda u, x: u * value * jnp.max(x), updates, like), state

    rule = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    news = []
    for model in (listed(), nested(), together(nested)):
        opt = pm.Optimizer(rule).init(model)
        news += [opt.update(model, model, like=jax.tree.map(jnp.cos, model), value=2.0)[0]]
    with pytest.raises(ArgumentError, match="fn"):
        opt.update(model, model, fn=jnp.sum)
    for other in (news[1], news[2].unstack()[0].tree):
        jax.tree.map(_assert_close, {**other, "blocks": layers_of(other["blocks"])}, news[0])


@made_once
def linears():
    """As a list, and as a Stack."""
    one = nn.Sequential(
        [nn.Linear(2, 2, key=key) for key in jax.random.split(jax.random.key(0), 3)]
    )
    return one, nn.Stack.from_layers(one.layers)


def _assert_layers_close(stack, layers):
    jax.tree.map(_assert_close, stack.unstack(), [*layers])


class Pair(pm.Module):
    """Two parts."""

    first: object
    second: object

    def __call__(self, x):
        return x


def test_ties_across_stacks_and_inside_of_one_are_followed():
    """There is one array for both, and it is the owner's."""
    one, stack = linears()
    inside = nn.Stack.from_layers(
        [pm.tie(Pair(a, b), "first.weight", "second.weight") for a, b in zip(one, one, strict=True)]
    )
    _assert_layers_close(stepped(NORMS, inside)[0], stepped(NORMS, inside.unstack())[0])

    other = jax.tree.map(jnp.cos, stack)
    across = pm.tie(Pair(stack, other), "first.layer.weight", "second.layer.weight")
    new = stepped(NORMS, across)[0]
    assert_same(new.first.layer.weight, new.second.layer.weight)


def test_no_trace_is_kept_in_which_a_rule_was_made():
    """Its learning rate may be traced, while the model is not."""
    model = stacked()

    @jax.jit
    def run(rate):
        opt = pm.Optimizer(optax.lamb(rate)).init(model)
        return opt.update(model, model)[0]["head"]

    with jax.checking_leaks():
        new = run(0.1)
    expected = pm.Optimizer(optax.lamb(0.1)).init(model).update(model, model)[0]["head"]
    _assert_close(new, expected)


class Number(pm.Module):
    """A parameter without axes."""

    value: jax.Array

    def __init__(self):
        self.value = jnp.ones(())

    def __call__(self, x):
        return x


def test_the_sum_of_a_layers_number_is_not_that_of_all_layers():
    """Though no equation of the program for one layer says so."""
    rule = optax.stateless_with_tree_map(lambda u, _: jnp.broadcast_to(jnp.sum(u), u.shape))
    stack = jax.tree.map(lambda x: jnp.cumsum(x), nn.Stack(Number, 3))
    new, expected = (stepped(rule, model)[0] for model in (stack, stack.unstack()))
    _assert_layers_close(new, expected)


BRANCHING = optax.GradientTransformation(optax.init_empty_state, _branching)


def as_one_then_per_layer(model):
    """A step with a state for the stacked arrays."""
    opt = pm.Optimizer(optax.novograd(0.1), stacked="as one").init(model)
    return opt.replace(stacked="per layer").update(model, model)


REFUSED = {
    "an `if` on a number": (lambda: pm.Optimizer(BRANCHING).init(together(listed)), "_branching"),
    "a state that changes its structure": (
        lambda: pm.Optimizer(optax.monitor({"norm": optax.tree.norm})).init(together(listed)),
        "monitor",
    ),
    "a state that was made as one": (lambda: as_one_then_per_layer(stacked()), "novograd"),
}


@pytest.mark.parametrize(("call", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_mapped_is_refused(call, match):
    """By the name of the transformation."""
    with pytest.raises(ArgumentError, match=match):
        call()
