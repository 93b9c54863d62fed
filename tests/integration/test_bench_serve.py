"""``onceflow bench serve``, with a small table and little time: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing.processes import with_argument
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "onceflow.cli.main", "bench", "serve", "--keys", "300", "--connections", "2"]
COMMAND += ["--seconds", "0.2", "--writer", "producer", "--trigger-ms", "100"]
KINDS = ["one key", "one key, max_staleness", "100 keys", "range, streamed"]


def started(tmp_path: Path, records_per_second: int) -> Any:
    command = [*COMMAND, "--output", str(tmp_path / "found.jsonl"), "--records-per-second", str(records_per_second)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_all_figures(tmp_path: Path) -> None:
    output, errors = (bench := started(tmp_path, 300)).communicate(timeout=180)
    assert bench.returncode == 0, errors
    results = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert output.splitlines()[-1].startswith(f"One instance answered {results[-1]['lookups_per_s']:,} look-ups/s")
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        assert result["correct"] == "yes"
        by_name.setdefault(result["bench"], []).append(result)
    parts = [f"serve_{count}_{how}" for how in ("idle", "writing") for count in ("one", "two")]
    assert list(by_name) == ["serve_floor", *parts, "serve_summary"]
    assert [result["what"] for result in by_name["serve_floor"]] == ["get", "multi_get"]
    for name in parts:
        assert [result["what"] for result in by_name[name]] == KINDS
        for result in by_name[name]:
            assert result["keys_per_s"] > 0
            assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]
            assert result["age_p50_ms"] is not None
        written = [result["written_per_s"] > 0 for result in by_name[name]]
        assert any(written) == name.endswith("writing")
    summary = results[-1]
    assert summary["lookups_per_s"] == by_name["serve_one_idle"][0]["keys_per_s"]
    assert summary["lookups_per_s_of_two"] == by_name["serve_two_idle"][0]["keys_per_s"]


@pytest.mark.long
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with started(tmp_path, 0) as bench:
        try:
            end_it(bench, tmp_path)
        finally:
            bench.kill()


def end_it(bench: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = ""
    while "one of two instances, idle: one key" not in "".join(lines[-1:]):
        line = bench.stderr.readline()
        assert line, "".join(lines)
        lines.append(line)
    for arguments in with_argument("bench-serve"):
        if "--state-dir" in arguments:
            folder = arguments.split("--state-dir ")[1].split("/onceflow-")[1].split("/")[0]
    assert folder
    bench.send_signal(signal.SIGINT)
    output, errors = bench.communicate(timeout=60)
    assert (bench.returncode, output) == (130, "")
    assert errors.splitlines()[-1] == "onceflow: interrupted"
    wait_until(
        lambda: not with_argument(f"/onceflow-{folder}/"), 10, lambda: str(with_argument(f"/onceflow-{folder}/"))
    )
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [result["bench"] for result in found] == ["serve_floor"] * 2 + ["serve_one_idle"] * 4
