"""Processes that a benchmark starts, among them the service that it measures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STOP_S = 15.0
_LOG_CHARACTERS = 2000


@contextmanager
def process(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A process that is stopped at the end, with SIGTERM, and later with SIGKILL. Ctrl-C does not reach it."""
    with log.open("w") as handle:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def service(environment: Mapping[str, str], log: Path) -> Iterator[Any]:
    """A running ``onceflow_workshop.bench.service``, with the variables that it reads; it ends with this process."""
    # Empty is as good as not set, whatever the user's own environment has.
    kept = {"B_ENGINE": "", "B_VARIANT": "records", **environment, "B_PARENT": str(os.getpid())}
    with process([sys.executable, "-m", "onceflow_workshop.bench.service"], log, kept) as started:
        yield started


def ended(started: Any, log: Path) -> str:
    """Why a process does not run any more, with its last words; empty: it runs."""
    if started.poll() is None:
        return ""
    return f"it has ended with {started.returncode}: {log.read_text(errors='replace')[-_LOG_CHARACTERS:].strip()}"
