"""``onceflow bench restore`` with a few rows: it measures every way, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from onceflow.bench.restore_ways import FLOW, WAYS

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_every_way(onceflow_broker: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "onceflow.cli.main",
        "bench",
        "restore",
        "--keys",
        "3000",
        "--rounds",
        "1",
        "--json",
    ]
    output = tmp_path / "found.jsonl"
    done = subprocess.run(
        [*command, "--json", "--bootstrap-servers", onceflow_broker, "--output", str(output)],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results == [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["way"] for result in results] == list(WAYS)
    assert all(result["correct"] == "yes" and result["records_per_s"] > 0 for result in results)
    assert [file.name for file in tmp_path.iterdir()] == ["found.jsonl"]
    left = AdminClient({"bootstrap.servers": onceflow_broker}).list_topics().topics
    assert not [name for name in left if name.startswith(FLOW)]
