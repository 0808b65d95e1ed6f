"""Room `training.layered`: transformations of gradients over layer axes.

Owns: `per_layer`, and the recorded program of a transformation, by which it decides.

May import everything that `training` may.

Promises: on a Stack, a rule has the same effect as on a list of its layers. On an Ensemble, it has
the same effect as on each member alone. Where a rule looks at one array at a time, its program does
not grow with the number of layers.
"""
