"""Hyperparameters that are changed between two steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Affine, affine, ramp


@pytest.fixture(autouse=True)
def _standard_promotion():
    """What optax injects is of a float's dtype, and its count an integer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def injected(rate=1.0, **kwargs):
    """Gradient descent whose learning rate is in the state."""
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, **kwargs)


def model():
    """Two layers, and a norm."""
    return {"a": affine(1, 1), "b": affine(1, 1), "norm": nn.LayerNorm(1)}


def three_groups():
    """Two of which have a learning rate in the state."""
    return pm.by({"a": injected(), nn.LayerNorm: optax.sgd(1.0), ...: injected()})


def ones(tree):
    """A gradient."""
    return jax.tree.map(jnp.ones_like, tree)


def rates(opt):
    """What the learning rates are."""
    return [float(s.hyperparams["learning_rate"]) for s in opt.states if hasattr(s, "hyperparams")]


def test_all_groups_are_meant_if_none_is_named():
    """Those that have it; the others have none that could be changed."""
    tree = model()
    opt = pm.Optimizer(three_groups()).init(tree).with_hyperparams(learning_rate=0.5)

    new, _ = opt.update(tree, ones(tree))

    assert rates(opt) == [0.5, 0.5]
    assert np.allclose(new["b"].bias, tree["b"].bias - 0.5)
    assert np.allclose(new["norm"].bias, tree["norm"].bias - 1)


@pytest.mark.parametrize(
    "selector", ["a", "a.**", pm.select.at(lambda m: m["a"]), pm.select.path("a") & Affine]
)
def test_groups_are_named_by_selectors_of_their_leaves(selector):
    """By path, by access, and combined."""
    opt = pm.Optimizer(three_groups()).init(model())

    assert rates(opt.with_hyperparams(selector, learning_rate=0.25)) == [0.25, 1.0]


def test_roles_name_groups_too():
    """As those that were given when the optimizer was initialized."""
    tree = pm.with_role(model(), "a", "slow")
    rules = pm.by({pm.select.role("slow"): injected(), ...: injected()})
    opt = pm.Optimizer(rules).init(tree)

    new = opt.with_hyperparams(pm.select.role("slow"), learning_rate=0.0)

    assert rates(new) == [0.0, 1.0]


def test_what_acts_on_all_is_meant_with_all():
    """A hyperparameter of `before` belongs to no group."""
    scale = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1.0)
    opt = pm.Optimizer(three_groups(), before=scale).init(model())

    new = opt.with_hyperparams(max_norm=0.5, learning_rate=2.0)

    assert float(new.before_state.hyperparams["max_norm"]) == 0.5
    assert rates(new) == [2.0, 2.0]
    with pytest.raises(ArgumentError, match="max_norm"):
        opt.with_hyperparams("a", max_norm=0.5)


def test_it_is_found_wherever_it_is_kept():
    """In a chain, and below what gathers gradients."""
    rule = optax.MultiSteps(optax.chain(optax.clip(1.0), injected()), every_k_schedule=2)
    opt = pm.Optimizer(rule).init(model()).with_hyperparams(learning_rate=0.5)

    assert float(optax.tree.get(opt, "learning_rate")) == 0.5


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), jnp.asarray(0.5), 1])
def test_nothing_is_compiled_anew(value):
    """The new value has shape, dtype and weak type of the old, whatever it was given as."""
    traces = []

    @pm.filter_jit
    def step(tree, opt):
        traces.append(1)
        return opt.update(tree, ones(tree))

    tree = affine(1, 1)
    tree, opt = step(tree, pm.Optimizer(injected()).init(tree))
    new, opt = step(tree, opt.with_hyperparams(learning_rate=value))

    assert len(traces) == 1
    assert np.allclose(new.bias, tree.bias - float(value))


def test_weak_types_stay():
    """For a compiled function they are another type."""
    keeping = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    opt = pm.Optimizer(keeping).init({"w": jnp.asarray(1.0)})
    weak = jax.tree.map(lambda x: jnp.asarray(1.0) if x.dtype == jnp.float32 else x, opt)

    new = weak.with_hyperparams(learning_rate=np.float32(0.5))

    assert jax.tree.map(jax.typeof, jax.tree.leaves(new)) == [
        jax.typeof(leaf) for leaf in jax.tree.leaves(weak)
    ]
    assert weak.states[0].hyperparams["learning_rate"].weak_type


def test_it_may_be_traced():
    """Inside of a compiled step the rate may come from anywhere."""
    tree = affine(1, 1)
    opt = pm.Optimizer(injected()).init(tree)

    @pm.filter_jit
    def step(tree, opt, rate):
        return opt.with_hyperparams(learning_rate=rate).update(tree, ones(tree))

    new, opt = step(tree, opt, jnp.asarray(0.5))

    assert np.allclose(new.bias, tree.bias - 0.5)
    assert rates(opt) == [0.5]


def test_each_member_of_a_stack_may_have_its_own():
    """An array like the old one; a scalar is for all of them."""
    trees = pm.stack([affine(1, 1), affine(1, 1)])
    opts = pm.filter_vmap(pm.Optimizer(injected()).init)(trees)

    own = opts.with_hyperparams(learning_rate=ramp(2))

    assert own.states[0].hyperparams["learning_rate"].tolist() == [1.0, 2.0]
    same = opts.with_hyperparams(learning_rate=3.0)
    assert same.states[0].hyperparams["learning_rate"].tolist() == [3.0, 3.0]
    with pytest.raises(ShapeError, match=r"a scalar, or an array like f32\[2\]"):
        opts.with_hyperparams(learning_rate=ramp(3))


# ---- refusals


def test_what_is_not_in_the_state_is_refused():
    """With the line that puts it there."""
    opt = pm.Optimizer(optax.adam(1e-3)).init(model())

    with pytest.raises(ArgumentError, match="there is none") as caught:
        opt.with_hyperparams(learning_rate=1e-4)
    assert "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)" in str(caught.value)


def test_a_misspelt_name_is_refused():
    """With those that there are."""
    opt = pm.Optimizer(injected(momentum=0.9)).init(model())

    with pytest.raises(ArgumentError, match="learning_rate, momentum") as caught:
        opt.with_hyperparams(learnig_rate=1e-4)
    assert "did you mean" in str(caught.value)


def test_what_a_schedule_decides_is_refused():
    """The next step would set it anew, and nobody would see."""
    scheduled = injected(optax.linear_schedule(1.0, 0.0, 10))
    opt = pm.Optimizer(scheduled).init(model())

    with pytest.raises(ArgumentError, match="a schedule sets anew"):
        opt.with_hyperparams(learning_rate=1e-4)


def test_a_part_of_a_group_is_refused():
    """All of it has one value in common."""
    opt = pm.Optimizer(three_groups()).init(model())

    with pytest.raises(SpecError, match="all leaves of a rule") as caught:
        opt.with_hyperparams("a.weight", learning_rate=0.5)
    assert "at a.bias: not picked" in str(caught.value)


def test_a_selector_of_nothing_that_is_trained_is_refused():
    """Also of leaves that are left alone."""
    opt = pm.Optimizer(pm.by({"a": None, ...: injected()})).init(model())

    with pytest.raises(SpecError, match="which picks none"):
        opt.with_hyperparams("a", learning_rate=0.5)
    with pytest.raises(SpecError, match="matches at least one leaf"):
        opt.with_hyperparams("c", learning_rate=0.5)


def test_predicates_on_arrays_are_refused():
    """The optimizer has none of the model's."""
    opt = pm.Optimizer(injected()).init(model())

    with pytest.raises(SpecError, match="asks for arrays"):
        opt.with_hyperparams(pm.is_array, learning_rate=0.5)


@pytest.mark.parametrize("value", [True, "1e-3", None, 1j])
def test_values_are_numbers_of_the_kind(value):
    """Nothing of them is lost but precision."""
    opt = pm.Optimizer(injected()).init(model())

    with pytest.raises(ArgumentError, match="a number, or an array, that fits"):
        opt.with_hyperparams(learning_rate=value)


def test_fractions_are_not_cut_off():
    """Where the old value is an integer."""
    rule = optax.inject_hyperparams(lambda n: optax.scale(n * 1.0))(n=2)
    opt = pm.Optimizer(rule).init(model())

    with pytest.raises(ArgumentError, match=r"fits i32\[\]"):
        opt.with_hyperparams(n=0.5)
    assert_same(opt.with_hyperparams(n=2), opt)


def test_a_rule_that_has_what_another_lacks_is_named():
    """What was meant may be there, for other leaves."""
    rule = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    model = {"head": jnp.ones(2), "body": jnp.ones(2)}
    opt = pm.Optimizer(pm.by({"head": rule, ...: optax.sgd(0.1)})).init(model)

    with pytest.raises(ArgumentError, match=r"rule for select\.path\('head'\) has one") as caught:
        opt.with_hyperparams("body", learning_rate=0.5)
    assert "opt.with_hyperparams(select.path('head'), learning_rate=1e-3)" in str(caught.value)
