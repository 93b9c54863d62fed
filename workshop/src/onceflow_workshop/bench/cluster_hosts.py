"""The hosts of ``onceflow bench cluster``: workers of a standalone cluster that share nothing but this machine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from onceflow.testing.faults import python_workers
from onceflow_workshop.bench.processes import Process, below, nbytes_on_disk, processes_of_machine
from onceflow_workshop.chaos.spark_cluster import SparkCluster

# A worker that leaves ends its tasks first, and hands on what they have shuffled.
_LEAVES_IN_ORDER = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
}
_LEAVE_S = 60.0


class Hosts(SparkCluster):
    """A cluster whose workers have one core, an address, a home and a state folder each.

    Spark takes each worker for a host, by its address. onceflow does, too: where a copy of state is (`location` of its
    reports) is the identity of the machine together with the state folder.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder, workers, java_options=["-Dspark.decommission.enabled=true"], own_hosts=True)
        self._known: dict[int, int] = {}  # when each process below a worker has begun, by pid

    def __enter__(self) -> Hosts:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.look()
        super().__exit__(kind, error, trace)
        self._end_leftovers()

    @property
    def settings(self) -> dict[str, str]:
        """As docs/deploy.md says, so that a lost host is noticed soon; and the JVM's own compilers in executors."""
        given = {name: value for name, value in super().settings.items() if name != "spark.executor.extraJavaOptions"}
        times = {
            "spark.network.timeout": "40s",
            "spark.network.timeoutInterval": "10s",
            "spark.executor.heartbeatInterval": "5s",
        }
        return {**given, **_LEAVES_IN_ORDER, **times}

    def environment(self, name: str) -> dict[str, str]:
        folders = {"HOME": "home", "TMPDIR": "tmp", "SPARK_LOCAL_DIRS": "local", "ONCEFLOW_STATE_DIR": "state"}
        for each in folders.values():
            (self.folder / name / each).mkdir(parents=True, exist_ok=True)
        return {**os.environ, **{variable: str(self.folder / name / each) for variable, each in folders.items()}}

    def kill_executor(self, worker: str) -> None:
        """SIGKILL to the JVM of an executor. The worker starts another one."""
        for pid in self.executors(worker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_host(self, worker: str) -> None:
        """SIGKILL to a worker and everything below it, and its home is gone."""
        self.look()
        self.kill_worker(worker)
        shutil.rmtree(self.folder / worker, ignore_errors=True)

    def leave(self, worker: str, meanwhile: Callable[[], None]) -> None:
        """A worker is told to leave: its executor ends its task. Then it is stopped. Its home stays."""
        os.kill(self.pid(worker), signal.SIGPWR)
        end = time.monotonic() + _LEAVE_S
        while self.executors(worker) and time.monotonic() < end:
            meanwhile()
            time.sleep(0.1)
        self.kill_worker(worker)

    def executor_pids(self) -> list[int]:
        """Of all executors now."""
        stats = self.look()
        workers = {self.pid(worker) for worker in self.workers}
        return [pid for pid, process in stats.items() if process.parent in workers]

    def look(self) -> Mapping[int, Process]:
        """Remember which processes there are below the workers, so that nothing is left in the end."""
        stats = processes_of_machine()
        for worker in self.workers:
            self._known.update({pid: stats[pid].begun for pid in below(self.pid(worker), stats)})
        return stats

    def all_work(self) -> bool:
        """Whether each worker has an executor, and each executor a Python worker."""
        executors = self.executors()
        return len(executors) >= len(self.workers) and all(python_workers(pid) for pid in executors)

    def state_dir(self, worker: str) -> Path:
        """The folder of its copies of tables."""
        return self.folder / worker / "state"

    def state_mib(self) -> dict[str, float]:
        """What the state of each running worker takes on its disk."""
        return {name: round(nbytes_on_disk(self.state_dir(name)) / 2**20, 1) for name in self.workers}

    def _end_leftovers(self) -> None:
        """Python workers outlive an executor that was killed, for a moment or for ever."""
        stats = processes_of_machine()
        for pid, begun in self._known.items():
            if pid in stats and stats[pid].begun == begun:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
