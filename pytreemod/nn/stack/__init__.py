"""Room `nn.stack`. Owns `Stack`, many layers of one kind as one layer, applied by a scan.

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
