"""Laws of every transform: callables, binding as a method, nesting, errors by path.

The function is always the sum of squares. Each transform can be made to give its value again:
derivatives by `f(x) = f'(x) x / 2`. So a transform of a transform of it must give it, too.
"""

import functools as ft
import inspect

import jax
import jax.experimental.checkify
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.meshes import DEVICES
from tests.helpers.trees import ramp

X = ramp(2)
MESH = Mesh(np.array(DEVICES[:1]), ("only",))
SPECS = {"mesh": MESH, "in_specs": P(), "out_specs": P()}


def squares(x):
    """The sum of squares."""
    return jnp.sum(x * x)


VALUE = squares(X)


# ---- each transform, ours and JAX's, as a way to call `f`


def by_derivative(derivative, f, x):
    return jnp.sum(derivative(f)(x) * x) / 2


def by_vjp(vjp, f, x):
    y, pull = vjp(f, x)
    return jnp.sum(pull(jnp.ones_like(y))[0] * x) / 2


def by_associative_scan(scan, f, x):
    def second(a, b):
        rows = [0 * row + f(row) for row in b]
        return jnp.stack(rows) if rows else a

    return scan(second, jnp.stack([x, x]))[1][0]


def by_while_loop(loop, f, x):
    step = lambda carry: (carry[0] + 1, carry[1] + f(x))  # noqa: E731
    return loop(lambda carry: carry[0] < 1, step, (0, jnp.zeros(())))[1]


def by_custom_jvp(custom_jvp, f, x):
    made = custom_jvp(f)
    define = made.defjvp if custom_jvp is jax.custom_jvp else made.def_jvp
    define(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return made(x)


def by_custom_vjp(custom_vjp, f, x):
    made = custom_vjp(f)
    if custom_vjp is jax.custom_vjp:
        made.defvjp(lambda x: (f(x), x), lambda x, g: (g * jax.grad(f)(x),))
    else:
        made.def_fwd(lambda perturbed, x: (f(x), None))
        made.def_bwd(lambda residuals, g, perturbed, x: g * jax.grad(f)(x))
    return made(x)


def by_callback(callback, f, x):
    on_host = lambda x: np.asarray(f(jnp.asarray(x)))  # noqa: E731
    options = {} if "io" in callback.__name__ else {"vmap_method": "sequential"}
    struct = jax.ShapeDtypeStruct((), np.float32)
    if callback.__name__.startswith("filter"):
        return callback(on_host, x, result_shape_dtypes=struct, **options)
    return callback(on_host, struct, x, **options)


def by_closure_convert(convert, f, x):
    if convert is pm.filter_closure_convert:
        return convert(f, x)(x)
    converted, constants = convert(f, x)
    return converted(x, *constants)


WAYS = {
    "jit": lambda jit, f, x: jit(f)(x),
    "checkpoint": lambda checkpoint, f, x: checkpoint(f)(x),
    "vmap": lambda vmap, f, x: vmap(f)(x[None])[0],
    "pmap": lambda pmap, f, x: pmap(f)(x[None])[0],
    "grad": by_derivative,
    "value_and_grad": lambda value_and_grad, f, x: value_and_grad(f)(x)[0],
    "jacfwd": by_derivative,
    "jacrev": by_derivative,
    "hessian": lambda hessian, f, x: x @ hessian(f)(x) @ x / 2,
    "jvp": lambda jvp, f, x: jvp(f, (x,), (x,))[1] / 2,
    "vjp": by_vjp,
    "linearize": lambda linearize, f, x: linearize(f, x)[1](x) / 2,
    "scan": lambda scan, f, x: scan(lambda n, x: (n + 1, f(x)), 0, x[None])[1][0],
    "map": lambda map, f, x: map(f, x[None])[0],
    "associative_scan": by_associative_scan,
    "cond": lambda cond, f, x: cond(x[0] > -99, f, lambda x: 2 * f(x), x),
    "switch": lambda switch, f, x: switch(1, [lambda x: 2 * f(x), f], x),
    "while_loop": by_while_loop,
    "fori_loop": lambda loop, f, x: loop(0, 1, lambda i, y: y + f(x), jnp.zeros(())),
    "shard_map": lambda shard_map, f, x: shard_map(f, **SPECS)(x),
    "custom_jvp": by_custom_jvp,
    "custom_vjp": by_custom_vjp,
    "pure_callback": by_callback,
    "io_callback": by_callback,
    "checkify": lambda checkify, f, x: checkify(f)(x)[1],
    "closure_convert": by_closure_convert,
}


def jaxs(name):
    """JAX's own transform."""
    places = (jax, jax.lax, jax.experimental, jax.experimental.checkify)
    return next(getattr(place, name) for place in places if callable(getattr(place, name, None)))


def through(way, transform):
    return lambda f: lambda x: way(transform, f, x)


OURS = {name: through(way, getattr(pm, f"filter_{name}")) for name, way in WAYS.items()}
JAXS = {name: through(way, jaxs(name)) for name, way in WAYS.items()}
EVERY = pytest.mark.parametrize("name", OURS)
# JAX refuses these only when it compiles.
LATER = {name: {"custom_vjp"} for name in ("jvp", "linearize")}

CALLBACKS = {"pure_callback", "io_callback"}
REVERSE = {"while_loop", *CALLBACKS}
# JAX does not support these: derivatives of a callback, reverse mode of a loop without a bound,
# forward mode of a backward rule; and a device can be in a mesh only once.
REFUSED = {
    **dict.fromkeys(["grad", "value_and_grad", "jacrev", "hessian", "vjp"], REVERSE),
    **dict.fromkeys(["jvp", "linearize"], CALLBACKS),
    "jacfwd": {"custom_vjp", *CALLBACKS},
    "pmap": {"shard_map"},
    "shard_map": {"pmap", "shard_map"},
}


def attempt(fn):
    """The shape of a program's result, or the error that it raises."""
    try:
        return jax.eval_shape(fn, X).shape
    except Exception as error:
        return error


@pytest.mark.slow
@EVERY
def test_nests_in_every_other(name):
    """Each transform of ours or of JAX's fits into it, and it into them, with the same value.

    Where a pair does not fit, JAX's own pair does not either.
    """
    refused = set()
    for inner in OURS:
        ours = [OURS[name](OURS[inner](squares)), OURS[name](JAXS[inner](squares))]
        for fn in [*ours, JAXS[name](OURS[inner](squares))]:
            found = attempt(fn)
            if found != ():
                assert isinstance(attempt(JAXS[name](JAXS[inner](squares))), Exception), found
                refused.add(inner)
        if inner not in REFUSED.get(name, set()) | LATER.get(name, set()):
            np.testing.assert_allclose(jax.jit(ours[0])(X), VALUE, rtol=1e-5, err_msg=inner)
    assert refused == REFUSED.get(name, set())


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


@EVERY
@pytest.mark.sampled
@pytest.mark.collects
def test_nothing_that_is_traced_outlives_its_trace(name):
    """`filter_grad` had held the rebuilt arguments for as long as the call ran."""
    layer = Layer(ramp(2, 2), jnp.tanh, jnp.asarray(3))
    run = OURS[name](lambda x: squares(layer(x)[0]))
    for fn in (run, jax.jit(JAXS["grad"](run))):
        try:
            with jax.checking_leaks():
                fn(X)
        except Exception as error:
            assert "Leaked" not in str(error)  # noqa: PT017  (others are refusals of JAX)


def count(index, x, state):
    """Counts its calls."""
    state = state.set(index, state.get(index) + 1)
    return x * state.get(index), state


FOR_EACH = {"in_axes": (0, None), "out_axes": (0, None)}
LOOPS = {
    "jax's scan": lambda f, s: jax.lax.scan(lambda s, x: f(x, s)[::-1], s, X),
    "scan": lambda f, s: pm.filter_scan(lambda s, x: f(x, s)[::-1], s, X),
    "vmap": lambda f, s: pm.filter_vmap(f, **FOR_EACH)(X, s),
    "grad": lambda f, s: pm.filter_grad(f, has_aux=True)(X[0], s),
    "part": lambda f, s: (lambda y, part: (y, s.update(part)))(*f(X, s.substate(f))),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.collects
def test_no_state_outlives_its_trace(loop):
    """The outer function had held all States made inside, to watch them."""
    index, state = pm.make_with_state(pm.StateIndex)(jnp.zeros(()))
    with jax.checking_leaks():
        pm.filter_jit(loop)(pm.Partial(count, index), state)


# ---- callables of a transform


def forward(f):
    return lambda x: jax.jvp(f, (x,), (x,))


class Squares(pm.Module):
    """The function as a Module."""

    scale: jax.Array
    name: str = "squares"

    def __call__(self, x):
        return jnp.sum(x * x) * self.scale

    def apply(self, x):
        return self(x)

    @classmethod
    def of_one(cls, x):
        return cls(jnp.ones(()))(x)


ONE = Squares(jnp.ones(()))
CALLABLES = {
    "function": squares,
    "Module": ONE,
    "bound method": ONE.apply,
    "class method": Squares.of_one,
    "Partial": pm.Partial(Squares.apply, ONE),
    "JAX's Partial": jax.tree_util.Partial(Squares.apply, ONE),
    "functools.partial": ft.partial(Squares.apply, ONE),
    "object": type("Plain", (), {"__call__": lambda self, x: squares(x)})(),
    "jitted by JAX": jax.jit(squares),
    "jitted Module": pm.filter_jit(ONE),
}


@EVERY
@pytest.mark.sampled
def test_takes_every_kind_of_callable(name):
    """Functions, Modules, bound methods, partials, objects, and transformed functions."""
    for kind, fn in CALLABLES.items():
        call = OURS[name](fn)
        call = jax.jit(call) if name == "shard_map" else call
        np.testing.assert_allclose(call(X), VALUE, rtol=1e-5, err_msg=kind)


@pytest.mark.parametrize("name", [name for name in OURS if name != "pmap"])
def test_no_operation_is_added(name):
    """The program of a Module, and its derivative, have the operations of JAX's of a function."""
    ours, by_hand = OURS[name](ONE), JAXS[name](lambda x: jnp.sum(x * x) * ONE.scale)
    assert equations(ours, X) == equations(by_hand, X)
    if name not in CALLBACKS:
        assert equations(forward(ours), X) == equations(forward(by_hand), X)


# ---- decorators

# With options that change nothing: decorators.
DERIVATIVES = ["grad", "value_and_grad", "jacfwd", "jacrev", "hessian", "vjp", "linearize"]
DECORATORS = {
    "filter_jit": {"donate": "none"},
    "filter_checkpoint": {"prevent_cse": True},
    "filter_vmap": {"in_axes": (None, 0)},
    "filter_pmap": {"in_axes": (None, 0)},
    **{f"filter_{name}": {"has_aux": False} for name in DERIVATIVES},
    "filter_shard_map": {"mesh": MESH, "in_specs": None, "out_specs": None},
    "filter_checkify": {},
    "filter_make_jaxpr": {},
}
# The former needs an argument, the latter takes none.
BARE = [name for name in DECORATORS if name not in ("filter_shard_map", "filter_make_jaxpr")]


def decorator_of(name):
    """The decorator."""
    made = getattr(pm, name)
    return made if name == "filter_make_jaxpr" else made(**DECORATORS[name])


def comparable(tree):
    """The arrays of a result; of functions and programs in it, nothing."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorated_method_binds(name):
    """It binds as methods do, to an instance and to none; the signature says so."""
    method = decorator_of(name)(Squares.apply)
    layer, x = type("Layer", (Squares,), {"apply": method})(jnp.asarray(2.0)), jnp.ones(1)
    jit = jax.jit if name == "filter_shard_map" else lambda fn: fn

    bound = jit(lambda layer, x: layer.apply(x))(layer, x)
    free = jit(lambda layer, x: type(layer).apply(layer, x))(layer, x)
    assert_close(comparable(bound), comparable(free))
    assert comparable(bound) or name == "filter_make_jaxpr"
    assert list(inspect.signature(layer.apply).parameters) == ["x"]
    assert list(inspect.signature(type(layer).apply).parameters) == ["self", "x"]


@pytest.mark.parametrize("name", BARE)
def test_decorators_with_and_without_options(name):
    """`@transform`, `@transform()` and `@transform(option=...)` are three spellings of one."""
    transform = getattr(pm, name)
    options = {k: v for k, v in DECORATORS[name].items() if k != "in_axes"}

    assert transform(squares) == transform()(squares) == transform(**options)(squares)


# ---- Linen's table of lifted transformations (L15), and later ones


class Layer(pm.Module):
    """Parameters, a function, a name, and a count that each call changes."""

    weight: jax.Array
    act: object
    count: jax.Array = pm.buffer()

    def __call__(self, x):
        return self.act(self.weight @ x), self.replace(count=self.count + 1)


call = Layer.__call__


def first_of(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def first_row(y, layer):
    return y[0], layer


def loss_and_all(layer, x):
    y, layer = layer(x)
    return jnp.sum(y), (y, layer)


def whole(name):
    """A transform of a function of the pair of the layer and x."""
    return lambda m, x: pm.filter_jit(OURS[name](lambda pair: call(*pair)))((m, x))


ONE_LAYER = {"in_axes": (None, 0), "out_axes": (0, None)}
WHOLE = ["jit", "checkpoint", "custom_jvp", "custom_vjp", "shard_map", "checkify"]
TABLE = {
    **{name: whole(name) for name in [*WHOLE, "closure_convert"]},
    "vmap": lambda m, x: first_row(*pm.filter_vmap(call, **ONE_LAYER)(m, x[None])),
    "scan": lambda m, x: first_row(*pm.filter_scan(lambda m, x: m(x)[::-1], m, x[None])[::-1]),
    "jvp": lambda m, x: pm.filter_jvp(call, (m, x), (None, x))[0],
    "vjp": lambda m, x: pm.filter_vjp(call, m, x)[0],
    "while_loop": lambda m, x: pm.filter_while_loop(
        lambda carry: carry[0] < 1, lambda carry: (carry[0] + 1, *carry[2](x)), (0, 0 * x, m)
    )[1:],
    "cond": lambda m, x: pm.filter_cond(True, call, lambda m, x: (0 * x, m), m, x),
    "switch": lambda m, x: pm.filter_switch(1, [lambda m, x: (0 * x, m), call], m, x),
    "pmap": lambda m, x: first_of(pm.filter_pmap(call, in_axes=(None, 0))(m, x[None])),
    "value_and_grad": lambda m, x: pm.filter_value_and_grad(loss_and_all, has_aux=True)(m, x)[0][1],
    "linearize": lambda m, x: pm.filter_linearize(call, m, x)[0],
    "fori_loop": lambda m, x: pm.filter_fori_loop(0, 1, lambda i, ym: ym[1](x), (0 * x, m)),
    "map": lambda m, x: first_of(pm.filter_map(lambda x: m(x), x[None])),
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
