"""Trees on disk.

A file is a table from names to arrays; everything else is a function of tables.
"""
