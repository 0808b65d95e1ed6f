"""vmap under value semantics: programs of founding documents, and of reference libraries.

The programs of the Flax proposal (F), the NNX guide (G) and Linen's note (L) with the shapes and
numbers that they print, or would print if they ran; then the scenarios of Flax NNX's own suite
(their names are in the docstrings). Changes are returned, and one value at two paths is two leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FrozenError, SpecError
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

    count: jax.Array


def vector_dot(weights, x):
    y = x @ weights.kernel
    return y + jnp.broadcast_to(weights.bias, y.shape)


def stateful_vector_dot(weights, x):
    return vector_dot(weights, x), weights.replace(count=weights.count + 1)


def make_weights(seed):
    return Weights(jax.random.uniform(jax.random.key(seed), (2, 3)), jnp.zeros(3))


M, WIDE = Square(ramp(4, 4)), Square(ramp(4, 5))
TURNED = Square(M.kernel.T)
WEIGHTS = Weights(ramp(10, 2, 3), ramp(10, 3))
COUNTED = Counted(WEIGHTS.kernel, WEIGHTS.bias, jnp.arange(10))
SINGLE = COUNTED.replace(count=jnp.asarray(0))
X = ramp(10, 2)
Y = jnp.stack([x @ k + b for x, k, b in zip(X, WEIGHTS.kernel, WEIGHTS.bias, strict=True)])
ONE_COUNT = pm.by({"count": None, ...: 0})

# ---- the proposal: JAX-style transforms


def test_axes_of_each_argument():
    """F1: each Module argument has its own axis."""
    fn = pm.filter_vmap(lambda m1, m2: m1.kernel @ m2.kernel, in_axes=(1, 0))
    assert_close(fn(WIDE, Square(WIDE.kernel.T)), (WIDE.kernel**2).sum(0))


def test_a_path_starts_at_its_argument():
    """F3: `kernel` is that of the argument that the rule is for; none has to say which one."""
    axes = pm.by({"kernel": 0, ...: 0}), pm.by({"kernel": 1, ...: 0})
    turned = WEIGHTS.replace(kernel=WEIGHTS.kernel.swapaxes(0, 1))
    found = pm.filter_vmap(lambda a, b: (a.kernel, b.kernel), in_axes=axes)(WEIGHTS, turned)

    assert_close(found, (WEIGHTS.kernel, WEIGHTS.kernel))
    with pytest.raises(SpecError, match=r"\[0\]\.kernel"):
        pm.filter_vmap(vector_dot, in_axes=(pm.by({"[0].kernel": 0, ...: 0}), 0))(WEIGHTS, X)


def test_no_argument_stands_for_all_the_others():
    """F2: statistics are broadcast in one model and mapped in the next; no placeholders."""
    fn = pm.filter_vmap(
        lambda one, many, x: (vector_dot(one, x), one.count + 1, many.count + 1),
        in_axes=(ONE_COUNT, 0, 0),
        out_axes=(1, None, 0),
    )
    y, one, many = fn(SINGLE, COUNTED, X)
    assert_close((y, one, many), (Y.T, jnp.asarray(1), jnp.arange(1, 11)))


def test_aliases_with_one_spec():
    """F8: `f(m1, m2, m1)` with equal axes for both uses of m1 is accepted; so are others."""
    axes = pm.by({"kernel": 0})
    fn = pm.filter_vmap(lambda a, b, c: (a.kernel + c.kernel, b), in_axes=(axes, 1, axes))
    assert_close(fn(M, M, M), (2 * M.kernel, TURNED))


def test_rejected_1_inconsistent_input_aliases():
    """F9, consistent_aliasing_inputs: `f(m, m)` over rows and columns has the shape (4, 4)."""
    out = pm.filter_vmap(lambda m1, m2: m1.kernel - m2.kernel, in_axes=(0, 1))(M, M)
    assert out.shape == (4, 4)
    assert_close(out, M.kernel - M.kernel.T)


def test_rejected_2_input_and_output_alias():
    """F10, consistent_aliasing_input_output: the identity from axis 0 to 1 is (4, 5) to (5, 4)."""
    out = pm.filter_vmap(lambda m: m, in_axes=0, out_axes=1)(WIDE)
    assert_close(out, Square(WIDE.kernel.T))


def test_rejected_3_aliases_in_nested_structures():
    """F11, consistent_aliasing_shared: an argument inside a result, a part of two arguments."""
    found = pm.filter_vmap(Holder, in_axes=0, out_axes=1)(WIDE)
    assert_close(found, Holder(Square(WIDE.kernel.T)))
    found = pm.filter_vmap(lambda a, b: (a, b), in_axes=(0, 1))(Holder(M), Holder(M))
    assert_close(found, (Holder(M), Holder(TURNED)))


def test_inconsistent_aliases_at_any_depth():
    """vmap_inconsistent_aliasing: one value at several depths, each with the axis of its path."""
    tree, axes = {"a": [M, (M, 3)], "b": M}, {"a": [0, pm.if_array(1)], "b": 1}
    out = pm.filter_vmap(lambda tree: tree, in_axes=(axes,))(tree)
    assert_close(out, {"a": [M, (TURNED, 3)], "b": TURNED})


def test_rejected_4_a_captured_module_as_result():
    """F12, captured_module_in_return_error: it is broadcast, here to (5, 4, 5)."""
    out = pm.filter_vmap(lambda: WIDE, axis_size=5)()
    assert_close(out, Square(jnp.stack([WIDE.kernel] * 5)))


def test_no_result_is_hidden():
    """F13: JAX maps only the results of the function, and none for its arguments."""
    fn = pm.filter_vmap(lambda m, x: m.kernel.sum() * x)
    jaxpr, _, _ = pm.filter_make_jaxpr(fn)(WIDE, ramp(4))
    assert [str(out.aval) for out in jaxpr.jaxpr.outvars] == ["float32[4]"]
    assert pm.filter_eval_shape(fn, WIDE, ramp(4)).shape == (4,)


def _assigning(x):
    M.kernel = x


ASSIGN = [
    _assigning,
    pm.filter_vmap(_assigning),
    pm.filter_jit(_assigning),
    lambda x: jax.grad(_assigning)(x[0]),
]


@pytest.mark.parametrize("call", ASSIGN, ids=["outside", "filter_vmap", "filter_jit", "jax.grad"])
def test_no_attribute_can_be_assigned(call):
    """F14, G16, L13, L19: a Module is never changed, in a transform or outside, captured or not."""
    with pytest.raises(FrozenError, match=r"Square\.kernel"):
        call(ramp(3))
    assert_close(M.kernel, ramp(4, 4))


def test_a_captured_module_is_read():
    """G16: to read a captured Module is legal in every transform."""
    read = pm.filter_jit(pm.filter_vmap(lambda x: M.kernel.sum() * x))
    assert_close(read(ramp(3)), M.kernel.sum() * ramp(3))


# ---- the guide


@pytest.mark.parametrize("in_axes", [0, (0, 0), pm.if_array(0), (Weights(0, 0), 0)])
def test_vmap_over_a_module_and_its_data(in_axes):
    """G2, example_with_vectorization: the result has the shape (3, 10)."""
    out = pm.filter_vmap(vector_dot, in_axes=in_axes, out_axes=1)(WEIGHTS, X)
    assert out.shape == (3, 10)
    assert_close(out, Y.T)


def test_a_module_as_the_result():
    """G3, example, basic: a function that makes a Module makes the stack: kernel (10, 2, 3)."""
    made = pm.filter_vmap(make_weights)(jnp.arange(10))
    assert (made.kernel.shape, made.bias.shape) == ((10, 2, 3), (10, 3))
    assert_close(made.kernel[3], make_weights(3).kernel)


def test_decorated_methods():
    """G4: a decorated `__call__`."""

    class Layer(Weights):
        @pm.filter_vmap(in_axes=0, out_axes=1)
        def __call__(self, x):
            return vector_dot(self, x)

    assert_close(Layer(WEIGHTS.kernel, WEIGHTS.bias)(X), Y.T)


def test_decorated_init():
    """G5: not on `__init__`, which is refused with the hint; on the class, with one seed each."""

    class Decorated(pm.Module):
        kernel: jax.Array

        @pm.filter_vmap
        def __init__(self, seed):
            self.kernel = make_weights(seed).kernel

    with pytest.raises(FrozenError, match=r"Decorated\.kernel|filter_vmap\(Decorated\)"):
        Decorated(jnp.arange(10))

    class Stack(pm.Module):
        kernel: jax.Array

        def __init__(self, seed):
            self.kernel = make_weights(seed).kernel

    made = pm.filter_vmap(Stack)(jnp.arange(10))
    assert type(made) is Stack
    assert_close(made.kernel, pm.filter_vmap(make_weights)(jnp.arange(10)).kernel)


def test_a_count_for_each_member():
    """G6, vmap_stateful: counts from 0 to 9 are those from 1 to 10 after a call."""
    y, after = pm.filter_vmap(stateful_vector_dot, out_axes=(1, 0))(COUNTED, X)
    assert y.shape == (3, 10)
    assert after.count.tolist() == list(range(1, 11))
    assert COUNTED.count.tolist() == list(range(10))


def test_another_structure():
    """G7: fields that are removed, added and shared inside a transform are so in the result."""

    class Crazy(pm.Module):
        kernel: jax.Array
        some_property: list
        new_param: jax.Array

    def crazy(weights, x):
        made = Crazy(weights.kernel, ["a", 2, False], weights.kernel)
        return vector_dot(weights, x), made

    y, made = pm.filter_vmap(crazy, in_axes=0, out_axes=(1, pm.if_array(0)))(COUNTED, X)
    assert_close(y, Y.T)
    assert made.some_property == ["a", 2, False]
    assert not hasattr(made, "bias")
    assert_close(made.new_param, made.kernel)


def test_a_new_structure_is_a_new_trace():
    """G8: a function that adds a field for each call is traced for each call; others once."""
    traces = []

    @pm.filter_jit
    def grow(tree):
        traces.append(len(tree))
        return {**tree, f"x{len(tree)}": jnp.zeros(())}

    tree = grow(grow(grow({})))
    grow({"x0": jnp.ones(())})
    assert (traces, [*tree]) == ([0, 1, 2], ["x0", "x1", "x2"])


@pytest.mark.parametrize("axes", [ONE_COUNT, Counted(0, 0, None)], ids=["by", "Module"])
def test_one_count_for_all_members(axes):
    """G10, G11, state_axes_from_state: broadcast, changed, and returned with the axis None: 1."""
    run = pm.filter_vmap(stateful_vector_dot, in_axes=(axes, 0), out_axes=(1, axes))
    y, after = run(SINGLE, X)
    assert_close((y, after.count), (Y.T, jnp.asarray(1)))
    assert after.kernel.shape == (10, 2, 3)


def test_rules_inside_containers():
    """G9, G12: a rule applies to one of several Modules in a tree; so does a Module of axes."""
    trees = {"a": SINGLE, "b": COUNTED}
    add = lambda trees: trees["a"].count + trees["b"].count + 1  # noqa: E731
    for axes in (ONE_COUNT, Counted(0, 0, None)):
        found = pm.filter_vmap(add, in_axes=({"a": axes, "b": 0},))(trees)
        assert_close(found, COUNTED.count + 1)


def test_keys_split_where_they_are_passed():
    """G14, replicate: the same weights, a key for each member."""
    fn = lambda m, x, key: vector_dot(m, x) + jax.random.normal(key, (3,))  # noqa: E731
    keys = jax.random.split(jax.random.key(1), 10)
    y = pm.filter_vmap(fn, in_axes=(None, None, 0))(make_weights(0), X[0], keys)
    assert len(np.unique(np.asarray(y), axis=0)) == 10


# ---- axis names (G18, metadata_graph_updates, metadata_transform_metadata, scan_with_sharding)

MESH = Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
AUTO = Mesh(MESH.devices, ("a", "b"))


def spec_of(array):
    """The names of an array's axes: on a mesh with explicit axes they belong to its type."""
    return tuple(jax.typeof(array).sharding.spec)


def placed(names, *shape):
    """An array whose axes have names."""
    return jax.device_put(ramp(*shape), NamedSharding(MESH, P(*names)))


def test_axis_names_through_vmap():
    """G18: inside (3, 5) with ('a', None), outside (3, 4, 5) with ('a', 'b', None); here doubled.

    JAX's type of an array has the names, so that every transform keeps them in step.
    """
    seen = []

    def inside(m, x):
        seen.append((m.kernel.shape, spec_of(m.kernel)))
        return m.kernel.sum() + x, m

    with jax.set_mesh(MESH):
        m, x = Square(placed(("a", "b", None), 6, 4, 5)), placed("b", 4)
        y, out = pm.filter_vmap(inside, in_axes=(1, 0), out_axes=(0, 1))(m, x)

    assert seen == [((6, 5), ("a", None))]
    assert (out.kernel.shape, spec_of(out.kernel)) == ((6, 4, 5), ("a", "b", None))
    assert_close(np.asarray(y), np.asarray(m.kernel).sum((0, 2)) + np.asarray(x))


def test_axis_names_of_what_is_made_inside():
    """G18: the same for a Module that is made under the map."""

    def make(value):
        return Square(jax.sharding.reshard(jnp.broadcast_to(value, (6, 5)), P("a", None)))

    with jax.set_mesh(MESH):
        made = pm.filter_vmap(make, out_axes=1)(placed("b", 4))
    assert (made.kernel.shape, spec_of(made.kernel)) == ((6, 4, 5), ("a", "b", None))


def test_axis_names_through_scan():
    """scan_with_sharding: the scanned axis is removed inside, and is back outside."""
    seen = []

    def step(x, m):
        seen.append((m.kernel.shape, spec_of(m.kernel)))
        return x + m.kernel.sum(), m

    with jax.set_mesh(MESH):
        m = Square(placed((None, "a", "b"), 3, 4, 6))
        total, out = pm.filter_scan(step, jnp.zeros(()), m)

    assert (seen, spec_of(out.kernel)) == ([((4, 6), ("a", "b"))], (None, "a", "b"))
    assert_close(np.asarray(total), np.asarray(m.kernel).sum())


def test_names_beside_the_model():
    """The same without explicit axes: a tree of specs beside the model, changed with its axes."""
    stacked = Square(P("b", *Square(P("a", None)).kernel))
    layers = [Square(ramp(4, 3)), Square(ramp(4, 3) + 1)]

    with jax.set_mesh(AUTO):
        made = pm.filter_jit(pm.stack, out_shardings=stacked)(layers)
        fn = pm.filter_jit(lambda m: m, in_shardings=(stacked,), out_shardings=stacked)
        assert made.kernel.sharding.spec == fn(made).kernel.sharding.spec == P("b", "a", None)
    assert_close(pm.unstack(made)[1].kernel, layers[1].kernel)


def test_specs_of_a_model_are_a_tree():
    """G19: specs by path are a model of specs; so are the shardings that are made of them."""
    specs = pm.by({"kernel": P("a", None), ...: P()})(make_weights(0))
    assert specs == Weights(P("a", None), P())

    shardings = Weights(NamedSharding(AUTO, specs.kernel), NamedSharding(AUTO, specs.bias))
    placed = jax.device_put(make_weights(0), shardings)
    for model in (placed, pm.filter_jit(make_weights, out_shardings=shardings)(0)):
        assert (model.kernel.sharding.spec, model.bias.sharding.spec) == (P("a", None), P())


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

    class Inner(pm.Module):
        kernel: jax.Array

        def __init__(self, key):
            ran.append("made")
            self.kernel = jax.random.normal(key, (2,))

        def __call__(self, x, count):
            ran.append("called")
            return x @ self.kernel, count + 1

    def three_maps(fn):
        return pm.filter_vmap(pm.filter_vmap(pm.filter_vmap(fn)))

    keys = jax.random.split(jax.random.key(0), (2, 2, 2))
    nets = three_maps(Inner)(keys)
    y, counts = three_maps(lambda net, count: net(ramp(2), count))(nets, jnp.zeros((2, 2, 2)))

    assert ran == ["made", "called"]
    assert y.shape == counts.shape == (2, 2, 2)
    assert_close(y[1, 0, 1], Inner(keys[1, 0, 1])(ramp(2), 0)[0])


def test_a_function_of_the_tree_before_the_layer():
    """L14, lift_transpose: stored (4, 2), used as (2, 4): the result is (3, 4)."""
    stored = Weights(ramp(4, 2), jnp.zeros(4))
    turned = jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, stored)
    y = vector_dot(turned, ramp(3, 2))
    assert y.shape == (3, 4)
    assert_close(y, ramp(3, 2) @ stored.kernel.T)


# ---- TestVmap


def test_vmap_over_a_stack_and_its_inputs():
    """vmap_basic, vmap_ensemble_forward: members on axis 0, or one input for all."""
    assert_close(pm.filter_vmap(vector_dot)(WEIGHTS, X), Y)
    every = pm.filter_vmap(vector_dot, in_axes=(0, None))(WEIGHTS, X)
    assert_close(every, jnp.stack([vector_dot(w, X) for w in pm.unstack(WEIGHTS)]))


def test_one_model_for_all_members():
    """vmap_replicate: the weights are shared, by the axis None or because they are captured."""
    model = make_weights(0)
    assert_close(pm.filter_vmap(vector_dot, in_axes=(None, 0))(model, X), vector_dot(model, X))
    assert_close(pm.filter_vmap(lambda x: vector_dot(model, x))(X), vector_dot(model, X))


def test_statistics_mapped_and_the_rest_shared():
    """state_axes_simple, state_axes_super_simple: buffers are mapped, parameters are not."""

    class Normed(pm.Module):
        weight: jax.Array
        mean: jax.Array = pm.buffer()

        def __call__(self, x):
            mean = 0.9 * self.mean + 0.1 * x.mean()
            return (x - mean) * self.weight, self.replace(mean=mean)

    axes = pm.by({pm.select.role("buffer"): 0, ...: None})
    model = Normed(jnp.asarray(2.0), jnp.zeros(10))
    y, after = pm.filter_vmap(lambda m, x: m(x), in_axes=(axes, 0), out_axes=(0, axes))(model, X)

    assert after.weight.shape == ()
    assert_close((after.mean, y), (0.1 * X.mean(1), (X - after.mean[:, None]) * 2))
