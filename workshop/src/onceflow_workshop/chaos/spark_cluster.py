"""A Spark standalone cluster on 127.0.0.1: a master and some workers, so that executors can be lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from onceflow.broker.local import free_ports
from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError
from onceflow.host.java import find_java
from onceflow.testing.processes import descendants

START_S = 60.0
_HOST = "127.0.0.1"
_EXECUTOR = "CoarseGrainedExecutorBackend"


class SparkCluster:
    """A context manager: it starts the cluster, and at the end kills it with all its executors.

    Args:
        folder: for logs, jars and shuffle files. workers: how many at the start, of one core each. memory_mb: of each.
        own_hosts: give every worker a loopback address of its own (Linux has them all). When a worker leaves, Spark
            forgets the shuffle files of all executors on its host. With one address for all these would be all files.
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        *,
        memory_mb: int = 900,
        java_options: Sequence[str] = (),
        own_hosts: bool = False,
    ) -> None:
        self.folder = folder
        self.local = folder / "local"
        self._workers_wanted = workers
        self._memory_mb = memory_mb
        self._java_options = list(java_options)
        self._own_hosts = own_hosts
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.master = ""
        self._workers_started = 0

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a session that uses this cluster."""
        return {
            "spark.executor.memory": f"{self._memory_mb - 300}m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.driver.host": _HOST,
            "spark.driver.bindAddress": _HOST,
        }

    def __enter__(self) -> SparkCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.local.mkdir(exist_ok=True)
        try:
            (port,) = free_ports(1)
            self.master = f"spark://{_HOST}:{port}"
            self._spawn("master", "org.apache.spark.deploy.master.Master", "--port", str(port))
            self._await_port(port)
            names = [self._start_worker() for _ in range(self._workers_wanted)]
            self._await_workers(names)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def workers(self) -> list[str]:
        """Names of the workers that run."""
        return [name for name, process in self._processes.items() if name != "master" and process.poll() is None]

    def kill_worker(self, name: str) -> None:
        """SIGKILL to a worker and all its executors."""
        _kill_all(self._processes.pop(name))

    def kill_executors(self, *, meanwhile: Callable[[], None]) -> int:
        """Send SIGKILL to all executors and their Python workers. Returns how many executors there were.

        Args:
            meanwhile: called when all have ended, before new ones are started.
        """
        for name in self.workers:
            os.kill(self.pid(name), signal.SIGSTOP)  # otherwise the worker would start new executors at once
        try:
            killed = self.executors()
            for executor in killed:
                for pid in [executor, *descendants(executor)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            meanwhile()
        finally:
            for name in self.workers:
                os.kill(self.pid(name), signal.SIGCONT)
        return len(killed)

    def add_worker(self, again: str | None = None) -> str:
        """Start one more worker. Returns its name, as soon as the master knows it.

        Args:
            again: the name of a worker that was killed. It comes back, with the same address.
        """
        name = self._start_worker(again)
        self._await_workers([name])
        return name

    def executors(self, worker: str | None = None) -> list[int]:
        """Pids of the executors of one worker, or of all."""
        chosen = self._processes.values() if worker is None else [self._processes[worker]]
        found = (descendants(process.pid) for process in chosen)
        return [pid for below in found for pid, line in below.items() if _EXECUTOR in line]

    def pid(self, worker: str) -> int:
        """Pid of a worker itself."""
        return self._processes[worker].pid

    def environment(self, name: str) -> dict[str, str]:
        """Environment of the master or of a worker, and of the executors that the worker starts."""
        return {**os.environ, "SPARK_LOCAL_DIRS": str(self.local)}

    def lose_shuffle_files(self) -> int:
        """Delete the shuffle files of map tasks. Returns how many files there were."""
        files = list(self.local.rglob("shuffle_*.data"))
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def close(self) -> None:
        for process in self._processes.values():
            _kill_all(process)
        self._processes = {}

    def _start_worker(self, again: str | None = None) -> str:
        name = f"worker-{self._workers_started}" if again is None else again
        self._workers_started += again is None
        number = 2 + int(name.rpartition("-")[2])
        options = ["--cores", "1", "--memory", f"{self._memory_mb}M", "--work-dir", str(self.folder / name)]
        host = f"127.0.0.{number}" if self._own_hosts else _HOST
        self._spawn(name, "org.apache.spark.deploy.worker.Worker", *options, self.master, host=host)
        return name

    def _spawn(self, name: str, main_class: str, *arguments: str, host: str = _HOST) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        command = [str(find_java()), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        # Executors are killed often here. Spark must not give up on an application because of that.
        command += ["-Dspark.deploy.maxExecutorRetries=-1", *self._java_options]
        command += ["-cp", f"{home}/jars/*", main_class]
        command += ["--host", host, "--webui-port", "0", *arguments]
        environment = {
            **self.environment(name),
            "SPARK_HOME": str(home),
            "SPARK_SCALA_VERSION": "2.13",  # a worker asks for it before it starts an executor
            "SPARK_LOCAL_IP": host,
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _await_port(self, port: int) -> None:
        end = time.monotonic() + START_S
        while True:
            self._check()
            try:
                with socket.create_connection((_HOST, port), timeout=1):
                    return
            except OSError:
                self._wait(end, "the master does not listen")

    def _await_workers(self, names: Sequence[str]) -> None:
        end = time.monotonic() + START_S
        logs = [self.folder / f"{name}.log" for name in names]
        while not all("Successfully registered with master" in log.read_text(errors="replace") for log in logs):
            self._check()
            self._wait(end, "the workers did not find the master")

    def _check(self) -> None:
        for process in self._processes.values():
            if process.poll() is not None:
                raise EnvironmentUnusableError(
                    "A part of the Spark cluster ended while it was started", next_step=f"see the logs in {self.folder}"
                )

    def _wait(self, end: float, problem: str) -> None:
        if time.monotonic() > end:
            raise DeadlineExceededError(
                f"The Spark cluster was not ready within {START_S:g} s",
                detail=problem,
                next_step=f"see the logs in {self.folder}",
            )
        time.sleep(0.1)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes below it. It may have ended already."""
    if process.poll() is not None:
        return
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
