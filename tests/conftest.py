"""The strictest JAX that users may have: what passes here passes everywhere."""

import os

# Before JAX starts: eight virtual devices, for sharding and pmap.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key() -> jax.Array:
    """A key, the same in every test."""
    return jax.random.key(0)
