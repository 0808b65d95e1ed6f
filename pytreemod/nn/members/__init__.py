"""Room `nn.members`: several of one kind as one value, whose arrays have a leading axis.

The common part of `Stack` and `Ensemble`: the first applies its members in sequence, the second
side by side.

Owns:

    layer       their base, and how a call is split; read this first.
    checks      their owner, as errors name it; checks before a call.
    making      makes members as one.
    stacking    splits and joins members.
    sharing     the shared parts of an `Ensemble`, found by a selector.
    resharding  their sharding on a mesh with explicit axes.
    state       splits a State between members, and joins it after them.

May import what `nn` may, and the files of `nn` that all layers share.
"""
