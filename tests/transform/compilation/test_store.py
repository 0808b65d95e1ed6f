"""The compiled functions behind filter_jit: how they are found, cached and freed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.transform.compilation import store as compiling
from pytreemod.transform.compilation.donation import as_donation
from pytreemod.transform.compilation.store import Options, store_for
from tests.goldens import refusals
from tests.helpers.trees import affine, ramp


def identity(x, n=None):
    return x


def entry_of(jitted, *args):
    """The compiled function that a call finds."""
    return jitted.find(args, {})[0]


# ---- one store for each function and set of options


@pytest.mark.parametrize(
    "options",
    [
        Options(donation=as_donation("x", identity)),
        Options(max_traces=1),
        Options(static=("n",)),
        Options(jit=(("inline", True),)),
    ],
    ids=["donate", "max_traces", "static", "jax.jit"],
)
def test_options_are_told_apart(options):
    """Each option makes another program."""
    assert store_for(identity, options) is not store_for(identity, Options())
    assert store_for(identity, options) is store_for(identity, options)


def test_options_that_cannot_be_hashed():
    """They have a separate store, and work."""
    jitted = pm.filter_jit(identity, compiler_options={"xla_embed_ir_in_executable": False})

    assert jitted.store is not pm.filter_jit(identity).store
    assert jitted(ramp(2)).shape == (2,)


def test_functions_that_are_trees_share_a_store():
    """They come in with the arguments, so that one program serves all Modules of one structure."""
    first, second = pm.filter_jit(affine()), pm.filter_jit(affine(start=9.0))

    assert first.store is second.store
    assert (first(ramp(3)) != second(ramp(3))).any()
    assert entry_of(first, ramp(3)) is entry_of(second, ramp(3))


def test_a_store_goes_with_its_function():
    """Nothing of a function is cached after it is freed."""

    def make():
        def fn(x):
            return x

        jitted = pm.filter_jit(fn)
        jitted(ramp(2))
        return weakref.ref(fn), weakref.ref(jitted.store)

    watched = make()
    gc.collect()

    assert [ref() for ref in watched] == [None, None]


# ---- entries


@pytest.mark.parametrize(
    "trace",
    [
        lambda f, x: jax.make_jaxpr(lambda x: f(x))(x),
        lambda f, x: jax.grad(lambda x: jnp.sum(f(x)))(x),
        lambda f, x: jax.vmap(f)(x),
        lambda f, x: f.trace(x),
        lambda f, x: f.eval_shape(x),
    ],
    ids=["jaxpr", "grad", "vmap", "trace", "eval_shape"],
)
@pytest.mark.sampled
def test_a_trace_elsewhere_leaves_the_entry_to_be_looked_at(trace):
    """A trace inside another transform has not run: its first own call looks for checks."""
    jitted = pm.filter_jit(lambda x: pm.error_if(x, x > 3, "too large"))
    x = ramp(2)
    for shape in (2, 1):
        trace(jitted, x)
        assert entry_of(jitted, x).is_special
        with pytest.raises(pm.CheckError, match="too large"):
            jitted(9 * ramp(shape))
        assert entry_of(jitted, x).has_check


def test_each_call_that_traces_is_counted_once():
    """Looking for checks does not trace a second time."""
    traces = []
    jitted = pm.filter_jit(lambda x: traces.append(x.shape) or pm.error_if(x, x > 9, "too large"))
    for size in (2, 2, 3, 2, 3):
        jitted(ramp(size))
    jitted.lower(ramp(4)).compile()
    jitted(ramp(4))

    assert traces == [(2,), (3,), (4,)]


# ---- size of the cache


def test_ten_thousand_static_values(monkeypatch):
    """Neither the programs nor the records of their traces grow without a bound."""
    monkeypatch.setattr(compiling, "MAX_ENTRIES", 50)
    jitted = pm.filter_jit(lambda n: n)
    for n in range(10_000):
        jitted.find((n,), {})
    for n in range(100):
        assert jitted.eval_shape(n) == n
    [log] = jitted.store.logs.values()

    assert len(jitted.entries) == 50
    assert log.count == 100
    assert len(log.last) < 50


def test_forgotten_entries_are_freed(monkeypatch):
    """A static value goes with the programs that were made for it."""
    monkeypatch.setattr(compiling, "MAX_ENTRIES", 2)

    class Static:
        """A value that can be watched."""

    jitted = pm.filter_jit(lambda x, how: x)

    def use():
        how = Static()
        jitted(ramp(1), how)
        return weakref.ref(how)

    watched = use()
    for n in range(20):
        jitted(ramp(1), n)
    gc.collect()

    assert watched() is None


def test_a_check_that_only_new_shapes_have_is_heard_the_first_time():
    """The failing call itself raises, even if no call had a check before."""

    def grow(x):
        return pm.error_if(x, x > 3, "too large") if x.size > 2 else x

    jitted = pm.filter_jit(grow)
    jitted(9 * jnp.ones(2))
    assert jitted(jnp.ones(3)).shape == (3,)


def test_useless_donations_are_passed_over_in_silence_for_new_shapes_too():
    """donate="all" donates usable arrays; warnings are errors here, and active again after."""
    jitted = pm.filter_jit(lambda x: jnp.sum(x), donate="all")
    for size in (2, 3):
        jitted(jnp.ones(size))


def test_a_call_without_donation_leaves_the_warning_on():
    """Only calls that donate usable arrays silence JAX's warning, in their own thread."""
    jitted = pm.filter_jit(lambda x: x + 1)
    for size in (2, 3):
        jitted(jnp.ones(size))

    with pytest.raises(UserWarning, match="donated buffers were not usable"):
        jax.jit(jnp.sum, donate_argnums=0)(jnp.ones(2))


def _refuse_three(x):
    if x.size == 3:
        raise ValueError("in trace")
    return x


def test_checks_of_all_shapes_are_remembered():
    """Shapes without a check do not let an entry forget the check of others."""
    jitted = pm.filter_jit(lambda x: pm.error_if(x, x > 9, "large") if x.ndim else x + 1)
    jitted(ramp(2))
    jitted(jnp.float32(1))

    assert entry_of(jitted, ramp(2)).has_check


test_refusals = refusals(globals())
