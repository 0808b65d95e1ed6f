"""Room `transform.interception`: what is chosen in the arguments of a call, and wrapped.

Owns: a spec for each argument (`argument_specs`), the Modules that a selector means
(`chosen_modules`), rules around their calls (`surrounded_calls`).

May import `boundary`.
"""
