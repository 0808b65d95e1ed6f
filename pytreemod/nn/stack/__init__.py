"""Room `nn.stack`. Owns `Stack`, many layers of one kind as one layer, applied by a scan.

Owns:

    layer       the class, and what a step of its scan does

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
