"""Which machine, container and boot this process runs in. What was verified of a local file holds while these stay.

Local stores are not synced to disk. What a process has written is in the kernel's memory until the disk has it, and the
kernel shows it to every process. So a process that is killed loses nothing of what it had committed: LMDB writes the
page that makes a commit valid last. A machine that goes down does: the disk may have some of the pages, in any order.
And another container or machine of the same name may have other files under the same path.
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
    """Which host this is, as it is now: a copy that was verified here need not be verified again while this stays.

    The host's name tells machines apart that are clones of each other, the boot a machine before and after a crash, the
    mount namespace two containers of one machine that have the same name.
    """
    return f"{socket.gethostname()}/{boot_id()}/{_mounts()}"


@cache
def boot_id() -> str:
    """Another one after every start of the machine's kernel.

    Where the system does not tell, it is one of this process: then every process verifies for itself.
    """
    try:
        found = _BOOT_ID.read_text().strip()
    except OSError:
        found = _of_macos() if sys.platform == "darwin" else ""
    return found or f"process-{uuid.uuid4().hex}"


def _mounts() -> int:
    """Number of the mount namespace; 0 where there are none."""
    try:
        return os.stat(_MOUNTS).st_ino
    except OSError:
        return 0


def _of_macos() -> str:
    """``kern.bootsessionuuid``; the time of the boot would move when the clock is set."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        buffer = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(len(buffer))
        failed = library.sysctlbyname(b"kern.bootsessionuuid", buffer, ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return ""
    return "" if failed else buffer.value.decode(errors="replace")
