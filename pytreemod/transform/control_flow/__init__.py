"""Room `transform.control_flow`: loops and branches that carry any tree.

May import `boundary`, `host`, `compilation` and `maps`.
"""
