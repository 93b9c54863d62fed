"""The parts of a chaos run that need no cluster: what is compared, counted and concluded."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from onceflow import DeltaSink, ExternalSink
from onceflow.errors import OptionError
from onceflow.external.sink import BatchAttempt
from onceflow.planning.engine import AUTO, DRIVER, TASKS
from onceflow.testing import history
from onceflow.testing.independent import Seen
from onceflow.testing.processes import descendants
from onceflow.testing.waiting import wait_until
from onceflow_workshop.chaos import external
from onceflow_workshop.chaos.driver_process import Engines
from onceflow_workshop.chaos.fault_kinds import FAULT_KINDS
from onceflow_workshop.chaos.flows import COPY, JOINER, LEDGER, SORTER, Choices, Names
from onceflow_workshop.chaos.replacing import replaceable
from onceflow_workshop.chaos.run import Injected, Report
from onceflow_workshop.chaos.test_bed import SETUPS, Setup
from onceflow_workshop.chaos.topic_changes import growing
from onceflow_workshop.chaos.verify import Findings, check_copy, check_rows, check_unlogged, verify_external
from onceflow_workshop.cli.chaos import chaos


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


def test_switches_of_engines() -> None:
    """A flow has switched when tasks write its next batch instead of the driver, or the other way round."""
    engines = Engines()
    for flow, batches in (("a", [False, False]), ("b", [True]), ("a", []), ("a", [False, True]), ("a", [False])):
        engines.starts[AUTO] += 1
        for by_tasks in batches:
            engines.committed(flow, by_tasks=by_tasks)
    assert engines.as_json() == {"starts": {AUTO: 5}, "batches": {DRIVER: 4, TASKS: 2}, "switches": 2}
    report = Report(1)
    report.engines.add(engines)
    report.engines.add(engines)
    assert report.as_json()["engines"]["switches"] == 4


def test_engines_of_flows() -> None:
    """A fault that needs tasks has precedence."""
    assert Choices(engines={COPY: DRIVER}).engine(COPY) == DRIVER
    assert Choices(engines={COPY: DRIVER}, tasks=True).engine(COPY) == TASKS
    assert Choices().engine(COPY) == AUTO


@pytest.mark.parametrize("setup", SETUPS.values(), ids=str)
def test_every_setup_can_be_broken_in_many_ways(setup: object) -> None:
    possible = [kind for kind, fault in FAULT_KINDS.items() if fault.possible(setup)]  # type: ignore[arg-type]
    assert len(possible) >= 10
    assert random.Random(1).choices(possible, [FAULT_KINDS[kind].weight for kind in possible])


def test_every_kind_is_possible_somewhere() -> None:
    for kind, fault in FAULT_KINDS.items():
        assert any(fault.possible(setup) for setup in SETUPS.values()), kind


@pytest.mark.parametrize(
    "setup, kinds",
    [
        (Setup("tables of its own", flows=(COPY, LEDGER, SORTER)), [COPY, LEDGER, SORTER]),
        (Setup("a table that a flow joins", flows=(LEDGER, JOINER)), [JOINER]),
        (Setup("a table that servers read", flows=(LEDGER,), servers=1), []),
        (Setup("lost markers", nodes=3, copies=1), []),
        (SETUPS["checkpoint"], [COPY]),
        (SETUPS["no-changelog"], [COPY]),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_flows_that_a_copy_may_replace(setup: Setup, kinds: list[str]) -> None:
    assert replaceable(setup) == kinds
    assert FAULT_KINDS["flow replaced"].possible(setup) is bool(kinds)


@pytest.mark.parametrize(
    "setup, kinds",
    [
        (Setup("tables of its own", flows=(COPY, LEDGER, SORTER)), [LEDGER, SORTER]),
        (Setup("a table that a flow joins", flows=(LEDGER, JOINER, SORTER)), [SORTER]),
        (Setup("a table that servers read", flows=(LEDGER,), servers=1), []),
        (Setup("lost markers", nodes=3, copies=1, flows=(LEDGER, SORTER)), []),
        (SETUPS["checkpoint"], []),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_tables_that_may_grow(setup: Setup, kinds: list[str]) -> None:
    assert growing(setup) == kinds
    assert FAULT_KINDS["table repartitioned"].possible(setup) is bool(kinds)


@pytest.mark.parametrize(
    "written, problems",
    [
        ([(0, b"a", b"1"), (0, b"a", b"2"), (1, b"b", b"3")], 0),
        ([(0, b"a", b"1"), (0, b"a", None), (1, b"a", b"2"), (1, b"b", b"3")], 0),  # it has moved
        ([(1, b"a", b"2"), (1, b"b", b"3"), (2, b"a", None)], 0),  # to a partition that is read before
        ([(0, b"a", b"1"), (1, b"a", b"2"), (1, b"b", b"3")], 1),
    ],
)
def test_rows_of_a_table_that_has_grown(written: list[tuple[int, bytes, bytes | None]], problems: int) -> None:
    found = Findings(records=1)
    records = [Seen("sums", partition, at, key, value, (), 0) for at, (partition, key, value) in enumerate(written)]
    assert check_rows("sums", records, found) == {b"a": 2, b"b": 3}
    assert dict(found.others) == ({history.STATE: problems} if problems else {})


def test_names_of_a_copy(tmp_path: Path) -> None:
    """It shares nothing but the source with its flow. What replaces the flow has all of the flow's but the table."""
    names = Names("chaos", tmp_path)
    for kind in (COPY, LEDGER, SORTER, JOINER):
        before, copy = names.outputs([kind]), names.of_copy(kind)
        own = {copy.flow(kind), *copy.outputs([kind]), str(copy.state), *filter(None, [copy.own_table(kind)])}
        assert not own & {names.flow(kind), *before, str(names.state), *filter(None, [names.own_table(kind)])}
        assert (copy.source, copy.history, copy.clock) == (names.source, names.history, names.clock)
        names.versions[kind] = copy.versions[kind]
        assert names.own_table(kind) == copy.own_table(kind)
        assert (names.outputs([kind]), names.flow(kind)) == (before, f"chaos-{kind}")
        assert names.of_copy(kind).flow(kind) not in own


@pytest.mark.parametrize(
    "written, lost, duplicated, others",
    [
        ("", 0, 0, {}),
        ("345", 0, 0, {}),
        ("0123456", 0, 0, {}),
        ("35", 1, 0, {}),
        ("3455", 0, 1, {}),
        ("3349", 3, 1, {"wrong value": 1}),
    ],
)
def test_outputs_of_a_copy(written: str, lost: int, duplicated: int, others: dict[str, int]) -> None:
    """It begins and ends anywhere, and has everything in between once."""
    found = Findings(records=7)
    source = [(key, n) for n in range(8) for key in (b"a", b"b")]
    check_copy("chaos-copy-v1", [(b"a", int(n)) for n in written], source, found)
    assert (found.lost, found.duplicated, dict(found.others)) == (lost, duplicated, others)


SqliteSink: Any = external.sqlite_sink()


class Doubles(SqliteSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        super().commit(attempt, [*receipts, *receipts], progress)


class ProgressFirst(SqliteSink):
    """It is killed before the rows come."""

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        super().commit(attempt, [], progress)


class RowsFirst(DeltaSink):
    """It is killed before the progress row comes."""

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        super().commit(attempt, receipts, json.dumps({"offsets": {"in": {"0": 0}}}))


class ForgetsATask(DeltaSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        super().commit(attempt, receipts[1:], progress)


def written_by(sink: ExternalSink, end: int = 6, start: int = 0) -> list[Seen]:
    """A batch of two tasks. Returns the records of the source."""
    records = [Seen("in", 0, n, b"key", b'{"n": %d}' % n, (), 0) for n in range(start, end)]
    rows = [
        {"partition": 0, "offset": each.offset, "key": "key", "value": str(each.value, "ascii")} for each in records
    ]
    sink.check(pa.RecordBatch.from_pylist(rows).schema)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    receipts = [sink.write(attempt, str(n), iter([pa.RecordBatch.from_pylist(half)])) for n, half in enumerate(halves)]
    sink.commit(attempt, receipts, json.dumps({"offsets": {"in": {"0": end}}}))
    return records


@pytest.mark.parametrize(
    "kind, mutant, verdict",
    [
        (external.SQLITE, None, (0, 0, 0)),
        (external.DELTA, None, (0, 0, 0)),
        (external.SQLITE, Doubles, (0, 6, 1)),
        (external.SQLITE, ProgressFirst, (6, 0, 1)),
        (external.DELTA, RowsFirst, (0, 0, 1)),
        (external.DELTA, ForgetsATask, (3, 0, 1)),
    ],
)
def test_broken_sinks_are_found_out(tmp_path: Path, kind: str, mutant: Any, verdict: tuple[int, int, int]) -> None:
    target = external.Target(kind, tmp_path)
    target.create()
    sink = target.sink()
    if mutant is not None:
        sink.__class__ = mutant
    source = written_by(sink)
    found = Findings(records=6)
    verify_external(kind, target.state(), source, found)
    assert (found.lost, found.duplicated, found.torn) == verdict
    assert found.verdict == ("passed" if mutant is None else "failed")


@pytest.mark.parametrize(
    "accounts, deletions, verdict",
    [
        ([(1, 0), (2, 1), (3, 3)], 0, (0, 0, {})),
        ([(1, 0), (1, 1), (2, 3)], 1, (0, 0, {})),
        ([(1, 0), (1, 1), (2, 3)], 0, (0, 0, {history.STATE: 1})),
        ([(1, 0), (1, 1), (1, 2)], 1, (0, 0, {history.STATE: 1})),
        ([(1, 0), (3, 2), (4, 4)], 1, (0, 0, {history.STATE: 1})),
        ([(1, 0), (2, 1)], 1, (1, 0, {"order": 1})),
    ],
)
def test_accounts_without_a_changelog(
    accounts: list[tuple[int, int]], deletions: int, verdict: tuple[int, int, dict[str, int]]
) -> None:
    source = [Seen("in", 0, n, b"key", b'{"n": %d}' % n, (), 0) for n in range(3)]
    outputs = [
        Seen("out", 0, n, b"key", json.dumps({"n": n, "count": count, "sum": total}).encode(), (), 0)
        for n, (count, total) in enumerate(accounts)
    ]
    found = Findings(records=3)
    check_unlogged(source, outputs, deletions, found)
    assert (found.lost, found.duplicated, dict(found.others)) == verdict


def test_command_line() -> None:
    listed = CliRunner().invoke(chaos, ["--list"])
    assert "three-nodes" in listed.output
    assert "rolling restart" in listed.output
    assert "unlogged" in listed.output
    assert "engines: auto, driver, tasks" in listed.output
    for wrong in (["--setup", "moon"], ["--flow", "moon"], ["--engine", "moon"], ["--flow", "joiner"]):
        assert isinstance(CliRunner().invoke(chaos, wrong).exception, OptionError)


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
