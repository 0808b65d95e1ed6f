"""Room `transform.boundary`: where a call is taken apart for JAX, and its result put together.

Owns: the way in (`packing.split_call`) and out (`pack`, `unpack`); what all transformed functions
have in common (`wrapping`); what callables take (`signatures`); what comes out beside the result
(`sowing`), and what is lost or doubled (`lost_updates`, `shared_parameters`).

May import nothing else of `transform`.
"""
