"""Room `nn.ensemble`: `Ensemble`, members of one kind as one value, called like one of them.

Owns:

    layer       the class, and what a call of it does: read this first
    sharing     what the members share: found by a selector, and held once
    inputs      what of a call is for each member, and what is for all of them

How the members are made, taken apart and given their State is in `nn.members`.

May import what `nn` may, `nn.members`, and the files of `nn` that all layers share.
"""
