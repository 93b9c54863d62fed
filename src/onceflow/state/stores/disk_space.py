"""Tells whether a write has failed for want of room, and makes room for files that are written through a map."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

#: There is no room, the user has a quota, or the process may not write larger files.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def lacks_room(folder: Path, size: int) -> bool:
    """Whether a file of this size would not fit into the folder.

    Of a quota, and of a limit for files, the file system does not tell. So a file without a name is given that room for
    a moment; but only if there is much more than that, so that nobody else lacks it.
    """
    try:
        found = os.statvfs(folder)
        if found.f_bavail * found.f_frsize < 2 * size:
            return True
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as refused:
        return refused.errno in NO_ROOM
    return False


def allocate(path: Path, size: int) -> None:
    """Give a file all of its blocks if it is shorter than this; it is created if it is missing.

    No other part of this process may use the file: closing a file releases the process's locks on it.

    Raises:
        OSError: there is no room. Other errors are left to those who open the file.
    """
    try:
        if path.exists() and path.stat().st_size >= size:
            return
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)
    except OSError as refused:
        if refused.errno in NO_ROOM:
            raise
