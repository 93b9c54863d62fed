"""Temporary files and folders of processes that have ended; their names have the process id."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path


def of_ended_processes(prefix: str, ending: str) -> Iterator[Path]:
    """Those named ``<prefix><process id><ending>`` whose process has ended. Nothing where there is no ``/proc``.

    Args:
        prefix: as it is. ending: a regular expression.
    """
    if not Path("/proc").exists():
        return
    name = re.compile(rf"{re.escape(prefix)}(\d+){ending}")
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        match = name.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            yield path
