"""The checker finds what it is there for: broken builds fail, the sound one passes the same faults."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow import FencedError, ProgressConflictError, TransactionTimeoutError
from onceflow.admin.verify.audit import Audit, Outputs
from onceflow.admin.verify.identity import identity_of
from onceflow.admin.verify.tally import RecordComparison
from onceflow.client.cluster import Cluster
from onceflow.client.settings import ClientSettings
from onceflow.protocol.names import Names
from onceflow.testing.history import ABORTED_READ, DUPLICATE, FAILED, GAP, LOST, PASSED, TORN

pytestmark = [pytest.mark.integration, pytest.mark.faults]

#: Only the driver of the direct engine sends progress ahead.
AHEAD = "progress sent ahead is wrong, killed after the next write"
# Fault, mutant, and what it must be found out by. The first is the one that needs no fault.
BROKEN = [
    ("none", "commit_before_flush", {LOST, TORN}),
    ("an attempt fails half-way", "next_attempt_continues", {LOST, DUPLICATE, TORN}),
    ("an attempt fails half-way", "retry_under_one_epoch", {LOST, DUPLICATE, TORN}),
    ("killed after progress", "progress_outside_the_transaction", {LOST, TORN}),
    ("killed after write", "progress_in_a_transaction_before", {LOST, TORN}),
    ("stopped and started again", "plan_is_off_by_one", {LOST, GAP, TORN}),
    ("started again too early in the source", "no_contiguity_check", {DUPLICATE, GAP}),
    ("failed after write, and not started again", "two_transactions", {TORN, ABORTED_READ}),
    ("killed after write", "two_transactions", {DUPLICATE, ABORTED_READ}),
    ("rows come in two equal halves", "sequences_start_anew", {LOST, TORN}),
]
# With a checkpoint, the next start reads on where Spark ended, whatever progress says. A checkpoint that does not fit
# progress is refused before the first batch.
BROKEN_WITH_CHECKPOINT = [
    (fault, mutant, {GAP} if mutant == "plan_is_off_by_one" else kinds)
    for fault, mutant, kinds in BROKEN
    if mutant != "no_contiguity_check"
]
BROKEN_DIRECT = [
    ("none", "arrived_counts_as_taken", {LOST, TORN}),
    ("none", "rest_begins_too_early", {DUPLICATE, GAP}),
    ("an attempt fails half-way", "rows_are_there_once", {LOST, TORN}),
    (AHEAD, "ahead_is_not_compared", {DUPLICATE, GAP}),
]
#: What runs the batches: the driver; tasks that read; Spark's micro-batches, with a checkpoint.
DRIVER, BY_TASKS, CHECKPOINT = "driver", "tasks", "checkpoint"
BROKEN_BY_TASKS = [
    ("none", "tasks_begin_too_early", {DUPLICATE, GAP}),
    ("tasks give back, and more records come", "driver_reads_on_where_it_stood", {LOST, TORN}),
    ("killed after progress", "progress_outside_the_transaction", {LOST, TORN}),
    ("killed after write", "progress_in_a_transaction_before", {LOST, TORN}),
    ("started again too early in the source", "no_contiguity_check", {DUPLICATE, GAP}),
]
#: The direct engine, with a query that Spark evaluates in the driver.
SQL = "sql"
BROKEN_SQL = [
    ("none", "rows_of_the_last_batch_stay", {DUPLICATE}),
    ("none", "spark_gets_the_batch_before", {DUPLICATE, LOST, TORN}),
]
# Most of what these change is the same for all. For those the driver has code of its own: in short, it is tested with
# them, and micro-batches with a few others.
OWN = {
    "next_attempt_continues",
    "retry_under_one_epoch",
    "plan_is_off_by_one",
    "no_contiguity_check",
    *(mutant for _, mutant, _ in BROKEN_DIRECT),
}
OF_CHECKPOINT = {"commit_before_flush", "progress_outside_the_transaction", "two_transactions"}
OWN_FAULTS = {"an attempt fails half-way", "started again too early in the source"}
# The hand-over to tasks and back is in none of the others.
OWN_BY_TASKS = {"driver_reads_on_where_it_stood"}
OWN_FAULTS_BY_TASKS = {"tasks give back, and more records come"}


def case(engine: str, fault: str, mutant: str, kinds: set[str]) -> Any:
    own = OWN if engine == DRIVER else OWN_BY_TASKS
    in_short = mutant in OF_CHECKPOINT if engine == CHECKPOINT else mutant in own
    marks = [] if in_short else [pytest.mark.long]
    return pytest.param(engine, fault, mutant, kinds, id=f"{mutant}-{fault}-{engine}", marks=marks)


def sound_case(engine: str, fault: str) -> Any:
    own = OWN_FAULTS if engine == DRIVER else OWN_FAULTS_BY_TASKS
    in_short = fault == "killed after write" if engine == CHECKPOINT else fault in own
    marks = [] if in_short else [pytest.mark.long]
    return pytest.param(engine, fault, id=f"{fault}-{engine}", marks=marks)


CASES = [case(CHECKPOINT, *each) for each in BROKEN_WITH_CHECKPOINT] + [
    case(DRIVER, *each) for each in BROKEN + BROKEN_DIRECT
]
CASES += [case(BY_TASKS, *each) for each in BROKEN_BY_TASKS]
CASES += [pytest.param(SQL, *each, id=f"{each[1]}-{SQL}") for each in BROKEN_SQL]
FAULTS = list(dict.fromkeys(fault for fault, _, _ in BROKEN[1:]))
SOUND_CASES = [sound_case(engine, fault) for engine in (CHECKPOINT, DRIVER) for fault in FAULTS]
SOUND_CASES += [sound_case(BY_TASKS, fault) for fault, _, _ in BROKEN_BY_TASKS[1:]]
OF_AHEAD = (AHEAD, "killed after the offsets alone")
SOUND_CASES += [pytest.param(DRIVER, fault, id=f"{fault}-{DRIVER}") for fault in OF_AHEAD]
SOUND_CASES += [pytest.param(SQL, "an attempt fails half-way", id=f"an attempt fails half-way-{SQL}")]


@pytest.fixture(scope="module")
def mutants() -> Any:
    """The module ``mutants.py`` beside this file."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return importlib.import_module("mutants")
    finally:
        sys.path.pop(0)


@pytest.fixture
def audits() -> list[Any]:
    """What audits by an outsider have found after each run."""
    return []


@pytest.fixture
def run(mutants: Any, make_pipe: Callable[..., Any], audits: list[Any]) -> Callable[[str, str, str], Any]:
    """``run("killed after write", "two_transactions", DRIVER)``: the verdict, and how the runs ended."""

    def run_(fault: str, mutant: str, engine: str) -> Any:
        pipe = make_pipe(partitions=1, target_partitions=2)
        found = mutants.run(pipe, getattr(mutants, mutant), mutants.FAULTS[fault], engine)
        audits.append(audit(pipe))
        return found

    return run_


def audit(pipe: Any) -> Any:
    """What `onceflow verify FLOW --id record --partitioner any` finds: it knows nothing of the runs."""
    settings = ClientSettings(pipe.bootstrap, {})
    outputs = Outputs(identity_of("record"), (pipe.target,), by_key=False)
    with contextlib.closing(Cluster(settings)) as cluster, RecordComparison(pipe.tmp_path) as tally:
        return Audit(cluster, Names(pipe.flow), outputs, limit=5, tell=lambda text, done, total: None).run(tally)


@pytest.mark.parametrize("engine, fault, mutant, kinds", CASES)
def test_a_broken_build_is_found_out(
    run: Callable[[str, str, str], Any],
    mutants: Any,
    audits: list[Any],
    engine: str,
    fault: str,
    mutant: str,
    kinds: set[str],
) -> None:
    verdict, _ = run(fault, mutant, engine)
    assert audits[0].counts, "an audit without the history finds it, too"
    assert verdict.verdict == FAILED, verdict
    assert verdict.kinds == kinds, verdict
    if mutant == "commit_before_flush":  # Kafka refuses the late rows: they are of an epoch that is over
        assert mutants.refused
        assert all(isinstance(error, FencedError) for error in mutants.refused)


@pytest.mark.parametrize("engine, fault", SOUND_CASES)
def test_the_sound_build_passes(
    run: Callable[[str, str, str], Any], audits: list[Any], engine: str, fault: str
) -> None:
    verdict, ends = run(fault, "sound", engine)
    assert audits[0].counts == {}, audits[0].examples
    assert verdict.verdict == PASSED, verdict
    stopped = [error for error in ends if error is not None]
    if fault == "started again too early in the source":
        # A checkpoint stays as it is: each start is refused.
        assert [type(error) for error in stopped] == [ProgressConflictError] * (3 if engine == CHECKPOINT else 1)
    else:
        assert len(stopped) == ("after" in fault)
        assert all("injected at" in str(error) for error in stopped)
    if fault in ("an attempt fails half-way", "failed after write, and not started again"):
        assert verdict.counts["fail"] == 1
    if fault.startswith("killed"):
        assert verdict.counts["info"] == 1


@pytest.mark.parametrize("engine", [CHECKPOINT, pytest.param(DRIVER, marks=pytest.mark.long)])
def test_kafka_refuses_an_epoch_that_was_aborted(run: Callable[[str, str, str], Any], engine: str) -> None:
    """Nothing of it becomes visible: an abort moves the epoch on the broker (transaction version 2), so what is
    written under the old one is refused. As nobody else owns the flow, it takes that for a timeout, again and again."""
    verdict, ends = run("an attempt fails half-way", "abort_keeps_the_epoch", engine)
    assert isinstance(ends[0], TransactionTimeoutError)
    assert ends[1:] == [None]
    assert verdict.verdict == PASSED, verdict


@pytest.mark.long
def test_kafka_refuses_sequences_that_start_anew(run: Callable[[str, str, str], Any]) -> None:
    """Unless the halves of a batch have as many rows for a partition: then it takes the second for the first, above."""
    verdict, ends = run("rows come in two halves, by key", "sequences_start_anew", CHECKPOINT)
    assert ends == [None]
    assert verdict.counts["fail"] == 2, "the batches with two halves are aborted, and run again by tasks"
    assert verdict.verdict == PASSED, verdict
