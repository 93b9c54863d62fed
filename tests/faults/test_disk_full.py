"""The broker's disk is full: the flow says what it waits for, loses nothing, and goes on when there is room again.

Where this process may mount, Kafka's data are on a file system of their own that is filled up (ENOSPC). Elsewhere the
files of the broker's process are not let grow (RLIMIT_FSIZE, EFBIG). Kafka does the same in both cases: a log
directory that cannot be written goes offline, and without another one the broker ends.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.broker.local import LocalBroker
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="neither tmpfs nor limits of another process"),
]

DISK_BYTES = 64 * 2**20
ROOM_BYTES = 3 * 2**20
MAX_FILE_BYTES = 2**20


@dataclass
class Disk:
    """What the broker writes to. ``ballast``: a file on a file system of its own; None: there is none."""

    broker: LocalBroker
    ballast: Path | None

    def fill(self) -> None:
        """Leave room for a few batches."""
        if self.ballast is None:
            (pid,) = self.broker.status().pids
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, resource.RLIM_INFINITY))
            return
        free = os.statvfs(self.ballast.parent)
        with self.ballast.open("wb") as handle:
            os.posix_fallocate(handle.fileno(), 0, free.f_bavail * free.f_frsize - ROOM_BYTES)

    def mend(self) -> None:
        """Make room, and start the broker as an operator would."""
        if self.ballast is not None:
            self.ballast.unlink()
        self.broker.kill()  # if it has not ended by itself
        self.broker.start()

    def await_end(self) -> None:
        """Return when the broker has given up."""
        wait_until(lambda: not self.broker.status(0.1).running, 60, "the broker ends of its full disk")


@pytest.fixture
def disk(make_mount: Callable[..., tuple[Path, bool]]) -> Iterator[Disk]:
    folder, mounted = make_mount(DISK_BYTES, "node-1/data")
    properties = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
    with LocalBroker(folder, heap="512m", properties=properties) as broker:
        yield Disk(broker, folder / "node-1" / "data" / "ballast" if mounted else None)
        broker.kill()


@pytest.fixture
def make_full_pipe(disk: Disk, make_pipe: Callable[..., Any]) -> Callable[[], Any]:
    """Sources of 8 MB, for batches of 1 MB."""

    def make() -> Any:
        pipe = replace(make_pipe(), bootstrap=disk.broker.bootstrap_servers)
        for topic in (pipe.source, pipe.target):
            create_topic(pipe.bootstrap, topic, 4)
        rest = "x" * 990
        pipe.sent = [(f"key-{n % 50}".encode(), f"{n:09d}{rest}".encode()) for n in range(8000)]
        independent.fill(pipe.bootstrap, pipe.source, pipe.sent)
        return pipe

    return make


def start(pipe: Any, transaction_timeout: str = "60 seconds") -> Any:
    """One batch of 1 MB a second, so that the disk can be filled up between two."""
    flow = pipe.open()
    df = flow.read(pipe.source, max_records_per_batch=1000).select("key", "value")
    return flow.write(df, topic=pipe.target, trigger="1 second", transaction_timeout=transaction_timeout).start()


def test_flows_wait_or_give_up_and_go_on(
    disk: Disk, make_full_pipe: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two flows meet the full disk: a patient one, and one that gives up and is started again."""
    monkeypatch.setattr("onceflow.driver.kafka.output_writer._MIN_PATIENCE_S", 2.0)
    patient, hasty = make_full_pipe(), make_full_pipe()
    waiting = start(patient, "5 minutes")
    try:
        query = start(hasty)
        wait_until(lambda: query.batches, 60, "a first batch", useless=lambda: query.failure)
        # Only the flow's patience: a broker that ends timed-out transactions while it starts (Kafka 4.3.1) takes
        # partitions without a leader for deleted ones, and leaves out their abort markers.
        commit = query._sink._commit
        commit._options = commit._writer._options = replace(commit._options, transaction_timeout_s=2.0)
        disk.fill()
        try:
            disk.await_end()
            ran_at = time.monotonic()

            def gave_up_or_waits() -> bool:
                """If the broker has ended between two batches of this flow, it waits, as the other one does."""
                nonlocal ran_at
                if not query.status["message"].startswith("Waiting"):
                    ran_at = time.monotonic()
                return query.failure is not None or time.monotonic() - ran_at > 20

            wait_until(gave_up_or_waits, 180, "it gives up, or waits")
        finally:
            query.stop()
        if (problem := query.failure) is not None:
            assert isinstance(problem, onceflow.DeadlineExceededError | onceflow.BatchAbortedError)
            assert (problem.flow, problem.batch) == (hasty.flow, len(query.batches) + 1)
            assert "start" in problem.next_step
        assert waiting.isActive
        disk.mend()
        waiting.processAllAvailable()
    finally:
        waiting.stop()
    patient.check()
    hasty.run()
    hasty.check()
