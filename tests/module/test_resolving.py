"""`resolve`: arrays instead of computed leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ShapeError, SpecError
from tests.helpers.computing import STYLES, Generated, Scaled, scaled
from tests.helpers.trees import ramp


def test_it_reads_as_the_model_does():
    """In a class of every style: it is of the class itself, with arrays for leaves."""
    for style in STYLES.values():
        model = style(scaled(), ramp(2))
        found = pm.resolve(model)

        np.testing.assert_allclose(found.weight, model.weight)
        assert jax.tree.structure(found) == jax.tree.structure(style(ramp(2), ramp(2)))
        assert pm.resolve(found) is found


def test_everywhere_in_a_tree():
    """In containers, in chains, at the root."""
    model = {"a": [scaled(), Generated(Scaled(scaled(), jnp.asarray(2.0)), ramp(2))], "b": 1}
    found = pm.resolve(model)

    np.testing.assert_allclose(found["a"][0], [3, 6])
    np.testing.assert_allclose(found["a"][1].weight, [6, 12])
    assert found["b"] == 1
    np.testing.assert_allclose(pm.resolve(scaled()), [3, 6])


def test_a_selector_says_which():
    """Those of which it picks any part."""
    model = [Generated(scaled(), ramp(2)), Generated(scaled(), ramp(2))]

    found = pm.resolve(model, "0.weight.factor")
    assert sorted(pm.named_leaves(found)) == [
        "0.bias",
        "0.weight",
        "1.bias",
        "1.weight.array",
        "1.weight.factor",
    ]
    both = pm.resolve(model, pm.select.role("factor"))
    assert sorted(pm.named_leaves(both)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    with pytest.raises(SpecError, match=r"select\.path\('2\.weight'\)"):
        pm.resolve(model, "2.weight")


def test_of_several_models_as_one():
    """The result is the resolved models as one."""
    models = [Generated(Scaled(ramp(2), jnp.asarray(float(i))), ramp(2)) for i in range(3)]
    many = pm.stack(models)

    assert pm.tree_equal(pm.resolve(many), pm.stack([pm.resolve(m) for m in models]))
    twice = pm.resolve(pm.stack([many, many]))
    assert twice.weight.shape == (2, 3, 2)


def test_ties_are_resolved_too():
    """The tied paths become separate leaves; with a selector they remain tied."""

    class Pair(pm.Module):
        one: Generated
        two: Generated

    model = Pair(Generated(scaled(), ramp(2)), Generated(ramp(2), ramp(2)))
    model = pm.tie(model, "two.weight", to="one.weight")

    found = pm.resolve(model)
    assert len(jax.tree.leaves(found)) == 4
    np.testing.assert_allclose(found.two.weight, [3, 6])
    kept = pm.resolve(model, "one.weight")
    assert len(jax.tree.leaves(kept)) == 3
    np.testing.assert_allclose(kept.two.weight, [3, 6])


def test_under_jit_and_grad():
    """Gradients go through it."""
    model = Generated(scaled(), ramp(2))

    grads = pm.filter_jit(pm.filter_grad(lambda m: jnp.sum(pm.resolve(m)(1.0))))(model)

    np.testing.assert_allclose(pm.named_leaves(grads)["weight.factor"], 3.0)


def test_parts_of_another_shape_are_an_error():
    """No map can be told from the shapes alone."""
    model = pm.tree_at("weight.factor", Generated(scaled(), ramp(2)), jnp.ones(3))
    with pytest.raises(ShapeError, match=r"(?s)weight.*ranks"):
        pm.resolve(model)
