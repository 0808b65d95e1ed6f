"""Fixtures for the tests of examples."""

import pytest

from tests.helpers.examples import example


@pytest.fixture(scope="module")
def program(request):
    """The example of which a file has the tests, as a module."""
    with example(request.path.stem.removeprefix("test_")) as module:
        yield module


@pytest.fixture(scope="module", autouse=True)
def as_users_have_it(usual_promotion):
    """Examples are written for JAX's usual promotion."""
