"""What killed processes leave in a folder: files that were being written, and are no more.

Owns: how who writes such a file shows that it is alive
([`show_alive`][pytreemod.io.leftovers.show_alive]), and how to remove those of which nobody does
([`remove_leftovers`][pytreemod.io.leftovers.remove_leftovers]). Other processes may be writing into
the same folder at this moment.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows, which lets nobody remove a file that is open
    fcntl = None

from pytreemod.io.access import StrPath, system_errors

_NAME = re.compile(r"(.+)\.saving-[0-9a-f]{16}")
_YOUNG = 60.0
"""Seconds; who has just made a file may not have shown yet that it is alive."""
_OLD = 24 * 3600.0
"""Seconds; where nobody can show it, a file that was left alone for so long is nobody's."""


def show_alive(descriptor: int) -> None:
    """Show that somebody is writing a file, for as long as it is open.

    Args:
        descriptor: of the open file. The system lets go of it when the process ends, however that
            comes about.
    """
    if fcntl is not None:
        # Not every kind of disk has locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_leftovers(folder: StrPath, is_ours: Callable[[str], bool]) -> None:
    """Remove what was being written when a process was killed.

    Args:
        folder: where to look; not below it.
        is_ours: whether a file may be removed, by the name that it would have got.

    Raises:
        FileAccessError: the folder cannot be read.
    """
    with system_errors(os.fspath(folder), "a folder to read"), os.scandir(folder) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is not None and is_ours(found[1]):
                # Another process may remove it first; and who may not remove it need not.
                with suppress(OSError):
                    if _is_abandoned(entry.path):
                        os.unlink(entry.path)


def _is_abandoned(path: str) -> bool:
    age = time.time() - os.stat(path).st_mtime
    if age < _YOUNG:
        return False
    if fcntl is None:
        return age > _OLD
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age > _OLD
    finally:
        os.close(descriptor)
    return True
