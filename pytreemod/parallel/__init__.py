"""Room `parallel`: how a model lies on many devices.

Owns: the specs, shardings and tables that rules from names of axes to axes of a mesh give for a
tree (the rules themselves are in `transform`), and models that are made in parts.

May import everything below it (`nn`, `transform`, `state`, `module`, `tree`).

Promises: a model has nothing of it: names are read from its annotations (`module.naming_axes`), and
the engine is JAX's own.
"""
