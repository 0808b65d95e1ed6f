"""Room `transform.maps`: one function for many members: vmap, pmap, shard_map, stacks of trees.

Owns: `filter_vmap`, `filter_pmap`, `filter_shard_map`; `stack` and `unstack`; the mapped axis of
each array, and the axis of each result; a warning about random streams that members share.

May import `boundary`, `interception`, `host` and `compilation`; a peer of `derivatives`.
"""
