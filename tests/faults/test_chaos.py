"""A short chaos run: faults of many kinds, then every record is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setup, seconds, records", [("one-node", 10, 20_000), ("three-nodes", 150, 50_000)])
def test_a_short_run(tmp_path: Path, setup: str, seconds: int, records: int) -> None:
    command = [sys.executable, "-m", "onceflow.cli.main", "chaos", "--seconds", str(seconds), "--seed", "216"]
    command += ["--setup", setup, "--keep", str(tmp_path / "run")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["verdict"] == "passed"
    assert result["setups"] == {setup: "passed"}
    assert (result["lost"], result["duplicated"], result["torn"], result["others"]) == (0, 0, 0, {})
    assert result["faults"] >= 3
    assert result["records"] > records
