"""EndTxn whose answer is lost: the right verdict both when it was applied and when it was not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from onceflow import DeadlineExceededError, Flow
from onceflow.cli.main import cli
from onceflow.driver.kafka import output_writer
from onceflow.driver.step.joins import Joins
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow_workshop.testing.proxy import END_TXN, Proxy, proxied_broker

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PRODUCE, LIST_OFFSETS, FIND_COORDINATOR, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT = 0, 2, 10, 22, 28
CREATE_TOPICS, DELETE_TOPICS = 19, 20


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Proxy]]:
    with proxied_broker(tmp_path_factory.mktemp("proxied")) as found:
        yield found


@pytest.fixture
def proxied_pipe(proxied: tuple[str, str, Proxy], make_pipe: Callable[..., Any]) -> Any:
    direct, _, _ = proxied
    pipe = make_pipe()  # for unique names; the topics are made on the other broker
    for topic in (pipe.source, pipe.target):
        create_topic(direct, topic, 4)
    return replace(pipe, bootstrap=direct)


@pytest.fixture
def start(proxied: tuple[str, str, Proxy], proxied_pipe: Any) -> Iterator[Callable[..., Any]]:
    """``start()``: the flow, through the proxy; the query before is stopped. ``start(cut=(api_key, "before"))``"""
    from onceflow import Flow

    running: list[Any] = []

    def start_(cut: tuple[int, str] | None = None) -> Any:
        while running:
            running.pop().stop()
        flow = Flow(proxied_pipe.flow, proxied_pipe.spark, bootstrap_servers=proxied[1])
        if cut is not None:
            proxied[2].cut(*cut)
        df = flow.read(proxied_pipe.source, max_records_per_batch=400).select("key", "value")
        running.append(flow.write(df, topic=proxied_pipe.target).start())
        return running[-1]

    yield start_
    while running:
        running.pop().stop()


@pytest.mark.parametrize("when", ["before", "after"])
def test_end_txn(proxied: tuple[str, str, Proxy], proxied_pipe: Any, start: Callable[..., Any], when: str) -> None:
    _, _, proxy = proxied
    query = start()
    for times in (1, 3):
        proxy.cut(END_TXN, when, times)
        proxied_pipe.fill(1000)
        query.processAllAvailable()
        assert proxy.cuts == times
    # Decided as it was: no batch was run twice because its outcome was misread.
    assert len(query.batches) >= 4
    assert [b.attempts for b in query.batches] == [1] * len(query.batches)
    proxied_pipe.check()


@pytest.mark.parametrize("when", ["before", "after"])
def test_other_requests(
    proxied: tuple[str, str, Proxy], proxied_pipe: Any, start: Callable[..., Any], when: str
) -> None:
    """A lost Produce or TxnOffsetCommit is sent again, the same bytes; the broker recognises what it has."""
    _, _, proxy = proxied
    for api_key in (FIND_COORDINATOR, INIT_PRODUCER_ID):  # of a start
        proxied_pipe.fill(500)
        query = start(cut=(api_key, when))
        query.processAllAvailable()
        assert proxy.cuts == 1
    for api_key in (PRODUCE, TXN_OFFSET_COMMIT):
        proxy.cut(api_key, when)
        proxied_pipe.fill(500)
        query.processAllAvailable()
        assert proxy.cuts == 1
    proxied_pipe.check()


def test_fenced_while_the_answer_was_lost(proxied: tuple[str, str, Proxy], proxied_pipe: Any) -> None:
    """The commit was applied, the answer lost, and somebody else took over meanwhile: progress decides."""
    from onceflow.client.cluster import Cluster
    from onceflow.client.deadline import Deadline
    from onceflow.client.settings import ClientSettings
    from onceflow.client.transactions import Outcome, Transactions

    direct, _, _ = proxied
    cluster = Cluster(ClientSettings(direct))
    deadline = Deadline(30, "test")
    older = Transactions(cluster, f"onceflow.{proxied_pipe.flow}")
    older.init(deadline)
    older.begin(deadline)
    older.commit_offsets(proxied_pipe.flow, {proxied_pipe.source: {0: 0}}, deadline)
    newer = Transactions(cluster, f"onceflow.{proxied_pipe.flow}")
    newer.init(deadline)
    assert older.end(deadline, commit=True) is Outcome.FENCED
    cluster.close()
    assert independent.committed_offsets(direct, proxied_pipe.flow) == {}


@pytest.mark.parametrize("when", ["before", "after"])
def test_topic_commands(proxied: tuple[str, str, Proxy], make_pipe: Callable[..., Any], when: str) -> None:
    """The repeated request is told that there is nothing to do any more: it was done by the first."""
    _, servers, proxy = proxied
    name = make_pipe().source

    def call(*arguments: str) -> str:
        proxy.cut(CREATE_TOPICS if "create" in arguments else DELETE_TOPICS, when)
        answer = CliRunner().invoke(cli, ["topic", *arguments, "--bootstrap-servers", servers])
        assert answer.exception is None, answer.output
        assert proxy.cuts == 1
        return answer.stdout

    assert call("create", f"{name}-new", "--partitions", "3") == f"Topic {name}-new created with 3 partitions.\n"
    assert call("delete", f"{name}-new", "--yes") == f"Topic {name}-new deleted.\n"


@pytest.mark.long
def test_the_offsets_of_a_joined_table(
    proxied: tuple[str, str, Proxy], proxied_pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch waits for them as long as for everything else. Its error says what it has waited for."""
    direct, through, proxy = proxied
    table = proxied_pipe.source.replace("in-", "joined-", 1)
    create_topic(direct, table, 2, {"cleanup.policy": "compact"})
    pin = Joins.pin
    monkeypatch.setattr(output_writer, "_MIN_PATIENCE_S", 2.0)
    with Flow(proxied_pipe.flow, proxied_pipe.spark, bootstrap_servers=through) as flow:
        df = flow.join_table(flow.read(proxied_pipe.source), table, on="key", columns="more", how="left")
        query = flow.write(
            df.select("key", "value"), topic=proxied_pipe.target, transaction_timeout="2 seconds"
        ).start()
        proxied_pipe.fill(10)
        query.processAllAvailable()
        next_batch = len(query.batches) + 1  # a batch may have begun while the topic was being filled
        monkeypatch.setattr(Joins, "pin", lambda *given: (proxy.cut(LIST_OFFSETS, "before", 10_000), pin(*given)))
        proxied_pipe.fill(10)
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError) as raised:
            query.processAllAvailable()
        proxy.cut(END_TXN, "before", 0)
        assert time.monotonic() - began < 20
    error = raised.value
    assert (error.flow, error.topic, error.batch) == (proxied_pipe.flow, table, next_batch)
    assert f"Gave up after 2 s: looking for the ends of table {table}" in error.what
    assert f"--describe --topic {table}" in error.next_step
