"""Constrained fields: values within bounds, computed from unbounded arrays that are trained."""

import copy
import dataclasses
import functools as ft
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError, FieldError, FileError, ShapeError, SpecError
from tests.helpers.comparing import assert_same

positive, unit_interval = pm.constraints.positive, pm.constraints.unit_interval
simplex = pm.constraints.simplex
bounded = ft.partial(pm.field, constraint=positive)


class Kernel(pm.Module):
    scale: jax.Array = pm.field(constraint=positive)
    noise: jax.Array = pm.buffer(constraint=pm.constraints.interval(0.0, 0.5))
    shares: jax.Array = pm.field(constraint=simplex, role="shares")
    plain: jax.Array


def kernel(scale=2.0):
    return Kernel(scale, jnp.float32(0.25), jnp.asarray([0.2, 0.3, 0.5]), jnp.zeros(()))


def new(name, **body):
    fields = {key: Any for key, value in body.items() if isinstance(value, dataclasses.Field)}
    return type(name, (pm.Module,), {"__annotations__": fields, **body})


def assign(self, scale):
    self.scale = scale
    self.seen = np.size(self.scale)


class Post(pm.Module):
    scale: jax.Array = pm.field(constraint=positive, init=False)
    given: dataclasses.InitVar[float]

    def __post_init__(self, given):
        self.scale = given


Written = new("Written", scale=bounded())
Own = new("Own", scale=bounded(), seen=pm.field(static=True), __init__=assign)
Converted = new("Converted", scale=bounded(converter=lambda x: x))
Annotated = new("Annotated", scale=dataclasses.field(metadata={"constraint": positive}))
Child = type("Child", (Own,), {"__check_init__": lambda self: self.scale.shape})
# A computed leaf that is computed from a constrained one.
Inside = type("Inside", (Written, pm.Computed), {"value": lambda self: jnp.ones(3) * self.scale})
Shares = new("Shares", shares=pm.field(constraint=simplex))
Free = new("Free", scale=pm.field())

STYLES = [Written, Own, Post, Converted, Annotated, Child, Inside]


def test_values_are_given_and_read_in_the_clear():
    """In every style of class, by every change, whatever the number is; its logarithm is stored."""
    for make in STYLES:
        for value in (2.0, 2, np.float32(2), np.asarray(2.0, np.float32)):
            made = make(value)
            assert isinstance(made.scale, jax.Array)
            assert (made.scale, made.scale.dtype) == (2, jnp.float32)
            found = float(pm.named_leaves(made)["scale.unconstrained"])
            assert found == pytest.approx(np.log(2))
        changed = made.replace(scale=jnp.asarray([1.0, 3.0]))
        assert changed.scale.tolist() == pytest.approx([1.0, 3.0])
        assert made.replace() == made
        model = [made, 1]
        assert pm.tree_at(lambda m: m[0].scale, model, 3)[0].scale == pytest.approx(3.0)
        doubled = pm.tree_at("0.scale", model, replace_fn=lambda scale: scale * 2)[0]
        assert doubled.scale.tolist() == pytest.approx(4.0)
        assert pm.tree_at("0.scale.unconstrained", model, jnp.zeros(()))[0].scale == 1


@pytest.mark.parametrize("value", [-1.0, np.nan, [1.0], "1", True, jnp.arange(2)])
def test_bad_values_are_refused(value):
    """In every style of class, by construction and every change, with the field's name."""
    # A mask, or a tree of labels, has the form of a model.
    changes = CHANGES[:2] if isinstance(value, (bool, str, list)) else CHANGES
    for make in STYLES:
        for change in (lambda *_: make(value), *changes):  # noqa: B023
            with pytest.raises(FieldError, match=r"\.scale"):
                change(make(2.0), value)


CHANGES = [
    lambda _, value: Own(value),
    lambda model, value: model.replace(scale=value),
    lambda model, value: pm.tree_at("scale", model, replace_fn=lambda _: value),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_traced_value_outside_its_bound_fails(change):
    """At construction and in every change: not clipped; and no other value is checked again."""
    for under, expected in ((pm.filter_jit, 2.0), (pm.filter_grad, 1.0)):
        call = under(lambda value, model: change(model, value).scale.sum())
        assert np.allclose(call(jnp.asarray(2.0), Written(3.0)), expected)
        with pytest.raises(CheckError, match="scale"):
            call(jnp.asarray(-2.0), Written(3.0))
    # A known value is checked while it is traced, and is a constant of the program.
    program = str(jax.make_jaxpr(lambda x: Written(2.0).scale * x)(1.0))
    assert "log" not in program
    changing = pm.filter_make_jaxpr(lambda m, x: (m.scale * x, m.replace(seen=2)))
    assert "callback" not in program + str(changing(Own(2.0), jnp.ones(()))[0])


def test_defaults_and_what_converters_return_are_in_the_clear():
    """A number, a factory, an attribute of a subclass instead of a field."""
    b = bounded(default_factory=lambda: jnp.ones(2))
    c = bounded(converter=lambda x: x + 3, default=-1.0)
    Defaults = new("Defaults", a=bounded(default=2.0), b=b, c=c, d=bounded(init=False))
    with_d = lambda value: type("Later", (Defaults,), {"d": value})  # noqa: E731
    made = with_d(5.0)()
    assert (made.a, made.b.tolist(), made.c, Defaults.a) == (2, [1.0, 1.0], 2, 2.0)
    assert made.d == pytest.approx(5.0)
    assert made.replace(c=-2.0).c == 1
    for change, name in ((with_d(-5.0), "d"), (lambda: made.replace(c=-4.0), "c")):
        with pytest.raises(FieldError, match=rf"Later\.{name}"):
            change()


def test_dtypes_and_structs_are_kept():
    """Of arrays; a Python number becomes the same as in JAX; a model of shapes has its form."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        made = Written(jnp.ones(2, dtype))
        assert made.scale.dtype == jax.tree.leaves(made)[0].dtype == dtype
    assert Written(1.0).scale.weak_type
    # Half precision: JAX 0.10 takes an unpickled weak number for a strong one, and uses its
    # compiled program for all later ones.
    assert not Written(jnp.float16(1)).scale.weak_type
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    made = Shares(struct)
    assert jax.tree.structure(made) == jax.tree.structure(Shares(jnp.ones(3) / 3))
    assert jax.tree.leaves(made) == [jax.ShapeDtypeStruct((2,), jnp.float32)]
    assert pm.filter_eval_shape(Shares, struct) == jax.eval_shape(Shares, struct) == made


def test_none_stays_none():
    """For a field that may be empty; it can be filled later."""
    optional = new("Optional", scale=pm.field(constraint=positive, default=None))
    empty = optional()
    assert (type(empty), empty.scale, jax.tree.leaves(empty)) == (optional, None, [])
    filled = empty.replace(scale=2.0)
    assert pm.tree_at(lambda m: m.scale, empty, 2.0, is_leaf=lambda x: x is None) == filled
    assert filled.replace(scale=None) == pm.tree_at(lambda m: m.scale, filled, None) == empty


def test_what_is_computed_tied_or_resolved_already_stays():
    """A computed leaf of the user's or of another model; what the library made."""
    computed = pm.computed(jnp.abs, jnp.asarray(-2.0))
    (stored,) = jax.tree.leaves(Written(3.0), is_leaf=lambda node: isinstance(node, pm.Computed))
    assert pm.named_leaves(Written(computed)) == {"scale.trees.0": -2.0}
    assert Written(stored) == Written(1.0).replace(scale=stored) == Written(3.0)
    Both = new("Both", a=bounded(), b=bounded())
    both = Both(2.0, 3.0)
    assert pm.named_leaves(pm.resolve(both)) == {"a": both.a, "b": both.b}
    tied = pm.tie(both, "b", to="a")
    assert list(pm.named_leaves(tied)) == ["a.unconstrained"]
    assert (tied.b, tied.replace(a=5.0).b) == (2, 5)
    assert pm.untie(tied) == Both(2.0, 2.0)
    assert pm.tie(both, "b", to="a", through=lambda a: a / 2).b == 1


def test_a_tie_does_not_lead_out_of_the_bounds():
    """A source without bounds, or with others, is refused; the other way round it may be."""
    bounds = {"positive": bounded()}
    bounds |= {"share": pm.field(constraint=unit_interval), "free": pm.field(), "inner": pm.field()}
    model = new("Three", **bounds)(2.0, 0.5, jnp.float32(-1.0), [Written(1.0), Own(1.0)])
    other = pm.tree_at(lambda m: m.inner[1], model, Free(jnp.float32(1.0)))
    for tree, place, source, text in (
        (model, "positive", "free", "positive"),
        (model, "positive", "share", "share"),
        (other, "inner[0]", "inner[1]", r"inner\[0\].*positive"),
    ):
        with pytest.raises(ShapeError, match=text):
            pm.tie(tree, place, to=source)
    assert pm.tie(model, "free", to="positive").free == 2
    assert pm.tie(model, "positive", to="share", through=lambda share: share).positive == 0.5
    assert pm.tie(model, "inner[0]", to="inner[1]").inner[0].scale == 1


def test_trees_that_have_the_form_of_a_model_take_anything():
    """Axes, masks, labels, specs: their leaves are not values; but derivatives take no value."""
    model = Written(2.0)
    for other in (None, 0, "label", 0.5):
        tree = jax.tree.map(lambda _, other=other: other, model)
        for value in (True, "other", -1.0):
            assert pm.tree_at(lambda m: m.scale, tree, value).scale == value
            assert tree.replace(scale=value).scale == value
    assert pm.tree_at(lambda m: m.scale, model, True).scale is True
    gradients = pm.filter_grad(lambda m: m.scale)(model)
    assert gradients == pm.tree_at("scale.unconstrained", gradients, jnp.asarray(2.0))
    inside = pm.filter_grad(lambda m: m["a"].func.scale)({"a": pm.Partial(model)})
    for grads in (gradients, inside["a"].func):
        for change in (lambda g: pm.tree_at("scale", g, 0.0), lambda g: g.replace(scale=1.0)):
            with pytest.raises(SpecError, match="scale"):
                change(grads)


def test_roles_that_were_given_stay():
    """Of the field, or of its parameter: a new value is of the same leaf."""
    for place in ("scale", "scale.unconstrained"):
        model = pm.with_role(Written(2.0), place, "buffer")
        for changed in (model.replace(scale=3.0), pm.tree_at("scale", model, 3.0)):
            assert changed.scale == pytest.approx(3.0)
            assert pm.select.role("buffer").mask(changed) == [True]


def test_each_of_several_as_one_is_constrained_alone():
    """A map may read its whole array: that of one layer, or of one member."""
    rising = pm.constraints.bijection(
        lambda u: jnp.cumsum(u, axis=0),
        lambda x: jnp.diff(x, axis=0, prepend=jnp.zeros_like(x[:1])),
    )
    call = {"__call__": lambda self, x: x + self.heights}
    steps = new("Steps", heights=pm.field(constraint=rising), **call)
    stack = ft.partial(pm.nn.Stack, lambda key: steps(jax.random.normal(key, (3,))), 2)
    values = jnp.arange(12.0).reshape(2, 2, 3) ** 2
    nets = pm.nn.Ensemble(stack, 2, key=jax.random.key(0))
    change = lambda nets, values: pm.tree_at("member.layer.heights", nets, values)  # noqa: E731
    for changed in (change(nets, values), pm.filter_jit(change)(nets, values)):
        assert_same(pm.resolve(changed).member.layer.heights, values)
        np.testing.assert_allclose(changed[1](jnp.ones(3)), 1 + values[1].sum(0))
    many = pm.filter_vmap(Written)(jnp.asarray([1.0, 2.0]))
    assert many.replace(scale=3.0).scale == pytest.approx(3.0)
    struct = jax.ShapeDtypeStruct((2,), "f4")
    made = pm.filter_eval_shape(lambda m: m, many).replace(scale=struct)
    assert jax.tree.structure(made) == jax.tree.structure(many)
    with pytest.raises(ShapeError, match=r"Shares\.shares"):
        pm.filter_vmap(Shares)(jnp.ones((2, 1))).replace(shares=jnp.ones(2))


def test_the_tree_has_what_is_trained():
    """By path; a buffer remains one, and a selector of the field selects its parameter."""
    model = kernel()
    paths = ["scale.unconstrained", "noise.unconstrained", "shares.unconstrained", "plain"]
    assert list(pm.named_leaves(model)) == paths
    for selector, mask in (
        (pm.select.role("buffer"), [False, True, False, False]),
        (pm.select.role("shares"), [False, False, True, False]),
        (pm.select.path("scale"), [True, False, False, False]),
        (pm.select.type(pm.Computed), [True, True, True, False]),
    ):
        assert selector.mask(model) == mask
    assert "scale=positive(unconstrained=f32[2])" in repr(pm.filter_vmap(kernel)(jnp.ones(2)))
    assert "noise=interval(0.0, 0.5)(unconstrained=f32[]) (buffer)" in repr(model)


def test_the_constraint_is_structure():
    """Equal in all instances, whose program is that of the formula; another one differs."""
    model = kernel()
    u = pm.named_leaves(model)["scale.unconstrained"]
    ours = jax.make_jaxpr(lambda m, x: m.scale * x)(model, 1.0).eqns
    theirs = jax.make_jaxpr(lambda u, x: positive.forward(u) * x)(u, 1.0).eqns
    assert [e.primitive for e in ours] == [e.primitive for e in theirs]
    assert pickle.loads(pickle.dumps(model)) == copy.deepcopy(model) == model
    soft = pm.constraints.softplus_positive
    other = model.replace(scale=soft.constrain(jnp.float32(2.0), "scale"))
    assert jax.tree.structure(other) != jax.tree.structure(model) == jax.tree.structure(kernel(3.0))


def test_files_have_what_is_trained(tmp_path):
    """A round trip is exact; a parameter of other bounds is not taken for it."""
    model, path = kernel(jnp.float32(0.1)), tmp_path / "model"
    pm.save(path, model)
    assert_same(pm.named_leaves(pm.load(path, kernel())), pm.named_leaves(model))
    one, other = (Free(c.constrain(jnp.float32(0.5), "scale")) for c in (positive, unit_interval))
    pm.save(path, one)
    with pytest.raises(FileError, match=r"scale.*constraint|constraint"):
        pm.load(path, other)
