"""State on a standalone cluster whose hosts have a disk each: it stays where it is, and a lost host costs its part."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing import independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.chaos.spark_cluster import SparkCluster

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(600)]

PARTITIONS = 6
WAIT_S = 180.0


class Hosts(SparkCluster):
    """Each worker has a state folder of its own, and is in one of two racks."""

    def environment(self, name: str) -> dict[str, str]:
        rack = "even" if name[-1] in "02468" else "odd"
        return {**super().environment(name), "ONCEFLOW_STATE_DIR": str(self.state(name)), "ONCEFLOW_RACK": rack}

    def state(self, name: str) -> Path:
        return self.folder / f"state-of-{name}"

    def partitions(self, name: str) -> set[int]:
        """The partitions that a host has a copy of."""
        return {int(path.parent.name) for path in self.state(name).rglob("data.mdb")}

    def copies(self) -> int:
        """How many copies there are on all hosts."""
        return sum(len(self.partitions(name)) for name in self.workers)

    def lose(self, name: str) -> None:
        """The host is gone, with its disk."""
        self.kill_worker(name)
        shutil.rmtree(self.state(name), ignore_errors=True)


class Service:
    """The running service, and the lines that it has printed."""

    def __init__(self, pipe: Any, process: subprocess.Popen[str]) -> None:
        self.pipe = pipe
        self.process = process
        self.lines: list[str] = []
        self.batches: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("{"):
                self.batches.append(json.JSONDecoder().raw_decode(line)[0])

    @property
    def last(self) -> dict[str, Any]:
        return self.batches[-1]

    @property
    def copies(self) -> dict[str, int]:
        return dict(self.last["copies"])

    def feed_until(self, done: Callable[[], bool], what: str) -> None:
        """Records keep coming until something has happened."""
        sent = len(self.batches)

        def holds() -> bool:
            nonlocal sent
            if len(self.batches) >= sent:
                self.pipe.fill(200)
                sent = len(self.batches) + 1
            return bool(self.batches) and done()

        def ended() -> str:
            return "" if self.process.poll() is None else "".join(self.lines)[-5000:] or "the driver has ended"

        wait_until(holds, WAIT_S, lambda: f"{what}; {''.join(self.lines[-20:])}", useless=ended, poll_s=0.1)

    def feed_batches(self, count: int) -> None:
        wanted = len(self.batches) + count
        self.feed_until(lambda: len(self.batches) >= wanted, f"{count} more batches")


@pytest.mark.parametrize(
    "copies, shuffled",
    [
        pytest.param(2, False, id="two copies"),
        pytest.param(1, False, id="one copy", marks=pytest.mark.long),
        pytest.param(2, True, id="two copies, behind a shuffle", marks=pytest.mark.long),
    ],
)
def test_hosts_are_lost_and_join(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path, copies: int, shuffled: bool
) -> None:
    pipe = make_state_pipe(partitions=PARTITIONS)
    pipe.fill(600)
    with Hosts(tmp_path / "cluster", workers=2, own_hosts=True) as cluster:
        arguments = {
            "flow": pipe.flow,
            "bootstrap": pipe.bootstrap,
            "source": pipe.source,
            "target": pipe.target,
            "table": pipe.table,
            "master": cluster.master,
            "config": cluster.settings,
            "copies": copies,
            "shuffled": shuffled,
        }
        service = Service(pipe, driver_process(Path(__file__).with_name("homes_service.py"), None, arguments))
        standby = PARTITIONS * (copies - 1)
        service.feed_until(lambda: service.copies["hosts"] == 2 and service.copies["standby"] == standby, "two hosts")

        # In steady state, each host has its share, nothing moves, and only standby copies are read.
        moved, restored = service.copies["moved"], service.last["restored"]
        service.feed_batches(6)
        assert service.copies["moved"] == moved
        if copies == 1:
            assert service.last["restored"] == restored
            homes = [cluster.partitions(name) for name in cluster.workers]
            assert [len(each) for each in homes] == [3, 3]
            assert set.union(*homes) == set(range(PARTITIONS))
        else:
            assert all(cluster.partitions(name) == set(range(PARTITIONS)) for name in cluster.workers)

        # A host joins: no batch is run again for it.
        before = service.last["batch"]
        third = cluster.add_worker()
        service.feed_until(
            lambda: service.copies["hosts"] == 3 and service.copies["standby"] == standby, "work for the new host"
        )
        service.feed_batches(2)
        attempts = {int(batch): count for batch, count in service.last["attempts"].items()}
        assert {count for batch, count in attempts.items() if batch > before} == {1}
        wait_until(lambda: cluster.copies() == PARTITIONS * copies, WAIT_S, "the end of superfluous copies")
        assert 2 <= len(cluster.partitions(third)) <= 2 * copies

        # A host is lost with its disk: only its partitions move.
        moved, lost = service.copies["moved"], PARTITIONS // 3
        cluster.lose(cluster.workers[0])
        service.feed_until(lambda: service.copies["hosts"] == 2, "the hosts that are left")
        service.feed_batches(2)
        assert lost <= service.copies["moved"] - moved <= lost + 1  # one more for the balance
        assert (service.copies["waiting"], service.copies["lacking"]) == (0, 0)

        # The driver is killed. The next one finds the copies where they are.
        service.process.kill()
        service.process.wait(30)
        pipe.fill(100)
        service = Service(pipe, driver_process(Path(__file__).with_name("homes_service.py"), None, arguments))
        service.feed_until(lambda: service.copies["hosts"] == 2, "the homes of before")
        service.feed_batches(2)
        ends = independent.end_offsets(pipe.bootstrap, pipe.source)
        wait_until(
            lambda: independent.committed_offsets(pipe.bootstrap, pipe.flow) == ends, WAIT_S, "all records", poll_s=0.2
        )
        os.kill(service.process.pid, signal.SIGTERM)
        assert service.process.wait(60) == 0, "".join(service.lines)[-5000:]
    pipe.check(local=False)
