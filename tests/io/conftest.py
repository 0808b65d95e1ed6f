"""Fixtures for the tests of files."""

import pytest


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="compares with PyTorch: tasks.py install peers")


@pytest.fixture
def path(tmp_path):
    """Where a file will be."""
    return tmp_path / "model.safetensors"
