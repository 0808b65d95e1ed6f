"""capture: which submodules, which of their values, and that nothing else changes."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import CaptureError, SpecError
from tests.helpers.trees import Affine, affine, ramp

X = ramp(2)


class Net(pm.Module):
    """Two layers in a tuple, one in a dict, and a buffer."""

    layers: tuple[Affine, ...]
    heads: dict[str, Affine]
    scale: jax.Array = pm.buffer()

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.scale * self.heads["out"](x)

    def encode(self, x):
        """A method that uses some of the layers."""
        return self.layers[0](x)


def net(scale=1.0):
    """A `Net`, with weights of about one."""
    layers = (affine(2, 2, 1.0), affine(2, 2, -2.0))
    model = Net(layers, {"out": affine(1, 2, 1.0)}, jnp.float32(0.5))
    return jax.tree.map(lambda x: x * jnp.float32(scale / 4), model)


NET = net()


close = ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def by_hand(model, x):
    """The outputs of the layers of a `Net`, in NumPy."""
    first = np.asarray(model.layers[0].weight) @ x + np.asarray(model.layers[0].bias)
    second = np.asarray(model.layers[1].weight) @ np.tanh(first) + np.asarray(model.layers[1].bias)
    head = model.heads["out"]
    out = np.asarray(head.weight) @ np.tanh(second) + np.asarray(head.bias)
    return {"layers[0]": first, "layers[1]": second, "heads['out']": out}


def names(fn, selector, *args, **kwargs):
    """The names under which a captured function shows something."""
    return list(pm.capture(fn, selector)(*args, **kwargs)[1])


ALL = ["layers[0]", "layers[1]", "heads['out']"]
SELECTORS = {
    "a class": (Affine, ALL),
    "everything": (..., [*ALL, "<root>"]),
    "a path": ("layers.*", ALL[:2]),
    "all at any depth": ("**", [*ALL, "<root>"]),
    "access": (pm.select.at(lambda m: (m.layers[0], m.heads["out"])), [ALL[0], ALL[2]]),
    "a predicate": (lambda m: isinstance(m, Affine) and m.bias.shape == (1,), ALL[2:]),
    "not": (~pm.select.path("layers.*") & Affine, ALL[2:]),
}


@pytest.mark.parametrize(("selector", "expected"), SELECTORS.values(), ids=SELECTORS)
def test_a_selector_chooses_modules_themselves(selector, expected):
    """And not their submodules."""
    assert names(NET, selector, X) == expected


def test_values_are_what_the_layers_return():
    """They are those of a computation by hand, in the order of the calls."""
    out, seen = pm.capture(NET, Affine)(X)

    expected = by_hand(NET, X)
    assert list(seen) == list(expected)
    for name, value in expected.items():
        close(seen[name], value)
    close(out, NET.scale * expected["heads['out']"])


def loss(model, x):
    """A scalar."""
    return jnp.sum(model(x) ** 2)


CALLED = {
    "a Module": (NET, (X,)),
    "the second argument": (lambda x, model: model(x), (X, NET)),
    "jit inside": (lambda model, x: pm.filter_jit(model)(x), (NET, X)),
    "a method, jitted": (pm.filter_jit(NET.__call__), (X,)),
    "jit of grad of checkpoint": (
        pm.filter_jit(pm.filter_grad(pm.filter_checkpoint(loss))),
        (NET, X),
    ),
    "jvp": (lambda model, x: pm.filter_jvp(model, (x,), (x,)), (NET, X)),
    "vjp": (lambda model, x: pm.filter_vjp(loss, model, x)[0], (NET, X)),
    "cond": (lambda model, x: pm.filter_cond(x[0] > 0, model, model, x), (NET, X)),
}


@pytest.mark.parametrize(("fn", "args"), CALLED.values(), ids=CALLED)
def test_submodules_are_seen_through_transforms(fn, args):
    """Wherever the Module is, and however it is called; results are the same."""
    out, seen = pm.capture(fn, Affine)(*args)

    for name, value in by_hand(NET, X).items():
        close(seen[name], value)
    assert sorted(seen) == sorted(ALL)
    assert pm.tree_equal(out, fn(*args), rtol=1e-5, atol=1e-6)


STACKED = {
    "map": lambda model, xs: pm.filter_map(model, xs),
    "scan": lambda model, xs: pm.filter_scan(lambda c, x: (c, model(x)), None, xs)[1],
    "jit of vmap": pm.filter_jit(lambda model, xs: pm.filter_vmap(model)(xs)),
}


@pytest.mark.parametrize("fn", STACKED.values(), ids=STACKED)
def test_values_of_members_are_stacked(fn):
    """Along axis 0, as they are computed."""
    xs = ramp(3, 2)
    seen = pm.capture(fn, Affine)(NET, xs)[1]

    for number, x in enumerate(xs):
        for name, value in by_hand(NET, np.asarray(x)).items():
            close(seen[name][number], value)


def test_arguments_by_keyword_are_arguments():
    """Their Modules can be chosen, too."""
    assert names(lambda x, *, model: model(x), "layers.*", X, model=NET) == ALL[:2]


def test_a_method_is_captured_with_its_module():
    """Paths are those in the Module."""
    assert names(NET.encode, "layers.*", X) == ALL[:1]
    assert names(pm.filter_jit(NET.encode), Affine, X) == ALL[:1]


def test_what_is_sown_is_seen_beside_submodules():
    """In the order of the calls."""

    def fn(model, x):
        return pm.sow("out", model(pm.sow("in", x)))

    assert names(fn, "layers.0", NET, X) == ["in", "layers[0]", "out"]
    assert names(fn, None, NET, X) == ["in", "out"]


def test_a_chosen_module_is_what_it_was():
    """Its class is a subclass, and everything else is the same."""

    def fn(model, x):
        layer = model.layers[0]
        assert isinstance(layer, Affine)
        assert type(layer).__qualname__ == "Affine"
        close(layer.scaled(x, by=2.0), 2 * layer(x))
        assert repr(layer) == repr(NET.layers[0])
        changed = pm.tree_at(lambda m: m.layers[0].bias, model, replace_fn=lambda b: b + 1)
        return changed(x)

    out, seen = pm.capture(fn, "layers.0")(NET, X)
    assert list(seen) == ["layers[0]", "layers[0]#2", "layers[0]#3"]
    close(seen["layers[0]#3"], NET.layers[0](X) + 1)
    assert out.shape == (1,)


def test_state_is_left_out():
    """Of a layer that returns (out, state), the output is seen, and the State goes on."""
    model, state = pm.make_with_state(
        lambda: nn.Sequential([nn.BatchNorm(2), nn.Identity(), nn.BatchNorm(2)])
    )()
    xs = ramp(4, 2)
    (out, after), seen = pm.capture(pm.filter_jit(model), nn.BatchNorm)(xs, state)

    expected, expected_after = model(xs, state)
    assert list(seen) == ["layers[0]", "layers[2]"]
    close(seen["layers[2]"], expected)
    close(out, expected)
    assert pm.tree_equal(after, expected_after, rtol=1e-5, atol=1e-6)


class Returning(pm.Module):
    """A layer that returns whatever a function makes of its input."""

    make: object

    def __call__(self, x):
        return self.make(x)


@pytest.mark.parametrize("make", [lambda x: (x, 2 * x), lambda x: ((x, 2 * x), pm.State(NET))])
def test_a_result_that_is_a_tuple_is_seen(make):
    """As it is; only State is left out."""
    _, seen = pm.capture(Returning(make), Returning)(X)

    assert pm.tree_equal(seen, {"<root>": (X, 2 * X)})


def classes(tree):
    """The class of each Module in a tree, and the structure of the whole."""
    return jax.tree.structure(tree)


def test_what_is_sown_has_its_own_class_again():
    """A chosen Module may itself be sown."""

    def fn(model, x):
        pm.sow("layer", model.layers[0])
        return model(x)

    seen = pm.capture(fn, Affine)(NET, X)[1]
    assert type(seen["layer"]) is Affine
    assert seen["layer"] == NET.layers[0]


OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def update_by_optimizer(model, opt, x):
    """A step with an `Optimizer`, which has its model's structure in its configuration."""
    return opt.update(model, pm.filter_grad(loss)(model, x))


@pytest.mark.parametrize("selector", [..., pm.select.type(Affine) & "**.layers.*"])
def test_a_training_step_with_an_optimizer_can_be_captured(selector):
    """It takes the model for the one that it was made for, and goes on with it afterwards."""
    opt = pm.Optimizer(OPTIMIZER).init(NET)
    step = pm.filter_jit(update_by_optimizer)
    (model, after), seen = pm.capture(step, selector)(NET, opt, X)

    assert {"layers[0]", "layers[1]"} <= set(seen) <= {*ALL, "<root>"}
    assert classes((model, after)) == classes((NET, opt))
    assert pm.tree_equal((model, after), step(NET, opt, X), rtol=1e-5, atol=1e-6)
    assert pm.tree_equal(step(model, after, X), step(*step(NET, opt, X), X), rtol=1e-5, atol=1e-6)


def test_captures_are_nested():
    """Each returns its selection; the outer one also sees values that are sown in the inner one."""

    def fn(model, x):
        def inside(model, x):
            return pm.sow("out", model(x))

        out, seen = pm.capture(inside, "layers.1")(model, x)
        return out, list(seen), model

    (_, inner, model), seen = pm.capture(fn, "layers.*")(NET, X)
    assert inner == ["layers[1]", "out"]
    assert list(seen) == ["layers[0]", "layers[1]", "out"]
    assert classes(model) == classes(NET)


def test_a_capture_inside_of_a_plain_transform_is_its_own():
    """Values that are captured and used there need not be returned."""
    xs = ramp(3, 2)
    seen = jax.vmap(lambda x: pm.capture(NET, "layers.0")(x)[1])(xs)

    close(seen["layers[0]"], jax.vmap(NET.layers[0])(xs))


def test_each_choice_is_traced_once():
    """Calls with and without capture in turns find their compiled programs."""
    traces = []

    @pm.filter_jit
    def fn(model, x):
        traces.append(1)
        return model(x)

    for number in range(3):
        model = net(number)
        for selector in (None, "layers.0", Affine):
            out, seen = pm.capture(fn, selector)(model, X)
            close(out, model(X))
            for name, value in seen.items():
                close(value, by_hand(model, X)[name])
        close(fn(model, X), model(X))
    assert len(traces) == 4


def test_vectors_are_captured_on_each_device():
    """With the devices first, whatever the shape of the values."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    mapped = pm.filter_shard_map(
        lambda x: pm.sow("seen", x.sum(0)),
        mesh=mesh,
        in_specs=spec,
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    seen = pm.capture(mapped)(jnp.arange(12.0).reshape(4, 3))[1]

    np.testing.assert_array_equal(seen["seen"], [[3, 5, 7], [15, 17, 19]])


REFUSED = {
    "inside jax.vmap": (
        lambda: pm.capture(lambda m, xs: jax.vmap(m)(xs), Affine)(NET, ramp(3, 2)),
        CaptureError,
        r"layers\[0\]",
    ),
    "a path of no Module": (lambda: pm.capture(NET, "scale")(X), SpecError, "scale"),
    "one of two that picks nothing": (
        lambda: pm.capture(NET, Affine | pm.select.path("foo"))(X),
        SpecError,
        "foo",
    ),
    "a captured closure": (
        lambda: pm.capture(lambda x: NET(x), Affine)(X),
        SpecError,
        "Affine",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_seen_is_refused(call, error, match):
    """Instead of a result in which it is missing."""
    with pytest.raises(error, match=match):
        call()
