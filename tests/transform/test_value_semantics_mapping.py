"""Programs of the founding documents, and of reference libraries, under value semantics.

The programs of the Flax proposal (F), the NNX guide (G) and Linen's note (L) with the shapes and
numbers that they print, or would print if they ran; then the scenarios of Flax NNX's own suite.
Changes are returned, and one value at two paths is two leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FrozenError
from tests.helpers.comparing import assert_close
from tests.helpers.meshes import DEVICES
from tests.helpers.trees import Holder, ramp


class Square(pm.Module):
    """One matrix."""

    kernel: jax.Array


class Weights(pm.Module):
    """The guide's Module."""

    kernel: jax.Array
    bias: jax.Array


class Counted(Weights):
    """The guide's Module with a count."""

    count: jax.Array = pm.buffer()


def dot(weights, x):
    """The guide's `vector_dot`."""
    y = x @ weights.kernel
    return y + jnp.broadcast_to(weights.bias, y.shape)


def counted(weights, x):
    """The guide's `stateful_vector_dot`."""
    return dot(weights, x), weights.replace(count=weights.count + 1)


def make_weights(seed):
    """The guide's `create_weights`."""
    return Weights(jax.random.uniform(jax.random.key(seed), (2, 3)), jnp.zeros(3))


M, WIDE = Square(ramp(4, 4)), Square(ramp(4, 5))
TURNED = Square(M.kernel.T)
WEIGHTS = Weights(ramp(10, 2, 3), ramp(10, 3))
KERNEL, BIAS = WEIGHTS.kernel, WEIGHTS.bias
COUNTED = Counted(KERNEL, BIAS, jnp.arange(10))
SINGLE = COUNTED.replace(count=jnp.asarray(0))
ONE, X = make_weights(0), ramp(10, 2)
Y = jnp.stack([x @ k + b for x, k, b in zip(X, KERNEL, BIAS, strict=True)])


def check(found, expected):
    """Equal values with equal shapes."""
    assert_close(found, expected)
    shapes = jax.tree.map(jnp.shape, expected)
    assert jax.tree.leaves(jax.tree.map(jnp.shape, found)) == jax.tree.leaves(shapes)


vmap = pm.filter_vmap
ROWS, DEEP = pm.by({"kernel": 0}), {"a": [0, pm.if_array(1)], "b": 1}
ALIASES = {
    "F8, one spec": (
        lambda: vmap(lambda a, b, c: (a.kernel + c.kernel, b), in_axes=(ROWS, 1, ROWS))(M, M, M),
        (2 * M.kernel, TURNED),
    ),
    "F9, consistent_aliasing_inputs": (
        lambda: vmap(lambda a, b: a.kernel - b.kernel, in_axes=(0, 1))(M, M),
        M.kernel - M.kernel.T,
    ),
    "F10, consistent_aliasing_input_output": (
        lambda: vmap(lambda m: m, in_axes=0, out_axes=1)(WIDE),
        Square(WIDE.kernel.T),
    ),
    "F11, an argument inside a result": (
        lambda: vmap(Holder, in_axes=0, out_axes=1)(WIDE),
        Holder(Square(WIDE.kernel.T)),
    ),
    "F11, consistent_aliasing_shared": (
        lambda: vmap(lambda a, b: (a, b), in_axes=(0, 1))(Holder(M), Holder(M)),
        (Holder(M), Holder(TURNED)),
    ),
    "F12, captured_module_in_return_error": (
        lambda: vmap(lambda: WIDE, axis_size=5)(),
        Square(jnp.stack([WIDE.kernel] * 5)),
    ),
    "vmap_inconsistent_aliasing, at any depth": (
        lambda: vmap(lambda tree: tree, in_axes=(DEEP,))({"a": [M, (M, 3)], "b": M}),
        {"a": [M, (TURNED, 3)], "b": TURNED},
    ),
    "no_shared_variable_refs, compiled": (
        lambda: pm.filter_jit(lambda a, b: (Square(a.kernel + 1), b))(M, M),
        (Square(M.kernel + 1), M),
    ),
}


@pytest.mark.parametrize(("run", "expected"), ALIASES.values(), ids=ALIASES)
def test_aliases_are_independent(run, expected):
    """One value at several paths has the axis of each path; the proposal rejects most of these."""
    check(run(), expected)


ONE_COUNT, AXES = pm.by({"count": None, ...: 0}), Counted(0, 0, None)
COUNTS = pm.by({pm.select.role("buffer"): 0, ...: None})
MANY = Counted(ONE.kernel, ONE.bias, jnp.arange(10))
KEYS = jax.random.split(jax.random.key(1), 10)
MAPS = {
    "F1, an axis for each": (lambda: vmap(dot, in_axes=(0, 1), out_axes=1)(WEIGHTS, X.T), Y.T),
    "F2, no placeholders": (
        lambda: vmap(
            lambda one, many: (one.count + 1, many), in_axes=(ONE_COUNT, 0), out_axes=(None, 0)
        )(SINGLE, COUNTED),
        (jnp.asarray(1), COUNTED),
    ),
    "F3, paths start at their argument": (
        lambda: vmap(lambda *two: two, in_axes=(pm.by({"kernel": 0}), pm.by({"kernel": 1})))(M, M),
        (M, TURNED),
    ),
    "G2, example_with_vectorization": (
        lambda: vmap(dot, in_axes=(Weights(0, 0), 0), out_axes=1)(WEIGHTS, X),
        Y.T,
    ),
    "G3, a Module is made": (
        lambda: vmap(make_weights)(jnp.arange(3)),
        pm.stack([make_weights(seed) for seed in range(3)]),
    ),
    "G6, vmap_stateful": (
        lambda: vmap(counted, out_axes=(1, 0))(COUNTED, X),
        (Y.T, COUNTED.replace(count=jnp.arange(1, 11))),
    ),
    "G7, another structure": (
        lambda: vmap(lambda m: Holder({"kernel": m.kernel, "new": [2, m.kernel]}))(COUNTED),
        Holder({"kernel": KERNEL, "new": [2, KERNEL]}),
    ),
    "G9, G12, rules inside containers": (
        lambda: vmap(lambda pair: pair[0].count + pair[1].count, in_axes=([ONE_COUNT, 0],))(
            [SINGLE, COUNTED]
        ),
        COUNTED.count,
    ),
    "G10, G11, state_axes_from_state": (
        lambda: vmap(counted, in_axes=(ONE_COUNT, 0), out_axes=(1, ONE_COUNT))(SINGLE, X),
        (Y.T, SINGLE.replace(count=jnp.asarray(1))),
    ),
    "G10, G11, a Module of axes": (
        lambda: vmap(counted, in_axes=(AXES, 0), out_axes=(1, AXES))(SINGLE, X),
        (Y.T, SINGLE.replace(count=jnp.asarray(1))),
    ),
    "G14, replicate: a key for each": (
        lambda: vmap(lambda m, key: m.bias + jax.random.normal(key), in_axes=(None, 0))(ONE, KEYS),
        jnp.stack([ONE.bias + jax.random.normal(key) for key in KEYS]),
    ),
    "G16, a captured Module is read": (lambda: vmap(lambda x: dot(ONE, x))(X), dot(ONE, X)),
    "L7, state_axes_simple: by role": (
        lambda: vmap(counted, in_axes=(COUNTS, 0), out_axes=(0, COUNTS))(MANY, X),
        (dot(ONE, X), MANY.replace(count=jnp.arange(1, 11))),
    ),
    "L8, vmap_ensemble_forward": (
        lambda: vmap(dot, in_axes=(0, None))(WEIGHTS, X),
        jnp.stack([dot(w, X) for w in pm.unstack(WEIGHTS)]),
    ),
    "L8, vmap_replicate": (lambda: vmap(dot, in_axes=(None, 0))(ONE, X), dot(ONE, X)),
}


@pytest.mark.parametrize(("run", "expected"), MAPS.values(), ids=MAPS)
def test_what_is_mapped_shared_and_returned(run, expected):
    """Axes for each argument, path and role; a function returns its changes, with their axes."""
    check(run(), expected)


def test_no_result_is_hidden():
    """F13: JAX maps only the results of the function, and none for its arguments."""
    fn = pm.filter_vmap(lambda m, x: m.kernel.sum() * x)
    jaxpr, _, _ = pm.filter_make_jaxpr(fn)(WIDE, ramp(4))
    assert [str(out.aval) for out in jaxpr.jaxpr.outvars] == ["float32[4]"]
    assert pm.filter_eval_shape(fn, WIDE, ramp(4)).shape == (4,)


class Impure(Square):
    """A method that writes into its object."""

    def __call__(self, x):
        self.kernel = x


def assigning(x):
    """Writes into a captured Module."""
    M.kernel = x


ASSIGN = {
    "outside": assigning,
    "filter_vmap": pm.filter_vmap(assigning),
    "filter_jit": pm.filter_jit(assigning),
    "jax.grad": lambda x: jax.grad(assigning)(x[0]),
    "method": Impure(M.kernel),
    "jitted method": lambda x: jax.jit(Impure.__call__)(Impure(M.kernel), x),
    "inner": lambda x: setattr(Holder(M).content, "kernel", x),
}


@pytest.mark.parametrize("call", ASSIGN.values(), ids=ASSIGN)
def test_no_attribute_can_be_assigned(call):
    """F14, G16, L13, L19, X1, S2: a Module is never changed, in a transform or outside."""
    with pytest.raises(FrozenError, match=r"(Square|Impure)\.kernel"):
        call(ramp(3))
    assert_close(M.kernel, ramp(4, 4))


def test_decorated_init():
    """G5: not on `__init__`, which is refused with the hint; on the class, with one seed each."""

    class Plain(pm.Module):
        kernel: jax.Array

        def __init__(self, seed):
            self.kernel = make_weights(seed).kernel

    class Decorated(Plain):
        __init__ = pm.filter_vmap(Plain.__init__)

    with pytest.raises(FrozenError, match=r"\.kernel|filter_vmap\(Decorated\)"):
        Decorated(jnp.arange(10))
    check(vmap(Plain)(jnp.arange(3)), pm.stack([Plain(seed) for seed in range(3)]))


# ---- axis names (G18, metadata_graph_updates, metadata_transform_metadata, scan_with_sharding)

MESH = Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def typed(array):
    """The shape and the names of an array's axes: with explicit axes they belong to its type."""
    return array.shape, tuple(jax.typeof(array).sharding.spec)


def placed(names, *shape):
    """An array whose axes have names."""
    return jax.device_put(ramp(*shape), NamedSharding(MESH, P(*names)))


def test_axis_names_through_maps():
    """G18: without its name inside of a map or a scan, with it outside; also of what is made there.

    JAX's type of an array has the names, so that every transform keeps them in step.
    """
    seen = []

    def inside(m, x):
        seen.append(typed(m.kernel))
        return m.kernel.sum() + x, m

    def make(value):
        return Square(jax.sharding.reshard(jnp.broadcast_to(value, (6, 5)), P("a", None)))

    with jax.set_mesh(MESH):
        m, x = Square(placed(("a", "b", None), 6, 4, 5)), placed("b", 4)
        y, out = pm.filter_vmap(inside, in_axes=(1, 0), out_axes=(0, 1))(m, x)
        made = pm.filter_vmap(make, out_axes=1)(x)
        layers = Square(placed((None, "a", "b"), 3, 4, 6))
        total, scanned = pm.filter_scan(lambda x, m: inside(m, x), jnp.zeros(()), layers)

    assert seen == [((6, 5), ("a", None)), ((4, 6), ("a", "b"))]
    assert typed(out.kernel) == typed(made.kernel) == ((6, 4, 5), ("a", "b", None))
    assert typed(scanned.kernel) == ((3, 4, 6), (None, "a", "b"))
    assert_close(np.asarray(y), np.asarray(m.kernel).sum((0, 2)) + np.asarray(x))
    assert_close(np.asarray(total), np.asarray(layers.kernel).sum())


# ---- Linen's note


def test_plain_vmap_of_models():
    """L3: `jax.vmap(lambda mlp, x: mlp(x))(mlps, xs)`, which does not run there."""
    make = pm.filter_vmap(lambda key: nn.MLP(3, 1, 4, 1, key=key))
    mlps, xs = make(jax.random.split(jax.random.key(0), 3)), ramp(3, 3)
    y = jax.vmap(lambda mlp, x: mlp(x))(mlps, xs)

    assert_close(y, jnp.stack([m(x) for m, x in zip(pm.unstack(mlps), xs, strict=True)]))
    # L4: hidden kernel (3, 4, 4), out kernel (3, 4, 1) there, with the outputs last.
    assert [layer.weight.shape for layer in mlps.layers] == [(3, 4, 3), (3, 1, 4)]


def test_code_runs_once_at_any_depth():
    """L5: three maps inside each other run a constructor, and a call, once, and not 2^3 times."""
    ran = []

    def make(key):
        ran.append("made")
        return Square(jax.random.normal(key, (2,)))

    def call(m, count):
        ran.append("called")
        return m.kernel @ ramp(2), count + 1

    keys = jax.random.split(jax.random.key(0), (2, 2, 2))
    y, counts = vmap(vmap(vmap(call)))(vmap(vmap(vmap(make)))(keys), jnp.zeros((2, 2, 2)))

    assert ran == ["made", "called"]
    assert_close(counts, jnp.ones((2, 2, 2)))
    assert_close(y[1, 0, 1], call(make(keys[1, 0, 1]), 0)[0])
