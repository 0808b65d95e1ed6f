"""Room `nn.stack`: `Stack`, many layers of one kind as one layer, applied by a scan.

    layer       the class, and what a call of it does: read this first
    making      the layers are made as one
    step        one layer of the scan, and that it gives back what it takes
    state       a State taken apart for the layers, and put together after them
    members     layers taken out one by one, and put in
    refusals    what is checked before the scan

May import what `nn` may, and the files of `nn` that all layers share.
"""
