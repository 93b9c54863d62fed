"""Identifies the machine, the container and the boot of this process. While these are the same, a local file that was
verified once need not be verified again.

Local stores are not synced to disk (fsync). Written data is in the kernel's page cache until it is on the disk, and all
processes read it from there. So a process that is killed loses nothing that it has committed: LMDB writes the page that
makes a commit valid last. If the machine crashes, committed data may be lost: any subset of the pages may be on the
disk. Another container or machine with the same name may have other files under the same path.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import socket
import sys
import uuid
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/ns/mnt")


def host_identity() -> str:
    """The identity of this host. A local copy that was verified with the same identity need not be verified again.

    It has three parts. The host name distinguishes machines that are clones of each other. The boot id distinguishes a
    machine before and after a crash. The mount namespace distinguishes two containers of one machine that have the same
    name.
    """
    return f"{socket.gethostname()}/{boot_id()}/{_mounts()}"


@cache
def boot_id() -> str:
    """An id that changes with every boot of the machine.

    If the system has none, the id is a random one of this process. Then every process verifies its files itself.
    """
    try:
        found = _BOOT_ID.read_text().strip()
    except OSError:
        found = _of_macos() if sys.platform == "darwin" else ""
    return found or f"process-{uuid.uuid4().hex}"


def _mounts() -> int:
    """Number of the mount namespace; 0 if the system has none."""
    try:
        return os.stat(_MOUNTS).st_ino
    except OSError:
        return 0


def _of_macos() -> str:
    """``kern.bootsessionuuid``. Not the time of the boot, which changes when the clock is set."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        buffer = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(len(buffer))
        failed = library.sysctlbyname(b"kern.bootsessionuuid", buffer, ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return ""
    return "" if failed else buffer.value.decode(errors="replace")
