"""Room `transform`: JAX's transforms, for functions of any trees.

Owns: `filter_jit`, `filter_grad`, `filter_vmap` and the rest, each in a room for its kind:

    control_flow                   loops, branches.
    derivatives     maps           gradients, rules, checkpoints; vmap, pmap, shard_map, stacks.
    compilation                    jit, donation, static arguments, shardings, retraces.
    host                           checks inside compiled code, callbacks, enumerations.
    interception                   chosen parts of a call's arguments; rules around calls.
    boundary                       splits a call into arrays and everything else, and assembles it.

These import downwards only.

May import `module` and the rooms that it may import; a peer of `state`. Transforms work on trees:
except for the rules around calls, they treat a Module like any node.

Promises: a transform returns the result of calling the function, or raises an error that names the
argument and the path.
"""
