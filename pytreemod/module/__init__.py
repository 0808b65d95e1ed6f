"""Room `module`: dataclasses that are pytrees.

Owns: declaring fields, dividing them into data and configuration, building instances, and
flattening them for JAX. Bound methods, pickling, fields that are read in another form than they
are stored in, roles of single instances, and names of axes belong here, too. The walk is
`fields` → `division` → `flattening` → `reading` → `schema` →
`overriding` → `methods` → `records` → `construction` → `pickling` → `classes`. Built on it are
`computed_leaves`, `ties`, `resolving`, `roles` and `naming_axes`.

May import `tree` and anything that `tree` may import.

Promises: an instance never changes once it is built. `unflatten(flatten(m)) == m` for every
class and all leaves. Reading a field that is set runs no code of ours, unless the field is stored
in another form (`reading`).
"""
