"""Room `transform`: JAX's transforms, for functions of any trees.

Owns: `filter_jit`, `filter_grad`, `filter_vmap` and the rest, each in a file of its name;
`capture`, `intervene` and `sow`; checks and callbacks; names of axes on a mesh.

All of them stand on one boundary: `packing` divides a call into arrays and everything else, and
builds the result again. `wrapping` is what transformed functions have in common, `arguments` knows
their parameters, and `sowing` lets values out of any of them. A new transform is a file on these
four.

May import `module` and the rooms that it may import; a peer of `state`. Transforms work on trees:
except for the rules around calls (`call_rules`), they treat a Module like any node.

Promises: a transform returns the result of calling the function, or raises an error that names the
argument and the path.
"""
