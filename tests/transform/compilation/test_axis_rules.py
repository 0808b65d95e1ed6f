"""Rules for names of axes, and the context in which activations are laid out by them."""

import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod.errors import ShapeError, SpecError
from tests.helpers.comparing import assert_same
from tests.helpers.meshes import DEVICES, EXPLICIT, MESH, lies, on
from tests.helpers.trees import ramp

RULES = pm.AxisRules({"batch": "data", "batch_too": "data", "embed": "model", "seq": None})
OTHERS = pm.AxisRules({"batch": "model", "embed": None, "seq": None})
MIXED = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Auto))
MESHES = [MESH, EXPLICIT, MIXED]


def named(x: Any, names: Any, mesh: Any = MESH) -> Any:
    with pm.use_rules(mesh, RULES):
        return pm.filter_shard(x, names)


def test_rules_are_values():
    again = pm.AxisRules({"batch": "data"}) | {"batch_too": "data", "embed": "model", "seq": None}

    assert pickle.loads(pickle.dumps(RULES)) == RULES == again
    assert hash(RULES) == hash(again)
    assert pm.AxisRules({}) != RULES
    assert eval(repr(RULES), {"AxisRules": pm.AxisRules}) == RULES


@pytest.mark.parametrize("mesh", MESHES)
def test_names_are_laid_out_by_the_rules(mesh: Mesh):
    """Outside compiled code and inside, whatever the types of the mesh's axes."""
    x = pm.filter_shard(ramp(8, 3, 2), on(mesh=mesh))

    for call in (named, pm.filter_jit(named), jax.jit(named, static_argnums=(1, 2))):
        assert lies(call(x, "batch seq embed", mesh)) == ("data", None, "model")
        assert lies(call(x, "_ _ embed", mesh)) == (None, None, "model")
        assert lies(call(x, "seq _ seq", mesh)) == ()
    assert_same(named(x, "batch seq embed", mesh), x)


@pytest.mark.parametrize("mesh", MESHES)
def test_names_inside_a_map(mesh: Mesh):
    """They are those of the array that the function sees; the map's axis is left as it lies."""
    x = pm.filter_shard(ramp(8, 3, 2), on("data", mesh=mesh))
    mapped = jax.jit(jax.vmap(lambda x: named(x, "seq embed", mesh)))

    assert lies(mapped(x)) == ("data", None, "model")


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}])
def test_names_inside_a_shard_map(mesh: Mesh, manual: set[str]):
    """Of a part: a name whose mesh axis is manual falls away, the others are in effect."""
    types: list[Any] = []

    def part(x: jax.Array) -> jax.Array:
        y = named(x, "batch seq embed", mesh)
        types.append(jax.typeof(y).sharding.spec)
        return y

    mapped = pm.filter_shard_map(
        part, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=manual
    )
    x = pm.filter_shard(ramp(8, 3, 2), on("data", mesh=mesh))

    assert_same(pm.filter_jit(mapped)(x), x)
    is_split = mesh is EXPLICIT and manual == {"data"}
    assert types[0] == P(None, None, "model" if is_split else None)


# ---- the context


class _Traced:
    """A function that names an activation, through several transforms, and counts its traces."""

    def __init__(self, transform: Any):
        self.count = 0
        self.call = transform(self._run)

    def _run(self, x: jax.Array) -> jax.Array:
        self.count += 1
        return pm.filter_shard(2 * x, "batch embed")

    def lies(self, mesh: Any = None, rules: Any = None) -> tuple[Any, int]:
        x = pm.filter_shard(ramp(8, 4), on())
        if mesh is None:
            return lies(self.call(x)), self.count
        with pm.use_rules(mesh, rules):
            return lies(self.call(x)), self.count


TRANSFORMS = {
    "jax.jit": jax.jit,
    "filter_jit": pm.filter_jit,
    "filter_jit of filter_checkpoint": lambda fn: pm.filter_jit(pm.filter_checkpoint(fn)),
    "jax.jit of custom_vjp": lambda fn: jax.jit(_of_rule(fn)),
}


def _of_rule(fn: Any) -> Any:
    @pm.filter_custom_vjp
    def rule(x: Any) -> Any:
        return fn(x)

    rule.def_fwd(lambda perturbed, x: (fn(x), None))
    rule.def_bwd(lambda residuals, grad, perturbed, x: 2 * grad)
    return rule


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_context_is_part_of_a_program_s_key(transform: Any):
    """One trace for each mesh and rules, and one without; equal rules are the same."""
    traced = _Traced(transform)
    again = pm.AxisRules(dict(RULES.rules))

    assert traced.lies() == ((), 1)
    assert traced.lies(MESH, RULES) == (("data", "model"), 2)
    assert traced.lies(MESH, OTHERS) == (("model",), 3)
    assert traced.lies(MESH, again) == (("data", "model"), 3)
    assert traced.lies() == ((), 3)


def test_what_is_cached_of_eager_transforms_has_the_context_in_its_key():
    """A loop, a branch and a map outside of compiled code."""
    x = pm.filter_shard(ramp(8, 4), on())

    def run(x: jax.Array) -> jax.Array:
        return pm.filter_shard(x, "batch embed") * 2

    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return run(carry), None

    calls = [
        lambda: pm.filter_scan(step, x, None, length=1)[0],
        lambda: pm.filter_cond(jnp.array(True), run, lambda x: x, x),
        lambda: pm.filter_fori_loop(0, 1, lambda i, x: run(x), x),
        lambda: pm.filter_checkpoint(run)(x),
    ]
    for call in calls:
        assert lies(call()) == ()
        with pm.use_rules(MESH, RULES):
            assert lies(call()) == ("data", "model")
        with pm.use_rules(MESH, OTHERS):
            assert lies(call()) == ("model",)
        assert lies(call()) == ()


def test_contexts_nest():
    """The innermost counts, and the one around it afterwards, whatever ends the inner one."""
    x = pm.filter_shard(ramp(8, 4), on())
    with pm.use_rules(MESH, RULES):
        with pm.use_rules(MESH, OTHERS):
            assert lies(pm.filter_shard(x, "batch embed")) == ("model",)
        with pytest.raises(ZeroDivisionError, match="by zero"), pm.use_rules(MESH, OTHERS):
            1 / 0
        assert lies(pm.filter_shard(x, "batch embed")) == ("data", "model")
    assert pm.filter_shard(x, "batch embed") is x


def test_threads_have_their_own_rules():
    """One program, called in two threads at once under different rules."""
    start = threading.Barrier(3)
    wrong: list[Any] = []
    x = pm.filter_shard(ramp(8, 4), on())
    run = pm.filter_jit(lambda x: pm.filter_shard(2 * x, "batch embed"))

    def work(rules: pm.AxisRules | None, expected: Any) -> None:
        start.wait()
        for _ in range(50):
            if rules is None:
                found = lies(run(x))
            else:
                with pm.use_rules(MESH, rules):
                    found = lies(run(x))
            if found != expected:
                wrong.append((rules, found))

    cases = [(RULES, ("data", "model")), (OTHERS, ("model",)), (None, ())]
    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_entering_often_grows_nothing():
    """Ten thousand times, with rules that are equal: one trace, and nothing left behind."""
    traces: list[Any] = []

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        traces.append(None)
        return pm.filter_shard(x, "batch")

    x = ramp(8)
    for _ in range(10_000):
        with pm.use_rules(MESH, pm.AxisRules({"batch": "data"})):
            run(x)

    assert len(traces) == 1


MISTAKES = {
    "rank": (lambda: named({"b": [ramp(8)]}, "batch embed"), ShapeError, r"\['b'\]\[0\]"),
    "no rule": (lambda: named(ramp(8, 4), "bach embed"), SpecError, "bach"),
    "twice": (lambda: named(ramp(8, 8), "batch batch_too"), SpecError, "batch_too"),
    "size": (lambda: named({"a": ramp(6, 4)}, "batch embed"), ShapeError, r"\['a'\]"),
    "mesh": (
        lambda: pm.use_rules(MESH, pm.AxisRules({"batch": "date"})).__enter__(),
        SpecError,
        "date",
    ),
}


@pytest.mark.parametrize(("call", "error", "where"), MISTAKES.values(), ids=MISTAKES)
def test_names_that_would_split_nothing_are_refused(call: Any, error: Any, where: str):
    """An array would lie whole on each device, or a name mean another axis."""
    with pytest.raises(error, match=where):
        call()
