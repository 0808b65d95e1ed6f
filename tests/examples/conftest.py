"""Fixtures for the tests of examples."""

import jax
import pytest

from tests.helpers.examples import example


@pytest.fixture(scope="module")
def program(request):
    """The example of which a file has the tests, as a module."""
    with example(request.path.stem.removeprefix("test_")) as module:
        yield module


@pytest.fixture(scope="module", autouse=True)
def usual_promotion():
    """JAX as a user finds it: optax's Adam itself raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
