"""filter_custom_jvp and filter_custom_vjp: derivatives that the user writes, for any trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pytreemod as pm
from pytreemod.errors import DerivativeError
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.trees import affine, ramp

# ---- filter_custom_jvp


def make_scaled(log=None):
    """`d["x"] * y`, whose derivative by x is ten times too large, so that one can see it."""

    @pm.filter_custom_jvp
    def scaled(d, y, *, shift=0.0):
        """Scales."""
        return {"out": d["x"] * y + shift, "name": d["name"], "n": jnp.arange(2)}

    @scaled.def_jvp
    def scaled_jvp(primals, tangents, *, shift=0.0):
        (d, y), (dd, dy) = primals, tangents
        if log is not None:
            log.append((d, y, dd, dy))
        terms = [10 * dd["x"] * y] if dd["x"] is not None else []
        terms += [d["x"] * dy] if dy is not None else []
        out = {"out": d["x"] * y + shift, "name": d["name"], "n": jnp.arange(2)}
        return out, {"out": sum(terms[1:], start=terms[0]), "name": None, "n": None}

    return scaled


def test_a_call_is_the_functions():
    """Values, strings, integers and keywords are as without the rule, compiled and not."""
    scaled = make_scaled()
    for call in (scaled, pm.filter_jit(scaled)):
        out = call({"x": ramp(2), "name": "a"}, ramp(2), shift=1.0)
        assert_close(out["out"], ramp(2) ** 2 + 1.0)
        assert_close(out["n"], jnp.arange(2))
        assert out["name"] == "a"


@pytest.mark.slow
def test_the_jvp_rule_is_the_derivative():
    """Forward, reverse, compiled, mapped, scanned and nested: all of it comes from the rule."""
    scaled = make_scaled()

    def f(x):
        return jnp.sum(scaled({"x": x, "name": "a"}, jnp.asarray(3.0))["out"])

    x, expected = jnp.asarray(2.0), jnp.asarray(30.0)
    assert_close(pm.filter_jvp(f, (x,), (jnp.ones(()),))[1], expected)
    assert_close(pm.filter_grad(f)(x), expected)
    assert_close(jax.jit(jax.grad(f))(x), expected)
    assert_close(pm.filter_grad(pm.filter_jit(f))(x), expected)
    assert_close(pm.filter_grad(pm.filter_checkpoint(f))(x), expected)
    assert_close(jax.vmap(jax.grad(f))(ramp(2)), jnp.full(2, 30.0))
    assert_close(jax.grad(lambda x: jnp.sum(pm.filter_vmap(f)(x)))(ramp(2)), jnp.full(2, 30.0))
    assert_close(jax.grad(lambda x: jnp.sum(jax.lax.map(f, x)))(ramp(2)), jnp.full(2, 30.0))
    assert_close(pm.filter_jacrev(f)(x), expected)
    assert_close(pm.filter_linearize(f, x)[1](1.0), expected)


def test_a_tangent_is_none_where_it_is_zero():
    """The rule gets None for constants, integers and non-arrays, and can skip them."""
    log = []
    scaled = make_scaled(log)

    pm.filter_jvp(scaled, ({"x": ramp(2), "name": "a"}, 2.0), ({"x": ramp(2), "name": None}, None))
    d, y, dd, dy = log.pop()
    assert_close(dd, {"x": ramp(2), "name": None})
    assert (d["name"], y, dy) == ("a", 2.0, None)
    jax.grad(lambda y: jnp.sum(scaled({"x": ramp(2), "name": "a"}, y)["out"]))(2.0)
    assert log.pop()[2] == {"x": None, "name": None}


def test_none_is_a_zero_tangent_of_the_result():
    """At a leaf or for everything below a node, in the rule's result."""

    @pm.filter_custom_jvp
    def f(x):
        return {"a": x, "b": [x, x]}

    f.def_jvp(lambda primals, tangents: (f(*primals), {"a": tangents[0], "b": None}))

    tangent = pm.filter_jvp(f, (ramp(2),), (jnp.ones(2),))[1]
    assert_close(tangent, {"a": jnp.ones(2), "b": [None, None]})
    assert_close(jax.grad(lambda x: jnp.sum(f(x)["b"][0]))(ramp(2)), jnp.zeros(2))


@pytest.mark.slow
def test_second_derivatives_go_through_the_rule():
    """The rule is differentiated in its turn."""

    @pm.filter_custom_jvp
    def cube(x):
        return x**3

    cube.def_jvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))

    assert_close(pm.filter_hessian(cube)(jnp.asarray(2.0)), jnp.asarray(12.0))
    check_grads(cube, (jnp.asarray(0.7),), order=2, rtol=2e-2, atol=2e-2)


# ---- filter_custom_vjp


def make_clipped(log=None):
    """`d["x"] * y`, whose gradient is ten times too large, so that one can see it."""

    @pm.filter_custom_vjp
    def clipped(d, y, *, shift=0.0):
        """Clips."""
        return {"out": d["x"] * y + shift, "name": d["name"], "rest": [jnp.arange(2), jnp.ones(2)]}

    @clipped.def_fwd
    def clipped_fwd(perturbed, d, y, *, shift=0.0):
        if log is not None:
            log.append(perturbed)
        return clipped(d, y, shift=shift), {"y": y, "word": "kept"}

    @clipped.def_bwd
    def clipped_bwd(residuals, grad_out, perturbed, d, y, *, shift=0.0):
        if log is not None:
            log.append((residuals, grad_out, perturbed, d, y, shift))
        assert residuals["word"] == "kept"
        return {"x": 10 * grad_out["out"] * residuals["y"], "name": None, "n": None}

    return clipped


ARGUMENT = {"x": ramp(2), "name": "a", "n": jnp.arange(2)}


def with_x(x):
    return {**ARGUMENT, "x": x}


def test_the_vjp_rule_is_the_gradient():
    """Plain, compiled, mapped, scanned, checkpointed: all of it comes from the rules."""
    clipped = make_clipped()

    def f(x):
        return jnp.sum(clipped(with_x(x), jnp.asarray(3.0))["out"])

    x, expected = ramp(2), jnp.full(2, 30.0)
    assert_close(pm.filter_grad(f)(x), expected)
    assert_close(jax.jit(jax.grad(f))(x), expected)
    assert_close(pm.filter_grad(pm.filter_jit(f))(x), expected)
    assert_close(pm.filter_vjp(f, x)[1](1.0)[0], expected)
    assert_close(pm.filter_grad(pm.filter_checkpoint(f))(x), expected)
    assert_close(jax.vmap(jax.grad(f))(jnp.stack([x, x])), jnp.full((2, 2), 30.0))
    mapped = jax.grad(lambda x: jnp.sum(pm.filter_vmap(f)(x)))
    assert_close(mapped(jnp.stack([x, x])), jnp.full((2, 2), 30.0))
    scanned = jax.grad(lambda x: jnp.sum(jax.lax.map(f, x)))
    assert_close(scanned(jnp.stack([x, x])), jnp.full((2, 2), 30.0))
    whole = pm.filter_grad(lambda d: jnp.sum(clipped(d, 3.0)["out"]))(ARGUMENT)
    assert_close(whole, {"x": expected, "name": None, "n": None})


def test_what_the_rules_are_given():
    """perturbed is a tree of bools; grad_out has None for non-arrays and unused results."""
    log = []
    clipped = make_clipped(log)

    pm.filter_grad(lambda x: jnp.sum(clipped(with_x(x), 2.0, shift=1.0)["out"]))(ramp(2))
    perturbed, (residuals, grad_out, again, d, y, shift) = log

    assert perturbed == again == {"x": True, "name": False, "n": False}
    assert residuals == {"y": 2.0, "word": "kept"}
    assert_close(grad_out, {"out": jnp.ones(2), "name": None, "rest": [None, None]})
    assert_close(d["x"], ramp(2))
    assert (d["name"], y, shift) == ("a", 2.0, 1.0)


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

    def f(x, y):
        both = product((x, y))
        one = product((x, jax.lax.stop_gradient(y)))
        return both + one

    for transform in (lambda f: f, jax.jit):
        grads = jax.grad(transform(f), argnums=(0, 1))(2.0, 3.0)
        assert_close(grads, (jnp.asarray(6.0), jnp.asarray(2.0)))


def test_none_is_a_zero_gradient():
    """For a leaf, and for everything below a node."""

    @pm.filter_custom_vjp
    def f(d):
        return d["a"] * d["b"][0]

    f.def_fwd(lambda perturbed, d: (f(d), None))
    f.def_bwd(lambda residuals, grad_out, perturbed, d: {"a": grad_out, "b": None})

    grad = jax.grad(f)({"a": 2.0, "b": [3.0]})
    assert_close(grad, {"a": jnp.ones(()), "b": [jnp.zeros(())]})


def test_vjp_against_finite_differences():
    """A rule that is right passes JAX's own check of gradients."""

    @pm.filter_custom_vjp
    def f(d, how):
        return jnp.sin(d["x"]) * (2.0 if how == "twice" else 1.0)

    f.def_fwd(lambda perturbed, d, how: (f(d, how), jnp.cos(d["x"])))
    f.def_bwd(lambda cos, grad_out, perturbed, d, how: {"x": 2.0 * cos * grad_out})

    check_grads(lambda x: f({"x": x}, "twice"), (ramp(2),), 1, ["rev"], rtol=1e-2, atol=1e-2)


# ---- both


def make_both():
    """A function under each, with a rule that multiplies the derivative by ten."""
    jvp, vjp = pm.filter_custom_jvp(documented), pm.filter_custom_vjp(documented)
    jvp.def_jvp(tenfold_jvp)
    vjp.def_fwd(tenfold_fwd)
    vjp.def_bwd(tenfold_bwd)
    return jvp, vjp


def documented(x):
    """Squares."""
    return x**2


def tenfold_jvp(primals, tangents):
    return documented(*primals), 10 * tangents[0]


def tenfold_fwd(perturbed, x):
    return documented(x), None


def tenfold_bwd(residuals, grad_out, perturbed, x):
    return 10 * grad_out


def test_rules_that_are_replaced_are_seen_by_compiled_code():
    """A jitted function that is given one with other rules traces again."""
    f = make_both()[0]
    derivative = pm.filter_jit(lambda f, x: jax.grad(f)(x))

    assert float(derivative(f, 3.0)) == 10.0
    f.def_jvp(lambda primals, tangents: (f(*primals), 20 * tangents[0]))
    assert float(derivative(f, 3.0)) == 20.0


@pytest.mark.parametrize("index", [0, 1], ids=["custom_jvp", "custom_vjp"])
def test_modules_are_functions(index):
    """The arrays of the Module are constants, and go through jit as data."""
    model = affine(2, 2)
    transform = [pm.filter_custom_jvp, pm.filter_custom_vjp][index]

    def make(model):
        made = transform(model)
        if index:
            made.def_fwd(lambda perturbed, x: (model(x), None))
            made.def_bwd(lambda residuals, grad_out, perturbed, x: 10 * grad_out)
        else:
            made.def_jvp(lambda primals, tangents: (model(*primals), 10 * tangents[0]))
        return made

    assert_close(make(model)(ramp(2)), model(ramp(2)))
    assert_close(
        jax.grad(lambda x: jnp.sum(make(model)(x)))(ramp(2)),
        jnp.full(2, 10.0),
    )
    with pytest.raises(DerivativeError, match=r"weight"):
        pm.filter_grad(lambda m: jnp.sum(make(m)(ramp(2))))(model)


def test_no_operation_is_added():
    """The programs have the operations of JAX's own on the arrays alone."""
    clipped, scaled = make_both()[1], make_both()[0]
    by_hand_jvp, by_hand_vjp = jax.custom_jvp(documented), jax.custom_vjp(documented)
    by_hand_jvp.defjvp(lambda p, t: tenfold_jvp(p, t))
    by_hand_vjp.defvjp(
        lambda x: (documented(x), None), lambda residuals, grad_out: (10 * grad_out,)
    )

    for mine, theirs in ((scaled, by_hand_jvp), (clipped, by_hand_vjp)):
        for transform in (lambda f: f, jax.grad, lambda f: jax.grad(jax.jit(f)), jax.vmap):
            x = ramp(2) if transform is jax.vmap else jnp.asarray(2.0)
            assert equations(transform(mine), x) == equations(transform(theirs), x)


# ---- what would be wrong in silence


def by_keyword(shift):
    """A derivative that the rule has no tangent for."""
    return jnp.sum(make_scaled()({"x": ramp(2), "name": "a"}, 1.0, shift=shift)["out"])


def by_another(y):
    """Only the first argument of a custom_vjp has a gradient."""
    return jnp.sum(make_clipped()(ARGUMENT, y)["out"])


@pytest.mark.parametrize(("loss", "where"), [(by_keyword, "shift"), (by_another, "y")])
def test_a_derivative_that_no_rule_gives_is_refused(loss, where):
    """It would be zero."""
    with pytest.raises(DerivativeError, match=rf"at {where}"):
        jax.grad(loss)(2.0)


@pytest.mark.parametrize(
    "out", [lambda x: {"y": x, "n": "b"}, lambda x: {"y": x}, lambda x: {"y": x[:2], "n": "a"}]
)
@pytest.mark.parametrize("transform", [pm.filter_custom_jvp, pm.filter_custom_vjp])
def test_a_rule_gives_the_function_s_own_result(transform, out):
    """A rule with another result would decide what the function returns."""
    f = transform(lambda x: {"y": x, "n": "a"})
    if transform is pm.filter_custom_jvp:
        f.def_jvp(lambda primals, tangents: (out(primals[0]), None))
    else:
        f.def_fwd(lambda perturbed, x: (out(x), None))
        f.def_bwd(lambda residuals, grad, perturbed, x: grad["y"])

    with pytest.raises(DerivativeError, match="def_"):
        pm.filter_grad(pm.filter_jit(lambda x: jnp.sum(f(x)["y"])))(ramp(3))


@pytest.mark.parametrize(
    "gradient",
    [lambda g: g, lambda g: {"x": g[:2], "n": None}, lambda g: {"x": (g, g), "n": None}],
    ids=["structure", "shape", "node"],
)
def test_a_gradient_that_does_not_fit_is_refused(gradient):
    """By the rule's name, for the first argument."""
    f = pm.filter_custom_vjp(lambda d: d["x"])
    f.def_fwd(lambda perturbed, d: (d["x"], None))
    f.def_bwd(lambda residuals, grad, perturbed, d: gradient(grad))

    with pytest.raises(DerivativeError, match="def_bwd"):
        pm.filter_grad(lambda d: jnp.sum(f(d)))({"x": ramp(3), "n": np.arange(2)})


@pytest.mark.parametrize(
    "tangent",
    [lambda t: {"z": t}, lambda t: {"y": t[:2]}, lambda t: t],
    ids=["key", "shape", "node"],
)
def test_a_tangent_of_a_rule_that_does_not_fit_is_refused(tangent):
    """By the rule's name."""
    f = pm.filter_custom_jvp(lambda x: {"y": x})
    f.def_jvp(lambda primals, tangents: ({"y": primals[0]}, tangent(tangents[0])))

    with pytest.raises(DerivativeError, match="def_jvp"):
        pm.filter_jvp(f, (ramp(3),), (ramp(3),))


def test_the_older_spelling_warns():
    """Equinox's `defjvp` works, and is deprecated there as well."""
    fn = pm.filter_custom_jvp(jnp.sin)
    with pytest.warns(DeprecationWarning, match="defjvp"):
        fn.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 5 * tangents[0]))

    assert_close(jax.grad(fn)(1.0), 5.0)
