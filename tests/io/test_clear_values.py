"""Files with constrained values where `like` has constraints: older files, or resolved models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError
from pytreemod.training.constraints import lower_cholesky, positive, simplex
from tests.helpers.comparing import assert_same


class Kernel(pm.Module):
    """Three values within bounds, two of which have another shape than their parameters."""

    length: jax.Array = pm.field(constraint=positive)
    scale: jax.Array = pm.field(constraint=lower_cholesky)
    mix: jax.Array = pm.field(constraint=simplex)
    bias: jax.Array = pm.field(default_factory=lambda: jnp.zeros(2))


class Older(pm.Module):
    """The same before it was constrained."""

    length: jax.Array
    scale: jax.Array
    mix: jax.Array
    bias: jax.Array = pm.field(default_factory=lambda: jnp.zeros(2))


SCALE = np.array([[2.0, 0.0], [0.5, 1.0]], "f")
MIX = np.array([0.25, 0.5, 0.25], "f")
GIVEN = (np.array(2.0, "f"), SCALE, MIX, np.ones(2, "f"))


def kernel(cls=Kernel):
    """One that has other values than the file."""
    return cls(jnp.ones(()), jnp.eye(2), jnp.full(3, 1 / 3))


@pytest.fixture
def path(tmp_path):
    """A file of constrained values."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(dict(zip(pm.named_leaves(kernel(Older)), GIVEN, strict=True)), path)
    return path


def test_values_are_brought_in_as_by_the_constructor(path):
    """They were "unexpected", and their parameters missing."""
    expected = Kernel(*map(jnp.asarray, GIVEN))

    for like in (kernel(), pm.filter_eval_shape(kernel)):
        found, report = pm.load(path, like, strict=False)
        assert_same(found, expected)
        assert report.missing == report.unexpected == ()
        assert len(report.loaded) == 4
    assert_same(pm.load(path, kernel()), expected)


def bounded(constraint):
    """A class of which the field may have any constraint, under one name."""

    class Bounded(pm.Module):
        value: jax.Array = pm.field(constraint=constraint)
        bias: jax.Array = pm.field(default_factory=lambda: jnp.zeros(2))

    return Bounded


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (positive, pm.constraints.interval(0.0, 200.0)),
        (positive, pm.constraints.softplus_positive),
        (positive, simplex),
    ],
)
def test_a_constraint_that_has_changed_keeps_the_values(tmp_path, old, new):
    """The same numbers without bounds would be others: 1e5 became 11.5."""
    values = jnp.asarray([0.25, 0.75])
    pm.save(tmp_path / "f", bounded(old)(values))

    found, report = pm.load(tmp_path / "f", bounded(new)(jnp.full(2, 0.5)), strict=False)
    np.testing.assert_allclose(found.value, values, rtol=1e-5)
    assert report.missing == report.unexpected == ()
    assert len(report.configuration) == 1


@pytest.mark.parametrize("make", [optax.adam(0.1).init, pm.Optimizer(optax.adam(0.1)).init])
@pytest.mark.parametrize("old", [positive, None])
def test_moments_are_no_values(tmp_path, make, old):
    """Those of another constraint, or of none, are left out: a second moment became -5.3."""
    model = (Clear if old is None else bounded(old))(jnp.asarray([0.25, 0.75]))
    moments = jax.tree.map(lambda x: x + 0.5 if x.dtype == "float32" else x, make(model))
    pm.save(tmp_path / "f", {"model": model, "state": moments})
    like = bounded(pm.constraints.unit_interval)(jnp.full(2, 0.5))
    like = {"model": like, "state": make(like)}

    found, report = pm.load(tmp_path / "f", like, strict=False)
    np.testing.assert_allclose(found["model"].value, [0.25, 0.75], rtol=1e-5)
    assert len(report.missing) == 2
    assert all(name.endswith("u.value.unconstrained") for name in report.missing)
    leaves = pm.named_leaves(found)
    assert not any(leaves[name].any() for name in report.missing)


class Clear(pm.Module):
    """Like `bounded`, before it had a constraint."""

    value: jax.Array
    bias: jax.Array = pm.field(default_factory=lambda: jnp.zeros(2))


@pytest.mark.parametrize("saved_as", ["stack", "list"])
@pytest.mark.parametrize("loaded_as", ["stack", "list"])
def test_a_constraint_of_several_as_one_that_has_changed(tmp_path, saved_as, loaded_as):
    """Each is taken out of the old bounds alone."""

    def several(constraint, form, values):
        class Bounded(pm.Module):
            value: jax.Array = pm.field(constraint=constraint)

            def __call__(self, x):
                return x

        members = [Bounded(value) for value in values]
        return members if form == "list" else nn.Stack.from_layers(members)

    values = [jnp.asarray(MIX), jnp.asarray(MIX[::-1])]
    pm.save(tmp_path / "f", several(simplex, saved_as, values))
    like = several(positive, loaded_as, [jnp.ones(3)] * 2)

    found, report = pm.load(tmp_path / "f", like, strict=False)
    assert report.missing == report.unexpected == ()
    members = found if loaded_as == "list" else found.unstack()
    made = [member.value for member in members]
    np.testing.assert_allclose(made, values, rtol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("length", -1.0), ("mix", [1.0, 1.0, 1.0])])
def test_what_is_outside_is_refused(tmp_path, name, value):
    """As by the constructor; nothing is loaded."""
    path = tmp_path / "model.safetensors"
    values = dict(zip(pm.named_leaves(kernel(Older)), GIVEN, strict=True))
    safetensors.numpy.save_file(values | {name: np.array(value, "f")}, path)

    with pytest.raises(FileError, match=name):
        pm.load(path, kernel())


def test_a_value_in_the_clear_is_not_taken_for_what_stands_for_it(tmp_path, path):
    """Renamed to that, 2.0 was read as 7.39, which is its exponential."""
    own = tmp_path / "own.safetensors"
    pm.save(own, {"a": pm.resolve(Kernel(*map(jnp.asarray, GIVEN)))})
    like = {"b": kernel()}

    with pytest.raises(ArgumentError, match=r"b\.length"):
        pm.load(own, like, rename={"a.length": "b.length.unconstrained", "a": "b"})
    pm.save(own, pm.resolve(kernel()))
    with pytest.raises(ArgumentError, match="length"):
        pm.load(own, kernel(), rename={"length": "length.unconstrained"})
    # A file of other tools may have such an array, and only its owner knows.
    found = pm.load(path, kernel(), rename={"length": "length.unconstrained"})
    np.testing.assert_allclose(found.length, np.exp(2.0), rtol=1e-6)


def make_nets(kind, seed):
    """A net, and the same with updates of low rank, of other values."""
    key, other = jax.random.split(jax.random.key(seed))
    if kind == "stack":
        nets = [nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=k) for k in (key, other)]
    else:
        nets = [nn.MLP(3, 3, 4, 1, key=k) for k in (key, other)]
    return nets[0], pm.lora(nets[1], nn.Linear, 2, key=key)


@pytest.mark.parametrize("kind", ["mlp", "stack"])
def test_a_matrix_is_the_base_of_an_update_of_low_rank(tmp_path, kind):
    """A plain model goes into one with LoRA: it computes the same, for updates begin at zero."""
    path = tmp_path / "file"
    plain, adapted = make_nets(kind, 0)
    pm.save(path, plain)

    loaded, report = pm.load(path, adapted, strict=False)
    x = jnp.arange(3.0)
    np.testing.assert_allclose(loaded(x), plain(x), rtol=1e-6)
    assert report.unexpected == ()
    assert all(name.endswith((".a", ".b")) for name in report.missing)
    assert all(new == f"{old}.base" for new, old in report.renamed)
    with pytest.raises(FileError, match=r"weight\.a: missing\n") as error:
        pm.load(path, adapted)
    assert ".base" not in str(error.value)
