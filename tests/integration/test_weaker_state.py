"""State that is not exactly-once.

``changelog=False``: outputs stay exactly-once, state may be lost, and nobody has to guess whether it was. With
``at_least_once`` records may be processed twice, and nothing is lost.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import onceflow
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.planning import placement
from onceflow.state.stores.lmdb_environment import forget
from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration]

LOCAL = {"changelog": False}


def topics(pipe: Any) -> set[str]:
    cluster = Cluster(ClientSettings(pipe.bootstrap, {}))
    try:
        return set(cluster.topics(None, Deadline(30, "listing topics")))
    finally:
        cluster.close()


@pytest.mark.long
def test_state_without_a_changelog(
    make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the driver, with operators behind it, by tasks that read; then a copy is lost, and a switch is refused."""
    monkeypatch.setattr(placement, "TASK_ROWS", 400)
    pipe = make_state_pipe(partitions=3)
    pipe.fill(1200)
    pipe.run(process=LOCAL)
    pipe.fill(700)
    pipe.run(process=LOCAL, inside=True, engine="tasks")
    pipe.fill(400)
    query = pipe.run(process=LOCAL, engine="tasks")
    assert {batch.path for batch in query.batches} == {"3 reading tasks"}
    assert sum(batch.state_lost for batch in query.batches) == 0
    pipe.check(topic=False)
    assert not {pipe.table, f"{pipe.table}-internal"} & topics(pipe)
    assert pipe.table not in query.position

    shutil.rmtree(pipe.folder / "1")
    forget(pipe.folder / "1")
    pipe.fill(600)
    query = pipe.run(process=LOCAL)
    assert sum(batch.state_lost for batch in query.batches) == 1
    assert f"the state of table {pipe.table}-1 is lost, and the partition begins empty" in caplog.text
    wanted, sums, _ = pipe.ledger.expected(pipe.sent)
    seen = pipe.outputs()
    assert Counter(value["n"] for value in seen) == Counter(wanted.keys())  # exactly once, whatever state they show
    stored = {key: json.loads(value) for key, value in onceflow.Table.of_flow(pipe.folder).range()}
    begun_anew = {key for key in stored if stored[key] != sums[key]}
    assert 0 < len(begun_anew) < len(stored)
    assert all(stored[key]["count"] <= sums[key]["count"] for key in stored)

    with pytest.raises(onceflow.ProgressConflictError, match=r"(?s)has no changelog.*changelog=False"):
        pipe.run()
    with pytest.raises(onceflow.UnknownTopicError, match=r"changelog=False has no topics.*Table\.of_flow"):
        onceflow.Table(pipe.table, bootstrap_servers=pipe.bootstrap).start()


def test_a_batch_that_changes_only_local_state_counts(make_state_pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Timers that fire without an output write nothing to Kafka, yet the batch must be committed."""
    caplog.set_level(logging.WARNING)
    pipe = make_state_pipe(partitions=2)
    pipe.fill(300)
    quiet = {"processor": pipe.ledger.Quiet(), **LOCAL}
    for _ in range(2):
        pipe.run(process=quiet, once=True)
    stored = {key: json.loads(value) for key, value in onceflow.Table.of_flow(pipe.folder).range()}
    assert sum(each["records"] for each in stored.values()) == len(pipe.sent)
    assert {each["rung"] for each in stored.values()} == {1}
    assert pipe.outputs() == []
    assert "lost" not in caplog.text


# ---- at least once -----------------------------------------------------------------------------------

AT_LEAST_ONCE = {"guarantee": "at_least_once"}


def removed(folder: Path) -> None:
    for partition in folder.iterdir():
        shutil.rmtree(partition)
        forget(partition)


@pytest.mark.long
def test_at_least_once_with_state(make_state_pipe: Any, inject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver, then by tasks, one of which fails when everything is acknowledged."""
    monkeypatch.setattr(placement, "TASK_ROWS", 400)
    pipe = make_state_pipe(partitions=3)
    pipe.fill(900)
    query = pipe.run(**AT_LEAST_ONCE)
    assert query._sink._commit._delivery.transactional_id is None
    pipe.check()  # without faults, once
    end = independent.end_offsets(pipe.bootstrap, pipe.table)
    assert sum(end.values()) == len(independent.read_topic(pipe.bootstrap, pipe.table)), "there are markers"

    pipe.fill(900)
    once = pipe.tmp_path / "fired"
    inject("write", "raise", where="task", task=0, once_file=str(once))
    query = pipe.run(**AT_LEAST_ONCE, engine="tasks")
    assert once.exists()
    assert max(batch.attempts for batch in query.batches) == 2
    assert pipe.check_at_least_once() > 0
    # The batch has run again on the state before it, so state has counted once.
    _, sums, _ = pipe.ledger.expected(pipe.sent)
    assert {key: json.loads(row) for key, row in onceflow.Table.of_flow(pipe.folder).range()} == sums
    assert pipe.table_rows() == sums


@pytest.mark.long
def test_at_least_once_when_the_copies_are_lost(
    make_state_pipe: Any, inject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crashed driver had written counts when it has to be restored, and its records are processed again."""
    pipe = make_state_pipe(partitions=3)
    for inside in (False, True):
        pipe.fill(600)
        pipe.run(**AT_LEAST_ONCE, inside=inside, engine="tasks")
    pipe.check()
    pipe.fill(600)
    inject("audit", "raise")
    with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
        pipe.run(**AT_LEAST_ONCE)
    inject("init", "raise", flow="nobody")
    removed(pipe.folder)
    pipe.run(**AT_LEAST_ONCE)
    assert pipe.check_at_least_once() > 500
    counted = {key: json.loads(row)["count"] for key, row in onceflow.Table.of_flow(pipe.folder).range()}
    _, sums, _ = pipe.ledger.expected(pipe.sent)
    assert any(count > sums[key]["count"] for key, count in counted.items())


@pytest.mark.long
def test_the_guarantee_of_a_step_can_be_changed_between_runs(make_state_pipe: Any, inject: Any) -> None:
    """Also after a crash: exactly-once goes on from what at-least-once has left."""
    pipe = make_state_pipe(partitions=2)
    for guarantee in ("exactly_once", "at_least_once", "exactly_once"):
        pipe.fill(500)
        pipe.run(guarantee=guarantee)
        pipe.check()
    pipe.fill(500)
    inject("audit", "raise")
    with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
        pipe.run(**AT_LEAST_ONCE)
    inject("init", "raise", flow="nobody")
    pipe.fill(200)
    pipe.run()
    assert pipe.check_at_least_once() > 0
    assert pipe.table_rows() == pipe.ledger.expected(pipe.sent)[1]
