"""Processes below another one, or with some arguments, found in /proc (Linux)."""

from __future__ import annotations

from pathlib import Path


def descendants(ancestor: int) -> dict[int, str]:
    """Command lines of all processes that ``ancestor`` has started, and that those have started, by pid."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        pid = int(folder.name)
        # The name in parentheses may itself have spaces and parentheses.
        parents[pid] = int(stat.rsplit(")", 1)[1].split()[1])
        lines[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return {pid: lines[pid] for pid in sorted(parents) if _descends(pid, ancestor, parents)}


def with_argument(text: str) -> list[str]:
    """Command lines of all processes that have this text in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if text in arguments:
            found.append(arguments)
    return found


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 1:
        if pid == ancestor:
            return True
    return False
