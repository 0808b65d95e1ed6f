"""Room `transform.compilation`: `filter_jit` and its options.

Owns: compiled functions and their caches, donation, static arguments, shardings, the reasons for
retraces; and looking at a call without running it.

May import `boundary`, `interception` and `host`.
"""
