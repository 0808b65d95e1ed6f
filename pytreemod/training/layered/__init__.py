"""Room `training.layered`: transformations of gradients over layers and members held as one.

Owns: `per_layer`, and what it decides by: the recorded program of a transformation.

May import what `training` may.

Promises: a rule gives on a Stack what it gives on a list of its layers, and on an Ensemble what it
gives on each member alone; where a rule looks at one array at a time, its program does not grow
with the number of layers.
"""
