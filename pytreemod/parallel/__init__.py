"""Room `parallel`: how a model lies on many devices.

Owns: rules from names of axes to axes of a mesh, and the specs, shardings and tables that they make
for a tree.

May import everything below it (`nn`, `transform`, `state`, `module`, `tree`).

Promises: a model has nothing of it: names are read from its annotations (`module.naming_axes`), and
the engine is JAX's own.
"""
