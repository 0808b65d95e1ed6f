"""Room `transform`: JAX's transforms, for functions of any trees.

Owns: `filter_jit`, `filter_grad`, `filter_vmap` and the rest, and the one `boundary` at which a
call is split into arrays and everything else.

May import `module` and what that may import; a peer of `state`. Transforms work on trees: they
ask a Module nothing that they would not ask a list.

Promises: a transform gives what calling the function gives, or an error that names the argument
and the path.
"""
