"""The strictest JAX that users may have: what passes here passes everywhere."""

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator

# Before JAX starts: eight virtual devices, for sharding and pmap.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# What one process has compiled, the others read, and the processes that tests start: half of all
# programs of a run are the same. Of this run alone, so that none sees an older JAX's.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="pytreemod-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import pytest

pytest.register_assert_rewrite("tests.goldens")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of what tests compile runs once. Tests of compiled programs turn this off for themselves.
jax.config.update("jax_disable_most_optimizations", True)

# Machines are busy, and the first example of a test is often compiled.
hypothesis.settings.register_profile("pytreemod", deadline=None)
hypothesis.settings.load_profile("pytreemod")


@pytest.hookimpl(tryfirst=True)  # Before pytest leaves out what is slow.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a grid that is `sampled`, mark all but every fourth case as slow; what is `long` is first.

    By their order, so that all processes of a run choose the same.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("sampled"):
            grid = item.nodeid.partition("[")[0]
            if seen[grid] % 4:
                item.add_marker(pytest.mark.slow)
            seen[grid] += 1
    # At the end of a run on several processes the others would wait for it.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def small_heap(request: pytest.FixtureRequest) -> Generator[None]:
    """Who collects garbage looks at what the test has made, and not at all that is there.

    After ten thousand tests a collection takes a second, and some tests ask for six.
    """
    if "gc" not in vars(request.module) and not request.node.get_closest_marker("collects"):
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def optimized() -> Generator[None]:
    """For tests that look into compiled programs: those that users get."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def key() -> jax.Array:
    """A key, the same in every test."""
    return jax.random.key(0)
