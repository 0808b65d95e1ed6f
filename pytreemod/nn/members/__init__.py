"""Room `nn.members`: several of one kind as one value, whose arrays have a leading axis.

What `Stack` and `Ensemble` have in common: the first applies its members one after the other, the
second side by side.

Owns:

    layer       their base, and how a call is split: read this first
    checks      whose members they are, for errors; what is checked before they are called
    making      made as one
    stacking    taken apart, and put together
    sharing     what the members of an `Ensemble` share, found by a selector
    laying      how they lie on a mesh with explicit axes
    state       a State taken apart for the members, and put together after them

May import what `nn` may, and the files of `nn` that all layers share.
"""
