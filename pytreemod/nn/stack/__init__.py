"""Room `nn.stack`. Owns `Stack`, which stores many layers as one and applies them by a scan.

Owns:

    layer       the class, and one step of its scan

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
