"""Room `io`: trees on disk.

Owns: checkpoint files (their contents, the atomic write, the checks of a load for each leaf), and
the other formats of the same table of paths: Equinox's files, dicts of leaves by name, PyTorch's
state dicts.

May import everything below it (`nn`, `transform`, `state`, `module`, `tree`). Only the top-level
package imports it, when one of its names is first requested.

Promises: no file can make anything be imported or executed. A file that is damaged, or of another
model, raises an error with its path, and leaves nothing half loaded.
"""
