"""Room `transform.maps`: one function for many members: vmap, pmap, shard_map, stacks of trees.

Owns: `filter_vmap`, `filter_pmap`, `filter_shard_map`; `stack` and `unstack`; which axis of each
array is mapped, and where each result goes; a warning of random streams that members share.

May import `boundary`, `interception`, `host` and `compilation`; a peer of `derivatives`.
"""
