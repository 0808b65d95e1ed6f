"""Room `module`: dataclasses that are pytrees.

Owns: declaring fields, dividing them into data and configuration, building instances, bound
methods, and fields that read as something else than they store. The walk is `fields` → `reading` →
`schema` → `methods` → `classes`; how an instance is stored is in `tree.instances`. Built on it are
`computed_leaves`, `constrained_leaves`, `ties`, `roles` and `naming_axes`.

May import `tree` and anything that `tree` may import.

Promises: an instance never changes once it is built. `unflatten(flatten(m)) == m` for every
class and all leaves. Reading a field that is set runs no code of ours, unless the field reads as
something else (`reading`).
"""
