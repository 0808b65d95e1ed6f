"""Laws of every transform: its callables, binding as a method, and nesting.

The function is always the same, the sum of squares, of which each transform can be made to give the
value again: derivatives by way of `f(x) = f'(x) x / 2`. So a transform of a transform of it, and so
on, must give the sum of squares, too.
"""

import functools as ft
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as jax_checkify
from jax.sharding import Mesh

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.meshes import DEVICES
from tests.helpers.trees import Holder, ramp

X = ramp(2)
MESH = Mesh(np.array(DEVICES[:1]), ("only",))
ONLY = jax.sharding.PartitionSpec()


def squares(x):
    """The sum of squares."""
    return jnp.sum(x * x)


VALUE = squares(X)


# ---- each transform, ours and JAX's, as a way to call `f`


def through_vmap(vmap):
    return lambda f: lambda x: vmap(f)(x[None])[0]


def through_derivative(derivative):
    return lambda f: lambda x: jnp.sum(derivative(f)(x) * x) / 2


def through_value_and_grad(value_and_grad):
    return lambda f: lambda x: value_and_grad(f)(x)[0]


def through_hessian(hessian):
    return lambda f: lambda x: x @ hessian(f)(x) @ x / 2


def through_jvp(jvp):
    return lambda f: lambda x: jvp(f, (x,), (x,))[1] / 2


def through_vjp(vjp):
    def transform(f):
        def run(x):
            y, pull = vjp(f, x)
            return jnp.sum(pull(jnp.ones_like(y))[0] * x) / 2

        return run

    return transform


def through_linearize(linearize):
    return lambda f: lambda x: linearize(f, x)[1](x) / 2


def through_scan(scan):
    return lambda f: lambda x: scan(lambda n, x: (n + 1, f(x)), 0, x[None])[1][0]


def through_map(map):
    return lambda f: lambda x: map(f, x[None])[0]


def through_associative_scan(scan):
    def transform(f):
        def second(a, b):
            rows = [0 * row + f(row) for row in b]
            return jnp.stack(rows) if rows else a

        return lambda x: scan(second, jnp.stack([x, x]))[1][0]

    return transform


def through_cond(cond):
    return lambda f: lambda x: cond(x[0] > -99, f, lambda x: 2 * f(x), x)


def through_switch(switch):
    return lambda f: lambda x: switch(1, [lambda x: 2 * f(x), f], x)


def through_while_loop(loop):
    def transform(f):
        def body(carry):
            i, x, y = carry
            return i + 1, x, y + f(x)

        return lambda x: loop(lambda carry: carry[0] < 1, body, (0, x, jnp.zeros(())))[2]

    return transform


def through_fori_loop(loop):
    return lambda f: lambda x: loop(0, 1, lambda i, y: y + f(x), jnp.zeros(()))


def through_shard_map(shard_map):
    specs = {"mesh": MESH, "in_specs": ONLY, "out_specs": ONLY}
    return lambda f: lambda x: shard_map(f, **specs)(x)


def through_callback(callback):
    return lambda f: lambda x: callback(lambda x: np.asarray(f(jnp.asarray(x))), x)


SCALAR = jax.ShapeDtypeStruct((), np.float32)
ONE_BY_ONE = {"vmap_method": "sequential"}


def pure_callback(f, x):
    return pm.filter_pure_callback(f, x, result_shape_dtypes=SCALAR, **ONE_BY_ONE)


def io_callback(f, x):
    return pm.filter_io_callback(f, x, result_shape_dtypes=SCALAR)


def jax_pure_callback(f, x):
    return jax.pure_callback(f, SCALAR, x, **ONE_BY_ONE)


def jax_io_callback(f, x):
    return jax.experimental.io_callback(f, SCALAR, x)


def through_checkify(checkify):
    return lambda f: lambda x: checkify(f)(x)[1]


def through_custom_jvp(custom_jvp):
    def transform(f):
        made = custom_jvp(f)
        define = made.defjvp if custom_jvp is jax.custom_jvp else made.def_jvp
        define(lambda primals, tangents: jax.jvp(f, primals, tangents))
        return made

    return transform


def through_custom_vjp(custom_vjp):
    def transform(f):
        made = custom_vjp(f)
        made.def_fwd(lambda perturbed, x: (f(x), None))
        made.def_bwd(lambda residuals, g, perturbed, x: g * jax.grad(f)(x))
        return made

    return transform


def through_jax_custom_vjp(custom_vjp):
    def transform(f):
        made = custom_vjp(f)
        made.defvjp(lambda x: (f(x), x), lambda x, g: (g * jax.grad(f)(x),))
        return made

    return transform


def through_closure_convert(convert):
    return lambda f: lambda x: convert(f, x)(x)


def jax_closure_convert(f, x):
    converted, constants = jax.closure_convert(f, x)
    return lambda x: converted(x, *constants)


# By name: how to call by way of it, ours, JAX's.
WAYS = {
    "jit": (lambda jit: jit, pm.filter_jit, jax.jit),
    "checkpoint": (lambda checkpoint: checkpoint, pm.filter_checkpoint, jax.checkpoint),
    "vmap": (through_vmap, pm.filter_vmap, jax.vmap),
    "pmap": (through_vmap, pm.filter_pmap, jax.pmap),
    "grad": (through_derivative, pm.filter_grad, jax.grad),
    "value_and_grad": (through_value_and_grad, pm.filter_value_and_grad, jax.value_and_grad),
    "jacfwd": (through_derivative, pm.filter_jacfwd, jax.jacfwd),
    "jacrev": (through_derivative, pm.filter_jacrev, jax.jacrev),
    "hessian": (through_hessian, pm.filter_hessian, jax.hessian),
    "jvp": (through_jvp, pm.filter_jvp, jax.jvp),
    "vjp": (through_vjp, pm.filter_vjp, jax.vjp),
    "linearize": (through_linearize, pm.filter_linearize, jax.linearize),
    "scan": (through_scan, pm.filter_scan, jax.lax.scan),
    "map": (through_map, pm.filter_map, jax.lax.map),
    "associative_scan": (
        through_associative_scan,
        pm.filter_associative_scan,
        jax.lax.associative_scan,
    ),
    "cond": (through_cond, pm.filter_cond, jax.lax.cond),
    "switch": (through_switch, pm.filter_switch, jax.lax.switch),
    "while_loop": (through_while_loop, pm.filter_while_loop, jax.lax.while_loop),
    "fori_loop": (through_fori_loop, pm.filter_fori_loop, jax.lax.fori_loop),
    "shard_map": (through_shard_map, pm.filter_shard_map, jax.shard_map),
    "pure_callback": (through_callback, pure_callback, jax_pure_callback),
    "io_callback": (through_callback, io_callback, jax_io_callback),
    "checkify": (through_checkify, pm.filter_checkify, jax_checkify.checkify),
    "custom_jvp": (through_custom_jvp, pm.filter_custom_jvp, jax.custom_jvp),
    "closure_convert": (through_closure_convert, pm.filter_closure_convert, jax_closure_convert),
}
OURS = {name: way(ours) for name, (way, ours, _) in WAYS.items()}
JAXS = {name: way(theirs) for name, (way, _, theirs) in WAYS.items()}
OURS["custom_vjp"] = through_custom_vjp(pm.filter_custom_vjp)
JAXS["custom_vjp"] = through_jax_custom_vjp(jax.custom_vjp)
EVERY = pytest.mark.parametrize("name", OURS)
# JAX refuses these only when it compiles.
LATER = {name: {"custom_vjp"} for name in ("jvp", "linearize")}

CALLBACKS = {"pure_callback", "io_callback"}
REVERSE = {"while_loop", *CALLBACKS}
MANUAL = {"pmap", "shard_map"}
# JAX does not support these: derivatives of a callback, reverse mode of a loop without a bound,
# forward mode of a backward rule; and a device can be in a mesh only once.
REFUSED = {
    **dict.fromkeys(["grad", "value_and_grad", "jacrev", "hessian", "vjp"], REVERSE),
    **dict.fromkeys(["jvp", "linearize"], CALLBACKS),
    "jacfwd": {"custom_vjp", *CALLBACKS},
    **dict.fromkeys(MANUAL, MANUAL),
}


def attempt(fn):
    """The shape of a program's result, or the error that it raises."""
    try:
        return jax.eval_shape(fn, X).shape
    except Exception as error:
        return error


def pairs(outer, inner):
    """A transform of a transform: of ours, and with one of JAX's."""
    yield OURS[outer](OURS[inner](squares))
    yield OURS[outer](JAXS[inner](squares))
    yield JAXS[outer](OURS[inner](squares))


def leaks(transform, f):
    """The leak that JAX finds in a program, bare and differentiated in a compiled one, or None."""
    for around in (lambda f: f, lambda f: JAXS["jit"](JAXS["grad"](f))):
        try:
            with jax.checking_leaks():
                around(transform(f))(X)
        except Exception as error:
            if "Leaked" in str(error):
                return str(error)
    return None


@EVERY
@pytest.mark.sampled
@pytest.mark.collects
def test_nothing_that_is_traced_outlives_its_trace(name):
    """`filter_grad` had held the rebuilt arguments for as long as the call ran.

    A callback of a program holds none of the arrays either: it lives as long as the program.
    """
    layer = Layer(ramp(2, 2), jnp.tanh, jnp.asarray(3))
    assert leaks(OURS[name], lambda x: squares(layer(x)[0])) is None


class Counter(pm.Module):
    """Counts its calls."""

    count: pm.StateIndex

    def __init__(self):
        self.count = pm.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        state = state.set(self.count, state.get(self.count) + 1)
        return x * state.get(self.count), state


def counted(call, x, state):
    """A sum that has used State."""
    y, state = call(x, state)
    return jnp.sum(y), state


LOOPS = {
    "jax's scan": lambda m, s: jax.lax.scan(lambda s, x: m(x, s)[::-1], s, X),
    "scan": lambda m, s: pm.filter_scan(lambda s, x: m(x, s)[::-1], s, X),
    "checkpoint": lambda m, s: pm.filter_checkpoint(m)(X, s),
    "vmap": lambda m, s: pm.filter_vmap(m, in_axes=(0, None), out_axes=(0, None))(X, s),
    "grad": lambda m, s: pm.filter_grad(lambda x, s: counted(m, x, s), has_aux=True)(X, s),
    "part": lambda m, s: (lambda y, part: (y, s.update(part)))(*m(X, s.substate(m))),
    "part in a scan": lambda m, s: s.update(
        jax.lax.scan(lambda s, x: m(x, s)[::-1], s.substate(m), X)[0]
    ),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.collects
def test_no_state_outlives_its_trace(loop):
    """The outer function had held all States made inside, to watch them."""
    model, state = pm.make_with_state(Counter)()
    with jax.checking_leaks():
        pm.filter_jit(loop)(model, state)


@pytest.mark.slow
@EVERY
def test_nests_in_every_other(name):
    """Each transform of ours or of JAX's fits into it, and it into them.

    Where a pair does not fit, JAX's own pair does not either.
    """
    refused = set()
    for inner in OURS:
        for fn in pairs(name, inner):
            found = attempt(fn)
            if isinstance(found, Exception):
                theirs = attempt(JAXS[name](JAXS[inner](squares)))
                assert isinstance(theirs, Exception), (name, inner, found)
                refused.add(inner)
            else:
                assert found == ()
    assert refused == REFUSED.get(name, set())


@pytest.mark.slow
@EVERY
def test_values_of_pairs(name):
    """Whatever fits together gives the value."""
    for inner in set(OURS) - REFUSED.get(name, set()) - LATER.get(name, set()):
        found = jax.jit(OURS[name](OURS[inner](squares)))(X)
        np.testing.assert_allclose(found, VALUE, rtol=1e-5, err_msg=inner)


CHAIN = ["jit", "vmap", "grad", "scan", "cond", "checkpoint", "jvp", "custom_jvp", "switch", "vjp"]


@pytest.mark.parametrize("turn", range(0, len(CHAIN), 3))
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.sampled
def test_values_of_chains(turn, direction):
    """Ten transforms, one around the other, in several orders, give the value of the innermost."""
    chain = CHAIN[turn:] + CHAIN[:turn]
    fn = squares
    for name in chain[::direction]:
        fn = OURS[name](fn)

    assert_close(jax.jit(fn)(X), VALUE)


# ---- callables of a transform


class Squares(pm.Module):
    """The function as a Module."""

    scale: jax.Array

    def __call__(self, x):
        return jnp.sum(x * x) * self.scale

    def apply(self, x):
        return self(x)

    @classmethod
    def of_one(cls, x):
        return cls(jnp.ones(()))(x)


class Plain:
    """A callable that is not a pytree."""

    def __call__(self, x):
        return squares(x)


def scaled(scale, x):
    return squares(x) * scale


ONE = Squares(jnp.ones(()))
CALLABLES = {
    "function": squares,
    "Module": ONE,
    "bound method": ONE.apply,
    "class method": Squares.of_one,
    "Partial": pm.Partial(scaled, jnp.ones(())),
    "JAX's Partial": jax.tree_util.Partial(scaled, jnp.ones(())),
    "functools.partial": ft.partial(scaled, 1.0),
    "object": Plain(),
    "jitted by JAX": jax.jit(squares),
    "jitted Module": pm.filter_jit(ONE),
}


@EVERY
@pytest.mark.sampled
def test_takes_every_kind_of_callable(name):
    """Functions, Modules, bound methods, partials, objects, and transformed functions."""
    for kind, fn in CALLABLES.items():
        through = OURS[name](fn)
        through = jax.jit(through) if name == "shard_map" else through
        np.testing.assert_allclose(through(X), VALUE, rtol=1e-5, err_msg=kind)


class Halves(pm.Module):
    """A class whose call returns a Module."""

    first: jax.Array
    second: jax.Array
    name: str

    def __init__(self, x):
        self.first, self.second, self.name = x[:1], x[1:], "halves"


OF_A_CLASS = {
    "jit": lambda: pm.filter_jit(Halves)(X),
    "checkpoint": lambda: pm.filter_checkpoint(Halves)(X),
    "vmap": lambda: jax.tree.map(lambda x: x[0], pm.filter_vmap(Halves)(X[None])),
    "pmap": lambda: jax.tree.map(lambda x: x[0], pm.filter_pmap(Halves)(X[None])),
    "jvp": lambda: pm.filter_jvp(Halves, (X,), (X,))[0],
    "vjp": lambda: pm.filter_vjp(Halves, X)[0],
    "linearize": lambda: pm.filter_linearize(Halves, X)[0],
    "map": lambda: jax.tree.map(lambda x: x[0], pm.filter_map(Halves, X[None])),
    "cond": lambda: pm.filter_cond(True, Halves, lambda x: Halves(-x), X),
    "switch": lambda: pm.filter_switch(1, [lambda x: Halves(-x), Halves], X),
    "shard_map": lambda: pm.filter_jit(
        pm.filter_shard_map(Halves, mesh=MESH, in_specs=None, out_specs=None)
    )(X),
    "checkify": lambda: pm.filter_checkify(Halves)(X)[1],
    "closure_convert": lambda: pm.filter_closure_convert(Halves, X)(X),
}


@pytest.mark.parametrize("name", OF_A_CLASS)
def test_a_class_gives_its_instance(name):
    """A class is a function that builds a Module: the result has non-array leaves as well."""
    made = OF_A_CLASS[name]()

    assert type(made) is Halves
    assert made.name == "halves"
    assert_close(made, Halves(X))


def test_tangents_and_shapes_of_a_class():
    """Derivatives of a constructor are Modules, and so is its skeleton."""
    tangent = pm.filter_jvp(Halves, (X,), (X,))[1]
    rows = pm.filter_jacfwd(Halves)(X), pm.filter_jacrev(Halves)(X)
    skeleton = pm.filter_eval_shape(Halves, X)

    assert type(tangent) is type(skeleton) is Halves
    assert_close(tangent.second, X[1:])
    for jacobian in rows:
        assert_close(jacobian.first, jnp.eye(2)[:1])
    assert skeleton.first.shape == (1,)


# ---- decorators

# With options that change nothing: decorators.
DECORATORS = {
    "filter_jit": {"donate": "none"},
    "filter_checkpoint": {"prevent_cse": True},
    "filter_vmap": {"in_axes": (None, 0)},
    "filter_pmap": {"in_axes": (None, 0)},
    "filter_grad": {"has_aux": False},
    "filter_value_and_grad": {"has_aux": False},
    "filter_jacfwd": {"has_aux": False},
    "filter_jacrev": {"has_aux": False},
    "filter_hessian": {"has_aux": False},
    "filter_vjp": {"has_aux": False},
    "filter_linearize": {"has_aux": False},
    "filter_shard_map": {"mesh": MESH, "in_specs": None, "out_specs": None},
    "filter_checkify": {},
    "filter_make_jaxpr": {},
}
# The former needs an argument, the latter takes none.
BARE = [name for name in DECORATORS if name not in ("filter_shard_map", "filter_make_jaxpr")]


def decorator_of(name):
    """The decorator."""
    return (
        getattr(pm, name) if name == "filter_make_jaxpr" else getattr(pm, name)(**DECORATORS[name])
    )


def decorated(decorate):
    """A class with a decorated method."""

    class Layer(pm.Module):
        weight: jax.Array

        @decorate
        def loss(self, x):
            """The loss."""
            return jnp.sum(self.weight * x)

    return Layer(jnp.asarray(2.0))


def comparable(tree):
    """The arrays of a result; of functions and programs in it, nothing."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorated_method_binds(name):
    """It binds as methods do; name, docstring and signature are the function's."""
    layer = decorated(decorator_of(name))
    x = jnp.ones(1)
    through = jax.jit if name == "filter_shard_map" else lambda fn: fn

    bound = through(lambda layer, x: layer.loss(x))(layer, x)
    free = through(lambda layer, x: type(layer).loss(layer, x))(layer, x)
    assert_close(comparable(bound), comparable(free))
    assert comparable(bound) or name == "filter_make_jaxpr"
    assert (layer.loss.__name__, layer.loss.__doc__) == ("loss", "The loss.")
    assert list(inspect.signature(layer.loss).parameters) == ["x"]
    assert list(inspect.signature(type(layer).loss).parameters) == ["self", "x"]
    assert inspect.unwrap(type(layer).loss).__name__ == "loss"
    assert repr(type(layer).loss).startswith(f"<{name} of ")


@pytest.mark.parametrize("name", BARE)
def test_decorators_with_and_without_options(name):
    """`@transform`, `@transform()` and `@transform(option=...)` are three spellings of one."""
    transform = getattr(pm, name)
    options = {k: v for k, v in DECORATORS[name].items() if k != "in_axes"}
    made = [transform(squares), transform()(squares), transform(**options)(squares)]

    assert made[0] == made[1] == made[2]
    x = X[None] if "map" in name else X
    assert_close(comparable(made[0](x)), comparable(made[1](x)))


@pytest.mark.parametrize("name", DECORATORS)
def test_transformed_functions_are_kept_in_fields(name):
    """A transformed Module in a field is a part of the model: its arrays are the model's."""
    made = decorator_of(name)(ONE)
    holder = Holder(made)

    (leaf,) = jax.tree.leaves(holder)
    assert leaf is ONE.scale
    again = pm.filter_jit(lambda h: h)(jax.tree.map(lambda x: 2 * x, holder))
    assert type(again.content) is type(made)
    assert_close(again.content.__wrapped__.scale, 2 * ONE.scale)
    assert again.content.__name__ == "Squares"


@pytest.mark.parametrize("make", [pm.filter_custom_jvp, pm.filter_custom_vjp])
def test_rules_of_methods(make):
    """A method with a custom derivative binds, too; its rule gets the instance."""

    class Layer(pm.Module):
        weight: jax.Array

        @make
        def scaled(self, x):
            """Scales."""
            return self.weight * x

        if make is pm.filter_custom_jvp:

            @scaled.def_jvp
            def rule(primals, tangents):
                (self, x), (d_self, _) = primals, tangents
                return self.weight * x, 100.0 * d_self.weight * x

        else:

            @scaled.def_fwd
            def forward(perturbed, self, x):
                return self.weight * x, None

            @scaled.def_bwd
            def backward(residuals, g, perturbed, self, x):
                return Layer(100.0 * g * x)

    layer = Layer(jnp.asarray(2.0))
    gradient = pm.filter_grad(lambda layer, x: layer.scaled(x))(layer, jnp.asarray(3.0))
    assert_close(layer.scaled(jnp.asarray(3.0)), jnp.asarray(6.0))
    assert_close(gradient.weight, jnp.asarray(300.0))
    assert (layer.scaled.__name__, layer.scaled.__doc__) == ("scaled", "Scales.")


# ---- Linen's table of lifted transformations (L15), and later ones


class Layer(pm.Module):
    """Parameters, a function, a name, and a count that each call changes."""

    weight: jax.Array
    act: object
    count: jax.Array = pm.buffer()

    def __call__(self, x):
        return self.act(self.weight @ x), self.replace(count=self.count + 1)


def call(layer, x):
    return layer(x)


def first_of(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def by_value_and_grad(layer, x):
    def loss(layer, x):
        y, layer = layer(x)
        return jnp.sum(y), (y, layer)

    (_, out), gradient = pm.filter_value_and_grad(loss, has_aux=True)(layer, x)
    assert (gradient.count, gradient.act) == (None, layer.act)
    return out


def by_while_loop(layer, x):
    def body(carry):
        n, layer, _ = carry
        y, layer = layer(x)
        return n + 1, layer, y

    return pm.filter_while_loop(lambda carry: carry[0] < 1, body, (0, layer, 0 * x))[:0:-1]


def by_scan(layer, x):
    def step(layer, x):
        y, layer = layer(x)
        return layer, y

    layer, ys = pm.filter_scan(step, layer, x[None])
    return ys[0], layer


def by_custom_jvp(layer, x):
    fn = pm.filter_custom_jvp(call)
    fn.def_jvp(lambda primals, tangents: (call(*primals), None))
    return fn(layer, x)


def by_custom_vjp(layer, x):
    fn = pm.filter_custom_vjp(call)
    fn.def_fwd(lambda perturbed, layer, x: (call(layer, x), None))
    fn.def_bwd(lambda residuals, g, perturbed, layer, x: layer)
    return fn(layer, x)


ONE_LAYER = {"in_axes": (None, 0), "out_axes": (0, None)}
EVERYWHERE = {"mesh": MESH, "in_specs": None, "out_specs": None}
TABLE = {
    "vmap": lambda m, x: (lambda y, m: (y[0], m))(*pm.filter_vmap(call, **ONE_LAYER)(m, x[None])),
    "scan": by_scan,
    "remat": pm.filter_checkpoint(call),
    "jit": pm.filter_jit(call),
    "jvp": lambda m, x: pm.filter_jvp(call, (m, x), (None, x))[0],
    "vjp": lambda m, x: pm.filter_vjp(call, m, x)[0],
    "custom_jvp": by_custom_jvp,
    "custom_vjp": by_custom_vjp,
    "while_loop": by_while_loop,
    "cond": lambda m, x: pm.filter_cond(True, call, lambda m, x: (0 * x, m), m, x),
    "switch": lambda m, x: pm.filter_switch(1, [lambda m, x: (0 * x, m), call], m, x),
    "pmap": lambda m, x: first_of(pm.filter_pmap(call, in_axes=(None, 0))(m, x[None])),
    "value_and_grad": by_value_and_grad,
    "linearize": lambda m, x: pm.filter_linearize(call, m, x)[0],
    "fori_loop": lambda m, x: pm.filter_fori_loop(0, 1, lambda i, ym: ym[1](x), (0 * x, m)),
    "map": lambda m, x: first_of(pm.filter_map(lambda x: m(x), x[None])),
    "shard_map": pm.filter_jit(pm.filter_shard_map(call, **EVERYWHERE)),
    "checkify": lambda m, x: pm.filter_checkify(call)(m, x)[1],
    "closure_convert": lambda m, x: pm.filter_closure_convert(call, m, x)(m, x),
}


@pytest.mark.parametrize("through", TABLE.values(), ids=TABLE)
@pytest.mark.sampled
def test_a_model_that_changes_goes_through(through):
    """Parameters, functions and counts go in; the updated ones are returned."""
    layer = Layer(ramp(2, 2), jnp.tanh, jnp.asarray(3))
    y, after = through(layer, X)

    assert_close(y, jnp.tanh(ramp(2, 2) @ X))
    assert (int(after.count), after.act) == (4, jnp.tanh)
    assert_close(after.weight, layer.weight)
