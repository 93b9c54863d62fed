"""A cluster whose transaction.version is 1: explicit enrolment, an epoch per InitProducerId."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from onceflow import FencedError, hooks
from onceflow.broker.local import LocalBroker
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.testing.broker import create_topic

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def version_1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    properties = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
    folder = tmp_path_factory.mktemp("version-1")
    with LocalBroker(folder, properties=properties, features={"transaction.version": 1}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def pipe(version_1: str, make_pipe: Callable[..., Any]) -> Any:
    pipe = replace(make_pipe(), bootstrap=version_1)
    for topic in (pipe.source, pipe.target):
        create_topic(version_1, topic, 4)
    pipe.fill(2500)
    return pipe


def test_the_cluster_is_what_it_should_be(version_1: str) -> None:
    cluster = Cluster(ClientSettings(version_1))
    cluster.connect(Deadline(20, "test"))
    assert cluster.transaction_version == 1
    cluster.close()


@pytest.mark.parametrize("small_batch_rows", [0, 4000])
def test_copies_exactly_once(pipe: Any, small_batch_rows: int) -> None:
    query = pipe.run(small_batch_rows=small_batch_rows)
    assert [b.attempts for b in query.batches] == [1] * len(query.batches)
    pipe.check()


def test_an_aborted_attempt_is_run_again_under_a_new_epoch(pipe: Any, inject: Any) -> None:
    inject("write", "raise", where="task", batch=2, task=0, once_file=str(pipe.tmp_path / "fired"))
    query = pipe.run(small_batch_rows=0, partitioner="source")
    assert {b.batch: b.attempts for b in query.batches}[2] == 2
    pipe.check()


def test_the_older_of_two_drivers_is_fenced(pipe: Any) -> None:
    flow = pipe.open()
    older = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    older.processAllAvailable()
    newer = pipe.open()
    df = newer.read(pipe.source).select("key", "value")
    pipe.fill(100)
    with pytest.raises(FencedError):
        older.awaitTermination(60)
    query = newer.write(df, topic=pipe.target).start()
    query.processAllAvailable()
    query.stop()
    pipe.check()


def test_a_transaction_that_timed_out_loses_nothing(pipe: Any, inject: Any) -> None:
    """Version 1 answers a timeout like a fencing, so the flow may stop; a restart goes on exactly there."""
    inject("audit", "pause", batch=1, seconds=4)
    try:
        pipe.run(transaction_timeout="2 seconds")
    except FencedError:
        os.environ.pop(hooks.VARIABLE, None)
        pipe.run()
    pipe.check()
