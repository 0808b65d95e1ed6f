"""Room `transform.interception`: choose parts of a call's arguments, and wrap them.

Owns: a spec for each argument (`argument_specs`), the Modules that a selector chooses
(`chosen_modules`), rules around their calls (`surrounded_calls`).

May import `boundary`.
"""
