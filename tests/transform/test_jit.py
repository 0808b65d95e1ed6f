"""filter_jit: a compiled call is the call; when it traces again, what it forgets, its stages."""

import contextlib
import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, CheckError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import MODULES, Holder, Pair, Registered, Static, affine, double, ramp


def counting(fn):
    """The function under filter_jit, and the list of its traces."""
    traces = []
    return pm.filter_jit(lambda *args, **named: traces.append(1) or fn(*args, **named)), traces


# ---- a compiled call is the call (see tests/laws/test_jit_is_call.py)

VALUES = [ramp(2).astype(dtype) for dtype in ("bool", "int8", "bfloat16", "complex64")]
VALUES += [jnp.asarray(1.0), np.float32(1), Pair(ramp(2), 1), jax.random.key(0)]
VALUES.append(pm.make_with_state(nn.BatchNorm)(2)[1])


def computed(*trees):
    """The same trees; each of their arrays is a result of the program."""
    return jax.tree.map(lambda x: jnp.stack([x])[0] if pm.is_array(x) else x, trees)


def test_a_steady_call_is_a_plain_call():
    """Law: of arguments of any kind, the first call, and the later ones on the fast path."""
    for args in ([*VALUES, *(make() for make in MODULES.values())], *([v] for v in VALUES)):
        jitted, expected = pm.filter_jit(computed), computed(*args)
        for _ in range(3):
            found = jitted(*args)
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_results_do_not_depend_on_what_was_called_before():
    """1, True, 1.0: the result has the type that the call has without jit."""

    def fn(x, n):
        return jnp.asarray(n), n, [n], Holder(n), Static(x, n), f"{n!r}"

    jitted = pm.filter_jit(fn)
    for n in (1, True, 0, False, 1.0, 0.0, float("nan"), 2, 2.0, 1j, True, 1):
        assert_same(jitted(ramp(1), n), fn(ramp(1), n))


def test_without_jit_values_can_be_read():
    """Under `jax.disable_jit` the function is called as it is."""
    with jax.disable_jit():
        assert pm.filter_jit(lambda x, n: n * float(x[1]))(ramp(2), 3) == 6.0


# ---- when a function is traced again


SAME = {
    "values": (ramp(2), ramp(2, start=5.0)),
    "Modules": (affine(), affine(start=3.0)),
    "NumPy for JAX": (ramp(2), np.ones(2, np.float32)),
    "NumPy scalars": (np.float32(1), np.float32(2)),
    "built and returned": (affine(), pm.filter_jit(lambda m: m)(affine())),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "one bound method": (affine().scaled, affine().scaled),
    "one transform": (pm.filter_jit(double), pm.filter_jit(double)),
}
DIFFERENT = {
    "weak type": (jnp.asarray(1.0), jnp.ones(())),
    "static and traced": (1.0, jnp.ones(())),
    "type of configuration": (Static(1.0, 1), Static(1.0, True)),
    "in a tuple in configuration": (Static(1.0, (1, 2)), Static(1.0, (1, 2.0))),
    "None": (None, 0),
    "container": ([1], (1,)),
    "function": (double, lambda x: x),
    "auxiliary data": (Registered(1, "a"), Registered(1, "b")),
}
CASES = {
    **{f"same {name}": (a, b, 1) for name, (a, b) in SAME.items()},
    **{f"other {name}": (a, b, 2) for name, (a, b) in DIFFERENT.items()},
}


@pytest.mark.parametrize(("a", "b", "count"), CASES.values(), ids=CASES)
def test_calls_of_one_program_have_one_trace(a, b, count):
    """Equal static values and types find the trace; others get their own, in either order."""
    for first, second in ((a, b), (b, a)):
        fn, traces = counting(lambda x: 0)
        for x in (first, second, first, second):
            fn(x)
        assert len(traces) == count


WRAPPED = {
    "alone": lambda fn: fn,
    "value_and_grad": pm.filter_value_and_grad,
    "checkpoint of grad": lambda fn: pm.filter_checkpoint(pm.filter_grad(fn, argnums=0)),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_written_in_a_loop_it_compiles_once(wrap):
    """filter_jit(f) finds the programs of f, under other transforms, too; not of other options."""
    traces = []

    def fn(x):
        traces.append(None)
        return jnp.sum(x**2)

    for _ in range(3):
        pm.filter_jit(wrap(fn))(ramp(2))
    assert len(traces) == 1
    pm.filter_jit(wrap(fn), inline=True)(ramp(2))
    assert len(traces) == 2


# ---- errors, and threads


def test_after_an_exception_the_next_call_works():
    """The user's error comes out unchanged, without a failed lookup of ours as its context."""

    @pm.filter_jit
    def fn(x, fail):
        if fail or x.shape == (3,):
            raise KeyError("mine")
        return x

    for _ in range(2):
        for args in ((ramp(1), True), (ramp(3), False)):
            with pytest.raises(KeyError, match="mine") as caught:
                fn(*args)
            assert caught.value.__context__ is None
        assert_same(fn(ramp(1), False), ramp(1))


def test_an_error_of_jax_names_the_argument_of_the_user():
    """A value that is known only when the program runs comes from an argument with a name."""
    with pytest.raises(jax.errors.TracerArrayConversionError, match="argument model"):
        pm.filter_jit(lambda x, model: np.asarray(model.bias))(ramp(2), affine())


def test_threads_call_and_trace_at_once():
    """Four threads, with other shapes and static values: each gets its own results."""
    fn = pm.filter_jit(lambda model, x, n: (model(x) * n, n, jax.tree.map(lambda w: w * n, model)))

    def work(i):
        calls = [(affine(2 + (i + j) % 3), float((i + j) % 4)) for j in range(8)]
        return [(model, n, fn(model, ramp(3), n)) for model, n in calls]

    with ThreadPoolExecutor(4) as pool:
        results = [each for found in pool.map(work, range(4)) for each in found]
    for model, n, (y, m, scaled) in results:
        assert m == n
        assert_close(y, model(ramp(3)) * n)
        assert_close(scaled.weight, model.weight * n)


# ---- what is forgotten


@pytest.mark.parametrize("each", [250, pytest.param(2500, marks=pytest.mark.slow)])
def test_functions_are_forgotten_with_their_programs(each):
    """Each captures an array, under a transform, in one of four threads; many raise an error."""
    wraps = [*WRAPPED.values()]

    def work(thread):
        alive = []
        for i in range(each):
            big = np.full(1, i % 5)
            fn = lambda x, big=big: 1 / 0 if big[0] else jnp.sum(x)  # noqa: E731
            alive += [weakref.ref(big), weakref.ref(fn)]
            jitted = pm.filter_jit(wraps[(i + thread) % len(wraps)](fn))
            if i % 20 < 2:
                with contextlib.suppress(ZeroDivisionError):
                    jitted(ramp(1))
        return alive

    with ThreadPoolExecutor(4) as pool:
        refs = [ref for found in pool.map(work, range(4)) for ref in found]
    gc.collect()

    assert len(refs) == 8 * each
    assert [ref for ref in refs if ref() is not None] == []


@pytest.mark.slow
def test_programs_of_static_values_are_bounded():
    """The oldest of more than 4096 goes, with its static value, and comes back right."""

    value = lambda: "a static value"  # noqa: E731
    watched = weakref.ref(value)
    jitted = pm.filter_jit(lambda x, how: x)
    with jax.disable_jit():
        for how in (value, *range(4097)):
            jitted(ramp(1), how)
        del value, how
    gc.collect()

    assert watched() is None
    assert_same(jitted(ramp(1), 0), ramp(1))


@pytest.mark.slow
def test_clear_caches():
    """Everything is traced again afterwards, and right; callables that are pytrees, too."""
    function, traces = counting(double)
    for jitted in (function, pm.filter_jit(pm.Partial(function.__wrapped__))):
        for _ in range(2):
            assert_same(jitted(ramp(2)), ramp(2) * 2)
            pm.clear_caches()

    assert len(traces) == 4


def test_no_cache_keeps_a_models_arrays():
    """A dropped model's arrays go, while the function, its programs and its log live on."""
    keep = pm.filter_jit(lambda model: jax.tree.map(lambda x: x + 1, model))
    for use in (
        keep,
        lambda model: pm.filter_jit(model)(ramp(3)),
        lambda model: keep.trace(model).lower().compile()(model),
        lambda model: pm.filter_grad(lambda m: jnp.sum(m.weight))(keep(model)),
        lambda model: pm.debug.explain_retraces(keep)(model),
    ):
        model = affine()
        result = use(model)
        watched = [weakref.ref(leaf) for leaf in jax.tree.leaves((model, result))]
        del model, result
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)


# ---- stages


def test_lower_and_compile():
    """lower(...).compile() returns a function for such arguments; structs count as arrays."""

    @pm.filter_jit
    def jitted(model, x, *, how="twice"):
        return jnp.sum(model(x)), jax.tree.map(lambda p: 0.9 * p, model), how

    struct, skeleton = jax.ShapeDtypeStruct((3,), jnp.float32), pm.filter_eval_shape(affine)
    for args in ((affine(), ramp(3)), (affine(), struct), (skeleton, struct)):
        compiled = jitted.lower(*args, how="a").compile()
        found = compiled(affine(), ramp(3), how="a")
        assert_close(found[:2], jitted.__wrapped__(affine(), ramp(3))[:2])
        assert found[2] == "a"
    assert compiled.cost_analysis()["flops"] > 0
    assert "func" in jitted.lower(affine(), ramp(3)).as_text()
    assert jitted.eval_shape(skeleton, struct)[0].shape == ()


OTHERS = {
    "structure": (affine().replace(bias=None), ramp(3)),
    "static value": (affine(), ramp(3), "other"),
    "shape": (affine(), ramp(4)),
}


@pytest.mark.parametrize("args", OTHERS.values(), ids=OTHERS)
def test_a_compiled_function_takes_what_it_was_compiled_for(args):
    """With another static value it would compute with the old one; nothing is traced again."""
    jitted, traces = counting(lambda model, x, how="twice": (model(x), how))
    compiled = jitted.lower(affine(), ramp(3), "twice").compile()

    with pytest.raises((ArgumentError, TypeError), match=r"compiled (for|with)"):
        compiled(*args)
    assert len(traces) == 1


def test_a_compiled_program_raises_its_checks():
    """In the call that fails, and in no other; to look for checks, no shape is traced again."""
    jitted, traces = counting(lambda x: pm.error_if(x, x > 3, "too large") + 1)
    for call in (jitted, jitted.lower(ramp(3)).compile(), jitted):
        assert_same(call(ramp(3)), ramp(3) + 1)
        with pytest.raises(CheckError, match="too large"):
            call(ramp(3) * 2)

    assert len(traces) == 2


def test_keywords_without_a_place_are_arguments():
    """A call with them is not that without them."""
    f = pm.filter_jit(lambda x, **more: x + sum(more.values()))
    x = jnp.asarray(1.0)
    for _ in range(2):
        assert f(x) == 1
        assert f(x, a=jnp.asarray(2.0)) == 3
        assert f(x, b=jnp.asarray(2.0), a=jnp.asarray(3.0)) == 6


def test_a_program_has_no_addresses_in_its_text():
    """So another process, which has other addresses, finds it in JAX's compilation cache."""
    for values in (VALUES, [make() for make in MODULES.values()]):
        text = pm.filter_jit(computed).lower(*values).as_text()
        assert not re.search("0x[0-9a-f]{6}", text)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pm.filter_jit(double, static_argnums=0), r"(?s)no static_argnums.*donate="),
        (lambda: pm.filter_jit(affine)([1, {"a": {3}}]), r"(?s)\[1\]\['a'\]: \{3\}.*frozenset"),
        (lambda: pm.filter_jit(affine)(bytearray(b"a")), r"no hash.*\n.*bytearray[^\n]*\Z"),
    ],
)
def test_a_static_value_has_a_hash_and_needs_no_number(call, match):
    """What has none is named by its path."""
    with pytest.raises(ArgumentError, match=match):
        call()


class Adding:
    """A function without a weak reference."""

    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return x + self.n


def test_functions_that_cannot_be_referred_to_weakly_are_told_apart():
    x = ramp(2)
    for n in (1, 2, 1):
        branched = pm.filter_cond(jnp.asarray(True), Adding(n), jnp.negative, x)
        assert_same([pm.filter_jit(Adding(n))(x), branched], [x + n] * 2)


def test_a_call_does_not_wait_for_its_result():
    """By position and by name; nor does the first one, once it is compiled."""
    spin = lambda _, y: jnp.tanh(y @ y)  # noqa: E731
    busy = pm.filter_jit(lambda x: jax.lax.fori_loop(0, 1000, spin, x))
    for call in (busy, busy, lambda x: busy(x=x), lambda x: busy(x=x)):
        result = call(jnp.eye(200))
        assert not result.is_ready()
        jax.block_until_ready(result)


def test_jax_finds_the_operation_that_made_a_nan():
    """For that it calls the function without a trace: in the first call, and in later ones."""
    log = pm.filter_jit(jnp.log)
    for size in (2, 3, 2):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in log"):
            log(-jnp.ones(size))
    with jax.checking_leaks():
        assert log(jnp.ones(4)).tolist() == log(jnp.ones(4)).tolist() == [0] * 4
