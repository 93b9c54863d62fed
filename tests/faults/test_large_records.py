"""Records of 1 MB through Spark's operators: memory is bounded, whatever the backlog."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long]

MB = 1_000_000  # not the most that a broker takes: the client has a limit, too
COUNT = 300
#: The same value, by Spark's own code.
COLUMNS = ["key", "unhex(hex(value)) AS value"]


def processes(driver: subprocess.Popen[str]) -> Iterator[Path]:
    """The driver, and the Python workers that it has."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            group = int((each / "stat").read_text().rpartition(")")[2].split()[2])
            if group == driver.pid and "python" in os.readlink(each / "exe"):
                yield each
        except OSError:
            continue


def peak_mb(driver: subprocess.Popen[str]) -> int:
    """The most memory that one of them has had, but for that of the JVM."""
    peaks = [0]
    for each in processes(driver):
        lines = (each / "status").read_text().splitlines()
        peaks += [int(line.split()[1]) * 1024 // MB for line in lines if line.startswith("VmHWM")]
    return max(peaks)


def shared_mb(driver: subprocess.Popen[str]) -> int:
    """What the driver and its JVM share in files in memory now."""
    found = Path(f"/proc/{driver.pid}/fd").iterdir()
    files = [each for each in found if os.readlink(each).startswith("/dev/shm/#")]  # without a name
    assert files, "there are none: the test looks for the wrong ones"
    return sum(each.stat().st_size for each in files) // MB


@pytest.mark.parametrize("write", [{}, {"engine": "tasks"}], ids=["driver", "tasks"])
def test_a_backlog_of_large_records(make_pipe: Any, write: dict[str, Any]) -> None:
    pipe = make_pipe()
    pipe.fill(100)
    process = pipe.driver(forever=True, columns=COLUMNS, write=write, records_per_batch=COUNT)
    try:
        wait_until(lambda: written(pipe) == 100, 90, "the first records")
        before, shared = peak_mb(process), [shared_mb(process)]
        more = [(b"key-%d" % (n % 50), b"%09d" % n * 105_000) for n in range(100, 100 + COUNT)]
        independent.fill(pipe.bootstrap, pipe.source, more)
        pipe.sent += more

        def is_done() -> bool:
            shared.append(shared_mb(process))
            return written(pipe) == 100 + COUNT

        wait_until(is_done, 120, "the large records")
        after = peak_mb(process)
        wait_until(lambda: shared_mb(process) == 0, 30, "between two batches, nothing is shared")
    finally:
        pipe.end_driver(process)
        process.wait(30)
    assert after - before < 200, "less than the records have together"
    assert max(shared) <= 64
    pipe.check()


def written(pipe: Any) -> int:
    progress = pipe.committed_progress()
    return sum(progress[-1].offsets[pipe.source].values()) if progress else 0
