"""Room `transform.derivatives`: gradients, Jacobians, linear maps, your own rules, checkpoints.

Owns: the choice of the leaves to differentiate (`chosen_leaves`), and trees of derivatives with the
structure of other trees (`tangents`).

May import `boundary` and `host`; a peer of `maps`.
"""
