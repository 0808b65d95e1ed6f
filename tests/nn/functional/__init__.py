"""Tests of the layers' numerics, against PyTorch and against NumPy."""
