"""`onceflow demo deposits` as people run it: two flows, each killed once, everything accounted for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.integration
@pytest.mark.faults
def test_deposits_survive_kills() -> None:
    command = [sys.executable, "-m", "onceflow.cli.main", "demo", "deposits", "--records", "20000", "--kills", "1"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads(answer.stdout.splitlines()[-1])
    assert result["demo"] == "deposits"
    assert result["in"] == 20_000
    assert result["validated"] + result["rejected"] == 20_000
    assert result["rejected"] > 0
    assert result["settled"] == result["validated"]
    assert (result["lost"], result["duplicated"], result["wrong"]) == (0, 0, 0)
    assert result["kills"] == 2
    assert result["verdict"] == "passed"
    assert "seed" in answer.stderr
    assert "SIGKILL after step" in answer.stderr
