"""The service that benchmarks and harnesses measure: what it asks of its flow, and how it is run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.testing.waiting import wait_until
from onceflow_workshop.bench import service
from onceflow_workshop.bench.service_process import ended, process
from onceflow_workshop.bench.service_process import service as service_process


class KnownFlow:
    """A flow that only notes what it is asked for."""

    asked: dict[str, Any]

    def __init__(self, name: str, spark: Any, bootstrap_servers: str) -> None:
        self.name = name
        KnownFlow.asked = {"name": name, "servers": bootstrap_servers}

    def read(self, topic: str, **options: Any) -> Any:
        KnownFlow.asked["read"] = (topic, options)
        return SimpleNamespace(select=lambda *columns: columns)

    def process(self, df: Any, processor: Any, **options: Any) -> Any:
        KnownFlow.asked["process"] = (type(processor).__name__, options)

    def write(self, df: Any, **options: Any) -> Any:
        KnownFlow.asked["write"] = options
        batches = [SimpleNamespace(path=path) for path in ("2 tasks", "driver", "driver")]
        query = SimpleNamespace(awaitTermination=lambda: None, batches=batches, engine="driver")
        return SimpleNamespace(start=lambda: query)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Runs the service with some variables; returns what it asked of its flow."""
    monkeypatch.setattr(service, "Flow", KnownFlow)
    monkeypatch.setattr(service, "session", lambda **given: given)
    monkeypatch.setattr("tempfile.tempdir", None)
    before = signal.getsignal(signal.SIGTERM)
    always = {"B_BOOTSTRAP": "b:1", "B_NAME": "f", "B_IN": "in", "B_OUT": "out", "B_COMMIT_MS": "250"}

    def run(**given: str) -> dict[str, Any]:
        for name in ("B_WORKLOAD", "B_ENGINE", "B_GUARANTEE", "B_VARIANT", "B_RAN", "B_PARENT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**always, "B_STATE": str(tmp_path), **given}.items():
            monkeypatch.setenv(name, value)
        service.main()
        return KnownFlow.asked

    yield run
    signal.signal(signal.SIGTERM, before)


def test_the_service_copies_unless_asked_for_balances(asked: Any, tmp_path: Path) -> None:
    copied = asked(B_RAN=str(tmp_path / "ran"))
    assert copied == {
        "name": "f",
        "servers": "b:1",
        "read": ("in", {}),
        "write": {
            "topic": "out",
            "trigger": "250 milliseconds",
            "guarantee": "exactly_once",
            "partitioner": "source",
        },
    }
    assert json.loads((tmp_path / "ran").read_text()) == {"engine": "driver", "paths": ["2 tasks", "driver"]}
    assert asked(B_WORKLOAD="w1") == copied
    balances = asked(B_WORKLOAD="w2", B_RECORDS_PER_BATCH="500")
    assert balances["read"] == ("in", {"max_records_per_batch": 500})
    assert balances["process"] == ("Balance", {"table": "f-table", "state_dir": tmp_path / "tables"})
    assert "partitioner" not in balances["write"]
    assert asked(B_WORKLOAD="w2", B_VARIANT="columns")["process"][0] == "ColumnBalance"


def test_the_service_is_given_an_engine_and_a_guarantee(asked: Any) -> None:
    assert asked(B_ENGINE="driver")["write"]["engine"] == "driver"
    assert "engine" not in asked(B_ENGINE="")["write"]
    assert asked(B_GUARANTEE="alo")["write"]["guarantee"] == "at_least_once"


def test_a_service_that_ends_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process([sys.executable, "-c", "import sys; sys.exit('no such topic')"], log) as started:
        wait_until(lambda: started.poll() is not None, 30, "it ends")
        assert ended(started, log) == "it has ended with 1: no such topic"
    with process([sys.executable, "-c", "import time; time.sleep(60)"], log) as started:
        assert ended(started, log) == ""
    assert started.returncode == -signal.SIGTERM


def test_the_users_own_variables_choose_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("B_ENGINE", "tasks")
    known: list[Any] = []

    def popen(command: list[str], **given: Any) -> Any:
        known.append(given["env"])
        return SimpleNamespace(terminate=lambda: None, wait=lambda seconds: 0)

    monkeypatch.setattr("onceflow_workshop.bench.service_process.subprocess.Popen", popen)
    with service_process({"B_NAME": "f"}, tmp_path / "log"):
        pass
    assert (known[0]["B_ENGINE"], known[0]["B_NAME"], known[0]["B_PARENT"]) == ("", "f", str(os.getpid()))
