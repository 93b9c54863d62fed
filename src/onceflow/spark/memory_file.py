"""A file in memory that this process and the driver's JVM share.

On Linux it has no name, so nothing is left behind when the processes are killed: the JVM opens it through the
descriptor of this process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from typing import Any

import pyarrow as pa

_MEMORY = "/dev/shm"
# Containers often have 64 MB, which the batches of several programs would fill.
_FREE_MIN = 256_000_000


class MemoryFile:
    """A file that is empty at first.

    Attributes:
        path: by which the JVM opens it.
    """

    def __init__(self) -> None:
        linux = sys.platform.startswith("linux")
        make: Any = tempfile.TemporaryFile if linux else tempfile.NamedTemporaryFile
        # Without a buffer, because the JVM changes the file, too.
        self._file = make(dir=_MEMORY if _has_room() else None, prefix="onceflow-rows-", buffering=0)
        weakref.finalize(self, self._file.close)  # nobody may have closed it
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}" if linux else str(self._file.name)

    def close(self) -> None:
        """Remove it."""
        self._file.close()

    def clear(self) -> None:
        """Make it empty."""
        os.ftruncate(self._file.fileno(), 0)

    def put(self, content: pa.Buffer) -> None:
        """Replace what it contains."""
        self.clear()
        self._file.seek(0)
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def take(self) -> pa.Buffer:
        """What it contains. It is empty afterwards."""
        self._file.seek(0)
        found = pa.py_buffer(self._file.read())
        self.clear()
        return found


def _has_room() -> bool:
    try:
        return os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _FREE_MIN
    except OSError:
        return False
