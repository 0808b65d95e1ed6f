"""Room `io`: trees on disk.

Owns: checkpoint files (what is in one, how it is written whole or not at all, what a load does for
each leaf), and the other doors to the same table of paths: Equinox's files, dicts of leaves by
name, PyTorch's state dicts.

May import everything below it (`nn`, `transform`, `state`, `module`, `tree`); nothing imports it
but the front door, which does so when one of its names is first asked for.

Promises: nothing is imported or executed because a file says so; a file that is damaged, or of
another model, is told with its path, and leaves nothing half loaded.
"""
