"""Room `module`: dataclasses that are pytrees.

Owns: declaring fields, dividing them into data and configuration, building and freezing
instances, telling JAX how to flatten them, bound methods, how the functions in fields are pickled,
fields that are not read as they are stored, the roles that single instances were given, and the
names of axes. The walk is `fields` → `division` → `flattening` → `reading` → `schema` →
`overriding` → `methods` → `records` → `construction` → `pickling` → `classes`; what builds on it:
`computed_leaves`, `ties`, `resolving`, `roles` and `naming_axes`.

May import `tree` and what that may import.

Promises: an instance never changes once it is built; `unflatten(flatten(m)) == m` for every
class and whatever the leaves are; reading a field that is there runs none
of our code, unless what is stored is another thing than what is read (`reading`).
"""
