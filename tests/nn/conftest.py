"""Fixtures for the tests of layers."""

import pytest


@pytest.fixture
def torch():
    """PyTorch, or the test is skipped."""
    return pytest.importorskip(
        "torch", reason="compares numbers with PyTorch: tasks.py install peers"
    )
