"""Room `transform.host`: compiled code and Python.

Owns: checks inside compiled code (`error_if`), `filter_checkify`, callbacks, enumerations.

May import `boundary`.
"""
