"""Room `nn.ensemble`. Owns `Ensemble`, members of one kind as one value, called like one of them.

Owns:

    layer       the class, and how the axes of its inputs are found

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
