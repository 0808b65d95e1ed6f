"""Room `transform.control_flow`: loops and branches that carry any tree.

Owns: scans (`scans`), loops with a condition (`loops`), branches; carries that keep their types
(`carries`), and mistakes that are refused before JAX is called (`refusals`).

May import `boundary`, `host`, `compilation` and `maps`.
"""
