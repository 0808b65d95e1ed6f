"""Room `tree`: operations on any pytree.

Owns: predicates on leaves, paths, selectors and `by`, splitting and combining, surgery,
comparison, printing; and, for the rooms above, how instances are stored, and snapshots.

May import `errors` and `typing`. Of a Module it knows how it is stored, and that its class has a
schema, `__module_schema__` (see [`instances`][pytreemod.tree.instances]).

Promises: nothing here changes a tree that it is given, nor depends on the order of a dict.
"""
