"""filter_custom_jvp and filter_custom_vjp: derivatives that the user writes, for any trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pytreemod as pm
from pytreemod.errors import ArgumentError, StateError, StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.trees import affine, ramp

KINDS = [pm.filter_custom_jvp, pm.filter_custom_vjp]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["jvp", "vjp"])
ARGUMENT = {"x": ramp(2), "name": "a", "n": jnp.arange(2)}


def with_x(x):
    """The argument with another array."""
    return {**ARGUMENT, "x": x}


def scale(d, y, *, shift=0.0):
    """A result of every kind."""
    return {"out": d["x"] * y + shift, "name": d["name"], "n": jnp.arange(2)}


def make_scaled(kind, log=None):
    """`scale`, whose derivative by x is ten times too large, so that one can see it."""
    scaled, log = kind(scale), [] if log is None else log
    if kind is pm.filter_custom_jvp:

        @scaled.def_jvp
        def scaled_jvp(primals, tangents, *, shift=0.0):
            (d, y), (dd, dy) = primals, tangents
            log.append((d, y, dd, dy))
            terms = [10 * dd["x"] * y] if dd["x"] is not None else []
            terms += [d["x"] * dy] if dy is not None else []
            tangent = {"out": sum(terms[1:], terms[0]), "name": None, "n": None}
            return scale(d, y, shift=shift), tangent
    else:

        @scaled.def_fwd
        def scaled_fwd(perturbed, d, y, *, shift=0.0):
            log.append(perturbed)
            return scale(d, y, shift=shift), {"y": y, "word": "kept"}

        @scaled.def_bwd
        def scaled_bwd(residuals, grad_out, perturbed, d, y, *, shift=0.0):
            log.append((residuals, grad_out, perturbed, d["name"], y, shift))
            # What it gives for an integer is ignored.
            return {"x": 10 * grad_out["out"] * residuals["y"], "name": None, "n": jnp.ones(2)}

    return scaled


def with_rules(kind, fn, out=None, derivative=lambda g: 10 * g):
    """A function of one argument with these rules."""
    f, out = kind(fn), out or fn
    if kind is pm.filter_custom_jvp:
        f.def_jvp(lambda primals, tangents: (out(*primals), derivative(tangents[0])))
    else:
        f.def_fwd(lambda perturbed, x: (out(x), None))
        f.def_bwd(lambda residuals, grad_out, perturbed, x: derivative(grad_out))
    return f


@kinds
def test_a_call_is_the_functions(kind):
    """Values, strings, integers and keywords are as without the rule, compiled and not."""
    for call in (make_scaled(kind), pm.filter_jit(make_scaled(kind))):
        expected = {"out": ramp(2) ** 2 + 1.0, "name": "a", "n": jnp.arange(2)}
        assert_same(call(ARGUMENT, ramp(2), shift=1.0), expected)


TWO = jnp.stack([ramp(2), ramp(2)])
AROUND = {
    "filter_grad": lambda f, x: pm.filter_grad(f)(x),
    "compiled": lambda f, x: jax.jit(jax.grad(f))(x),
    "of compiled": lambda f, x: pm.filter_grad(pm.filter_jit(f))(x),
    "of a checkpoint": lambda f, x: pm.filter_grad(pm.filter_checkpoint(f))(x),
    "jacrev": lambda f, x: pm.filter_jacrev(f)(x),
    "vjp": lambda f, x: pm.filter_vjp(f, x)[1](1.0)[0],
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(TWO)[1],
    "of vmap": lambda f, x: jax.grad(lambda x: pm.filter_vmap(f)(x).sum())(TWO)[1],
    "of scan": lambda f, x: jax.grad(lambda x: pm.filter_map(f, x).sum())(TWO)[1],
    "of cond": lambda f, x: jax.grad(lambda x: pm.filter_cond(x[0] > 0, f, jnp.sum, x))(x),
}


@kinds
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.sampled
def test_the_rule_is_the_derivative(kind, around):
    """Plain, compiled, mapped, scanned, nested: all of it comes from the rule."""
    f = lambda x: jnp.sum(make_scaled(kind)(with_x(x), jnp.asarray(3.0))["out"])  # noqa: E731
    assert_close(around(f, ramp(2)), jnp.full(2, 30.0))


def test_a_rule_gives_tangents_forward_and_is_differentiated():
    """jvp, jacfwd, Hessians; a rule that is right passes JAX's own check."""
    f = lambda x: jnp.sum(make_scaled(KINDS[0])(with_x(x), 3.0)["out"])  # noqa: E731
    assert_close(pm.filter_jvp(f, (ramp(2),), (jnp.ones(2),))[1], jnp.asarray(60.0))
    assert_close(pm.filter_jacfwd(f)(ramp(2)), jnp.full(2, 30.0))

    cube = pm.filter_custom_jvp(lambda x: x**3)
    cube.def_jvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))
    assert_close(pm.filter_hessian(cube)(jnp.asarray(2.0)), jnp.asarray(12.0))
    check_grads(cube, (jnp.asarray(0.7),), order=2, rtol=2e-2, atol=2e-2)


def test_what_the_rules_are_given():
    """None for constants, zeros and non-arrays; flags; residuals of any kind; keywords."""
    log = []
    forward, backward = (make_scaled(kind, log) for kind in KINDS)
    pm.filter_jvp(forward, (ARGUMENT, 2.0), ({"x": ramp(2), "name": None, "n": None}, None))
    assert_same(log.pop(), (ARGUMENT, 2.0, {"x": ramp(2), "name": None, "n": None}, None))
    jax.grad(lambda y: jnp.sum(forward(ARGUMENT, y)["out"]))(2.0)
    assert log.pop()[2] == {"x": None, "name": None, "n": None}

    pm.filter_grad(lambda x: jnp.sum(backward(with_x(x), 2.0, shift=1.0)["out"]))(ramp(2))
    perturbed, (residuals, grad_out, *rest) = log
    assert rest == [perturbed, "a", 2.0, 1.0]
    assert perturbed == {"x": True, "name": False, "n": False}
    assert residuals == {"y": 2.0, "word": "kept"}
    assert_close(grad_out, {"out": jnp.ones(2), "name": None, "n": None})

    f = with_rules(KINDS[1], lambda x: (x, -x), None, lambda g: (log.append(g), g[0])[1])
    assert float(jax.grad(lambda x: f(x)[0])(2.0)) == 1.0
    assert log[-1][1] is None


def test_each_forward_pass_has_its_own_residuals():
    """The residuals of a forward pass may depend on the perturbed leaves, call by call."""

    @pm.filter_custom_vjp
    def product(xy):
        return xy[0] * xy[1]

    @product.def_fwd
    def product_fwd(perturbed, xy):
        kept = {name: value for name, value, p in zip("xy", xy[::-1], perturbed, strict=True) if p}
        return product(xy), kept

    @product.def_bwd
    def product_bwd(residuals, grad_out, perturbed, xy):
        return tuple(grad_out * residuals[n] if n in residuals else None for n in "xy")

    f = lambda x, y: product((x, y)) + product((x, jax.lax.stop_gradient(y)))  # noqa: E731
    for transform in (lambda f: f, jax.jit):
        grads = jax.grad(transform(f), argnums=(0, 1))(2.0, 3.0)
        assert_close(grads, (jnp.asarray(6.0), jnp.asarray(2.0)))


def test_none_is_zero_in_the_result_of_a_rule():
    """At a leaf, or for everything below a node."""
    f = with_rules(KINDS[0], lambda x: {"a": x, "b": [x, x]}, None, lambda t: {"a": t, "b": None})
    tangent = pm.filter_jvp(f, (ramp(2),), (jnp.ones(2),))[1]
    assert_close(tangent, {"a": jnp.ones(2), "b": [jnp.zeros(2)] * 2})
    g = with_rules(KINDS[1], lambda d: d["a"] * d["b"][0], None, lambda t: {"a": t, "b": None})
    assert_close(jax.grad(g)({"a": 2.0, "b": [3.0]}), {"a": jnp.ones(()), "b": [jnp.zeros(())]})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
def test_dtypes_stay(dtype):
    """A rule may return Python numbers; they take the dtype of the result."""
    f = with_rules(KINDS[0], lambda x: x * 3, None, lambda t: 7.0)
    out, tangent = pm.filter_jvp(f, (jnp.ones((), dtype),), (jnp.ones((), dtype),))
    assert (tangent.dtype, complex(tangent)) == (out.dtype, 7.0)


def test_rules_that_are_replaced_are_seen_by_compiled_code():
    """A jitted function that is given one with other rules traces again."""
    f = with_rules(KINDS[0], jnp.square)
    derivative = pm.filter_jit(lambda f, x: jax.grad(f)(x))
    assert float(derivative(f, 3.0)) == 10.0
    f.def_jvp(lambda primals, tangents: (f(*primals), 20 * tangents[0]))
    assert float(derivative(f, 3.0)) == 20.0


def test_no_operation_is_added():
    """The programs have the operations of JAX's own on the arrays alone."""
    square = lambda x: x**2  # noqa: E731
    jvp, vjp = jax.custom_jvp(square), jax.custom_vjp(square)
    jvp.defjvp(lambda p, t: (square(*p), 10 * t[0]))
    vjp.defvjp(lambda x: (square(x), None), lambda residuals, grad_out: (10 * grad_out,))
    for kind, theirs in zip(KINDS, (jvp, vjp), strict=True):
        for transform in (lambda f: f, jax.grad, lambda f: jax.grad(jax.jit(f))):
            mine = transform(with_rules(kind, square))
            assert equations(mine, 2.0) == equations(transform(theirs), 2.0)


# ---- what would be wrong in silence


@kinds
def test_the_arrays_of_a_module_are_constants(kind):
    """It is a function; a derivative by its arrays is refused, by path."""
    loss = lambda model, x: jnp.sum(with_rules(kind, model)(x))  # noqa: E731
    model = affine(2, 2)
    assert_close(loss(model, ramp(2)), jnp.sum(model(ramp(2))))
    assert_close(jax.grad(loss, 1)(model, ramp(2)), jnp.full(2, 10.0))
    with pytest.raises(ArgumentError, match="weight"):
        pm.filter_grad(loss)(model, ramp(2))


CONSTANTS = {
    "jvp, keyword": (lambda y: make_scaled(KINDS[0])(ARGUMENT, 1.0, shift=y), "at shift"),
    "vjp, keyword": (lambda y: make_scaled(KINDS[1])(ARGUMENT, 1.0, shift=y), "at shift"),
    "vjp, another argument": (lambda y: make_scaled(KINDS[1])(ARGUMENT, y), "at y"),
    "vjp, by its name": (lambda y: make_scaled(KINDS[1])(ARGUMENT, y=y), "at y"),
}


@pytest.mark.parametrize(("f", "where"), CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.parametrize("wrap", [lambda f: f, pm.filter_jit, pm.filter_checkpoint])
def test_a_derivative_that_no_rule_gives_is_refused(f, where, wrap):
    """It would be zero; where the argument is constant, it is not refused."""
    with pytest.raises(ArgumentError, match=where):
        jax.grad(wrap(lambda y: jnp.sum(f(y)["out"])))(2.0)
    assert float(jax.grad(wrap(lambda y: jnp.sum(f(jax.lax.stop_gradient(y))["out"])))(2.0)) == 0


def own(x):
    """A result with a string."""
    return {"x": x["x"], "n": "a"}


def differentiate(f):
    """The gradient through it, compiled."""
    loss = pm.filter_jit(lambda x: jnp.sum(f(x)["x"]))
    return pm.filter_grad(loss)({"x": ramp(3), "n": np.arange(2)})


OTHERS = {
    "string": lambda x: {**own(x), "n": "b"},
    "key": lambda x: {"x": x["x"]},
    "shape": lambda x: {**own(x), "x": x["x"][:2]},
}
MISFITS = {
    "node": (lambda g: g, ""),
    "shape": (lambda g: {"x": g[:2], "n": None}, r"\['x'\]: f32\[2\]"),
    "inner node": (lambda g: {"x": (g, g), "n": None}, r"\['x'\]"),
    "key": (lambda g: {"z": g, "n": None}, r"\['x'\]"),
    "dtype": (lambda g: {"x": g.astype(jnp.float16), "n": None}, r"\['x'\]: f16\[3\]"),
}
RULE = r"def_(jvp|bwd) of own(?s:.*)(tangent_out|gradient)"
WRONG = {
    **{f"result: {name}": (out, lambda g: None, "def_|Custom") for name, out in OTHERS.items()},
    **{
        f"derivative: {name}": (own, lambda g, misfit=misfit: misfit(g["x"]), RULE + where)
        for name, (misfit, where) in MISFITS.items()
    },
}


@kinds
@pytest.mark.parametrize(("out", "derivative", "match"), WRONG.values(), ids=WRONG)
def test_what_a_rule_gives_fits_the_function(kind, out, derivative, match):
    """Another result would be what the function returns; a misfit would be broadcast, or lost."""
    with pytest.raises((StructureError, TypeError), match=match):
        differentiate(with_rules(kind, own, out, derivative))


@kinds
def test_rules_must_be_there_and_return_pairs(kind):
    """A function without its rule would be differentiated as if it had none."""
    with pytest.raises(StateError, match="def_"):
        kind(jnp.square)(1.0)
    f = with_rules(kind, jnp.square)
    define = f.def_jvp if kind is KINDS[0] else f.def_fwd
    with pytest.raises(ArgumentError, match="def_"):
        define(3)
    define(lambda *args: args[0])
    with pytest.raises(ArgumentError, match="no pair"):
        jax.grad(f)(1.0)
