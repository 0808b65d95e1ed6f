"""Room `nn.members`: several of one kind as one value, whose arrays have a leading axis.

What `Stack` and `Ensemble` have in common. The first applies its members one after the other, the
second side by side; how they are made, taken apart, put together, and given their State and their
random streams is the same.

Owns:

    checks      whose members they are, for errors; what is checked before they are called
    making      made as one
    taking      taken out one by one, and put in
    state       a State taken apart for the members, and put together after them

May import what `nn` may, and the files of `nn` that all layers share.
"""
