"""Room `transform.derivatives`: gradients, Jacobians, linear maps, rules of one's own, checkpoints.

Owns: what a derivative is taken by (`chosen_leaves`), and trees of derivatives beside the trees
that they belong to (`tangents`).

May import `boundary` and `host`; a peer of `maps`.
"""
