"""Tests of the layers; `catalogue.py` lists all layers, for laws that are true for every layer."""
