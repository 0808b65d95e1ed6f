"""Names of axes from annotations, from configuration, and from notes on single leaves."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float, Int

import pytreemod as pm
from pytreemod import nn


class Many(pm.Module):
    """All forms of annotations."""

    plain: Float[Array, "a b"] = pm.field(default_factory=lambda: jnp.ones((2, 3)))
    listed: list[Float[Array, "a b"]] = pm.field(default_factory=lambda: [jnp.ones((2, 3))])
    keyed: dict[str, Float[Array, " a"]] = pm.field(default_factory=lambda: {"x": jnp.ones(2)})
    pair: tuple[Float[Array, " a"], Float[Array, "b 3"]] = pm.field(
        default_factory=lambda: (jnp.ones(2), jnp.ones((2, 3)))
    )
    either: Float[Array, " a"] | Int[Array, "c b"] | None = pm.field(
        default_factory=lambda: jnp.ones((2, 2))
    )
    fixed: Float[Array, "3 a"] | Float[Array, "a b"] = pm.field(
        default_factory=lambda: jnp.ones((2, 3))
    )
    many: Float[Array, "a *rest b"] = pm.field(default_factory=lambda: jnp.ones((2, 3, 4, 5)))
    none: Float[Array, "..."] = pm.field(default_factory=lambda: jnp.ones((2, 3)))
    odd: Float[Array, "_ #a ?b a-1 {self.n} rgb=3"] = pm.field(
        default_factory=lambda: jnp.ones((1, 1, 1, 1, 1, 3))
    )
    twice: Float[Array, "a a"] = pm.field(default_factory=lambda: jnp.ones((2, 2)))
    nested: Float[Float[Array, "a b"], "c"] = pm.field(default_factory=lambda: jnp.ones((2, 2, 2)))
    text: "Float[Array, 'a b']" = pm.field(default_factory=lambda: jnp.ones((2, 3)))
    unread: "Nowhere[Array]" = pm.field(default_factory=lambda: jnp.ones((2, 3)))
    array: jax.Array = pm.field(default_factory=lambda: jnp.ones((2, 3)))
    scalar: Any = 1.0


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("plain", ("a", "b")),
        ("listed", [("a", "b")]),
        ("keyed", {"x": ("a",)}),
        ("pair", (("a",), ("b", None))),
        ("either", ("c", "b")),
        ("fixed", ("a", "b")),
        ("many", ("a", None, None, "b")),
        ("none", (None, None)),
        ("odd", (None, "a", "b", None, None, None)),
        ("twice", ("a", None)),
        ("nested", ("c", "a", "b")),
        ("text", ("a", "b")),
        ("unread", (None, None)),
        ("array", (None, None)),
        ("scalar", ()),
    ],
)
def test_an_annotation_names_axes(field: str, expected: Any):
    assert getattr(pm.axis_names(Many()), field) == expected


@pytest.mark.parametrize(
    ("layer", "field", "expected"),
    [
        (lambda k: nn.Conv2d(3, 4, 3, key=k), "weight", ("out_channels", "group_channels")),
        (lambda k: nn.Einsum("...i,io->...o", (3, 4), 4, key=k), "weight", ("i", "o")),
        (lambda k: nn.Einsum("...i,io->...o", (3, 4), 4, key=k), "bias", ("o",)),
        (lambda k: nn.LinearGeneral(3, 4, key=k), "weight", ("in_features", "out_features")),
        (
            lambda k: nn.LinearGeneral(3, (2, 4), key=k),
            "weight",
            ("in_features", "out_features_0", "out_features_1"),
        ),
        (lambda k: nn.Embedding(5, 3, key=k), "weight", ("num_embeddings", "embedding_size")),
        (lambda k: nn.LayerNorm(3), "weight", ()),
    ],
)
def test_layers_name_their_axes(layer: Any, field: str, expected: Any, key: jax.Array):
    made = layer(key)
    names = getattr(pm.axis_names(made), field)
    spare = getattr(made, field).ndim - len(expected)

    assert names == (*expected, *[None] * spare)


def test_layers_and_members_are_axes_of_their_own(key: jax.Array):
    def stack(key: Any) -> Any:
        return nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=key, axis_name="depth")

    nets = nn.Ensemble(stack, 2, key=key)
    names = pm.axis_names(nets).member.layer

    assert names.weight == ("members", "depth", "out_features", "in_features")
    assert names.bias == ("members", "depth", "out_features")
    assert pm.axis_names(nets[0]).layer.weight == ("depth", "out_features", "in_features")
    again = nn.Stack.from_layers(nets[0].unstack(), axis_name="d")
    assert pm.axis_names(again).layer.bias == ("d", "out_features")


def test_what_follows_a_model_has_its_names(key: jax.Array):
    """Gradients, moments, averages: they have the model's classes."""
    net = nn.Linear(3, 2, key=key)
    grads = pm.filter_grad(lambda m, x: m(x).sum())(net, jnp.ones(3))
    opt = pm.Optimizer(optax.adam(1e-3)).init(net)
    named = _named(opt)

    assert pm.axis_names(grads) == pm.axis_names(net)
    assert [n for path, n in named.items() if path.endswith("mu.weight")] == [
        ("out_features", "in_features")
    ]
    assert [n for path, n in named.items() if path.endswith("count")] == [()]


def test_parts_of_a_computed_leaf(key: jax.Array):
    net = {"net": nn.Linear(4, 6, key=key)}
    adapted = _named(pm.lora(net, "net.weight", rank=2, key=key))
    stack = nn.Stack(lambda key: nn.Linear(4, 4, key=key), 3, key=key)
    deep = _named(pm.lora(stack, "layer.weight", rank=2, key=key))
    small = _named(pm.quantize(net, "int8"))

    assert adapted["net.weight.base"] == ("out_features", "in_features")
    assert adapted["net.weight.a"] == (None, "in_features")
    assert adapted["net.weight.b"] == ("out_features", None)
    assert deep["layer.weight.base"] == ("layers", "out_features", "in_features")
    assert deep["layer.weight.a"] == ("layers", None, "in_features")
    assert small["net.weight.numbers"] == ("out_features", None)
    assert small["net.weight.scales"] == ("out_features", None)


class Scaled(pm.Computed):
    """A computed leaf of a user's."""

    base: jax.Array
    rows: Float[Array, "rows 1"]

    def value(self):
        """The array."""
        return self.base * self.rows


def test_parts_of_a_users_computed_leaf(key: jax.Array):
    """A part of the field's shape has the field's names, others have their own."""
    net = nn.Linear(3, 2, key=key)
    net = net.replace(weight=Scaled(net.weight, jnp.ones((2, 1))))

    assert _named(net)["weight.base"] == ("out_features", "in_features")
    assert _named(net)["weight.rows"] == ("rows", None)


def test_a_tie_has_one_leaf(key: jax.Array):
    class Net(pm.Module):
        embed: nn.Embedding
        head: nn.Linear

    net = Net(nn.Embedding(5, 3, key=key), nn.Linear(3, 5, use_bias=False, key=key))
    names = pm.axis_names(pm.tie(net, "head.weight", to="embed.weight"))

    assert _leaves(names) == [("num_embeddings", "embedding_size")]


# ---- names that are said of single leaves


def _nets(key: jax.Array) -> Any:
    return pm.filter_vmap(lambda key: nn.Linear(3, 2, key=key))(jax.random.split(key, 5))


def test_an_axis_of_a_map_is_named(key: jax.Array):
    nets = pm.with_axis_names(_nets(key), pm.by({"**": "nets ..."}))
    inside: list[Any] = []

    def look(net: Any, x: Any) -> Any:
        inside.append(pm.axis_names(net).weight)
        return net(x)

    pm.filter_vmap(look, in_axes=(0, None))(nets, jnp.ones(3))

    assert pm.axis_names(nets).weight == ("nets", "out_features", "in_features")
    assert inside == [("out_features", "in_features")]


class Kernel(pm.Module):
    """A kernel whose second axis has no name."""

    w: Float[Array, "a _"]


def test_names_of_what_is_made_inside_a_map():
    """The founding guide's program: four kernels along axis 1, under the name b."""
    inside: list[Any] = []

    def make() -> Kernel:
        kernel = Kernel(jnp.ones((3, 5)))
        inside.append((kernel.w.shape, pm.axis_names(kernel).w))
        return kernel

    kernels = pm.filter_vmap(make, axis_size=4, out_axes=1)()
    kernels = pm.with_axis_names(kernels, pm.by({"w": "a b _"}))

    def look(kernel: Kernel) -> jax.Array:
        inside.append((kernel.w.shape, pm.axis_names(kernel).w))
        return kernel.w

    pm.filter_vmap(look, in_axes=1)(kernels)

    assert inside == [((3, 5), ("a", None))] * 2
    assert kernels.w.shape == (3, 4, 5)
    assert pm.axis_names(kernels).w == ("a", "b", None)


@pytest.mark.parametrize(
    "make",
    [
        lambda k: nn.Conv2d(1, 2, 3, key=k),
        lambda k: nn.LayerNorm(3),
        lambda k: nn.Einsum("...i,io->...o", (3, 4), key=k),
        lambda k: nn.LinearGeneral(3, (2, 4), key=k),
    ],
)
def test_an_axis_of_a_map_is_none_of_a_layers_sizes(make: Any, key: jax.Array):
    """Nor if the annotation allows any number of axes: the layer knows its own number."""
    layer = make(key)
    layers = pm.filter_vmap(make)(jax.random.split(key, 2))
    named = pm.with_axis_names(layers, pm.by({"**": "nets ..."}))

    with pytest.raises(ValueError, match="axis_names"):
        pm.axis_names(layers)
    assert pm.axis_names(named).weight == ("nets", *pm.axis_names(layer).weight)


def test_names_are_configuration(key: jax.Array):
    """They are preserved like roles; and they are notes of the innermost Module."""
    net = pm.with_axis_names({"net": _nets(key)}, pm.by({"**.weight": "_ a b", ...: "n ..."}))
    expected = pm.axis_names(net)

    assert expected["net"].weight == (None, "a", "b")
    for same in (
        pickle.loads(pickle.dumps(net)),
        jax.tree.map(lambda x: x + 1, net),
        pm.tree_at(lambda n: n["net"].weight, net, replace_fn=lambda w: 2 * w),
    ):
        assert pm.axis_names(same) == expected
    assert pm.axis_names(pm.with_axis_names(net, pm.by({"**.weight": "x ...", ...: None})))[
        "net"
    ].weight == ("x", "out_features", "in_features")


def test_a_stack_may_be_named_by_its_layer(key: jax.Array):
    """With names for the layer's own axes, those of the Stack come first."""
    stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=key)
    named = pm.with_axis_names(stack, pm.by({"layer.weight": "mlp embed", ...: None}))

    assert pm.axis_names(named).layer.weight == ("layers", "mlp", "embed")
    assert pm.axis_names(named[0]).weight == ("mlp", "embed")


def _named(tree: Any) -> dict[str, Any]:
    return dict(zip(pm.named_leaves(tree), _leaves(pm.axis_names(tree)), strict=True))


def _leaves(names: Any) -> list[Any]:
    def is_names(node: Any) -> bool:
        return type(node) is tuple and all(n is None or isinstance(n, str) for n in node)

    return jax.tree.leaves(names, is_leaf=is_names)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: pm.axis_names({"nets": _nets(jax.random.key(0))}), r"\['nets'\]\.weight"),
        (lambda: pm.with_axis_names(nn.LayerNorm(2), "layers ..."), "layers"),
        (lambda: pm.with_axis_names(nn.LayerNorm(2), pm.by({...: "a-b"})), "a-b"),
        (lambda: pm.with_axis_names(nn.LayerNorm(2), pm.by({...: "a b"})), "weight"),
        (lambda: pm.with_axis_names({"w": jnp.ones(2)}, pm.by({...: "a"})), r"\['w'\]"),
    ],
)
def test_names_that_do_not_fit_are_refused(use: Any, text: str):
    """An axis that a map has added; no rule, no name, too many names, a leaf of no Module."""
    with pytest.raises((ValueError, TypeError), match=text):
        use()
