"""Room `transform.maps`: one function for many members: vmap, pmap, shard_map, stacks of trees.

May import `boundary`, `host` and `compilation`; a peer of `derivatives`.
"""
