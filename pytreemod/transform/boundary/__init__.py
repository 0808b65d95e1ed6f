"""Room `transform.boundary`: where a call is taken apart for JAX, and put together again.

Owns: the way in (`split_call`) and the way out (`pack`, `unpack`, `group`) of every transform; what
all transformed functions have in common (`wrapping`); specs for arguments; what comes out of a
transform besides its result (`sowing`), what must not be lost in it, or doubled; rules around the
calls of chosen Modules (`surrounded_calls`).

May import nothing else of `transform`. All other rooms in it stand on this one.
"""
