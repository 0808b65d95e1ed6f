"""Room `transform.compilation`: `filter_jit`, and all that its options ask for.

Owns: compiled functions and where they are cached, donation, static arguments, shardings, why a
function was traced again; and looking at a call without running it.

May import `boundary`, `interception` and `host`.
"""
