"""Room `transform.control_flow`: loops and branches that carry any tree.

Owns: scans (`scans`), loops that go on as long as they must (`loops`), branches; that what is
carried keeps its types (`carries`), and what is refused before JAX is called (`refusals`).

May import `boundary`, `host`, `compilation` and `maps`.
"""
