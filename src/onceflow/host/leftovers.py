"""Finds files and folders of processes that have ended. The process id is part of their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def of_ended_processes(prefix: str, ending: str, folder: Path) -> Iterator[Path]:
    """Files and folders in a folder named ``<prefix><process id><ending>`` whose process has ended. None of them if the
    system has no ``/proc``.

    Args:
        prefix: plain text.
        ending: a regular expression.
    """
    if not Path("/proc").exists():
        return
    name = re.compile(rf"{re.escape(prefix)}(\d+){ending}")
    for path in folder.glob(f"{prefix}*"):
        match = name.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            yield path
