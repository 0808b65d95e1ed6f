"""The strictest settings of JAX: code that passes here passes with all settings."""

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, ItemsView, KeysView, Set
from importlib.metadata import version

# Set before JAX starts: eight virtual devices for sharding and pmap.
if "XLA_FLAGS" not in os.environ:
    _flags = "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):
        # Programs compile in 40 % of the time, and the tests run in 66 %. Only these versions know
        # the flag, and XLA ends a process that sets a flag it does not know.
        _flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = _flags

# All processes of a run share their compiled programs, because half of the programs are the same.
# The cache is new for each run, so that no test gets programs of an older JAX.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="pytreemod-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most compiled programs run once. Tests of compiled programs use the fixture `optimized`.
jax.config.update("jax_disable_most_optimizations", True)

# No deadline, because machines are busy, and the first example of a test often compiles.
hypothesis.settings.register_profile("pytreemod", deadline=None)
hypothesis.settings.load_profile("pytreemod")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse a set of cases, which each process of a run would have in another order."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        for cases in (*mark.args, *mark.kwargs.values()):
            if isinstance(cases, Set) and not isinstance(cases, KeysView | ItemsView):
                where = f"{metafunc.module.__name__}.{metafunc.function.__name__}"
                pytest.fail(f"{where}: expected cases in order, got a set; write sorted(...)")


@pytest.hookimpl(tryfirst=True)  # Before pytest deselects slow tests.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of a `sampled` test as slow, and move `long` tests to the front.

    Cases are chosen by their order, so that all processes of a run choose the same ones.
    """
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("slow"):
            grid = item.nodeid.partition("[")[0]
            if seen[grid] % (*sampled.args, 10)[0]:
                item.add_marker(pytest.mark.slow)
            seen[grid] += 1
    # A long test at the end of a run would make the other processes wait.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def small_heap(request: pytest.FixtureRequest) -> Generator[None]:
    """In tests that collect garbage, limit a collection to the objects of the test.

    After ten thousand tests a full collection takes a second, and some tests collect six times.
    """
    if "gc" not in vars(request.module) and not request.node.get_closest_marker("collects"):
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def optimized() -> Generator[None]:
    """Compile as for users, for tests that inspect compiled programs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def usual_promotion() -> Generator[None]:
    """JAX as users have it: optax's Adam itself raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def key() -> jax.Array:
    """A key, the same in every test."""
    return jax.random.key(0)
