"""Room `transform.boundary`: a call is taken apart for JAX, and its result assembled.

Owns: the split of a call (`packing.split_call`) and of its result (`pack`, `unpack`). Also the
common part of all transformed functions (`wrapping`); the parameters of callables (`signatures`);
values returned beside the result (`sowing`). Also values that are lost or doubled
(`lost_updates`, `shared_parameters`).

May import nothing else of `transform`.
"""
