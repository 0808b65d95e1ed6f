"""Room `state`: values that change, as tokens and one State.

Owns: tokens (`StateIndex`), the `State` that holds their values, and making both with a model.

May import `module` and what that may import; a peer of `transform`.

Promises: a State that was replaced refuses to be used again, so no update is ever lost.
"""
