"""Shared fixtures. The broker, topics and the SparkSession come from onceflow.testing.plugin (an entry point)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from onceflow import hooks
from onceflow.testing import faults, independent

DRIVER = Path(__file__).parent / "faults" / "driver.py"


@dataclass
class Pipe:
    """One flow from a filled topic to an output topic, and what must come out."""

    bootstrap: str
    source: str
    target: str
    flow: str
    spark: Any
    tmp_path: Path
    sent: list[tuple[bytes | None, bytes | None]] = field(default_factory=list)

    def fill(self, count: int, *, keys: int = 50) -> None:
        """Produce ``count`` records; values are unique and tell their order within a key."""
        first = len(self.sent)
        more: list[tuple[bytes | None, bytes | None]] = [
            (f"key-{n % keys}".encode(), f"{n:09d}".encode()) for n in range(first, first + count)
        ]
        independent.fill(self.bootstrap, self.source, more)
        self.sent += more

    def open(self, **flow_options: Any) -> Any:
        from onceflow import Flow

        return Flow(self.flow, self.spark, bootstrap_servers=self.bootstrap, **flow_options)

    def run(self, *, read: dict[str, Any] | None = None, **write: Any) -> Any:
        """Start the flow in this process, let it write everything there is, stop it."""
        flow = self.open()
        source = flow.read(self.source, **{"max_records_per_batch": 1000, **(read or {})})
        query = flow.write(source.select("key", "value"), topic=self.target, **write).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return query

    def driver(self, rule: str | None = None, **options: Any) -> subprocess.Popen[str]:
        """The same flow as a process of its own (``tests/faults/driver.py``)."""
        environment = {key: value for key, value in os.environ.items() if key != hooks.VARIABLE}
        if rule is not None:
            environment[hooks.VARIABLE] = rule
        arguments = {
            "bootstrap": self.bootstrap,
            "flow": self.flow,
            "source": self.source,
            "target": self.target,
            **options,
        }
        return subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end_driver(self, process: subprocess.Popen[str]) -> None:
        """End the JVM and the workers that a killed driver leaves behind; ``driver`` has started them."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if process.stdout is not None:
            process.stdout.close()

    def check(self) -> list[independent.Seen]:
        """Exactly once: every record once, in order of its key, in the partition of its key; progress agrees."""
        seen = independent.read_topic(self.bootstrap, self.target, decided=True)
        assert_same_records(seen, self.sent)
        assert_key_order(seen, self.sent)
        ends = independent.end_offsets(self.bootstrap, self.source)
        assert independent.committed_offsets(self.bootstrap, self.flow) == ends
        return seen


def assert_same_records(seen: list[independent.Seen], sent: list[tuple[bytes | None, bytes | None]]) -> None:
    got, expected = Counter((s.key, s.value) for s in seen), Counter(sent)
    lost, doubled = expected - got, got - expected
    assert not lost, f"{lost.total()} records lost, for example {list(lost)[:3]}"
    assert not doubled, f"{doubled.total()} records doubled or foreign, for example {list(doubled)[:3]}"


def assert_key_order(seen: list[independent.Seen], sent: list[tuple[bytes | None, bytes | None]]) -> None:
    by_key: dict[bytes | None, list[bytes | None]] = {}
    partitions: dict[bytes | None, set[int]] = {}
    for record in sorted(seen, key=lambda s: (s.partition, s.offset)):
        by_key.setdefault(record.key, []).append(record.value)
        partitions.setdefault(record.key, set()).add(record.partition)
    assert all(len(found) == 1 for found in partitions.values()), "a key is in several partitions"
    expected: dict[bytes | None, list[bytes | None]] = {}
    for key, value in sent:
        expected.setdefault(key, []).append(value)
    assert by_key == expected, "records of a key are out of order"


@pytest.fixture
def make_pipe(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., Pipe]:
    """``make_pipe(partitions=4, target_partitions=None)``: an empty source, an empty target and a flow name."""

    def make(partitions: int = 4, target_partitions: int | None = None) -> Pipe:
        source = make_topic("in", partitions)
        target = make_topic("out", target_partitions or partitions)
        return Pipe(onceflow_broker, source, target, f"flow-{source}", onceflow_spark, tmp_path)

    return make


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``inject("progress", "raise", batch=2)``: a fault in this process and the tasks of its flows."""

    def inject_(step: str, action: str, **fields: Any) -> None:
        faults._fired.clear()
        monkeypatch.setenv(hooks.VARIABLE, faults.fault(step, action, **fields))

    return inject_


@pytest.fixture(autouse=True)
def _no_faults_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks.VARIABLE, raising=False)
