"""Checks of this machine's disks: room in onceflow's folders, and what flows and ended processes have left there."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from onceflow.admin.doctor.finding import Finding, error, ok, warning
from onceflow.admin.doctor.local import Host
from onceflow.host import jars
from onceflow.options.sizes import size_text

ROOM_MIN, ROOM_GOOD = 100 * 1024**2, 2 * 1024**3
UNUSED_DAYS = 30
_DAY_S = 86_400.0
_MOST = 10
_NO_FLOW = "@"  # no name of a flow begins with it: copies of `Table` are in @tables


@dataclass(frozen=True)
class LocalFlow:
    """The local state of a flow.

    Args:
        flow: the flow, after its prefix of transactional ids if it has one.
        folder: the folder of the flow's tables.
        size: bytes on disk.
        changed: when a file was changed last, in epoch seconds.
    """

    flow: str
    folder: Path
    size: int
    changed: float


def check_disk(host: Host) -> Iterator[Finding]:
    """Free room where state, jars and temporary files are, and whether the folders can be written."""
    for what, folder, cure in (
        *(("state", folder, "ONCEFLOW_STATE_DIR or state_dir=") for folder in host.state_dirs),
        ("cache", jars.cache_dir(), "ONCEFLOW_CACHE"),
        ("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        subject, there = f"{what} {folder}", _nearest(folder)
        if not os.access(there, os.W_OK | os.X_OK):
            yield error(subject, f"{there} cannot be written by this user", f"correct its permissions, or set {cure}")
            continue
        free = shutil.disk_usage(there).free
        found, fix = f"{size_text(free)} free", f"free some room there, or use another disk with {cure}"
        if free < ROOM_MIN:
            yield error(subject, found, fix)
        else:
            yield warning(subject, found, fix) if free < ROOM_GOOD else ok(subject, found)


def check_local_state(host: Host) -> Iterator[Finding]:
    """The local state of flows: how large it is, and whether it is still used."""
    for folder in host.state_dirs:
        used = []
        for each in local_flows(folder):
            days = (time.time() - each.changed) / _DAY_S
            if days < UNUSED_DAYS:
                used.append((each.flow, each.size))
                continue
            yield warning(
                str(each.folder),
                f"flow {each.flow}: {size_text(each.size)}, last changed {days:,.0f} days ago",
                "delete the folder if the flow does not run on this machine any more. A table with changelog=False has "
                "its rows only there",
            )
        yield ok(str(folder), f"flows in the last {UNUSED_DAYS} days: {_listed(used) if used else 'none'}")


def local_flows(state_dir: Path) -> Iterator[LocalFlow]:
    """The flows with state in a folder of local state, in order of names."""
    if not state_dir.is_dir():
        return
    for folder in sorted(state_dir.iterdir()):
        if folder.is_dir() and not folder.name.startswith(_NO_FLOW):
            size, changed = _usage(folder)
            yield LocalFlow(unquote(folder.name), folder, size, changed)


def _usage(folder: Path) -> tuple[int, float]:
    """Bytes on disk of all files below a folder, and when it or one of them was changed last."""
    size, changed = 0, folder.stat().st_mtime
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except OSError:  # it was removed meanwhile
            continue
        size += stat.st_blocks * 512  # a file of LMDB is longer than what is on disk
        changed = max(changed, stat.st_mtime)
    return size, changed


def _listed(sizes: Sequence[tuple[str, int]]) -> str:
    """Names and sizes for people, the largest first."""
    ordered = sorted(sizes, key=lambda each: -each[1])
    shown = ", ".join(f"{name} ({size_text(size)})" for name, size in ordered[:_MOST])
    rest = ordered[_MOST:]
    return f"{shown} and {len(rest)} more ({size_text(sum(size for _, size in rest))})" if rest else shown


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
