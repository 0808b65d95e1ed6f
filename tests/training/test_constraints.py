"""The values of constrained fields: the maps, both ways, and their errors."""

import functools as ft
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

import pytreemod as pm
from pytreemod import constraints
from pytreemod.errors import CheckError, FieldError
from tests.helpers.laws import law
from tests.labels import label

SIMPLE = [
    constraints.real,
    constraints.positive,
    constraints.softplus_positive,
    constraints.unit_interval,
    constraints.greater_than(-2.5),
    constraints.less_than(0.3),
    constraints.interval(-3.0, -1.0),
    constraints.interval(-1.0, 0.0),
    constraints.interval(0.1, 0.3),
]
# Each with a shape that it takes.
WITH_AXES = [
    (constraints.simplex, (1,)),
    (constraints.simplex, (4,)),
    (constraints.ordered_vector, (3,)),
    (constraints.lower_cholesky, (3, 3)),
    (constraints.positive_definite, (2, 2)),
    (constraints.orthogonal, (3, 2)),
    (constraints.orthogonal, (2, 2)),
]
ALL = [*((c, ()) for c in SIMPLE), *WITH_AXES]
ONE_TO_ONE = [(c, shape) for c, shape in ALL if c is not constraints.orthogonal]
TANH = constraints.bijection(jnp.tanh, jnp.arctanh)
SEEDS = st.integers(0, 2**32 - 1)

simple = pytest.mark.parametrize("constraint", SIMPLE, ids=repr)
every = pytest.mark.parametrize(("constraint", "shape"), ALL, ids=str)
one_to_one = pytest.mark.parametrize(("constraint", "shape"), ONE_TO_ONE, ids=str)


def free(constraint, shape, seed, scale=1.0, dtype=jnp.float32):
    """An array without bounds, of which the constraint makes one of a shape."""
    inside = jax.eval_shape(constraint.inverse, jax.ShapeDtypeStruct(shape, dtype))
    drawn = np.random.default_rng(seed).normal(size=inside.shape) * scale
    return jnp.asarray(drawn, dtype)


@ft.cache
def compiled(constraint):
    """Both ways, compiled: one program for each shape, and not one for each operation."""
    return jax.jit(constraint.forward), jax.jit(constraint.inverse)


@ft.cache
def value_and_slope(constraint):
    return jax.jit(jax.value_and_grad(constraint.forward))


def is_inside(constraint, value):
    constraint.constrain(value, "Model.x")
    return True


# ---- laws


@every
@law
@given(SEEDS)
@pytest.mark.sampled
def test_a_value_comes_back(constraint, shape, seed):
    """`forward(inverse(x))` is `x`, which is inside, and has its dtype and shape."""
    forward, inverse = compiled(constraint)
    x = forward(free(constraint, shape, seed))
    again = forward(inverse(x))

    assert is_inside(constraint, x)
    assert (again.shape, again.dtype) == (x.shape, x.dtype) == (shape, jnp.float32)
    np.testing.assert_allclose(again, x, rtol=1e-5, atol=2e-6)


@one_to_one
@law
@given(SEEDS)
@pytest.mark.sampled
def test_what_is_trained_comes_back(constraint, shape, seed):
    """`inverse(forward(u))` is `u`: nothing else has the value."""
    forward, inverse = compiled(constraint)
    u = free(constraint, shape, seed)
    again = inverse(forward(u))

    assert again.shape == u.shape
    np.testing.assert_allclose(again, u, rtol=1e-4, atol=1e-4)


@simple
@law
@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
@pytest.mark.sampled
def test_every_finite_number_gives_one_inside(constraint, u):
    """Of the whole range of the dtype; and a gradient that is finite, too."""
    value, slope = value_and_slope(constraint)(jnp.float32(u))

    assert is_inside(constraint, value)
    assert np.isfinite(slope)


@simple
@pytest.mark.sampled
def test_half_precision_stays_inside(constraint):
    for dtype in (jnp.bfloat16, jnp.float16):
        value = constraint.forward(jnp.asarray([-60000.0, -30.0, 0.0, 30.0, 60000.0], dtype))

        assert value.dtype == dtype
        assert is_inside(constraint, value)
    # The smallest number of float16 is an ordinary one where it is computed.
    assert pm.constraints.positive.forward(jnp.float16(-100)) == np.float16(2.0**-24)


def test_a_factor_in_half_precision_has_a_positive_diagonal():
    """Also where the exponential is no number of the dtype."""
    factor = constraints.lower_cholesky.forward(jnp.asarray([1.0, -40.0, 40.0], jnp.float16))
    assert (np.diag(factor) > 0).all()


@every
def test_the_shape_comes_back(constraint, shape):
    """Also for a batch."""
    for batch in ((), (5, 2)):
        value = jax.ShapeDtypeStruct((*batch, *shape), jnp.float32)
        inside = jax.eval_shape(constraint.inverse, value)
        assert jax.eval_shape(constraint.forward, inside) == value


# ---- against closed formulas


FORMULAS = [
    (constraints.positive, math.exp),
    (constraints.greater_than(-2.5), lambda u: math.exp(u) - 2.5),
    (constraints.less_than(0.3), lambda u: 0.3 - math.exp(u)),
    (constraints.softplus_positive, lambda u: math.log1p(math.exp(u))),
    (constraints.interval(-1.0, 3.0), lambda u: -1 + 4 / (1 + math.exp(-u))),
]


@pytest.mark.parametrize(("constraint", "formula"), FORMULAS, ids=label)
def test_numbers_are_those_of_the_formula(constraint, formula):
    for u in (-4.0, -0.5, 0.0, 0.25, 3.0):
        assert float(constraint.forward(jnp.float32(u))) == pytest.approx(formula(u), rel=1e-6)


@every
@pytest.mark.sampled
def test_gradients_are_finite_differences(constraint, shape):
    u, direction = (free(constraint, shape, seed) for seed in (0, 1))
    weights = jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.float32)

    @jax.jit
    def f(t):
        return jnp.sum(constraint.forward(u + t * direction) * weights)

    step = 1e-2
    difference = float(f(step) - f(-step)) / (2 * step)
    assert float(jax.grad(f)(0.0)) == pytest.approx(difference, abs=5e-3)


def test_extremes_keep_their_digits():
    """`float32`, from the least to the greatest number: to a relative error of 1e-5."""
    sizes = np.logspace(-37.9, 38.5, 500)
    small = np.logspace(-30, -0.01, 500)
    for constraint, values in [
        (constraints.positive, sizes),
        (constraints.softplus_positive, sizes),
        (constraints.greater_than(2.0), 2 + np.logspace(-6, 38, 500)),
        (constraints.less_than(2.0), 2 - np.logspace(-6, 38, 500)),
        (constraints.unit_interval, small),
        (constraints.unit_interval, 1 - np.logspace(-7, -0.3, 500)),
        (constraints.interval(-1.0, 0.0), -small),
    ]:
        x = jnp.asarray(values, jnp.float32)
        np.testing.assert_allclose(constraint.forward(constraint.inverse(x)), x, rtol=1e-5)


@law
@given(arrays(np.float32, 6, elements=st.floats(-80, 80, width=32)))
def test_matrices_and_vectors_are_what_they_are_called(u):
    """A simplex adds up to one, Cholesky's factor multiplied is definite, `Q` is orthonormal."""
    shares = compiled(constraints.simplex)[0](u)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-6)
    assert shares.min() > 0
    factor = compiled(constraints.lower_cholesky)[0](u / 40)
    assert (np.triu(factor, 1) == 0).all()
    assert (np.diag(factor) > 0).all()
    matrix = compiled(constraints.positive_definite)[0](u / 40)
    np.testing.assert_allclose(matrix, factor @ factor.T, rtol=1e-5, atol=1e-5)
    ordered = compiled(constraints.ordered_vector)[0](u / 40)
    assert (np.diff(ordered) > 0).all()


def test_orthogonal_matrices_are_all_there():
    """Reflections, too; and the scale of the parameter makes no difference."""
    mirror = jnp.asarray([[0.0, 1.0], [1.0, 0.0]])
    forward = constraints.orthogonal.forward

    np.testing.assert_allclose(forward(constraints.orthogonal.inverse(mirror)), mirror, atol=1e-6)
    np.testing.assert_allclose(forward(7 * mirror), mirror, atol=1e-6)
    tall = forward(free(constraints.orthogonal, (5, 3), 0))
    np.testing.assert_allclose(tall.T @ tall, np.eye(3), atol=1e-6)
    half = forward(jnp.eye(2, dtype=jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_constraints_are_values():
    """Equal if made of the same bounds, in any notation; otherwise distinguished."""
    assert constraints.interval(0, 1) == constraints.unit_interval
    assert constraints.greater_than(0) == constraints.greater_than(-0.0) == constraints.positive
    assert constraints.greater_than(np.float32(2)) == constraints.greater_than(2)
    assert constraints.interval(0, 2) != constraints.unit_interval
    assert constraints.positive != constraints.softplus_positive
    assert len({constraints.interval(0, 1), constraints.unit_interval}) == 1
    assert constraints.bijection(jnp.tanh, jnp.arctanh) == TANH
    assert repr(constraints.interval(1, 2)) == "interval(1.0, 2.0)"


# ---- refusals


BAD = [
    (constraints.real, math.nan),
    (constraints.positive, [1.0, -2.0]),
    (constraints.positive, math.inf),
    (constraints.softplus_positive, -1.0),
    (constraints.greater_than(2), 2.0),
    (constraints.less_than(2), 3.0),
    (constraints.unit_interval, 1.0),
    (constraints.simplex, [0.5, 0.6]),
    (constraints.simplex, [0.0, 1.0]),
    (constraints.ordered_vector, [1.0, 3.0, 3.0]),
    (constraints.lower_cholesky, [[1.0, 1.0], [0.0, 1.0]]),
    (constraints.lower_cholesky, [[1.0, 0.0], [0.0, -1.0]]),
    (constraints.positive_definite, [[1.0, 2.0], [2.0, 1.0]]),
    (constraints.positive_definite, [[1.0, 0.5], [0.0, 1.0]]),
    (constraints.orthogonal, [[1.0, 0.0], [0.0, 1.1]]),
    (TANH, 1.5),
    (constraints.bijection(jnp.exp, jnp.log), 0.0),
    # Functions that do not belong together.
    (constraints.bijection(jnp.exp, jnp.log1p), 2.0),
]


@pytest.mark.parametrize(("constraint", "value"), BAD)
@pytest.mark.sampled
def test_a_value_outside_is_refused(constraint, value):
    value = jnp.asarray(value, jnp.float32)

    def made(value):
        return constraint.constrain(value, "Model.x").unconstrained

    with pytest.raises(FieldError, match=r"Model\.x"):
        made(value)
    with pytest.raises(CheckError, match=r"Model\.x"):
        pm.filter_vmap(made)(value[None])


@every
@pytest.mark.sampled
def test_a_traced_value_inside_passes(constraint, shape):
    """Whatever its dtype: each value that is taken where it is known."""
    for dtype in ("float32", "bfloat16"):
        value = constraint.forward(free(constraint, shape, 0, dtype=dtype))
        stored = constraint.constrain(value, "Model.x").unconstrained

        made = pm.filter_vmap(lambda v: constraint.constrain(v, "Model.x").unconstrained)(
            value[None]
        )
        assert np.allclose(made[0], stored, rtol=1e-2, atol=1e-2)


def test_a_bijection_may_change_the_shape():
    def differences(x):
        return jnp.diff(x)

    def sums(u):
        return jnp.concatenate([jnp.zeros(1), jnp.cumsum(u)])

    class Path(pm.Module):
        points: jax.Array = pm.field(constraint=constraints.bijection(sums, differences))

    path = Path(jnp.asarray([0.0, 1.0, 3.0]))
    assert pm.named_leaves(path)["points.unconstrained"].tolist() == [1.0, 2.0]
    assert path.points.tolist() == [0.0, 1.0, 3.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.sampled
def test_a_positive_value_is_stored_to_a_few_roundings(dtype):
    """As many as its logarithm has, because that is stored; the docstring has the figures."""
    values = jnp.exp(jnp.linspace(-8.0, 8.0, 501)).astype(dtype)
    found = constraints.positive.forward(constraints.positive.inverse(values))

    exact = np.asarray(values, "float64")
    error = np.abs(np.asarray(found, "float64") - exact) / exact
    # Half a unit in the last digit: of the logarithm, and of the value.
    rounding = float(jnp.finfo(dtype).eps) / 2
    assert np.all(error <= 1.1 * rounding * (1 + np.abs(np.log(exact))) + 4 * 2.0**-24)
    assert error.max() < {"bfloat16": 0.04, "float16": 0.005, "float32": 1e-6}[dtype]
