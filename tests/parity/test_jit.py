"""`filter_jit`: what is traced, what is static, what comes out, what is donated."""

import functools as ft
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import caught, ramp, same_under_both_imports

# Everything here is compiled twice: in the slow run. What it compares has tests of its own.
pytestmark = pytest.mark.slow


def counting(function):
    """`function`, and a list that grows by one entry each time it is traced."""
    traces = []

    @ft.wraps(function)
    def counted(*args, **kwargs):
        traces.append(None)
        return function(*args, **kwargs)

    return counted, traces


@same_under_both_imports
def test_every_spelling_of_the_decorator(eqx):
    """Bare, called with options, called on a function, and curried without options."""

    @eqx.filter_jit
    def bare(x):
        return x + 1

    @eqx.filter_jit()
    def curried(x):
        return x + 2

    @eqx.filter_jit(donate="none", inline=True)
    def optioned(x):
        return x + 3

    direct = eqx.filter_jit(lambda x: x + 4, donate="none")
    return [f(ramp(2)) for f in (bare, curried, optioned, direct)]


@same_under_both_imports
def test_the_wrapper_shows_the_function(eqx):
    """Name, docstring and signature are those of the function."""

    @eqx.filter_jit
    def double(x: float, *, scale: float = 2.0) -> float:
        """Twice x."""
        return scale * x

    return double.__name__, double.__doc__, str(inspect.signature(double)), double.__wrapped__


@same_under_both_imports
def test_arrays_are_traced_and_the_rest_is_static(eqx):
    """Inside, arrays of either library are tracers; numbers, strings and functions are not."""
    kinds = []

    @eqx.filter_jit
    def look(tree, **more):
        leaves = jax.tree.leaves((tree, more))
        names = ["T" if isinstance(x, jax.core.Tracer) else type(x).__name__ for x in leaves]
        kinds.append(names)
        return tree[0]

    look((ramp(2), np.arange(3), np.float32(1.0), 1, 2.0, True, "a"), key=jax.random.key(0), n=3)
    return kinds


@same_under_both_imports
def test_a_new_trace_for_a_new_static_value_only(eqx):
    """New numbers in an array reuse the trace; a new shape, dtype or static value makes one."""
    counted, traces = counting(lambda x, n, f: f(x) * n)
    jitted = eqx.filter_jit(counted)
    counts = []
    for x, n, f in [
        (ramp(2), 1, jnp.sin),
        (2 * ramp(2), 1, jnp.sin),
        (ramp(3), 1, jnp.sin),
        (ramp(2), 2, jnp.sin),
        (ramp(2), 1, jnp.cos),
        (ramp(2), 1, jnp.sin),
        (ramp(2).astype(jnp.float16), 1, jnp.sin),
    ]:
        jitted(x, n, f)
        counts.append(len(traces))
    return counts


@same_under_both_imports
def test_every_spelling_of_the_arguments(eqx):
    """By position, by keyword, in another order, with the default written out or not."""

    @eqx.filter_jit
    def power(x, n=2, *, scale=1.0):
        return scale * x**n

    x = ramp(2)
    return [
        power(x),
        power(x=x),
        power(x, n=3),
        power(n=3, x=x),
        power(x, 2, scale=jnp.float32(2.0)),
        power(scale=2.0, x=x, n=2),
    ]


@pytest.mark.slow
@same_under_both_imports
def test_clear_caches_leaves_functions_usable(eqx):
    """After `clear_caches` what was compiled before still gives the same results."""
    jitted = eqx.filter_jit(lambda x, n: x**n)
    before = jitted(ramp(2), 3)
    return before, eqx.clear_caches(), jitted(ramp(2), 3), jitted(ramp(3), 2)


@same_under_both_imports
def test_outputs_may_be_anything(eqx):
    """Arrays come out as JAX arrays, everything else as it was returned."""

    class Layer(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True)

    @eqx.filter_jit
    def many(x, host, number):
        layer = Layer(2 * x, 3)
        return {"layer": layer, "host": host}, number, "text", None, jnp.sin, x.shape

    return many(ramp(2), np.arange(2.0, dtype=np.float32), 1.5), eqx.filter_jit(lambda x: x)(1.0)


@same_under_both_imports
def test_static_outputs_follow_the_static_inputs(eqx):
    """A non-array output belongs to its trace: it is right on a cached call too."""
    jitted = eqx.filter_jit(lambda x, name, n: (x * n, f"{name}-{n}"))
    calls = [("a", 1), ("b", 2), ("a", 1), ("b", 1), ("a", 2), ("a", 1)]
    return [jitted(ramp(2), *call) for call in calls]


@same_under_both_imports
def test_a_module_passes_through_unchanged(eqx):
    """Fields of every kind come back as they were, and defaults stay fields."""

    class Net(eqx.Module):
        weight: jax.Array
        parts: dict
        empty: Any = None
        name: str = eqx.field(static=True, default="net")
        scale: float = 2.0

    net = Net(ramp(2), {"a": [jnp.int32(1), "text"], "b": ()})
    return eqx.filter_jit(lambda n: n)(net), eqx.filter_jit(lambda n: n.scale * n.weight)(net)


@same_under_both_imports
def test_star_arguments(eqx):
    """`*args` and `**kwargs` hold arrays and static values alike."""

    @eqx.filter_jit
    def gather(first, *args, flag=False, **kwargs):
        total = first + sum(args)
        return total if flag else -total, dict(sorted(kwargs.items()))

    return gather(ramp(2), ramp(2), 1.0), gather(ramp(2), flag=True, b=ramp(1), a="text")


@same_under_both_imports
def test_jitted_methods(eqx):
    """A decorated method or `__call__` traces the arrays of `self`, and binds as methods do."""
    traces = []

    class Layer(eqx.Module):
        weight: jax.Array
        power: int = eqx.field(static=True, default=1)

        @eqx.filter_jit
        def __call__(self, x, scale=1.0):
            traces.append(isinstance(self.weight, jax.core.Tracer))
            return scale * x * self.weight**self.power

        @eqx.filter_jit
        def apply(self, x, *, scale=1.0):
            return self(x, scale)

        @classmethod
        @eqx.filter_jit
        def build(cls, x):
            return cls(2 * x)

        @staticmethod
        @eqx.filter_jit
        def halve(x):
            return x / 2

    layer, other = Layer(ramp(2)), Layer(ramp(2) + 1)
    method = layer.apply
    results = [layer(1.0), other(1.0), Layer(ramp(2), 2)(1.0), method(2.0, scale=3.0)]
    unbound = [Layer.build(ramp(2)), Layer.halve(ramp(2)), Layer.__call__(layer, 1.0)]
    return results, set(traces), unbound


@same_under_both_imports
def test_jit_of_callables_that_are_no_functions(eqx):
    """Modules, bound methods, partials, classes and JAX's own functions can be jitted."""

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x

        def twice(self, x):
            return 2 * self(x)

    layer = Layer(ramp(2))
    return [
        eqx.filter_jit(layer)(2.0),
        eqx.filter_jit(layer.twice)(2.0),
        eqx.filter_jit(ft.partial(layer.twice, 3.0))(),
        eqx.filter_jit(eqx.Partial(layer.twice, ramp(2)))(),
        eqx.filter_jit(Layer)(ramp(3)),
        eqx.filter_jit(jnp.sin)(1.0),
    ]


@same_under_both_imports
def test_arrays_of_the_callable_are_traced(eqx):
    """Two Modules of one structure share a trace: their arrays are inputs, not constants."""
    traces = []

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            traces.append(None)
            return self.weight * x

    run = eqx.filter_jit(lambda f, x: f(x))
    results = [run(Layer(ramp(2)), 1.0), run(Layer(2 * ramp(2)), 1.0)]
    return results, len(traces)


@same_under_both_imports
def test_closures_are_constants_of_the_trace(eqx):
    """A jitted function may close over arrays and Modules."""

    class Layer(eqx.Module):
        weight: jax.Array

    layer, offset = Layer(ramp(2)), ramp(2) + 5
    return eqx.filter_jit(lambda x: layer.weight * x + offset)(2.0)


@same_under_both_imports
def test_nested_jit(eqx):
    """A jitted function calls another with traced, static and Module arguments."""

    @eqx.filter_jit
    def inner(tree, n):
        return tree["x"] * n, tree["name"]

    @eqx.filter_jit
    def outer(x, n):
        y, name = inner({"x": x, "name": "a"}, n)
        z = jax.jit(lambda v: inner({"x": v, "name": "b"}, 3)[0])(y)
        return y + z, name

    return outer(ramp(2), 2)


@same_under_both_imports
def test_jit_composes_with_plain_transforms(eqx):
    """`jax.grad`, `jax.vmap` and `jax.lax.scan` go over a filtered function and under it."""
    jitted = eqx.filter_jit(lambda x, n: jnp.sum(x**n))
    inside = eqx.filter_jit(lambda x: jax.grad(lambda v: jnp.sum(v**3))(x))
    scanned = jax.lax.scan(lambda c, x: (c + jitted(x, 2), c), jnp.float32(0.0), ramp(3, 2))
    mapped = jax.vmap(lambda x: jitted(x, 2))(ramp(3, 2))
    return jax.grad(jitted)(ramp(2), 3), mapped, inside(ramp(2)), scanned


@pytest.mark.parametrize("donate", ["none", "all", "all-except-first", "warn", "warn-except-first"])
@same_under_both_imports
def test_donation(eqx, donate):
    """Equinox's strings say which arguments are used up, keyword arguments included."""
    first, second, third = ramp(4), ramp(4) + 1, ramp(4) + 2

    @eqx.filter_jit(donate=donate)
    def add(a, b, *, c):
        return a + 1, b + 1, c + 1

    results = add(first, second, c=third)
    return results, [x.is_deleted() for x in (first, second, third)]


@pytest.mark.parametrize("donate", ["all", "all-except-first"])
@pytest.mark.parametrize("kind", ["instance", "method", "Partial"])
@same_under_both_imports
def test_donation_of_a_callable_gives_its_own_arrays(eqx, donate, kind):
    """An instance, a bound method, a Partial: its arrays go, and are not the first argument."""

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x, self.weight + x

        def apply(self, x):
            return self(x)

    layer = Layer(ramp(3))
    partial = eqx.Partial(Layer.__call__, layer)
    call = {"instance": layer, "method": layer.apply, "Partial": partial}[kind]
    x = ramp(3) + 1
    out = eqx.filter_jit(call, donate=donate)(x)
    return out, layer.weight.is_deleted(), x.is_deleted()


@same_under_both_imports
def test_donation_of_a_method_counts_self_as_first(eqx):
    """`"all-except-first"` on a method keeps the Module and gives away the rest."""

    class Layer(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit(donate="all-except-first")
        def __call__(self, x):
            return self.weight + x

    layer, x = Layer(ramp(4)), ramp(4) + 1
    return layer(x), layer.weight.is_deleted(), x.is_deleted()


@same_under_both_imports
def test_lower_and_compile(eqx):
    """`.lower(...)` takes arrays and static values; the compiled object is called alike."""

    @eqx.filter_jit
    def power(x, n, *, name):
        return {name: x**n, "n": n}

    square = power.lower(ramp(2), 2, name="y")
    cube = power.lower(ramp(2), n=3, name="z").compile()
    results = square.compile()(ramp(2) + 1, 2, name="y"), cube(ramp(2), n=3, name="z")
    return results, "stablehlo.multiply" in square.as_text()


@same_under_both_imports
def test_a_compiled_function_refuses_other_shapes(eqx):
    """What was compiled for one shape is not called with another."""
    compiled = eqx.filter_jit(lambda x: x + 1).lower(ramp(2)).compile()
    return compiled(ramp(2)), caught(lambda: compiled(ramp(3)))


@same_under_both_imports
def test_lowering_a_method(eqx):
    """A decorated method lowers with its Module as the first argument."""

    class Layer(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit
        def apply(self, x):
            return self.weight * x

    layer = Layer(ramp(2))
    return Layer.apply.lower(layer, ramp(2)).compile()(layer, ramp(2) + 1)


@same_under_both_imports
def test_errors_come_through(eqx):
    """What the function raises while it is traced is what the caller sees."""

    @eqx.filter_jit
    def fail(x, flag):
        if flag:
            raise KeyError("from inside")
        return x if x.sum() > 0 else -x

    return [
        caught(lambda: fail(ramp(2), True), about="from inside"),
        caught(lambda: fail(ramp(2), False)),
        caught(lambda: fail(ramp(2)), about="flag"),
        caught(lambda: fail(ramp(2), False, 1)),
        caught(lambda: fail(ramp(2), flag=False, other=1), about="other"),
        caught(lambda: eqx.filter_jit(lambda x: x)({1, 2})),
    ]


@same_under_both_imports
def test_the_same_argument_twice(eqx):
    """Aliases are independent inputs."""

    class Layer(eqx.Module):
        weight: jax.Array

    layer = Layer(ramp(2))
    update = eqx.filter_jit(lambda a, b: (eqx.tree_at(lambda m: m.weight, a, a.weight + 1), b))
    return update(layer, layer)


@same_under_both_imports
def test_a_training_loop(eqx):
    """Gradient descent with a jitted step reaches the same weights after a few steps."""

    class Line(eqx.Module):
        slope: jax.Array
        offset: jax.Array
        degree: int = eqx.field(static=True, default=1)

        def __call__(self, x):
            return self.slope * x**self.degree + self.offset

    @eqx.filter_jit
    def step(model, x, y, rate):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        updates = jax.tree.map(lambda g: -rate * g, grads)
        return eqx.apply_updates(model, updates), loss

    model, losses = Line(jnp.float32(0.0), jnp.float32(0.0)), []
    for _ in range(5):
        model, loss = step(model, ramp(8), 3 * ramp(8) + 1, 0.5)
        losses.append(loss)
    return model, losses
