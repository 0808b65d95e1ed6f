"""Room `nn.stack`: `Stack`, many layers of one kind as one layer, applied by a scan.

Owns:

    layer       the class, and what a call of it does: read this first
    step        one layer of the scan, and that it gives back what it takes
    refusals    what is checked before the scan

How the layers are made, taken apart and given their State is in `nn.members`.

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
