"""Modules annotated with jaxtyping: checked field by field when they are built, and never later."""

import copy
import importlib
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import TypeCheckError

import pytreemod as pm
from tests.helpers.trees import ramp

# One file for all ways, with classes of every style.
SOURCE = """
import dataclasses
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import pytreemod as pm
class Generated(pm.Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "out"]
    size: int = pm.field(static=True, default=3)
    def __call__(self, x: Float[Array, "in"]) -> Float[Array, "out"]:
        return self.weight @ x + self.bias
class Own(pm.Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "out"]
    def __init__(self, weight, bias): self.weight, self.bias = weight, bias
class Converted(pm.Module):
    weight: Float[Array, "n"] = pm.field(converter=jnp.asarray)
    ints: Int[Array, "n"] = pm.field(converter=lambda x: jnp.asarray(x))
class Prepared(pm.Module):
    weight: Float[Array, "n"]
    total: Float[Array, ""] = pm.field(init=False)
    def __post_init__(self):
        self.total = self.weight.sum()
class Sub(Generated):
    extra: Int[Array, "out"] = dataclasses.field(default=None, kw_only=True)
class Holding(pm.Module):
    inner: Generated
    name: str = "a"
class Bounded(pm.Module):
    scale: Float[Array, ""] = pm.field(constraint=pm.constraints.positive)
    shares: Float[Array, "n"] | None = pm.field(constraint=pm.constraints.simplex, default=None)
"""


@pytest.fixture(scope="module", params=["import hook", "import hook with strings", "decorator"])
def classes(request, tmp_path_factory):
    """A module of annotated classes, checked in one of the ways that jaxtyping offers."""
    folder = tmp_path_factory.mktemp("annotated")
    name = f"annotated_{request.param.replace(' ', '_')}"
    source = SOURCE
    if "strings" in request.param:
        source = "from __future__ import annotations\n" + source
    if request.param == "decorator":
        decorator = "\n@jaxtyping.jaxtyped(typechecker=beartype.beartype)\nclass "
        source = "import beartype, jaxtyping\n" + source.replace("\nclass ", decorator)
    (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        if request.param == "decorator":
            yield importlib.import_module(name)
        else:
            with jaxtyping.install_import_hook(name, "beartype.beartype"):
                yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def test_fitting_values_are_accepted(classes):
    """A value that fits its annotation is built as without any checking."""
    layer = classes.Generated(ramp(2, 3), ramp(2))
    assert layer(ramp(3)).shape == (2,)
    assert classes.Own(ramp(2, 3), ramp(2)).bias.shape == (2,)
    assert classes.Converted([1.0, 2.0], [1, 2]).ints.dtype == jnp.int32
    assert classes.Prepared(ramp(2)).total == 3.0
    assert classes.Holding(layer).inner is layer
    bounded = classes.Bounded(2.0, jnp.asarray([0.5, 0.5]))
    assert bounded.scale == bounded.replace(shares=None).scale == 2
    assert bounded.replace(scale=3.0).shares.shape == (2,)


MISFITS = [
    lambda c: c.Generated(ramp(2), ramp(2)),
    lambda c: c.Generated(jnp.ones((2, 3), jnp.int32), ramp(2)),
    lambda c: c.Generated(ramp(2, 3), ramp(4)),
    lambda c: c.Sub(ramp(2, 3), ramp(2), extra=ramp(2)),
    lambda c: c.Holding(c.Own(ramp(2, 3), ramp(2))),
    lambda c: pm.filter_jit(c.Generated)(ramp(2, 3), ramp(3)),
]


@pytest.mark.parametrize("build", MISFITS)
def test_misfits_are_refused(classes, build):
    """Shape, dtype, sizes that disagree, a subclass's field, another class; under a trace, too."""
    with pytest.raises(TypeCheckError, match=r"(?s)Type-check error.*(parameter|Called with)"):
        build(classes)


def test_transforms_and_copies_never_check(classes):
    """They may put anything in a field: tree_map, tree_at, vmap, specs and gradients."""
    for cls in (classes.Generated, classes.Own):
        layer = cls(ramp(2, 3), ramp(2))
        mapped = jax.tree.map(lambda _: "text", layer)
        assert mapped.weight == copy.copy(mapped).weight == "text"
        assert pm.tree_at(lambda m: m.weight, layer, "text").weight == "text"
        _, rest = pm.partition(layer, pm.is_array)
        assert rest.weight is None
        assert pm.filter_grad(lambda m: jnp.sum(m.bias))(layer).weight.shape == (2, 3)
    # The layers of an ensemble fit no annotation; a new value of `replace` is not to blame.
    ensemble = jax.vmap(classes.Generated)(ramp(4, 2, 3), ramp(4, 2))
    assert ensemble.replace(size=5).size == 5
    assert pm.with_mode({"ensemble": ensemble}, size=5)["ensemble"].size == 5
