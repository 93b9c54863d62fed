"""A Spark cluster whose workers are hosts of their own: each has an address, a rack, and a disk with local copies of
tables. Hosts are lost with their disk, leave with notice, and come back."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from onceflow.testing.faults import python_workers
from onceflow_workshop.chaos.spark_cluster import SparkCluster

#: An executor that leaves ends its tasks first, and hands on what it has shuffled.
LEAVES_IN_ORDER = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
}
#: An executor that hangs is given up after this time, and may go on later beside the one that replaces it.
GIVEN_UP = {
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "2s",
    "spark.executor.heartbeatInterval": "2s",
}
_LEAVE_S = 60.0


class Hosts(SparkCluster):
    """The cluster. Workers of one core each; every second one is in another rack."""

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder, workers, java_options=["-Dspark.decommission.enabled=true"], own_hosts=True)

    @property
    def settings(self) -> dict[str, str]:
        return {**super().settings, **LEAVES_IN_ORDER}

    def environment(self, name: str) -> dict[str, str]:
        rack = "even" if name[-1] in "02468" else "odd"
        return {**super().environment(name), "ONCEFLOW_STATE_DIR": str(self.state(name)), "ONCEFLOW_RACK": rack}

    def state(self, name: str) -> Path:
        """The folder of the local copies of a host."""
        return self.folder / f"state-of-{name}"

    @property
    def states(self) -> list[Path]:
        """The folders of all hosts that have been there, and whose disks have not been lost."""
        return sorted(self.folder.glob("state-of-*"))

    def partitions(self, name: str) -> set[int]:
        """The partitions that a host has a copy of. Where there are several tables: of any of them."""
        return {int(path.parent.name) for path in self.state(name).rglob("data.mdb")}

    def copies(self) -> int:
        """How many copies there are on all hosts that are there."""
        return sum(len(self.partitions(name)) for name in self.workers)

    def lose_disk(self, name: str) -> None:
        """All local copies of a host are gone."""
        shutil.rmtree(self.state(name), ignore_errors=True)

    def spoil_disk(self, name: str) -> None:
        """The state folder of a host cannot be used: something else is in its place."""
        state = self.state(name)
        if state.exists():
            state.rename(self._aside(name))
        state.touch()

    def mend_disk(self, name: str, *, keep: bool) -> None:
        """It can be used again. ``keep``: with the copies that it had."""
        self.state(name).unlink()
        if keep and self._aside(name).exists():
            self._aside(name).rename(self.state(name))
        else:
            shutil.rmtree(self._aside(name), ignore_errors=True)

    def _aside(self, name: str) -> Path:
        return self.folder / f"spoilt-{name}"

    def lose(self, name: str) -> None:
        """A host is gone, with its disk."""
        self.kill_worker(name)
        self.lose_disk(name)

    def leave(self, name: str) -> bool:
        """A host leaves with notice, and is gone with its disk. Returns whether its executors have ended in time."""
        os.kill(self.pid(name), signal.SIGPWR)
        end = time.monotonic() + _LEAVE_S
        while (left := self.executors(name)) and time.monotonic() < end:
            time.sleep(0.1)
        self.lose(name)
        return not left

    def hang(self, pids: Sequence[int], seconds: float) -> None:
        """Processes do nothing for some seconds, and then go on."""
        _signal(pids, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            _signal(pids, signal.SIGCONT)

    def python_workers(self, name: str) -> list[int]:
        """Pids of the Python workers of a host."""
        return [pid for executor in self.executors(name) for pid in python_workers(executor)]


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
