"""``onceflow bench cluster``, with few records and little time: phases, figures and checks, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing.processes import with_argument

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

RECORDS = 30_000
COMMAND = [sys.executable, "-m", "onceflow.cli.main", "bench", "cluster", "--workers", "2", "--partitions", "4"]
COMMAND += ["--accounts", "2000", "--rate", "200", "--seconds", "6", "--warm-seconds", "3", "--backlog", str(RECORDS)]
PHASES = ["executor", "host"]


def test_phases_and_a_backlog(tmp_path: Path) -> None:
    output, scratch = tmp_path / "found.jsonl", tmp_path / "scratch"
    scratch.mkdir()
    command = [*COMMAND, "--phases", ",".join([*PHASES, "backlog"]), "--local", "--output", str(output)]
    done = subprocess.run(
        [*command, "--keep", str(tmp_path / "kept")],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["correct"] for row in rows] == ["yes"] * 5
    assert [row["phase"] for row in rows[:2]] == PHASES
    for row in rows[:2]:
        assert row["records"] > 0
        assert row["executors_us_per_record"] > 0
        assert row["driver_us_per_record"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["outage_s"] > 0
    assert (rows[0]["workers"], rows[1]["workers"]) == (2, 1)
    assert len(rows[1]["mib_per_host"]) == 1
    assert min(rows[1]["mib_per_host"]) > 0
    assert [(row["runs_on"], row["records"]) for row in rows[2:4]] == [("cluster", RECORDS), ("local", RECORDS)]
    assert rows[2]["seconds"] > 0
    batches = (tmp_path / "kept" / "batches.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["records"] for line in batches) > 2 * RECORDS
    assert not with_argument(str(scratch))
    assert list(scratch.glob("onceflow-*/cluster")) == []
