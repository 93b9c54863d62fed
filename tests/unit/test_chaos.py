"""The parts of a chaos run that need no cluster: what is compared, counted and concluded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest
from click.testing import CliRunner

from onceflow.chaos.fault_kinds import FAULT_KINDS
from onceflow.chaos.run import Injected, Report
from onceflow.chaos.test_bed import SETUPS
from onceflow.chaos.verify import Findings
from onceflow.cli.chaos import chaos
from onceflow.errors import OptionError
from onceflow.testing import history
from onceflow.testing.processes import descendants
from onceflow.testing.waiting import wait_until


def test_equal_multisets_are_no_anomaly() -> None:
    findings = Findings(records=2)
    findings.compare("copies", Counter("aab"), Counter("aab"))
    assert findings.verdict == "passed"


@pytest.mark.parametrize(
    "found, lost, duplicated, others",
    [("aa", 1, 0, {}), ("aabb", 0, 1, {}), ("aabx", 0, 0, {"wrong value": 1}), ("abb", 1, 1, {})],
)
def test_unequal_multisets(found: str, lost: int, duplicated: int, others: dict[str, int]) -> None:
    findings = Findings(records=3)
    findings.compare("copies", Counter(found), Counter("aab"))
    assert (findings.lost, findings.duplicated, dict(findings.others)) == (lost, duplicated, others)
    assert findings.verdict == "failed"


@pytest.mark.parametrize("kind", [history.LOST, history.DUPLICATE, history.TORN, history.STATE, "else"])
def test_every_anomaly_fails(kind: str) -> None:
    findings = Findings(records=1)
    findings.see(kind, "for example")
    assert findings.verdict == "failed"


def test_nothing_seen_is_no_pass() -> None:
    assert Findings().verdict == "unknown"
    assert Findings(records=1, unknown=["no history"]).verdict == "unknown"
    assert Report(1).verdict == "unknown"


def test_the_worst_setup_decides() -> None:
    report = Report(1, findings={"a": Findings(records=1), "b": Findings()})
    assert report.verdict == "unknown"
    report.findings["c"] = Findings(records=1, lost=1)
    assert report.verdict == "failed"
    assert report.as_json()["lost"] == 1


def test_recovery_times() -> None:
    report = Report(1)
    for back in (1.0, 3.0, 8.0, None):
        report.injected.append(Injected("one-node", "driver killed", "SIGKILL", 0.0, back))
    assert report.recovery() == {"driver killed": {"median_s": 3.0, "worst_s": 8.0}}
    assert report.as_json()["kinds"] == {"driver killed": 4}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=str)
def test_every_setup_can_be_broken_in_many_ways(setup: object) -> None:
    possible = [kind for kind, fault in FAULT_KINDS.items() if fault.possible(setup)]  # type: ignore[arg-type]
    assert len(possible) >= 10
    assert random.Random(1).choices(possible, [FAULT_KINDS[kind].weight for kind in possible])


def test_every_kind_is_possible_somewhere() -> None:
    for kind, fault in FAULT_KINDS.items():
        assert any(fault.possible(setup) for setup in SETUPS.values()), kind


def test_command_line() -> None:
    listed = CliRunner().invoke(chaos, ["--list"])
    assert "three-nodes" in listed.output
    assert "rolling restart" in listed.output
    wrong = CliRunner().invoke(chaos, ["--setup", "moon"])
    assert isinstance(wrong.exception, OptionError)


def test_descendants() -> None:
    def both() -> dict[int, str] | None:
        below = descendants(os.getpid())
        return below if sum("input()" in line for line in below.values()) >= 2 else None

    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    try:
        below = wait_until(both, 20, "both processes run")
        assert process.pid in below
        assert process.pid not in descendants(process.pid)
        assert len(descendants(process.pid)) == 1
    finally:
        process.communicate(b"\n")
