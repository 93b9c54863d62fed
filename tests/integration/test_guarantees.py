"""What each guarantee keeps and what it may lose or double, when the same thing goes wrong at the same place."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import onceflow
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.settings import ClientSettings
from onceflow.planning.options import GUARANTEES
from onceflow.task.row_writer import RowWriter
from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration]

BATCH = 2


def difference(pipe: Any) -> tuple[int, int]:
    """How many records are lost, and how many are there too often."""
    got = Counter((s.key, s.value) for s in independent.read_topic(pipe.bootstrap, pipe.target, decided=True))
    sent = Counter(pipe.sent)
    assert not set(got) - set(sent)
    return (sent - got).total(), (got - sent).total()


def batch_size(pipe: Any, inject: Any, step: str, **write: Any) -> int:
    """Run until the fault in batch 2; records of that batch. Everything is one bounded batch after the other."""
    pipe.fill(2500)
    inject(step, "raise", batch=BATCH)
    with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
        pipe.run(**write)
    inject("init", "raise", flow="nobody")
    query = pipe.run(**write)
    return int(query.batches[0].records)


def crash_case(guarantee: str, step: str, engine: str) -> Any:
    """`make test` has every crash of the weaker guarantees with one of driver and tasks, `make test-long` with both.
    (Those of transactions are in test_crashes.py.)"""
    by_driver = {"write", "progress"} if guarantee == "at_least_once" else {"progress"}
    in_short = guarantee != "exactly_once" and engine == ("driver" if step in by_driver else "tasks")
    marks = [] if in_short else [pytest.mark.long]
    return pytest.param(guarantee, step, engine, marks=marks)


@pytest.mark.parametrize(
    "guarantee, step, engine",
    [crash_case(g, s, engine) for g in GUARANTEES for s in ("write", "progress") for engine in ("driver", "tasks")],
)
def test_a_crash_at_the_same_step(make_pipe: Any, inject: Any, guarantee: str, step: str, engine: str) -> None:
    """After the rows and before progress: at_least_once doubles. The other way round: at_most_once loses."""
    pipe = make_pipe()
    batch = batch_size(pipe, inject, step, guarantee=guarantee, engine=engine)
    lost, doubled = difference(pipe)
    expected = {
        ("exactly_once", "write"): (0, 0),
        ("exactly_once", "progress"): (0, 0),
        ("at_least_once", "write"): (0, batch),
        ("at_least_once", "progress"): (0, 0),
        ("at_most_once", "write"): (0, 0),
    }
    if (guarantee, step) == ("at_most_once", "progress"):
        assert lost > 0
        assert doubled == 0
    else:
        assert (lost, doubled) == expected[guarantee, step]
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow) == independent.end_offsets(
        pipe.bootstrap, pipe.source
    )


@pytest.mark.long
def test_a_task_that_dies(make_pipe: Any, inject: Any) -> None:
    """All of a task's records are acknowledged, then it raises: run again, or not."""
    found = {}
    for guarantee in GUARANTEES:
        pipe = make_pipe()
        pipe.fill(2500)
        once = pipe.tmp_path / f"fired-{guarantee}"
        inject("write", "raise", where="task", batch=BATCH, task=0, once_file=str(once))
        query = pipe.run(guarantee=guarantee, engine="tasks", partitioner="source")
        assert once.exists()
        summary = {b.batch: b for b in query.batches}[BATCH]
        assert (summary.attempts, summary.lost) == ((1, True) if guarantee == "at_most_once" else (2, False))
        found[guarantee] = difference(pipe)
        # The rows of the batches after it are in order and whole under a new producer id.
        pipe.fill(300)
        before = len(independent.read_topic(pipe.bootstrap, pipe.target))
        pipe.run(guarantee=guarantee)
        assert len(independent.read_topic(pipe.bootstrap, pipe.target)) == before + 300
    assert found["exactly_once"] == (0, 0)
    assert found["at_least_once"][0] == 0
    assert found["at_least_once"][1] > 0
    assert found["at_most_once"][1] == 0


@pytest.mark.parametrize(
    "guarantee",
    [
        pytest.param("exactly_once", marks=pytest.mark.long),  # in short, test_mutants.py has it
        "at_least_once",
        "at_most_once",
    ],
)
def test_an_attempt_of_the_direct_engine_that_fails(
    make_pipe: Any, monkeypatch: pytest.MonkeyPatch, guarantee: str
) -> None:
    """Some of its rows are acknowledged: all of them are written again, from memory, or the batch is given up."""
    encode, failed = RowWriter._encode, []

    def failing(self: Any, *arguments: Any) -> None:
        encode(self, *arguments)
        if self._order.batch == BATCH and not failed:
            self._producer.flush()
            failed.append(self)
            raise onceflow.BatchAbortedError("injected behind some rows", next_step="none: it is run again")

    monkeypatch.setattr(RowWriter, "_encode", failing)
    pipe = make_pipe()
    pipe.fill(2500)
    query = pipe.run(guarantee=guarantee, engine="driver")
    assert failed
    summary = {b.batch: b for b in query.batches}[BATCH]
    lost, doubled = difference(pipe)
    if guarantee == "at_most_once":
        assert (summary.attempts, summary.lost) == (1, True)
        assert 0 < lost < summary.max_rows
        assert doubled == 0
    else:
        assert (summary.attempts, summary.lost) == (2, False)
        assert lost == 0
        assert (doubled > 0) == (guarantee == "at_least_once")
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow) == independent.end_offsets(
        pipe.bootstrap, pipe.source
    )


@pytest.mark.long
@pytest.mark.parametrize("engine", ["tasks", "driver"])
@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_without_faults_everything_is_there_once_and_in_order(make_pipe: Any, guarantee: str, engine: str) -> None:
    """One idempotent producer for the whole run, outside any transaction."""
    pipe = make_pipe()
    pipe.fill(2500)
    query = pipe.run(guarantee=guarantee, engine=engine)
    assert len(query.batches) >= 3
    pipe.check()
    delivery = query._sink._commit._delivery
    assert delivery._producer.producer_id >= 0
    assert sum(delivery.sequences.values()) == len(pipe.sent)  # they went on from batch to batch
    cluster = Cluster(ClientSettings(pipe.bootstrap, {}))
    try:
        for (_, partition), end in independent.end_offsets(pipe.bootstrap, pipe.target).items():
            for item in read_log(cluster, pipe.target, partition, 0, end, Deadline(30, "reading the output")):
                assert isinstance(item, LogRecord), "a transaction's marker"
                assert item.producer_id == -1, "part of a transaction"
    finally:
        cluster.close()


def test_the_guarantee_can_be_changed_between_runs(make_pipe: Any) -> None:
    pipe = make_pipe()
    for guarantee in ("exactly_once", "at_least_once", "at_most_once", "exactly_once"):
        pipe.fill(700)
        pipe.run(guarantee=guarantee)
    pipe.check()


def test_a_process_step_is_never_at_most_once(make_state_pipe: Any) -> None:
    pipe = make_state_pipe()
    pipe.fill(10)
    with pytest.raises(onceflow.UnsupportedQueryError, match=r"(?s)at_most_once.*before the state.*at_least_once"):
        pipe.run(guarantee="at_most_once")
