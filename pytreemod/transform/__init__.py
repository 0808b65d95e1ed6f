"""Room `transform`: JAX's transforms, for functions of any trees.

Owns: `filter_jit`, `filter_grad`, `filter_vmap` and the rest, each in a room of its own kind:

    control_flow                   loops, branches
    derivatives     maps           gradients, rules, checkpoints; vmap, pmap, shard_map, stacks
    compilation                    jit, donation, static arguments, shardings, retraces
    host                           checks inside compiled code, callbacks, enumerations
    interception                   what is chosen in the arguments of a call; rules around calls
    boundary                       where a call is split into arrays and everything else, and back

These import downwards only.

May import `module` and what that may import; a peer of `state`. Transforms work on trees: but
for the rules around calls, they ask a Module nothing that they would not ask any node.

Promises: a transform gives what calling the function gives, or an error that names the argument
and the path.
"""
