"""Tests of the layers; `catalogue.py` lists them all, for the laws that hold for every one."""
