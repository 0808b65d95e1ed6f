"""Room `nn.ensemble`. Owns `Ensemble`, which stores members as one and calls them by a map.

Owns:

    layer       the class, and the axes of its inputs

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
