"""`onceflow demo` as people run it: every flow killed, everything accounted for."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onceflow.client.deadline import Deadline
from onceflow.demos.balances import Balances
from onceflow.demos.chain import Choices
from onceflow.demos.display import Display
from onceflow.testing import independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.mark.long
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


@pytest.mark.long
def test_guarantees_differ_as_promised(onceflow_broker: str) -> None:
    """The same kills at all three: at_most_once has lost, at_least_once has doubled, exactly_once neither."""
    command = [sys.executable, "-m", "onceflow.cli.main", "demo", "guarantees", "--records", "3000"]
    command += ["--bootstrap-servers", onceflow_broker]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads(answer.stdout.splitlines()[-1])
    assert (result["demo"], result["in"], result["verdict"]) == ("guarantees", 3000, "passed")
    found = result["guarantees"]
    assert list(found) == ["at_most_once", "at_least_once", "exactly_once"]
    # What one kill costs is the batch that it has hit: at most 200 of the 3,000 records, and hardly fewer.
    assert 150 < found["at_most_once"]["lost"] <= 204
    assert found["at_most_once"]["duplicated"] == 0
    assert 150 < found["at_least_once"]["duplicated"] <= 204
    assert found["at_least_once"]["lost"] == 0
    assert (found["exactly_once"]["lost"], found["exactly_once"]["duplicated"]) == (0, 0)
    for counts in found.values():
        assert counts["out"] == 3000 - counts["lost"] + counts["duplicated"]
        assert counts["kills"] == 2
        assert counts["rows_per_s"] > 0
    for name in found:
        for step in ("write", "progress"):
            assert re.search(rf"copy-{name}-\w+: SIGKILL after step {step} \(in batch \d+\)", answer.stderr)


@pytest.mark.long
def test_balances_survive_kills_and_lost_state(
    onceflow_broker: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    chain = Balances(Choices(5_000, seed, 1), onceflow_broker, tmp_path, Deadline(160, "the demo balances"))
    result = chain.run()
    assert result["verdict"] == "passed", (seed, result, capfd.readouterr())
    assert result["in"] == 5_000
    assert result["statements"] == result["settled"] == result["validated"]
    assert result["validated"] + result["rejected"] == 5_000
    assert (result["lost"], result["duplicated"], result["wrong"], result["wrong_balances"]) == (0, 0, 0, 0)
    assert result["accounts"] > 1000
    assert result["kills"] == 3
    assert result["state_deleted"] == 1
    assert result["restores"] >= 1
    told = capfd.readouterr().err
    assert f"seed {seed}" in told
    assert "local state deleted" in told

    # One cent more on one account, by hand: the audit must not pass any more.
    in_topic, in_store = chain.audit_balances()
    assert in_topic.holds
    assert in_store.holds
    rows = independent.read_topic(onceflow_broker, chain.table, decided=True)
    last = {row.key: json.loads(row.value or b"") for row in rows}
    key = sorted(key for key in last if key is not None)[17]
    wrong = {"balance": last[key]["balance"] + 1, "count": last[key]["count"]}
    independent.fill(onceflow_broker, chain.table, [(key, json.dumps(wrong).encode())])
    with Display({}) as display:
        audit = chain.audit(display)
    result = chain.report(audit)
    assert result["verdict"] == "failed"
    assert result["wrong_balances"] > 0
    assert any(key.decode() in problem and str(wrong["balance"]) in problem for problem in audit.problems)
