"""filter_grad, filter_value_and_grad, trainable; filter_jacfwd, filter_jacrev, filter_hessian."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, SharedParameterWarning, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, Buffered, affine, double, ramp


def loss(model, x, *, power=2):
    """A scalar of a model and an input."""
    return jnp.sum(model(x) ** power)


def test_shape_of_what_comes_back():
    """The gradient; the value and the gradient; each with aux where asked."""
    model, x = affine(), ramp(3)
    aux = {"y": model(x), "name": "aux", "n": 3, "none": None}
    with_aux = lambda m, x: (loss(m, x), {**aux, "y": m(x)})  # noqa: E731
    gradient, value = pm.filter_grad(loss)(model, x), loss(model, x)

    assert_same(pm.filter_value_and_grad(loss)(model, x), (value, gradient))
    assert_same(pm.filter_grad(with_aux, has_aux=True)(model, x), (gradient, aux))
    found = pm.filter_value_and_grad(with_aux, has_aux=True)(model, x)
    assert_same(found, ((value, aux), gradient))
    listed = pm.filter_grad(lambda m, x: [loss(m, x), "aux"], has_aux=True)(model, x)
    assert_same(listed, (gradient, "aux"))


JACOBIANS = {"jacfwd": jax.jacfwd, "jacrev": jax.jacrev}
ALL = {"grad": jax.grad, **JACOBIANS, "hessian": jax.hessian}
every = pytest.mark.parametrize("name", ALL)


@every
@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 2), [2, 0], (1,), np.int32(2)], ids=repr)
@pytest.mark.sampled
def test_argnums(name, argnums):
    """One argument gives a tree, several a tuple of trees in the order asked for."""
    fn = lambda a, b, c: jnp.sum(a["x"] ** 2) * jnp.sum(b["x"]) * jnp.sum(c["x"])  # noqa: E731
    args = [{"x": ramp(n)} for n in (2, 3, 4)]
    found = getattr(pm, f"filter_{name}")(fn, argnums=argnums)(*({**a, "n": 3} for a in args))
    # Jacobians of JAX take a NumPy number for a tuple.
    argnums = int(argnums) if isinstance(argnums, np.integer) else argnums
    expected = ALL[name](fn, argnums=argnums)(*args)

    assert type(found) is type(expected)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected))


@every
def test_aux_keywords_and_options(name):
    """aux is returned beside, keywords are constant, `holomorphic` passes."""
    make, z = getattr(pm, f"filter_{name}"), jnp.asarray(1.0 + 2.0j)
    fn = lambda x, *, power: (jnp.sum(x**power), "aux")  # noqa: E731
    expected = ALL[name](lambda x: jnp.sum(x**3))(ramp(2))

    assert_same(make(fn, has_aux=True)(ramp(2), power=3), (expected, "aux"))
    assert_close(make(jnp.sin, holomorphic=True)(z), ALL[name](jnp.sin, holomorphic=True)(z))


def test_a_buffer_stays_a_buffer_where_it_is():
    """Buffers of inner Modules are left alone, also inside fields with other roles."""
    model = [Buffered(ramp(1), ramp(1), Buffered(ramp(1), ramp(1), ramp(1)))]
    (outer,) = pm.filter_grad(lambda m: sum(jnp.sum(x) for x in jax.tree.leaves(m)))(model)
    one = jnp.ones(1)
    assert_close(outer, Buffered(one, None, Buffered(one, None, one)))


def test_integers_have_no_gradient():
    """Also with `allow_int` of JAX."""
    f = lambda d: jnp.sum(d["x"] * d["n"].astype(jnp.float32))  # noqa: E731
    found = pm.filter_grad(f, allow_int=True)({"x": jnp.ones(2), "n": jnp.arange(2)})
    assert_close(found, {"x": jnp.arange(2.0), "n": None})


@pytest.mark.parametrize("name", JACOBIANS)
@pytest.mark.sampled
def test_results_of_jacobians(name):
    """Floating arrays and numbers of the result have a tree of the argument, the rest has None."""
    rest = [jnp.arange(2), "text", None, double]

    def f(d):
        return {"y": d["x"] * 2, "z": [jnp.sum(d["x"]), np.ones(1, np.float32), 1.5], "rest": rest}

    make = getattr(pm, f"filter_{name}")
    like = {"x": jnp.ones(2), "s": None}
    expected = {
        "y": {**like, "x": 2 * jnp.eye(2)},
        "z": [like, {**like, "x": jnp.zeros((1, 2))}, {**like, "x": jnp.zeros(2)}],
        "rest": [None, None, None, None],
    }
    assert_close(make(f)({"x": jnp.ones(2), "s": "a"}), expected)
    made = make(lambda x: Affine(jnp.outer(x, x), x))(jnp.ones(2))
    assert isinstance(made, Affine)
    assert (made.weight.shape, made.bias.shape) == ((2, 2, 2), (2, 2))


def test_trainable_is_for_the_optimizer():
    """Weight decay and the gradient have the same leaves."""
    model = {"net": Buffered(ramp(2), ramp(2), ramp(2)), "act": double, "frozen": affine()}
    wrt = pm.select.path("net") & ~pm.select.role("buffer")
    optimizer = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    first, rest = pm.trainable(model, wrt)
    gradient = pm.filter_grad(lambda m: 0.0 * jnp.sum(m["net"].weight), wrt=wrt)(model)

    assert jax.tree.structure(gradient) == jax.tree.structure(first)
    updates, _ = optimizer.update(gradient, optimizer.init(first), first)
    moved = pm.apply_updates(model, updates)
    assert_close(moved["net"].weight, 0.5 * ramp(2))
    assert_same((moved["net"].mean, moved["frozen"], moved["act"]), (ramp(2), affine(), double))
    assert_same(pm.combine(first, rest), model)


def test_a_parameter_at_two_paths_is_told():
    """It would become two; in a plain container it is an argument."""
    layer, x = nn.Linear(2, 2, key=jax.random.key(0)), ramp(2, 2)
    f = lambda pair: jnp.sum(pair[0].weight * pair[1].weight)  # noqa: E731
    for run in (pm.filter_grad(f), pm.trainable):
        with pytest.warns(SharedParameterWarning, match=r"\[0\]\.weight and .*\[1\]\.weight"):
            run([layer, layer])
    assert_close(pm.filter_grad(lambda pair: jnp.sum(pair[0] * pair[1]))([x, x]), [x, x])


# ---- mistakes


LOSSES = {
    "shape": (lambda m: m.weight, r"shape: \(2, 3\)"),
    "complex": (lambda m: jax.lax.complex(m.bias, m.bias).sum(), "complex64"),
    "pair": (lambda m: (jnp.sum(m.bias), 1), "tuple"),
    "nothing": (lambda m: None, "None"),
    "integer": (lambda m: jnp.sum(m.bias).astype(int), "int32"),
}


@pytest.mark.parametrize(("loss", "shown"), LOSSES.values(), ids=LOSSES)
def test_a_loss_is_a_floating_scalar(loss, shown):
    """A sum over the axes that the user forgot would be another loss."""
    with pytest.raises(TypeError, match=shown):
        pm.filter_grad(loss)(affine())


MISTAKES = {
    "by keyword": ({}, lambda f: f(x=ramp(2)), r"argument 0 \(x\)"),
    "no argument": ({}, lambda f: f(), r"argument 0 \(x\)"),
    "too far": ({"argnums": (0, 3)}, lambda f: f(1, 2), "argument 3"),
    "twice": ({"argnums": (1, -1)}, lambda f: f(1, ramp(2)), "twice"),
    "integers": ({}, lambda f: f({"a": jnp.arange(2)}), r"x\['a'\]: i32\[2\]"),
    "numbers": ({}, lambda f: f([2.0]), r"x\[0\]: 2\.0"),
    "empty": ({}, lambda f: f({}), "no floating array"),
    "buffers alone": ({}, lambda f: f(Buffered(None, ramp(2), None)), r"x\.mean"),
    "chosen": ({"wrt": False}, lambda f: f(ramp(2)), "wrt=False"),
    "no pair": ({"has_aux": True}, lambda f: f(ramp(2)), "no pair"),
}


@every
@pytest.mark.parametrize(("options", "call", "match"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_differentiated_is_named(name, options, call, match):
    """By argument and path: an empty gradient would train nothing, in silence."""
    fn = lambda x, y=0: (0.0, 1, 2) if options else jnp.zeros(())  # noqa: E731
    with pytest.raises(ArgumentError, match=match):
        call(getattr(pm, f"filter_{name}")(fn, **options))


@pytest.mark.parametrize("name", JACOBIANS)
def test_a_jacobian_of_nothing_is_refused(name):
    """A result without floating arrays would give an empty one."""
    with pytest.raises(ArgumentError, match="no floating array"):
        getattr(pm, f"filter_{name}")(lambda x: [jnp.arange(2), "a"])(ramp(2))


@pytest.mark.parametrize("wrt", ["wieght", ~pm.select.path("wieght"), pm.select.path("bias.x")])
def test_a_pattern_that_matches_nothing_is_refused(wrt):
    """A misspelt path is an error, not an empty gradient."""
    for call in (pm.filter_grad(lambda m: 0.0, wrt=wrt), lambda m: pm.trainable(m, wrt)):
        with pytest.raises(SpecError, match=r"wieght|bias\.x"):
            call(affine())
