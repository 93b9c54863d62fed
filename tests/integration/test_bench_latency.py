"""``onceflow bench latency``, for a few seconds: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.long]

COMMAND = [sys.executable, "-m", "onceflow.cli.main", "bench", "latency", "--rate", "200"]
SHORT = ["--warm-seconds", "0.5", "--seconds", "1.5", "--idle-seconds", "0.5"]


def started(tmp_path: Path, servers: str, *more: str) -> Any:
    """A running benchmark; its temporary files are below the folder."""
    command = [*COMMAND, "--bootstrap-servers", servers, "--output", str(tmp_path / "found.jsonl"), *more]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def topics(servers: str) -> set[str]:
    return {name for name in AdminClient({"bootstrap.servers": servers}).list_topics().topics if "latency" in name}


def running(tmp_path: Path) -> list[str]:
    """Processes that have the folder in their arguments or in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(folder / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
        except OSError:
            continue
        if int(folder.name) != os.getpid() and any(str(tmp_path) in text for text in texts):
            found.append(f"{folder.name}: {texts[0]}")
    return found


def test_both_workloads(onceflow_broker: str, tmp_path: Path) -> None:
    plot = ["--plot", str(tmp_path / "it.png")]
    bench = started(tmp_path, onceflow_broker, "--workload", "copy,balance", "--json", *SHORT, *plot)
    output, errors = bench.communicate(timeout=180)
    assert bench.returncode == 0, errors
    results = [json.loads(line) for line in output.splitlines()]
    assert results == [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [(result["bench"], result["workload"]) for result in results] == [
        ("latency", "copy"),
        ("latency", "balance"),
    ]
    for result in results:
        assert result["correct"] == "yes"
        assert 250 <= result["records"] <= 350, "1.5 seconds of 200 a second"
        assert 0 < result["p50_ms"] <= result["p95_ms"] <= result["p99_ms"] <= result["max_ms"]
        assert result["first_output_s"] > 1
        assert result["idle_cpu_percent"] >= 0, "the direct engine may need less than a tick of the clock"
        assert 0 < result["cpu_percent"] < 100 * (os.cpu_count() or 1) + 50
        assert result["max_rss_mib"] > 200, "Spark's JVM, too"
        assert result["broker_cpu_percent"] is None, "it may be on another machine"
        assert "driver" in result["path"]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert topics(onceflow_broker) == set()
    latest = {seen.key: seen.value for seen in independent.read_topic(onceflow_broker, PROGRESS_TOPIC) if seen.key}
    assert [key for key, value in latest.items() if b"bench-latency" in key and value is not None] == []
    assert running(tmp_path) == []


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    bench = started(tmp_path, "127.0.0.1:1")
    output, errors = bench.communicate(timeout=120)
    assert (bench.returncode, output) == (1, "")
    assert "could not be created at 127.0.0.1:1" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_it_started_ends_with_it(onceflow_broker: str, tmp_path: Path, how: signal.Signals) -> None:
    bench = started(tmp_path, onceflow_broker, "--seconds", "60")
    try:
        lines = []
        while not lines or "warming up" not in lines[-1]:
            lines.append(bench.stderr.readline())
            assert lines[-1], "".join(lines)
        assert len(running(tmp_path)) >= 3, "the command, the service, and Spark's JVM"
        bench.send_signal(how)
        _, errors = bench.communicate(timeout=60)
        assert bench.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        if how == signal.SIGINT:
            assert errors.splitlines()[-1] == "onceflow: interrupted"
            assert topics(onceflow_broker) == set()
            assert running(tmp_path) == []
        # After SIGKILL nobody is left to stop the others: they notice it themselves.
        wait_until(lambda: not running(tmp_path), 30, lambda: running(tmp_path))
    finally:
        bench.kill()
        for each in running(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(each.split(":")[0]), signal.SIGKILL)
