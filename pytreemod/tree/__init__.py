"""Room `tree`: operations on any pytree.

Owns: predicates on leaves, paths, selectors and `by`, splitting and combining, surgery,
comparison, printing; and, for the rooms above, records, pending records and snapshots.

May import `errors` and `typing`. Knows no Module: a class takes part by carrying a *record*
(see [`nodes`][pytreemod.tree.nodes]).

Promises: nothing here changes a tree that it is given, nor depends on the order of a dict.
"""
