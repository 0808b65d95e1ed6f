"""Room `parallel`: models on many devices.

Owns: the specs, shardings and tables for a tree, from rules that map names of axes to axes of a
mesh; models that are made in parts. (The rules themselves are in `transform`.)

May import everything below it (`nn`, `transform`, `state`, `module`, `tree`).

Promises: models need no code for it: names are read from their annotations (`module.naming_axes`),
and JAX itself runs the programs.
"""
