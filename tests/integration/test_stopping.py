"""Services that are stopped: as `timeout` does it, with SIGTERM to the process and to its group with Spark's JVM; in
the middle of a batch; and by a newer driver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import onceflow
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Transactions
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

SERVICE = """
import os
import sys
import onceflow

servers, source, target, engine, stop_timeout = sys.argv[1:]
spark = onceflow.session("stopping", "local[1]")
flow = onceflow.Flow("stopping-" + source, spark, bootstrap_servers=servers)
copied = flow.read(source).select("key", "value")
query = flow.write(copied, topic=target, engine=engine).start()
onceflow.serve(query, stop_timeout=stop_timeout, lineage="OPENLINEAGE__TRANSPORT__TYPE" in os.environ)
"""


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    said: Path

    def text(self) -> str:
        return self.said.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, 90, self.text)
        assert self.process.poll() is None, self.text()

    def stop(self) -> tuple[int, float]:
        """SIGTERM. Returns the exit code, and how many seconds the process took."""
        at = time.monotonic()
        os.kill(self.process.pid, signal.SIGTERM)
        return self.process.wait(60), time.monotonic() - at


@contextlib.contextmanager
def service(
    folder: Path,
    *topics: str,
    engine: str = "auto",
    stop_timeout: str = "1 minute",
    faults: str = "",
    **environment: str,
) -> Iterator[Service]:
    said = folder / f"said-{uuid4().hex}"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, *topics, engine, stop_timeout],
            env={**os.environ, "TMPDIR": str(folder), "ONCEFLOW_FAULTS": faults, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Service(process, said)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    "in_a_batch",
    [
        pytest.param(False, id="idle", marks=pytest.mark.long),
        pytest.param(True, id="in a batch", marks=pytest.mark.long),
    ],
)
def test_sigterm_to_the_process_and_its_group(
    in_a_batch: bool, make_topic: Any, onceflow_broker: str, tmp_path: Path
) -> None:
    """Spark's JVM ends as well. It is a stop all the same, also for the lineage."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    independent.fill(onceflow_broker, source, [(b"k", b"v")])
    hangs, events = tmp_path / "hangs", tmp_path / "events"
    rule = faults.fault("write", "pause", where="task", batch=2, once_file=str(hangs)) if in_a_batch else ""
    lineage = {"TYPE": "file", "LOG_FILE_PATH": str(events), "APPEND": "true"}
    environment = {f"OPENLINEAGE__TRANSPORT__{name}": value for name, value in lineage.items()}
    with service(
        tmp_path, onceflow_broker, source, target, engine="tasks" if in_a_batch else "auto", faults=rule, **environment
    ) as copy:
        copy.until(lambda: '"batch": 1' in copy.text())
        if in_a_batch:
            independent.fill(onceflow_broker, source, [(b"k", b"w")])
            copy.until(hangs.exists)
        os.kill(copy.process.pid, signal.SIGTERM)
        os.killpg(copy.process.pid, signal.SIGTERM)
        assert copy.process.wait(60) == 0, copy.text()
    assert "Traceback" not in copy.text(), copy.text()
    if not in_a_batch:  # Spark complains that tasks were cut short
        assert "Error" not in copy.text()
    assert copy.text().count("is being stopped") <= 1
    states = [json.loads(line)["eventType"] for line in events.read_text().splitlines()]
    assert states == ["START", "ABORT"], copy.text()


@pytest.mark.long
def test_a_batch_of_the_driver_that_hangs_and_one_of_tasks(
    make_topic: Any, onceflow_broker: str, tmp_path: Path
) -> None:
    """Both are under way when SIGTERM comes. The first one ends with the process, the second one is aborted."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    sent = [(b"k", str(number).encode()) for number in range(3)]
    independent.fill(onceflow_broker, source, sent[:2])

    hangs = tmp_path / "hangs"
    rule = faults.fault("write", "pause", batch=1, once_file=str(hangs))
    with service(tmp_path, onceflow_broker, source, target, stop_timeout="2 seconds", faults=rule) as copy:
        copy.until(hangs.exists)
        code, took_s = copy.stop()
    assert code == 128 + signal.SIGTERM, copy.text()
    assert 2 <= took_s < 12
    assert "not everything was stopped in 2 s (stop_timeout), so it ends now" in copy.text()
    assert independent.read_topic(onceflow_broker, target) == []

    hangs = tmp_path / "hangs in a task"
    rule = faults.fault("write", "pause", where="task", batch=2, once_file=str(hangs))
    with service(tmp_path, onceflow_broker, source, target, engine="tasks", faults=rule) as copy:
        copy.until(lambda: '"batch": 1' in copy.text())
        independent.fill(onceflow_broker, source, sent[2:])
        copy.until(hangs.exists)
        code, took_s = copy.stop()
    assert code == 0, copy.text()
    assert took_s < 30
    assert '"batch": 2' not in copy.text()
    assert "Traceback" not in copy.text()
    seen = independent.read_topic(onceflow_broker, target)
    assert [(record.key, record.value) for record in seen] == sent[:2]
    # Aborted by the stop itself: readers behind it do not wait for the transaction timeout.
    with contextlib.closing(Cluster(ClientSettings(onceflow_broker, {}))) as cluster:
        found = describe_transaction(cluster, f"onceflow.stopping-{source}", Deadline(10, "the test"))
    assert found["state"] in ("CompleteAbort", "PrepareAbort")


@dataclass(frozen=True)
class Signalled:
    """A signal, to the process alone or to its group, as a terminal sends it: with Spark's JVM in it."""

    number: signal.Signals
    group: bool
    in_a_batch: bool

    def send(self, process: subprocess.Popen[bytes]) -> None:
        if self.group:
            os.killpg(process.pid, self.number)
        else:
            os.kill(process.pid, self.number)


@pytest.mark.parametrize(
    "signalled",
    [
        pytest.param(Signalled(signal.SIGINT, True, True), id="Ctrl-C in a batch"),
        pytest.param(Signalled(signal.SIGTERM, True, True), id="SIGTERM to all in a batch", marks=pytest.mark.long),
        pytest.param(Signalled(signal.SIGTERM, False, True), id="SIGTERM in a batch", marks=pytest.mark.long),
        pytest.param(Signalled(signal.SIGINT, True, False), id="Ctrl-C while it waits", marks=pytest.mark.long),
        pytest.param(Signalled(signal.SIGTERM, False, False), id="SIGTERM while it waits", marks=pytest.mark.long),
    ],
)
def test_a_stop_of_the_direct_engine(
    make_topic: Any, onceflow_broker: str, onceflow_spark: Any, tmp_path: Path, signalled: Signalled
) -> None:
    """The batch that runs is finished, and the next start goes on behind it."""
    source, target = make_topic("in", 2), make_topic("out", 2)
    sent = [(b"key-%d" % (n % 5), b"%d" % n) for n in range(300)]
    independent.fill(onceflow_broker, source, sent[:100])
    reached, go_on = tmp_path / "reached", tmp_path / "go-on"
    rule = faults.fault("write", "pause", batch_from=2, once_file=str(reached), until=str(go_on))
    with service(tmp_path, onceflow_broker, source, target, faults=rule if signalled.in_a_batch else "") as copy:
        copy.until(lambda: '"batch": 1' in copy.text())
        if signalled.in_a_batch:
            independent.fill(onceflow_broker, source, sent[100:200])
            copy.until(reached.exists)
        signalled.send(copy.process)
        if signalled.in_a_batch:
            copy.until(lambda: "is being stopped" in copy.text())
            go_on.touch()
        assert copy.process.wait(60) == 0, copy.text()
    assert "the driver reads and writes; with a" in copy.text(), "it is the direct engine"
    assert "Traceback" not in copy.text(), copy.text()
    assert "Error" not in copy.text(), copy.text()
    assert ('"batch": 2' in copy.text()) == signalled.in_a_batch
    if not signalled.in_a_batch:
        independent.fill(onceflow_broker, source, sent[100:200])
    independent.fill(onceflow_broker, source, sent[200:])
    go_on_in_this_process(f"stopping-{source}", onceflow_spark, onceflow_broker, source, target)
    seen = independent.read_topic(onceflow_broker, target, decided=True)
    assert sorted((record.key, record.value) for record in seen) == sorted(sent)


def go_on_in_this_process(name: str, spark: Any, bootstrap: str, source: str, target: str) -> None:
    with onceflow.Flow(name, spark, bootstrap_servers=bootstrap) as flow:
        query = flow.write(flow.read(source).select("key", "value"), topic=target, engine="driver").start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()


def test_a_batch_that_tasks_of_the_direct_engine_read_is_aborted(
    make_topic: Any, onceflow_broker: str, onceflow_spark: Any, tmp_path: Path, inject: Any
) -> None:
    """A stop does not wait for tasks, as with Spark's engine. The next start runs the batch again."""
    source, target = make_topic("in", 2), make_topic("out", 2)
    sent = [(b"key-%d" % (n % 5), b"%d" % n) for n in range(100)]
    independent.fill(onceflow_broker, source, sent)
    hangs = tmp_path / "hangs"
    inject("write", "pause", where="task", task=0, seconds=40, once_file=str(hangs))
    with onceflow.Flow(f"stopping-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.read(source).select("key", "value")
        query = flow.write(rows, topic=target, engine="tasks").start()
        wait_until(hangs.exists, 60, lambda: repr(query))
        at = time.monotonic()
        query.stop()
        assert time.monotonic() - at < 20
        assert query.failure is None
        assert query.exception() is None
    assert independent.read_topic(onceflow_broker, target, decided=True) == []
    inject("init", "raise", flow="nobody")
    go_on_in_this_process(f"stopping-{source}", onceflow_spark, onceflow_broker, source, target)
    seen = independent.read_topic(onceflow_broker, target, decided=True)
    assert sorted((record.key, record.value) for record in seen) == sorted(sent)


AWAITING = """
import sys
import onceflow

servers, source, target = sys.argv[1:]
spark = onceflow.session("awaiting", "local[1]")
flow = onceflow.Flow("awaiting-" + source, spark, bootstrap_servers=servers)
query = flow.write(flow.read(source).select("key", "value"), topic=target, engine="driver").start()
print("started", flush=True)
query.awaitTermination()
"""


@pytest.mark.long
@pytest.mark.parametrize("in_a_batch", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_only_waits(
    make_topic: Any, onceflow_broker: str, onceflow_spark: Any, tmp_path: Path, number: signal.Signals, in_a_batch: bool
) -> None:
    """Without `serve`, a signal ends Python at once, as a crash would: the next start runs the batch again."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    sent = [(b"k", b"%d" % n) for n in range(200)]
    independent.fill(onceflow_broker, source, sent[:100])
    reached = tmp_path / "reached"
    rule = faults.fault("progress", "pause", batch=2, once_file=str(reached)) if in_a_batch else ""
    process = subprocess.Popen(
        [sys.executable, "-c", AWAITING, onceflow_broker, source, target],
        env={**os.environ, "TMPDIR": str(tmp_path), "ONCEFLOW_FAULTS": rule},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any(line == "started\n" for line in process.stdout)
        done = lambda: len(independent.read_topic(onceflow_broker, target))  # noqa: E731
        wait_until(lambda: done() == 100, 60, "the first batch")
        if in_a_batch:
            independent.fill(onceflow_broker, source, sent[100:])
            wait_until(reached.exists, 60, "the second batch")
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -number, said
    if not in_a_batch:
        independent.fill(onceflow_broker, source, sent[100:])
    go_on_in_this_process(f"awaiting-{source}", onceflow_spark, onceflow_broker, source, target)
    seen = independent.read_topic(onceflow_broker, target, decided=True)
    assert [(record.key, record.value) for record in seen] == sent


ENDING = """
import os, sys, time
import onceflow

servers, source, target, begun = sys.argv[1:]
spark = onceflow.session("stopping", "local[1]")
flow = onceflow.Flow("ending-" + source, spark, bootstrap_servers=servers)

def slowly(batch):
    open(begun, "w").close()
    time.sleep(1)
    return batch

rows = flow.map(flow.read(source), slowly).select("key", "value")
query = flow.write(rows, topic=target, engine="driver").start()
while not os.path.exists(begun):
    time.sleep(0.02)
sys.exit(3)
"""


@pytest.mark.long
def test_a_script_that_ends_in_the_middle_of_a_batch(make_topic: Any, onceflow_broker: str, tmp_path: Path) -> None:
    """The batch gets a moment to end: without it, a thread may be in a library that crashes when Python ends."""
    source, target = make_topic("in", 1), make_topic("out", 1)
    independent.fill(onceflow_broker, source, [(b"k", b"v")])
    done = subprocess.run(
        [sys.executable, "-c", ENDING, onceflow_broker, source, target, str(tmp_path / "begun")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert [record.value for record in independent.read_topic(onceflow_broker, target, decided=True)] == [b"v"]


FENCED_EARLY = """
import sys
import onceflow

servers, first, second, target = sys.argv[1:]
spark = onceflow.session("stopping", "local[1]")
flow = onceflow.Flow("early-" + first, spark, bootstrap_servers=servers)
flow.read(first)
print("read", flush=True)
sys.stdin.readline()
rows = flow.read(second).select("key", "value")
onceflow.serve(flow.write(rows, topic=target))
"""


@pytest.mark.long
def test_fenced_before_it_serves(make_topic: Any, onceflow_broker: str, tmp_path: Path) -> None:
    """A newer driver starts between two reads of a program: its exit code is that of one that is fenced later."""
    first, second, target = make_topic("in", 1), make_topic("in", 1), make_topic("out", 1)
    with subprocess.Popen(
        [sys.executable, "-c", FENCED_EARLY, onceflow_broker, first, second, target],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout
        assert program.stdout.readline() == "read\n"
        with contextlib.closing(Cluster(ClientSettings(onceflow_broker, {}))) as cluster:
            Transactions(cluster, f"onceflow.early-{first}").init(Deadline(20, "the test"))
        _, said = program.communicate("\n", timeout=60)
    assert program.returncode == 79, said
    assert said.count("onceflow.errors.FencedError: ") == 1


@pytest.mark.long
def test_the_older_of_two_drivers_ends_for_good(
    make_topic: Any, onceflow_broker: str, onceflow_spark: Any, tmp_path: Path
) -> None:
    """A supervisor must not start it again, or the two would fence each other for ever. It tells that by its code.

    The newer driver is in the process of the test.
    """
    source, target = make_topic("in", 1), make_topic("out", 1)
    sent = [(b"k", str(number).encode()) for number in range(2)]
    independent.fill(onceflow_broker, source, sent[:1])
    with service(tmp_path, onceflow_broker, source, target, ONCEFLOW_LOG_FORMAT="json") as older:
        older.until(lambda: '"batch": 1' in older.text())
        with onceflow.Flow(f"stopping-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
            rows = flow.read(source).select("key", "value")
            newer = flow.write(rows, topic=target).start()
            last = f"the driver that committed last: host {socket.gethostname()}, process {older.process.pid}, started"
            assert any(last in line for line in newer.untold_start())
            independent.fill(onceflow_broker, source, sent[1:])
            newer.processAllAvailable()
            assert older.process.wait(60) == onceflow.FencedError.exit_code == 79, older.text()
            assert newer.isActive
            assert [batch.batch for batch in newer.batches] == [2]
    seen = independent.read_topic(onceflow_broker, target)
    assert [(record.key, record.value) for record in seen] == sent
    told = [json.loads(line) for line in older.text().splitlines() if line.startswith("{")]
    assert (told[-1]["level"], told[-1]["flow"]) == ("CRITICAL", f"stopping-{source}")
    assert told[-1]["error"]["type"] == "onceflow.FencedError"
    assert told[-1]["error"]["next_step"]
    (start,) = [line["start"] for line in told if "start" in line]
    assert start["committed_batch"] is None
    assert start["transactional_id"] == f"onceflow.stopping-{source}"
