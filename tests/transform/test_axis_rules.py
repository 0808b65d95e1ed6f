"""Rules for names of axes, and the context in which activations are laid out by them."""

import contextlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_same
from tests.helpers.meshes import DEVICES, EXPLICIT, MESH, lies, on
from tests.helpers.trees import ramp

RULES = pm.AxisRules({"batch": "data", "batch_too": "data", "embed": "model", "seq": None})
OTHERS = pm.AxisRules({"batch": "model", "embed": None, "seq": None})
MIXED = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Auto))
MESHES = {"auto": MESH, "explicit": EXPLICIT, "mixed": MIXED}


def named(x: Any, names: Any, mesh: Any = MESH) -> Any:
    """`x` laid out by the rules."""
    with pm.use_rules(mesh, RULES):
        return pm.filter_shard(x, names)


def test_rules_are_values():
    """Equal by content, with a hash, pickled, and written as they are made."""
    again = pm.AxisRules({"batch": "data"}) | {"batch_too": "data", "embed": "model", "seq": None}

    assert pickle.loads(pickle.dumps(RULES)) == RULES == again
    assert hash(RULES) == hash(again)
    assert eval(repr(RULES), {"AxisRules": pm.AxisRules}) == RULES


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_names_are_laid_out_by_the_rules(mesh: Mesh):
    """Outside compiled code, inside, and in a map, whatever the types of the mesh's axes."""
    x = pm.filter_shard(ramp(8, 3, 2), on(mesh=mesh))

    for call in (named, pm.filter_jit(named), jax.jit(named, static_argnums=(1, 2))):
        assert lies(call(x, "batch seq embed", mesh)) == ("data", None, "model")
        assert lies(call(x, "_ _ embed", mesh)) == (None, None, "model")
        assert lies(call(x, "seq _ seq", mesh)) == ()
    assert_same(named(x, "batch seq embed", mesh), x)
    # The names are those of the array that the function sees; the map's axis is left as it lies.
    x = pm.filter_shard(x, on("data", mesh=mesh))
    mapped = jax.jit(jax.vmap(lambda x: named(x, "seq embed", mesh)))
    assert lies(mapped(x)) == ("data", None, "model")


# Outside compiled code, branches are cached, too.
TRANSFORMS = {
    "jax.jit": jax.jit,
    "filter_jit of filter_checkpoint": lambda fn: pm.filter_jit(pm.filter_checkpoint(fn)),
    "cond": lambda fn: lambda x: pm.filter_cond(jnp.array(True), fn, jnp.negative, x),
    "map": lambda fn: lambda x: pm.filter_map(fn, x[None])[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.sampled
def test_the_context_is_part_of_a_program_s_key(name: str):
    """A program for each mesh and rules, and one without; equal rules are the same."""
    traces: list[Any] = []

    def run(x: jax.Array) -> jax.Array:
        traces.append(None)
        return pm.filter_shard(2 * x, "batch embed")

    x, call = pm.filter_shard(ramp(8, 4), on()), TRANSFORMS[name](run)
    again = pm.AxisRules(dict(RULES.rules))
    for _ in range(2):
        assert lies(call(x)) == ()
        for rules in (RULES, OTHERS, again):
            with pm.use_rules(MESH, rules):
                assert lies(call(x)) == (("model",) if rules is OTHERS else ("data", "model"))
    assert len(traces) == 3 or "jit" not in name


def test_contexts_nest():
    """The innermost counts, whatever ends it; another thread has none."""
    x, shard = pm.filter_shard(ramp(8, 4), on()), lambda x: pm.filter_shard(x, "batch embed")
    with pm.use_rules(MESH, RULES), ThreadPoolExecutor(1) as pool:
        for call in (shard, pm.filter_jit(lambda x: shard(2 * x))):
            with contextlib.suppress(ZeroDivisionError), pm.use_rules(MESH, OTHERS):
                assert lies(call(x)) == ("model",)
                raise ZeroDivisionError
            assert lies(call(x)) == ("data", "model")
            assert pool.submit(lambda call=call: lies(call(x))).result() == ()
    assert shard(x) is x


MISTAKES = {
    "rank": ({"b": [ramp(8)]}, "batch embed", ShapeError, r"\['b'\]\[0\]"),
    "no rule": (ramp(8, 4), "bach embed", SpecError, "bach"),
    "twice": (ramp(8, 8), "batch batch_too", SpecError, "batch_too"),
}


@pytest.mark.parametrize(("x", "names", "error", "where"), MISTAKES.values(), ids=MISTAKES)
def test_names_that_would_split_nothing_are_refused(x, names, error, where):
    """Also compiled. An array would lie whole on each device, or a name mean another axis."""
    for call in (named, pm.filter_jit(named)):
        with pytest.raises(error, match=where):
            call(x, names)


def test_a_rule_for_an_axis_that_the_mesh_has_not_is_refused():
    """At the context, not where an array is constrained."""
    with (
        pytest.raises(SpecError, match="no axis 'modle'"),
        pm.use_rules(MESH, pm.AxisRules({"embed": "modle"})),
    ):
        pass


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda: pm.AxisRules({"embed": 3}), r"\n.*'embed': 3"),
        (lambda: pm.AxisRules({3: "data"}), r"\n.*3: 'data'"),
        (lambda: pm.AxisRules({"embed": ("data", "data")}), "'embed' has one axis .* twice"),
        (lambda: pm.use_rules(MESH, {"embed": "data"}).__enter__(), "the rules are AxisRules, not"),
        (lambda: pm.use_rules("data", RULES).__enter__(), "use_rules: 'data' is no mesh"),
    ],
)
def test_what_are_no_rules_is_refused(use, match):
    with pytest.raises(ArgumentError, match=match):
        use()
