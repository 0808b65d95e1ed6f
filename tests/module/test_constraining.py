"""Where the values of constrained fields come in: construction, `replace`, `tree_at`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError, FieldError, ShapeError, SpecError
from pytreemod.typing import class_of
from tests.helpers.comparing import assert_same

positive, unit_interval = pm.constraints.positive, pm.constraints.unit_interval


class Written(pm.Module):
    """The `__init__` is written."""

    scale: jax.Array = pm.field(constraint=positive)


class Own(pm.Module):
    """A custom `__init__`, which reads a field that it has assigned."""

    scale: jax.Array = pm.field(constraint=positive)
    seen: int = pm.field(static=True)

    def __init__(self, scale):
        self.scale = scale
        self.seen = np.size(self.scale)


class Post(pm.Module):
    """A `__post_init__`."""

    scale: jax.Array = pm.field(constraint=positive, init=False)
    given: dataclasses.InitVar[float]

    def __post_init__(self, given):
        self.scale = given


class Keyword(pm.Module, kw_only=True):
    """Keywords alone."""

    scale: jax.Array = pm.field(constraint=positive)


class Converted(pm.Module):
    """A converter."""

    scale: jax.Array = pm.field(constraint=positive, converter=lambda x: x)


class Annotated(pm.Module):
    """Declared by `dataclasses.field`."""

    scale: jax.Array = dataclasses.field(metadata={"constraint": positive})


class Child(Own):
    """Inherits the field and the `__init__`."""

    def __check_init__(self):
        assert isinstance(self.scale, jax.Array)


class Free(pm.Module):
    """Without bounds."""

    scale: jax.Array


class Inside(pm.Computed):
    """A computed leaf that is computed from a constrained one."""

    scale: jax.Array = pm.field(constraint=positive)

    def value(self):
        return jnp.ones(3) * self.scale


STYLES = [
    Written,
    Own,
    Post,
    lambda x: Keyword(scale=x),
    Converted,
    Annotated,
    Child,
    Inside,
    pm.Partial(Written),
]


def test_the_converter_comes_first():
    """Its result is constrained: at construction, and by `replace`."""

    class Shifted(pm.Module):
        scale: jax.Array = pm.field(constraint=positive, converter=lambda x: x + 3)

    assert Shifted(-1.0).scale == 2
    assert Shifted(0.0).replace(scale=-2.0).scale == 1
    with pytest.raises(FieldError, match=r"Shifted\.scale"):
        Shifted(-4.0)


def test_dtypes_are_kept():
    """Of arrays; a Python number becomes the same as in JAX."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        made = Written(jnp.ones(2, dtype))
        assert made.scale.dtype == jax.tree.leaves(made)[0].dtype == dtype
    assert Written(1.0).scale.weak_type
    # Half precision: JAX 0.10 takes an unpickled weak number for a strong one, and uses its
    # compiled program for all later ones.
    assert not Written(jnp.float16(1)).scale.weak_type


def test_none_stays_none():
    """For a field that may be empty; it can be filled later."""

    class Optional(pm.Module):
        scale: jax.Array | None = pm.field(constraint=positive, default=None)

    empty = Optional()
    assert class_of(empty) is Optional
    assert empty.scale is None
    assert jax.tree.leaves(empty) == []
    assert empty.replace(scale=2.0).scale == 2
    filled = pm.tree_at(lambda m: m.scale, empty, 2.0, is_leaf=lambda x: x is None)
    assert filled.scale == 2
    # As in a tree of axes, or of flags, in which a field that is empty gets one.
    assert pm.tree_at(lambda m: m.scale, empty, 0, is_leaf=lambda x: x is None).scale == 0
    assert filled.replace(scale=None) == pm.tree_at(lambda m: m.scale, filled, None) == empty


def test_what_is_computed_already_stays():
    """A computed leaf of the user's, or one that was taken from another model."""
    computed = pm.computed(jnp.abs, jnp.asarray(-2.0))
    (stored,) = jax.tree.leaves(Written(3.0), is_leaf=lambda node: isinstance(node, pm.Computed))

    assert pm.named_leaves(Written(computed)) == {"scale.trees.0": -2.0}
    assert Written(stored) == Written(3.0)
    assert Written(1.0).replace(scale=stored) == Written(3.0)


def test_defaults_are_in_the_clear():
    """A number, a factory, an attribute of a subclass instead of a field."""

    class Defaults(pm.Module):
        a: jax.Array = pm.field(constraint=positive, default=2.0)
        b: jax.Array = pm.field(constraint=positive, default_factory=lambda: jnp.ones(2))

    class Late(pm.Module):
        a: jax.Array = pm.field(constraint=positive, init=False)

    class Later(Late):
        a = 5.0

    class Bad(Late):
        a = -5.0

    assert Defaults().a == 2
    assert Defaults().b.tolist() == [1.0, 1.0]
    assert Later().a == pytest.approx(5.0)
    assert Defaults.a == 2.0
    with pytest.raises(FieldError, match=r"Bad\.a"):
        Bad()


def test_a_traced_value_outside_fails_in_plain_jax():
    """With JAX's own error under `jit`; a struct is not a number."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Written\.scale"):
        jax.block_until_ready(jax.jit(Written)(-1.0))
    made = jax.eval_shape(Written, jax.ShapeDtypeStruct((3,), "float32"))
    assert pm.named_leaves(made)["scale.unconstrained"].shape == (3,)


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32])
def test_a_known_value_is_checked_while_a_program_is_traced(kind):
    """And is a constant of it, without a check when it runs."""
    good = kind(2.0)
    program = jax.make_jaxpr(lambda x: Written(good).scale * x)(1.0)

    assert "log" not in str(program)
    assert "callback" not in str(program)


def test_a_step_that_takes_the_model_has_no_check():
    """Only new values of the field are checked."""
    model, x = Own(2.0), jnp.ones(())
    step = pm.filter_make_jaxpr(lambda m, x: (m.scale * x, m.replace(seen=2)))
    changing = pm.filter_make_jaxpr(lambda m, x: m.replace(scale=x))

    assert "callback" in str(changing(model, x)[0])
    assert "callback" not in str(step(model, x)[0])


def test_trees_that_have_the_form_of_a_model_take_anything():
    """Axes, masks, labels, specs: their leaves are not values of the field."""
    model = Written(2.0)
    for other in (None, 0, False, "label", 0.5):
        tree = jax.tree.map(lambda _, other=other: other, model)
        for new in (0, True, "other", -1.0):
            assert pm.tree_at(lambda m: m.scale, tree, new).scale == new
            assert tree.replace(scale=new).scale == new
    axes = pm.tree_at(lambda m: m.scale, jax.tree.map(lambda _: None, model), 0)
    many = pm.filter_vmap(Written)(jnp.asarray([1.0, 2.0]))
    assert pm.filter_vmap(lambda m: m.scale, in_axes=(axes,))(many).tolist() == [1.0, 2.0]
    mask = pm.tree_at(lambda m: m.scale, model, True)
    assert mask.scale is True


def test_a_tie_does_not_lead_out_of_the_bounds():
    """A source without bounds, or with others, is refused; the other way round it may be."""

    class Three(pm.Module):
        positive: jax.Array = pm.field(constraint=positive)
        share: jax.Array = pm.field(constraint=unit_interval)
        free: jax.Array
        inner: list

    model = Three(2.0, 0.5, jnp.float32(-1.0), [Written(1.0), Own(1.0)])
    with pytest.raises(ShapeError, match="positive"):
        pm.tie(model, "positive", to="free")
    with pytest.raises(ShapeError, match="share"):
        pm.tie(model, "positive", to="share")
    assert pm.tie(model, "free", to="positive").free == 2
    narrow = pm.tie(model, "positive", to="share", through=lambda share: share)
    assert narrow.positive == 0.5
    assert pm.tie(model, "inner[0]", to="inner[1]").inner[0].scale == 1
    other = pm.tree_at(lambda m: m.inner[1], model, Free(jnp.float32(1.0)))
    with pytest.raises(ShapeError, match=r"inner\[0\].*positive"):
        pm.tie(other, "inner[0]", to="inner[1]")


def test_roles_that_were_given_stay():
    """Of the field, or of its parameter: a new value is of the same leaf."""
    for place in ("scale", "scale.unconstrained"):
        model = pm.with_role(Written(2.0), place, "buffer")
        for changed in (model.replace(scale=3.0), pm.tree_at("scale", model, 3.0)):
            assert changed.scale == pytest.approx(3.0)
            assert pm.select.role("buffer").mask(changed) == [True]
    other = model.replace(scale=unit_interval.constrain(jnp.float32(0.5), "scale"))
    assert pm.select.role("buffer").mask(other) == [False]
    assert repr(other.replace(scale=1.0)) == "Written(scale=positive(weak_f32[]))"


def test_models_that_are_one_take_as_many_values():
    """And read them one by one; a single model may get a value of another rank."""
    many = pm.filter_vmap(Written)(jnp.asarray([1.0, 2.0]))
    changed = many.replace(scale=jnp.asarray([3.0, 4.0]))
    struct = pm.filter_eval_shape(lambda m: m, many).replace(scale=jax.ShapeDtypeStruct((2,), "f4"))

    assert pm.filter_vmap(lambda m: m.scale)(changed).tolist() == pytest.approx([3.0, 4.0])
    assert jax.tree.structure(struct) == jax.tree.structure(many)
    assert Written(1.0).replace(scale=jnp.ones(2)).scale.shape == (2,)

    class Layer(Written):
        def __call__(self, x):
            return self.scale * x

    stack = pm.nn.Stack(lambda key: Layer(jnp.ones(2)), 2, key=jax.random.key(0))
    stack = pm.tree_at(lambda s: s.layer.scale, stack, jnp.asarray([[1.0, 2.0], [3.0, 4.0]]))
    assert stack(jnp.ones(2)).tolist() == pytest.approx([3.0, 8.0])


def test_each_of_several_as_one_is_constrained_alone(tmp_path):
    """A map may read its whole array: that of one layer, or of one member."""
    rising = pm.constraints.bijection(
        lambda u: jnp.cumsum(u, axis=0),
        lambda x: jnp.diff(x, axis=0, prepend=jnp.zeros_like(x[:1])),
    )

    class Steps(pm.Module):
        heights: jax.Array = pm.field(constraint=rising)

        def __call__(self, x):
            return x + self.heights

    def stack(key):
        return pm.nn.Stack(lambda key: Steps(jax.random.normal(key, (3,))), 2, key=key)

    values = jnp.arange(12.0).reshape(2, 2, 3) ** 2
    nets = pm.nn.Ensemble(stack, 2, key=jax.random.key(0))
    path = "member.layer.heights"
    changed = pm.tree_at(path, nets, values)

    assert_same(pm.resolve(changed).member.layer.heights, values)
    traced = pm.filter_jit(lambda nets, values: pm.tree_at(path, nets, values))(nets, values)
    pm.save(tmp_path / "clear", pm.resolve(changed))
    rename = {"**.heights": ("**.heights.unconstrained", rising.inverse)}
    for other in (traced, pm.load(tmp_path / "clear", nets, rename=rename)):
        assert jax.tree.structure(other) == jax.tree.structure(changed)
        assert_same(jax.tree.leaves(other), jax.tree.leaves(changed))

    class Shares(pm.Module):
        shares: jax.Array = pm.field(constraint=pm.constraints.simplex)

    several = pm.filter_vmap(Shares)(jnp.ones((2, 1)))
    with pytest.raises(ShapeError, match=r"Shares\.shares"):
        several.replace(shares=jnp.ones(2))


def test_structs_have_the_form_of_arrays():
    """A model of shapes alone, made by hand."""
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)

    class Shares(pm.Module):
        shares: jax.Array = pm.field(constraint=pm.constraints.simplex)

    made = Shares(struct)
    assert jax.tree.structure(made) == jax.tree.structure(Shares(jnp.ones(3) / 3))
    assert jax.tree.leaves(made) == [jax.ShapeDtypeStruct((2,), jnp.float32)]
    assert pm.filter_eval_shape(Shares, struct) == made


def test_values_are_given_and_read_in_the_clear():
    """In every style of class, whatever the number is; the logarithm is stored."""
    for make in STYLES:
        for value in (2.0, 2, np.float32(2), np.asarray(2.0, np.float32)):
            made = make(value)
            assert isinstance(made.scale, jax.Array)
            assert made.scale == 2
            found = float(pm.named_leaves(made)["scale.unconstrained"])
            assert found == pytest.approx(np.log(2))
            assert made.scale.dtype == jnp.float32


@pytest.mark.parametrize("value", [-1.0, np.nan, [1.0], "1", True, jnp.arange(2)])
def test_bad_values_are_refused(value):
    """In every style of class, by construction and every change, with the field's name."""
    for make in STYLES:
        with pytest.raises(FieldError, match=r"\.scale"):
            make(value)
        with pytest.raises(FieldError, match=r"\.scale"):
            make(2.0).replace(scale=value)
        # A mask, or a tree of labels, has the form of a model.
        if not isinstance(value, (bool, str, list)):
            with pytest.raises(FieldError, match=r"\.scale"):
                pm.tree_at("0.scale", [make(2.0)], replace_fn=lambda _: value)


def test_changes_take_the_value_in_the_clear():
    """`replace`, and `tree_at` by a function or a path; the parameter can be reached, too."""
    for make in STYLES:
        model = [make(2.0), 1]
        changed = model[0].replace(scale=jnp.asarray([1.0, 3.0]))
        assert changed.scale.tolist() == pytest.approx([1.0, 3.0])
        assert model[0].replace() == model[0]
        assert pm.tree_at(lambda m: m[0].scale, model, 3)[0].scale == pytest.approx(3.0)
        doubled = pm.tree_at("0.scale", model, replace_fn=lambda scale: scale * 2)[0]
        assert doubled.scale.tolist() == pytest.approx(4.0)
        assert pm.tree_at("0.scale.unconstrained", model, jnp.zeros(()))[0].scale == 1


CHANGES = {
    "construction": lambda _, value: Own(value),
    "replace": lambda model, value: model.replace(scale=value),
    "tree_at": lambda model, value: pm.tree_at("scale", model, value),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_traced_value_outside_its_bound_fails(change):
    """At construction and in every change: not clipped to the nearest number inside."""
    for under in (pm.filter_jit, pm.filter_grad):
        call = under(lambda value, model: change(model, value).scale.sum())
        expected = 1.0 if under is pm.filter_grad else 2.0
        assert np.allclose(call(jnp.asarray(2.0), Written(3.0)), expected)
        with pytest.raises(CheckError, match="scale"):
            call(jnp.asarray(-2.0), Written(3.0))


def test_resolved_and_tied_values_are_stored_as_they_are():
    """They come from the library, and not from the user: nothing is made of them."""

    class Both(pm.Module):
        a: jax.Array = pm.field(constraint=positive)
        b: jax.Array = pm.field(constraint=positive)

    both = Both(2.0, 3.0)
    assert pm.named_leaves(pm.resolve(both)) == {"a": both.a, "b": both.b}
    tied = pm.tie(both, "b", to="a")
    assert list(pm.named_leaves(tied)) == ["a.unconstrained"]
    assert tied.b == tied.replace(a=5.0).replace().b - 3 == 2
    assert pm.untie(tied) == Both(2.0, 2.0)
    assert pm.tie(both, "b", to="a", through=lambda a: a / 2).b == 1


def test_derivatives_are_no_values():
    """A value in a tree of derivatives is refused if the field is named."""
    gradients = pm.filter_grad(lambda m: m.scale)(Written(2.0))

    assert gradients == pm.tree_at("scale.unconstrained", gradients, jnp.asarray(2.0))
    for change in (
        lambda: pm.tree_at("scale", gradients, 0.0),
        lambda: gradients.replace(scale=1.0),
    ):
        with pytest.raises(SpecError, match="scale"):
            change()
