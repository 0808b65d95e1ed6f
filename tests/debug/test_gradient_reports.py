"""gradient_report: the kinds, the numbers by layer, and what it does not change."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.trees import ramp


class Net(pm.Module):
    """A Stack whose third layer gets no gradient, and parameters of all other kinds."""

    stack: nn.Stack
    head: nn.Linear
    gate: jax.Array
    spare: dict
    mean: jax.Array = pm.buffer()

    def __init__(self, key):
        self.stack = nn.Stack(ft.partial(nn.Linear, 3, 3), 4, key=key)
        self.head = nn.Linear(3, 2, use_bias=False, key=key)
        self.gate, self.mean = jnp.ones(3), jnp.zeros(3)
        self.spare = {"zero": jnp.ones(3), "none": jnp.ones((2, 2))}

    def __call__(self, x):
        x = self.stack(x - self.mean)
        return self.head(jnp.round(self.gate) * (x + 0 * self.spare["zero"]))


def loss(model, x):
    return jnp.sum(model(x) ** 2)


NET = Net(jax.random.key(0))


REPORT = pm.debug.gradient_report(loss)(NET, ramp(3))


def test_every_parameter_is_of_the_kind_that_it_was_made_for():
    """In the order of the model; buffers are not included."""
    assert {row.path: row.kind for row in REPORT.rows} == {
        "stack.layer.weight": "nonzero",
        "stack.layer.bias": "nonzero",
        "head.weight": "nonzero",
        "gate": "zero",
        "spare.zero": "zero",
        "spare.none": "zero",
    }
    assert REPORT.paths("zero", "not finite") == ("gate", "spare.none", "spare.zero")
    with pytest.raises(KeyError, match="mean"):
        REPORT["mean"]
    np.testing.assert_allclose(REPORT.loss, loss(NET, ramp(3)), rtol=1e-6)
    title, *lines = str(REPORT).splitlines()
    assert title == f"GradientReport: 3 zero, 3 nonzero, loss {REPORT.loss:.6g}"
    assert lines[2:4] == ["    spare.none: f32[2,2]", "    spare.zero: f32[3]"]


def test_norms_are_those_of_the_gradient_for_each_layer_too():
    chosen = lambda m: (m.head.weight, m.stack.layer.weight)  # noqa: E731
    gradient = jax.grad(lambda ws: loss(pm.tree_at(chosen, NET, ws), ramp(3)))(chosen(NET))
    head, stack = map(np.asarray, gradient)
    row = REPORT["head.weight"]
    np.testing.assert_allclose(row.norm, np.linalg.norm(head), rtol=1e-5)
    np.testing.assert_allclose(
        row.ratio, np.linalg.norm(head) / np.linalg.norm(np.asarray(NET.head.weight)), rtol=1e-5
    )
    assert row.layers is None
    row = REPORT["stack.layer.weight"]
    by_layer = [np.linalg.norm(layer) for layer in stack]
    np.testing.assert_allclose(row.layers, by_layer, rtol=1e-5)
    np.testing.assert_allclose(row.norm, np.linalg.norm(stack), rtol=1e-5)


def test_layers_without_a_gradient_and_with_a_bad_one_are_named():
    """A dead layer, and one from which NaN goes back."""

    def dead(model, x):
        return jnp.sum(jnp.where(jnp.arange(4) == 2, 0, jnp.sum(model.stack.layer.bias, 1)))

    def bad(model, x):
        scale = jnp.where(jnp.arange(4) == 1, jnp.nan, 1.0)
        return jnp.sum(jnp.sum(model.stack.layer.bias, 1) * scale)

    found = str(pm.debug.gradient_report(dead)(NET, 0)["stack.layer.bias"])
    assert found.endswith("; zero in layer 2")
    row = pm.debug.gradient_report(bad)(NET, 0)["stack.layer.bias"]
    assert str(row) == "stack.layer.bias: f32[4,3]; not finite in layer 1"
    np.testing.assert_array_equal(np.isfinite(row.layers), [True, False, True, True])


def test_norms_of_large_and_small_numbers_are_right():
    """A square would be infinite, or zero."""
    for size in (1e30, 1e-30):
        found = pm.debug.gradient_report(lambda w, s=size: jnp.sum(w) * s)(jnp.ones(4))
        assert found.rows[0].norm == pytest.approx(2 * size, rel=1e-5)
    half = pm.debug.gradient_report(lambda w: jnp.sum(w * w))(jnp.full(4, 1e3, jnp.float16))
    assert half.rows[0].norm == pytest.approx(4e3, rel=1e-3)
    assert pm.debug.gradient_report(jnp.sum)(jnp.zeros(3)).rows[0].ratio == np.inf


def test_a_state_can_be_used_afterwards_and_aux_is_left_out():
    """The training step is called with the same arguments."""
    net, state = pm.make_with_state(
        lambda: nn.Sequential([nn.Linear(3, 3, key=jax.random.key(0)), nn.BatchNorm(3, "batch")])
    )()

    def with_state(net, state, x):
        run = pm.filter_vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = run(x, state)
        return jnp.sum(out**2), state

    report = pm.debug.gradient_report(with_state, has_aux=True)(net, state, jnp.eye(3))
    assert "layers[1].weight" in report.paths("nonzero")
    assert with_state(net, state, jnp.eye(3))[0] == pytest.approx(report.loss, rel=1e-5)


def test_chosen_parameters_alone_are_listed():
    """With `wrt`; the rules of an intervention are among the arrays of a model."""
    found = pm.debug.gradient_report(loss, wrt="stack.**")(NET, ramp(3))
    assert [row.path for row in found.rows] == ["stack.layer.weight", "stack.layer.bias"]
    shifted = pm.intervene(NET, "head", jnp.add, jnp.zeros(2))
    found = pm.debug.gradient_report(loss)(shifted, ramp(3))
    by_zeros = jax.grad(lambda z: loss(pm.intervene(NET, "head", jnp.add, z), ramp(3)))
    norms = [row.norm for row in found.rows if row.ratio == np.inf]
    np.testing.assert_allclose(norms, [np.linalg.norm(by_zeros(jnp.zeros(2)))], rtol=1e-5)
