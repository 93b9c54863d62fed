"""`onceflow fork` on a real broker, while the copied flow writes. Copies are compared with a fold of the source."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow import hooks
from onceflow.admin.versions.table_copy import TableCopy
from onceflow.client.deadline import Deadline
from onceflow.driver.record.progress_log import partition_of
from onceflow.testing import faults, independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from moving_flows import Call, feeding, progress_of, refused, told
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def under_load(pipe: Any) -> Iterator[Any]:
    """The flow runs, and its source gets more records all the time. At the end it has processed them all."""
    query = pipe.start()
    try:
        with feeding(pipe):
            yield query
    finally:
        try:
            query.processAllAvailable()
        finally:
            query.stop()


def copy_of(pipe: Any, name: str, target: str) -> Any:
    """What runs a copy that was made with the default names."""
    flow = f"{pipe.flow}-{name}"
    return replace(pipe, flow=flow, table=f"{flow}-{pipe.table}", target=target, sent=pipe.sent)


def numbers(offsets: Mapping[str, int]) -> dict[int, int]:
    return {int(partition): offset for partition, offset in offsets.items()}


def sent_before(pipe: Any, offsets: Mapping[int, int]) -> list[tuple[bytes | None, bytes | None]]:
    return [
        (record.key, record.value)
        for record in independent.read_topic(pipe.bootstrap, pipe.source)
        if record.offset < offsets[record.partition]
    ]


def check_copy(pipe: Any, copy: Any) -> dict[int, int]:
    """The copy's tables are a fold of the source up to its position, which is in its group, too. Returns the
    position."""
    progress = progress_of(copy)
    assert progress is not None
    at = numbers(progress["offsets"][pipe.source])
    _, sums, digits = pipe.ledger.expected(sent_before(pipe, at))
    assert copy.table_rows() == sums
    entries = {
        record.key: record.value
        for record in independent.read_topic(pipe.bootstrap, f"{copy.table}-internal", decided=True)
    }
    assert len([value for value in entries.values() if value is not None]) == len(digits)
    assert independent.committed_offsets(pipe.bootstrap, copy.flow) == {(pipe.source, p): n for p, n in at.items()}
    assert numbers(progress["forked"]["offsets"][pipe.source]) == at
    return at


@pytest.mark.long
def test_under_load(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """The flow goes on; the copy, run to the end, has the state of the flow, and writes what follows its position."""
    pipe = make_state_pipe(partitions=3)
    copy = copy_of(pipe, "next", make_topic("out", 2))
    pipe.fill(500)
    fork = ("fork", pipe.flow, copy.flow)
    with under_load(pipe) as query:
        wait_until(lambda: len(query.batches) > 3, 60, "batches")
        shown = call(*fork, "--dry-run").stdout
        assert f"{pipe.table}  {copy.table}" in shown
        assert progress_of(copy) is None
        done = told(call(*fork, "--yes", "--json"))
        batches = len(query.batches)
        wait_until(lambda: len(query.batches) > batches, 60, "the flow goes on")
    pipe.check()
    assert (done["tables"], done["already"]) == ({pipe.table: copy.table}, False)
    at = check_copy(pipe, copy)
    before, after = Counter(), Counter()  # type: ignore[var-annotated]
    forked = (progress_of(copy) or {})["forked"]
    ends = numbers(forked["outputs"][pipe.target])
    for record in independent.read_topic(pipe.bootstrap, pipe.target, decided=True):
        (before if record.offset < ends[record.partition] else after)[json.loads(record.value or b"")["n"]] += 1
    assert before == {json.loads(value or b"")["n"]: 1 for _, value in sent_before(pipe, at)}
    # A second time: it is done already, until it has run.
    assert told(call(*fork, "--yes", "--json"))["already"]
    copy.run()
    refused(call(*fork, "--yes"), onceflow.ProgressConflictError, "exists", "batch 1")
    outputs, sums, digits = pipe.ledger.expected(pipe.sent)
    assert copy.table_rows() == sums
    assert Counter(value["n"] for value in copy.outputs()) == after
    assert all(value == outputs[value["n"]] for value in copy.outputs())
    maps = {
        (key, entry.decode()): json.loads(value)
        for key, entry, value in onceflow.Table.of_flow(copy.folder).map_entries("digits")
    }
    assert maps == digits
    assert (progress_of(copy) or {})["forked"] == forked
    pipe.run()
    pipe.check()


@pytest.mark.long
def test_what_is_refused(make_pipe: Any, make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(50)
    pipe.run()
    copy = copy_of(pipe, "next", pipe.target)
    fork = ("fork", pipe.flow, copy.flow, "--yes")
    refused(call("fork", "nowhere", copy.flow), onceflow.ProgressConflictError, "no progress")
    refused(call("fork", pipe.flow, pipe.flow), onceflow.OptionError, "copy of itself")
    refused(call("fork", pipe.flow, "a b"), onceflow.OptionError, "cannot be the name of a flow")
    refused(call(*fork, "--table", "sums=x"), onceflow.OptionError, "no table 'sums'", pipe.table)
    assert "not of the form" in str(call(*fork, "--table", "sums").exception)
    answer = call("fork", pipe.flow, copy.flow, input="n\n")
    assert type(answer.exception).__name__ == "Abort"
    assert f"{pipe.table}  {copy.table}" in answer.stderr
    # Topics that are there already.
    other = make_topic("copy", 3, cleanup_policy="compact")
    refused(call(*fork, "--table", f"{pipe.table}={other}"), onceflow.ProgressConflictError, "3 partitions")
    other = make_topic("copy", 2, cleanup_policy="compact")
    independent.fill(pipe.bootstrap, other, [(b"k", b"v")])
    refused(call(*fork, "--table", f"{pipe.table}={other}"), onceflow.ProgressConflictError, "holds rows already")
    assert progress_of(copy) is None
    # A flow without state.
    plain = make_pipe(partitions=2)
    plain.fill(40)
    plain.run()
    done = told(call("fork", plain.flow, f"{plain.flow}-next", "--yes", "--json"))
    assert (done["tables"], done["records_copied"]) == ({}, 0)
    after = replace(plain, flow=f"{plain.flow}-next", target=make_topic("out", 2))
    plain.fill(10)
    after.run()
    seen = independent.read_topic(plain.bootstrap, after.target, decided=True)
    assert sorted(record.value for record in seen) == sorted(value for _, value in plain.sent[40:])


@pytest.mark.long
def test_a_program_with_another_table(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """It is refused before it reads anything, unless it says that the table may begin empty."""
    pipe = make_state_pipe(partitions=1)
    pipe.fill(30)
    pipe.run()
    copy = copy_of(pipe, "next", make_topic("out", 1))
    told(call("fork", pipe.flow, copy.flow, "--yes", "--json"))
    before = progress_of(copy)
    pipe.fill(10)
    wrong = replace(copy, table=f"{copy.table}s", sent=pipe.sent)
    with pytest.raises(onceflow.ProgressConflictError, match=f"does not use table {copy.table}:"):
        wrong.run()
    after = progress_of(copy)
    assert (before or {})["tables"] == (after or {})["tables"]
    assert (before or {})["changelogs"] == (after or {})["changelogs"]
    assert (after or {})["batch_id"] == 0
    assert "its program is untried" in call("promote", copy.flow, "--replaces", pipe.flow, "--dry-run").stdout
    wrong.run(process={"adopt_existing": True})
    shown = call("promote", copy.flow, "--replaces", pipe.flow, "--dry-run").stdout
    assert f"have only what {copy.flow} has put there: {wrong.table}." in shown
    assert f"{copy.flow} is ahead: {pipe.flow} has at most 10 records to go" in shown
    assert len(copy.outputs()) == 10


@pytest.mark.long
def test_killed_at_each_step(make_state_pipe: Any, call: Call) -> None:
    """Before `end` the copy does not exist, and after it, it does. The same command completes it, also if the killed
    one has left a transaction open in the partition with the progress of the flow."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(200)
    pipe.run()
    for step in ("init", "write", "progress", "end"):
        names = (f"{step}-{n}" for n in itertools.count())
        name = next(name for name in names if partition_of(f"{pipe.flow}-{name}") == partition_of(pipe.flow))
        copy = copy_of(pipe, name, pipe.target)
        fork = ("fork", pipe.flow, copy.flow, "--yes", "--json")
        environment = {**os.environ, hooks.VARIABLE: faults.fault(step, "kill", flow=copy.flow)}
        line = [sys.executable, "-m", "onceflow.cli.main", *fork]
        killed = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert killed.returncode == -9, killed.stderr
        done = told(call(*fork))
        assert done["already"] == (step == "end"), step
        assert check_copy(pipe, copy) == {p: n for (_, p), n in ends(pipe).items()}
    pipe.check(local=False)


def ends(pipe: Any) -> dict[tuple[str, int], int]:
    return independent.end_offsets(pipe.bootstrap, pipe.source)


# ---- compaction ------------------------------------------------------------------------------------------


def compacted_pipe(make_state_pipe: Any) -> Any:
    """A flow whose table is compacted all the time."""
    pipe = make_state_pipe(partitions=1)
    eager = {"cleanup.policy": "compact", "segment.ms": "50", "min.cleanable.dirty.ratio": "0.01"}
    for topic in (pipe.table, f"{pipe.table}-internal"):
        create_topic(pipe.bootstrap, topic, 1, eager)
    pipe.fill(100)
    pipe.run()
    return pipe


def let_compaction_happen(pipe: Any) -> None:
    """Replace rows of the table, until compaction has removed the records of keys that still have a row."""
    before = independent.read_topic(pipe.bootstrap, pipe.table, decided=True)
    end = before[-1].offset

    def is_removed() -> bool:
        pipe.fill(40)
        wait_until(lambda: ends(pipe) == independent.committed_offsets(pipe.bootstrap, pipe.flow), 60, "a batch")
        now = independent.read_topic(pipe.bootstrap, pipe.table, decided=True)
        return {r.key for r in before} > {r.key for r in now if r.offset <= end}

    wait_until(is_removed, 60, "compaction", poll_s=0.1)


def before_the_copy(self: Any, writer: Any, before: Any, deadline: Deadline) -> Any:
    """Broken: the ends are those of a progress record that was read before the rows are."""
    self._copy(writer, before.changelogs, deadline)
    return before


@pytest.mark.parametrize("broken", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.usefixtures("quick_cleaner")
def test_compaction_between_progress_and_rows(
    make_state_pipe: Any, call: Call, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The records of keys vanish after progress was read and before the rows are."""
    pipe = compacted_pipe(make_state_pipe)
    copy = copy_of(pipe, "next", pipe.target)
    original = before_the_copy if broken else TableCopy.run

    def run(self: Any, writer: Any, before: Any, deadline: Deadline) -> Any:
        let_compaction_happen(pipe)
        return original(self, writer, before, deadline)

    monkeypatch.setattr(TableCopy, "run", run)
    query = pipe.start()
    try:
        told(call("fork", pipe.flow, copy.flow, "--yes", "--json"))
    finally:
        query.stop()
    if broken:
        with pytest.raises(AssertionError):
            check_copy(pipe, copy)
    else:
        check_copy(pipe, copy)


@pytest.mark.long
@pytest.mark.usefixtures("quick_cleaner")
def test_compaction_under_load(make_state_pipe: Any, call: Call) -> None:
    """Copy after copy, while the table is written and compacted all the time."""
    pipe = compacted_pipe(make_state_pipe)
    copies = [copy_of(pipe, f"copy-{n}", pipe.target) for n in range(6)]
    with under_load(pipe):
        for copy in copies:
            told(call("fork", pipe.flow, copy.flow, "--yes", "--json"))
    at = [check_copy(pipe, copy)[0] for copy in copies]
    assert at == sorted(set(at))
    pipe.check()
