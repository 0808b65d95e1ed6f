"""A value within bounds, computed from an unbounded array: the value of a constrained field."""

import copy
import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from jax import lax

import pytreemod as pm
from pytreemod.errors import FileError, ShapeError
from tests.helpers.laws import law

positive, simplex = pm.constraints.positive, pm.constraints.simplex


class Kernel(pm.Module):
    """A model with bounds."""

    scale: jax.Array = pm.field(constraint=positive)
    noise: jax.Array = pm.buffer(constraint=pm.constraints.interval(0.0, 0.5))
    shares: jax.Array = pm.field(constraint=simplex, role="shares")
    plain: jax.Array

    def __call__(self, x):
        return self.scale * x + self.noise + jnp.sum(self.shares[:1]) + self.plain


def kernel(scale=2.0):
    """One, with arrays of all kinds."""
    return Kernel(scale, jnp.float32(0.25), jnp.asarray([0.2, 0.3, 0.5]), jnp.zeros(()))


PATHS = ["scale.unconstrained", "noise.unconstrained", "shares.unconstrained", "plain"]


def test_the_tree_has_what_is_trained():
    """By path; a buffer remains one, and a selector of the field selects its parameter."""
    model = kernel()
    roles = {role: pm.select.role(role).mask(model) for role in ("buffer", "shares")}

    assert list(pm.named_leaves(model)) == PATHS
    assert roles == {"buffer": [False, True, False, False], "shares": [False, False, True, False]}
    assert pm.select.path("scale").mask(model) == [True, False, False, False]
    assert pm.select.type(pm.Computed).mask(model) == [True, True, True, False]
    assert isinstance(model, Kernel)


@law
@given(st.floats(2**-10, 2**10, width=32))
def test_gradients_are_those_of_the_chain_rule(scale):
    """With respect to the parameter: the slope of the map, times the gradient at the value."""
    model = kernel(jnp.float32(scale))
    gradients = pm.named_leaves(pm.filter_grad(lambda m: 3 * m.scale**2)(model))

    assert float(gradients["scale.unconstrained"]) == pytest.approx(6 * scale**2, rel=1e-4)
    assert "noise.unconstrained" not in gradients


def test_lax_takes_what_is_read():
    """It converts to an array, and the compiled program is that of a formula."""
    model = kernel()

    assert lax.mul(model.scale, jnp.float32(3.0)) == 6

    def by_hand(u, x):
        return positive.forward(u) * x

    u = pm.named_leaves(model)["scale.unconstrained"]
    ours = jax.make_jaxpr(lambda m, x: m.scale * x)(model, 1.0)
    assert [e.primitive for e in ours.eqns] == [
        e.primitive for e in jax.make_jaxpr(by_hand)(u, 1.0).eqns
    ]


def test_training_never_leaves_the_bounds():
    """With steps that are much too large."""
    model = kernel()
    optimizer = optax.sgd(5.0)
    params, _ = pm.trainable(model)
    state = optimizer.init(params)

    @pm.filter_jit
    def step(model, state):
        gradients = pm.filter_grad(lambda m: m(jnp.float32(1.0)) ** 2)(model)
        updates, state = optimizer.update(gradients, state)
        return pm.apply_updates(model, updates), state

    for _ in range(5):
        model, state = step(model, state)
        assert float(model.scale) > 0
        assert float(model.shares.min()) > 0
        assert float(model.shares.sum()) == pytest.approx(1)
    assert model.noise == 0.25


@pytest.mark.slow
def test_transforms_carry_it():
    """jit, vmap over models, scan, checkpoints, stacks: each reads the same as one model alone."""
    scales = jnp.asarray([1.0, 2.0, 4.0])
    models = pm.filter_vmap(kernel)(scales)
    x = jnp.float32(3.0)
    expected = [float(kernel(scale)(x)) for scale in scales]

    assert pm.filter_jit(kernel(2.0))(x) == pytest.approx(expected[1])
    found = pm.filter_vmap(lambda m, x: m(x), in_axes=(0, None))(models, x)
    assert found.tolist() == pytest.approx(expected)
    _, found = pm.filter_scan(lambda carry, m: (carry, m(x)), None, models)
    assert found.tolist() == pytest.approx(expected)
    assert pm.unstack(models)[2].scale == pytest.approx(4.0)
    assert pm.stack([kernel(s) for s in scales]) == models
    with pytest.raises(ShapeError, match=r"Kernel\.scale"):
        models.scale


def test_copies_and_pickles():
    """Equal, with equal values; different constraints make models different."""
    model = kernel()
    for again in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again == model
        assert again.scale == model.scale
    assert jax.tree.structure(model) == jax.tree.structure(kernel(3.0))
    soft = pm.constraints.softplus_positive
    other = model.replace(scale=soft.constrain(jnp.float32(2.0), "scale"))
    assert jax.tree.structure(other) != jax.tree.structure(model)
    assert other.scale == pytest.approx(2.0)


def test_one_program_serves_all_values():
    """And all instances: the constraint is part of the structure, and equal."""
    traces = []

    @pm.filter_jit
    def read(m):
        traces.append(1)
        return m.scale

    for scale in (1.0, 2.0, 3.0):
        read(kernel(jnp.float32(scale)))
    assert traces == [1]


def test_files_have_what_is_trained(tmp_path):
    """So that a round trip is exact."""
    path = tmp_path / "model.safetensors"
    model = kernel(jnp.float32(0.1))
    pm.save(path, model)

    leaves = pm.named_leaves(pm.load(path, kernel()))
    assert leaves.keys() == pm.named_leaves(model).keys()
    assert all(np.array_equal(leaves[k], v) for k, v in pm.named_leaves(model).items())


def test_a_file_of_other_bounds_is_refused(tmp_path):
    """The same numbers would mean something else."""

    class Bounded(pm.Module):
        value: jax.Array

    one, other = (
        Bounded(c.constrain(jnp.float32(0.5), "value"))
        for c in (positive, pm.constraints.unit_interval)
    )
    path = tmp_path / "model.safetensors"
    pm.save(path, one)
    with pytest.raises(FileError, match=r"value.*constraint|constraint"):
        pm.load(path, other)


def test_values_in_the_clear_in_a_file(tmp_path):
    """Of a class that has got the constraint since: by its inverse, in one line."""

    def rate(value, **options):
        class Rate(pm.Module):
            value: jax.Array = pm.field(**options)

        return Rate(value)

    path = tmp_path / "model.safetensors"
    pm.save(path, rate(jnp.float32(2.0)))
    like = rate(jnp.float32(1.0), constraint=positive)

    with pytest.raises(FileError, match=r"at value\.unconstrained: missing"):
        pm.load(path, like)
    rename = {"value": ("value.unconstrained", positive.inverse)}
    assert pm.load(path, like, rename=rename).value == 2


def test_text_names_the_constraint():
    """With the shape of the value; of gradients, masks and several models, too."""
    model = kernel()

    assert repr(model) == (
        "Kernel(\n  scale=positive(weak_f32[]),\n  noise=interval(0.0, 0.5)(f32[]) (buffer),\n"
        "  shares=simplex(f32[3]) (shares),\n  plain=f32[]\n)"
    )
    text = pm.tree_pformat(model, short_arrays=False)
    assert "Array(2., " in text
    assert "unconstrained=Array(0.69" in text
    assert "scale=positive(unconstrained=True)" in repr(jax.tree.map(lambda _: True, model))
    assert "scale=positive(f32[2])" in repr(pm.filter_vmap(kernel)(jnp.ones(2)))
