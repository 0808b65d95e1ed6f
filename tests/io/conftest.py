"""Fixtures for the tests of files."""

import pytest


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="compares with PyTorch: tasks.py install peers")
