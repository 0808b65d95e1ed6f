"""Names of axes from annotations, from configuration, and from notes on single leaves."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float, Int

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, SpecError
from tests.helpers.trees import new


def a(*shape: int) -> jax.Array:
    return jnp.ones(shape)


@pytest.mark.parametrize(
    ("annotation", "value", "names"),
    [
        (dict[str, Float[Array, " a"]], {"x": a(2)}, {"x": ("a",)}),
        (tuple[Float[Array, " a"], Int[Array, "b 3"]], (a(2), a(2, 3)), (("a",), ("b", None))),
        (Float[Array, " a"] | Int[Array, "c b"] | None, a(2, 2), ("c", "b")),
        (Float[Array, "3 a"] | Float[Array, "a b"], a(2, 3), ("a", "b")),
        (Float[Array, "a *rest b"], a(2, 3, 4, 5), ("a", None, None, "b")),
        (Float[Array, "..."], a(2, 3), (None, None)),
        (Float[Array, "_ #a ?b a-1 {n} r=3"], a(1, 1, 1, 1, 1, 3), (None, "a", "b", *[None] * 3)),
        (Float[Array, "a a"], a(2, 2), ("a", None)),
        (Float[Float[Array, "a b"], "c"], a(2, 2, 2), ("c", "a", "b")),
        ("Float[Array, 'a b']", a(2, 3), ("a", "b")),
        ("Nowhere[Array]", a(2, 3), (None, None)),
        (Float[Array, "a b c"], a(2, 3), (None, None)),
        (Any, 1.0, ()),
    ],
)
def test_an_annotation_names_axes(annotation: Any, value: Any, names: Any):
    """A leaf that it does not fit has no names, and neither has a scalar."""
    one = new(fields={"x": annotation}, __module__=__name__)
    # A string is evaluated in the module of the class that has it.
    for cls in (one, new(one, __module__="math")):
        assert pm.axis_names(cls(value)).x == names


LAYERS = [
    (lambda k: nn.Conv2d(3, 4, 3, key=k), ("out_channels", "group_channels", None, None)),
    (lambda k: nn.Einsum("...i,io->...o", (3, 4), 4, key=k), ("i", "o")),
    (
        lambda k: nn.LinearGeneral(3, (2, 4), key=k),
        ("in_features", "out_features_0", "out_features_1"),
    ),
    (lambda k: nn.LayerNorm(3), (None,)),
]


@pytest.mark.parametrize(("make", "names"), LAYERS)
def test_layers_name_their_axes(make: Any, names: Any, key: jax.Array):
    """An axis that a map adds in front has no name until it gets one, and takes none of theirs."""
    layers = pm.filter_vmap(make)(jax.random.split(key, 2))
    named = pm.with_axis_names(layers, pm.by({"**": "nets ..."}))
    assert pm.axis_names(make(key)).weight == names
    assert pm.axis_names(layers).weight == (None, *names)
    assert pm.axis_names(named).weight == ("nets", *names)


def test_layers_and_members_are_axes_of_their_own(key: jax.Array):
    """With names for the layer's own axes, those of the Stack come first."""
    linear = ft.partial(nn.Linear, 2, 2)
    nets = nn.Ensemble(ft.partial(nn.Stack, linear, 3, axis_name="depth"), 2, key=key)
    names = pm.axis_names(nets).member.layer
    assert names.weight == ("members", "depth", "out_features", "in_features")
    assert names.bias == ("members", "depth", "out_features")
    assert pm.axis_names(nets[0]).layer.weight == ("depth", "out_features", "in_features")
    plain = nn.Stack(lambda: new(fields={"x": Any})(a(2)), 3)
    assert pm.axis_names(plain).layer.x == ("layers", None)
    named = pm.with_axis_names(nets[0], pm.by({"layer.weight": "mlp embed", ...: None}))
    assert pm.axis_names(named).layer.weight == ("depth", "mlp", "embed")
    assert pm.axis_names(named[0]).weight == ("mlp", "embed")


FIELDS = {"base": jax.Array, "rows": Float[Array, "rows 1"]}
Scaled = new(pm.Computed, fields=FIELDS, value=lambda self: self.base * self.rows)


def _named(tree: Any) -> dict[str, Any]:
    is_names = lambda n: type(n) is tuple and all(m is None or isinstance(m, str) for m in n)  # noqa: E731
    return dict(zip(pm.named_leaves(tree), jax.tree.leaves(pm.axis_names(tree), is_leaf=is_names)))


def test_what_follows_a_model_has_its_names(key: jax.Array):
    """Gradients, moments: they have its classes. Parts of a computed leaf share its axes."""
    net = nn.Linear(4, 6, key=key)
    moments = _named(pm.Optimizer(optax.adam(1e-3)).init(net))
    stack = nn.Stack(lambda key: nn.Linear(4, 4, key=key), 3, key=key)
    deep = _named(pm.lora(stack, "layer.weight", rank=2, key=key))
    own = _named(net.replace(weight=Scaled(net.weight, jnp.ones((6, 1)))))
    tied = pm.tie(nn.Sequential([nn.Embedding(5, 3, key=key)] * 2), "layers[1]", to="layers[0]")
    assert pm.axis_names(jax.tree.map(jnp.ones_like, net)) == pm.axis_names(net)
    (name,) = [name for name in moments if name.endswith("mu.weight")]
    assert moments[name] == ("out_features", "in_features")
    assert deep["layer.weight.base"] == ("layers", "out_features", "in_features")
    assert deep["layer.weight.a"] == ("layers", None, "in_features")
    assert deep["layer.weight.b"] == ("layers", "out_features", None)
    assert own["weight.base"] == ("out_features", "in_features")
    assert own["weight.rows"] == ("rows", None)
    assert [*_named(tied).values()] == [("num_embeddings", "embedding_size")]


def test_names_of_what_is_made_inside_a_map():
    """The founding guide's program: four kernels along axis 1, under the name b."""
    Kernel, inside = new(fields={"w": Float[Array, "a _"]}), []

    def look(kernel: Any) -> jax.Array:
        inside.append((kernel.w.shape, pm.axis_names(kernel).w))
        return kernel.w

    make = pm.filter_vmap(lambda: Kernel(look(Kernel(a(3, 5)))), axis_size=4, out_axes=1)
    kernels = pm.with_axis_names(make(), pm.by({"w": "a b _"}))
    pm.filter_vmap(look, in_axes=1)(kernels)
    assert inside == [((3, 5), ("a", None))] * 2
    assert kernels.w.shape == (3, 4, 5)
    assert pm.axis_names(kernels).w == ("a", "b", None)


def test_names_are_configuration(key: jax.Array):
    """They are preserved like roles; inside of a map over the axis that they name, it is gone."""
    nets = pm.filter_vmap(lambda key: nn.Linear(3, 2, key=key))(jax.random.split(key, 5))
    net = pm.with_axis_names({"net": nets}, pm.by({"**.weight": "n a _", ...: "n ..."}))
    expected, inside = pm.axis_names(net), []
    pm.filter_vmap(lambda net: inside.append(pm.axis_names(net)["net"].bias))(net)
    assert expected["net"].weight == ("n", "a", None)
    assert expected["net"].bias == ("n", "out_features")
    assert inside == [("out_features",)]
    assert pm.axis_names(pm.with_axis_names(net, pm.by({...: None}))) == expected
    assert pm.axis_names([a(2), 1.0]) == [(None,), ()]


def test_names_that_do_not_fit_are_refused():
    """No rule, too many names, two gaps, a leaf of no Module."""
    with pytest.raises(ArgumentError, match=r"by\("):
        pm.with_axis_names(nn.LayerNorm(2), "layers ...")  # pyright: ignore[reportArgumentType]
    norm = nn.LayerNorm(2)
    for tree, text in ((norm, "a b"), (norm, "... a ..."), ({"w": a(2)}, "a")):
        with pytest.raises(SpecError, match=rf"at (weight|\['w'\]).*{text!r}"):
            pm.with_axis_names(tree, pm.by({...: text}))
