"""Room `state`: values that change, as tokens and one State.

Owns: tokens (`StateIndex`, `RngStream`), the `State` that stores their values, making both with a
model, the arithmetic of random streams, and the keys that a model is built with.

May import `module` and anything that `module` may import; a peer of `transform`.

Promises: a State that was replaced refuses to be used again, and so does a substate whose State has
other values by then: no update is lost silently. (If a State is dropped inside a transform, that
warns: see `transform.lost_updates`.)
"""
