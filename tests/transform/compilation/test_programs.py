"""Two jaxprs are one program if they do the same; two signatures are one if they take the same."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.transform.boundary.packing import Plan
from pytreemod.transform.compilation.programs import Program
from tests.helpers.racing import race

X = jnp.arange(3.0)
Y = X + 1


@jax.custom_jvp
def halved(x):
    return x / 2


@halved.defjvp
def halved_jvp(primals, tangents):
    return halved(*primals), tangents[0] / 2


def program(fn, *args):
    """The program of a function, traced anew."""
    return Program(jax.make_jaxpr(lambda *args: fn(*args))(*(args or (X,))).jaxpr)


def constant(value):
    """A function with a literal in it."""
    return lambda x: x * np.float32(value)


def branches(first, second):
    """A function that holds two others."""
    return lambda x: jax.lax.cond(x[0] > 0, first, second, x)


SAME = {
    "operations": lambda x: jnp.sin(x) + x**2,
    "literals": constant(2.5),
    "minus zero": constant(-0.0),
    "nan": constant(np.nan),
    "numpy constants": lambda x: x[np.array([0, 2])],
    "inner jit": lambda x: jax.jit(jnp.cumsum)(x) + jax.nn.softmax(x),
    "loops": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * i, x),
    "scan": lambda x: jax.lax.scan(lambda c, x: (c + x, c), 0.0, x),
    "branches": branches(jnp.sin, jnp.cos),
    "keys": lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
    "linear algebra": lambda x: jnp.linalg.solve(jnp.outer(x, x), x),
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("name", SAME)
def test_a_function_traced_twice_is_one_program(name):
    """Equal, and with equal hashes, though JAX has two objects for it."""
    first, second = program(SAME[name]), program(SAME[name])

    assert first.jaxpr is not second.jaxpr
    assert first == second
    assert hash(first) == hash(second)


def bounded(limit):
    """A function with a bounded gradient; only its rule shows the bound."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -limit, limit),))
    return same


DIFFERENT = {
    "operation": (jnp.sin, jnp.cos),
    "more operations": (jnp.sin, lambda x: jnp.sin(jnp.sin(x))),
    "order of operands": (lambda x: x - 2.0 * x, lambda x: 2.0 * x - x),
    "which of two results": (lambda x: (x + 1, x * 2)[0] + 0, lambda x: (x + 1, x * 2)[1] + 0),
    "literal": (constant(2.0), constant(3.0)),
    "sign of zero": (constant(0.0), constant(-0.0)),
    "parameter": (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 0, keepdims=True)),
    "precision": (
        lambda x: jnp.dot(x, x),
        lambda x: jnp.dot(x, x, precision=jax.lax.Precision.HIGHEST),
    ),
    "inner program": (branches(jnp.sin, jnp.cos), branches(jnp.cos, jnp.sin)),
    "deeper program": (
        lambda x: jax.jit(branches(jnp.sin, constant(1.0)))(x),
        lambda x: jax.jit(branches(jnp.sin, constant(2.0)))(x),
    ),
    "number of steps": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + 1, x),
        lambda x: jax.lax.fori_loop(0, 4, lambda i, x: x + 1, x),
    ),
    "number of results": (lambda x: (x,), lambda x: (x, x)),
    "order of results": (lambda x: (x, x + 1), lambda x: (x + 1, x)),
    "a result and a literal": (lambda x: x[0], lambda x: 0.0),
    "rule that is not applied yet": (halved, halved),
    "rules that captured something": (bounded(1.0), bounded(2.0)),
    "arrays that an inner program captured": (
        lambda x: jax.jit(lambda x: x * X)(x),
        lambda x: jax.jit(lambda x: x * Y)(x),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_programs_that_may_differ_are_two(name):
    """Their operations differ, or (in a rule) cannot be inspected."""
    first, second = map(program, DIFFERENT[name])

    assert first != second
    assert first == first  # also where a part cannot be inspected


def test_linear_maps_of_a_function_with_a_rule_are_one_program():
    """The rule was applied when the function was linearized, so that nothing is hidden any more."""
    first, second = (jax.linearize(lambda x: jnp.sin(halved(x)), X)[1] for _ in range(2))

    assert program(first) == program(second)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (jnp.ones(3), jnp.ones(2)),
        (jnp.ones(3), jnp.ones(3, jnp.bfloat16)),
        (jnp.asarray(1.0), jnp.array(1.0, jnp.float32)),
    ],
    ids=["shape", "dtype", "weak type"],
)
def test_programs_on_other_inputs_are_two(a, b):
    """The types of all variables belong to a program."""
    assert program(jnp.sin, a) != program(jnp.sin, b)


def test_programs_under_other_settings_are_two():
    """Settings of JAX for operations belong to a program, such as how random bits are made."""
    draw = lambda x: jax.random.bits(jax.random.key(0)) + x  # noqa: E731
    with jax.threefry_partitionable(True):
        first = program(draw, jnp.uint32(0))
    with jax.threefry_partitionable(False):
        assert first != program(draw, jnp.uint32(0))


def test_a_program_is_no_other_thing():
    """It is compared with programs only, and shows its jaxpr."""
    assert program(jnp.sin) != 3
    assert "sin" in repr(program(jnp.sin))


def converted(y, fn=None):
    """A function that has captured `y`, converted anew."""
    return pm.filter_closure_convert(fn or (lambda x, n: jnp.sin(y * x) + n), X, 1)


def test_a_function_converted_twice_has_one_structure():
    """So it can be chosen by `cond`, combined by `tree_map`, and is traced once by `filter_jit`."""
    first, second = converted(X), converted(2 * X)
    call = pm.filter_jit(pm.debug.assert_max_traces(lambda f, x: f(x, 1), max_traces=1))

    assert jax.tree.structure(first) == jax.tree.structure(second)
    summed = jax.tree.map(jnp.add, first, second)
    np.testing.assert_allclose(summed(X, 1), jnp.sin(3 * X * X) + 1, rtol=1e-6)
    chosen = jax.lax.cond(True, lambda: converted(X), lambda: converted(2 * X))
    np.testing.assert_allclose(call(chosen, X), first(X, 1), rtol=1e-6)
    call(second, X)  # which is traced no second time


@pytest.mark.parametrize(
    "other",
    [
        lambda: converted(X, lambda x, n: jnp.cos(X * x) + n),
        lambda: pm.filter_closure_convert(lambda x, n: jnp.sin(X * x) + 1, X, True),
        lambda: pm.filter_closure_convert(lambda x, n: jnp.sin(X * x["a"]) + n, {"a": X}, 1),
        lambda: converted(X, lambda x, n: [jnp.sin(X * x) + n]),
        lambda: converted(X, lambda x, n: (jnp.sin(X * x) + n, "text")),
    ],
    ids=["program", "static argument", "arguments", "result", "static result"],
)
def test_functions_that_differ_have_two_structures(other):
    """The function, its inputs and outputs, static values with their kind."""
    assert jax.tree.structure(converted(X)) != jax.tree.structure(other())


def test_structures_of_arguments_are_shown():
    """In JAX's messages about structures, as trees of shapes and not as addresses."""
    assert "ShapeDtypeStruct(shape=(3,), dtype=float32), 1" in str(jax.tree.structure(converted(X)))


def programs_alive():
    """The number of programs and of plans, after a garbage collection."""
    gc.collect()
    return sum(type(thing) in (Program, Plan) for thing in gc.get_objects())


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_function_that_is_converted_in_each_step_keeps_one_program(count):
    """The first, because it is a part of the keys of calls; all others are freed."""
    call = pm.filter_jit(pm.debug.assert_max_traces(lambda f, x: f(x, 1), max_traces=1))
    plain = jax.jit(lambda f, x: f(x, 1))

    def step():
        function = converted(X)
        return call(function, X), plain(function, X)

    step()
    before = programs_alive(), len(jax.live_arrays())
    for _ in range(count):
        step()

    assert (programs_alive(), len(jax.live_arrays())) == before


def test_threads_that_convert_and_compare_at_once():
    """Each gets the structure that all others get, and a call of it the one result."""
    call = pm.filter_jit(lambda f, x: f(x, 1))

    def work(i):
        functions = [converted(X) for _ in range(5)]
        found = [call(function, X) for function in functions]
        return jax.tree.structure(functions[i % 5]), np.asarray(found[i % 5])

    results = race(work)

    assert len({structure for structure, _ in results}) == 1
    for _, value in results:
        np.testing.assert_array_equal(value, results[0][1])
