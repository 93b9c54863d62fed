"""A cluster whose transaction.version is 1: explicit enrolment, an epoch per InitProducerId."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from onceflow import FencedError
from onceflow.broker.local import LocalBroker
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.nodes import look_at_nodes
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Outcome, Transactions
from onceflow.testing import faults, independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline(seconds, "a test")


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
    (node,) = look_at_nodes(cluster, soon())
    assert (node.finalized["transaction.version"], node.supported["transaction.version"]) == (1, 2)
    cluster.close()


@pytest.mark.long
def test_a_flow_is_moved_and_its_state_deleted(version_1: str, make_state_pipe: Callable[..., Any]) -> None:
    pipe = replace(make_state_pipe(2), bootstrap=version_1)
    for topic in (pipe.source, pipe.target):
        create_topic(version_1, topic, 2)
    pipe.fill(200)
    pipe.run()
    _, sums, _ = pipe.ledger.expected(pipe.sent)
    assert pipe.table_rows() == sums
    move = ["reset", pipe.flow, "--bootstrap-servers", version_1, "--yes", "--to", "earliest", "--state", "delete"]
    answer = CliRunner().invoke(cli, move, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    assert pipe.table_rows() == {}
    assert set(independent.committed_offsets(version_1, pipe.flow).values()) == {0}
    pipe.run()
    assert pipe.table_rows() == sums
    assert len(pipe.outputs()) == 400


@pytest.mark.long
def test_a_new_version_takes_over(version_1: str, make_state_pipe: Callable[..., Any]) -> None:
    pipe = replace(make_state_pipe(2), bootstrap=version_1)
    for topic in (pipe.source, pipe.target):
        create_topic(version_1, topic, 2)
    pipe.fill(200)
    pipe.run()
    copy = f"{pipe.flow}-next"
    for count, words in ((100, ["fork", pipe.flow, copy]), (50, ["promote", copy, "--replaces", pipe.flow])):
        answer = CliRunner().invoke(cli, [*words, "--bootstrap-servers", version_1, "--yes"], catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        pipe.fill(count)
        if words[0] == "fork":
            pipe.run()
    after = replace(pipe, table=f"{copy}-{pipe.table}")
    after.run()
    after.check()


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["driver", "tasks"])
def test_copies_exactly_once(pipe: Any, engine: str) -> None:
    query = pipe.run(engine=engine)
    assert [b.attempts for b in query.batches] == [1] * len(query.batches)
    pipe.check()


@pytest.mark.long
def test_an_aborted_attempt_is_run_again_under_a_new_epoch(pipe: Any, inject: Any) -> None:
    inject("write", "raise", where="task", batch=2, task=0, once_file=str(pipe.tmp_path / "fired"))
    query = pipe.run(engine="tasks", partitioner="source")
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


@pytest.mark.long
def test_a_transaction_that_timed_out_is_run_again(pipe: Any, inject: Any) -> None:
    """Version 1 answers a timeout like a fencing; the driver finds out that nobody else owns the id."""
    inject("audit", "pause", batch=1, seconds=2.5)
    query = pipe.run(transaction_timeout="1 second")
    assert {b.batch: b.attempts for b in query.batches}[1] == 2
    pipe.check()


@pytest.mark.long
def test_a_timeout_that_the_commit_meets(pipe: Any, inject: Any) -> None:
    inject("progress", "pause", batch=1, seconds=2.5)
    query = pipe.run(transaction_timeout="1 second")
    assert {b.batch: b.attempts for b in query.batches}[1] == 2
    pipe.check()


# At version 2 it is test_a_driver_fenced_in_mid_batch.
@pytest.mark.long
def test_a_driver_that_slept_while_another_one_started_is_fenced(pipe: Any) -> None:
    """What it finds looks like a timeout at first sight: its transaction was aborted under another epoch."""
    ready = pipe.tmp_path / "paused"
    process = pipe.driver(faults.fault("progress", "pause", batch=1, seconds=12, once_file=str(ready)))
    try:
        wait_until(ready.exists, 60, "the older driver reaches its pause")
        pipe.run()
        output = process.communicate(timeout=90)[0]
        assert process.returncode != 0
        assert "FencedError" in output
    finally:
        pipe.end_driver(process)
    pipe.check()


# ---- the protocol, without Spark ---------------------------------------------------------------------------


@pytest.fixture
def cluster(version_1: str) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(version_1))
    cluster.connect(soon())
    yield cluster
    cluster.close()


def opened(cluster: Cluster, topic: str, timeout_ms: int = 60_000) -> Transactions:
    """A transaction with one partition in it."""
    transactions = Transactions(cluster, f"onceflow.{topic}", timeout_ms)
    transactions.init(soon())
    transactions.begin(soon())
    transactions.add_partitions({topic: [0]}, soon())
    return transactions


def state(cluster: Cluster, transactions: Transactions) -> str:
    return str(describe_transaction(cluster, transactions.transactional_id, soon())["state"])


@pytest.mark.parametrize("commit", [True, pytest.param(False, marks=pytest.mark.long)])
def test_who_timed_out_goes_on_with_an_epoch_of_its_own(cluster: Cluster, pipe: Any, commit: bool) -> None:
    transactions = opened(cluster, pipe.target, 1_000)
    before = transactions.identity
    wait_until(lambda: state(cluster, transactions) == "CompleteAbort", 60, "the transaction times out")
    if commit:
        assert transactions.end(soon(), commit=True) is Outcome.ABORTED
    else:
        transactions.abort(soon())
    after = transactions.begin(soon())
    assert after.producer_id == before.producer_id
    assert after.producer_epoch >= before.producer_epoch + 2  # the one in between is the abort's
    transactions.add_partitions({pipe.target: [0]}, soon())
    assert transactions.end(soon(), commit=True) is Outcome.COMMITTED


def test_an_abort_leaves_the_epoch_after_it_with_nobody(cluster: Cluster, pipe: Any) -> None:
    """CompleteAbort under an epoch that somebody owns would look like a timeout to the owner before."""
    transactions = opened(cluster, pipe.target)
    transactions.abort(soon())
    found = describe_transaction(cluster, transactions.transactional_id, soon())
    assert (found["state"], found["producer_epoch"]) == ("Empty", transactions.identity.producer_epoch)


# The others are states of the model (tests/model), and left to `make test-long`.
@pytest.mark.parametrize("commit", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "rival",
    [
        "has committed",
        "writes",
        *(pytest.param(rival, marks=pytest.mark.long) for rival in ("has begun nothing", "has aborted", "timed out")),
    ],
)
def test_who_was_fenced_stays_fenced(cluster: Cluster, pipe: Any, version_1: str, commit: bool, rival: str) -> None:
    """Whatever the newer owner does; and what it has open is left alone."""
    older = opened(cluster, pipe.target)
    elsewhere = Cluster(ClientSettings(version_1))
    try:
        newer = Transactions(elsewhere, older.transactional_id, 1_000 if rival == "timed out" else 60_000)
        newer.init(soon())
        if rival != "has begun nothing":
            newer.begin(soon())
            newer.add_partitions({pipe.target: [1]}, soon())
        if rival == "has committed":
            assert newer.end(soon(), commit=True) is Outcome.COMMITTED
        elif rival == "has aborted":
            newer.abort(soon())
        elif rival == "timed out":
            wait_until(lambda: state(elsewhere, newer) == "CompleteAbort", 60, "the transaction times out")
        assert older.end(soon(), commit=commit) is Outcome.FENCED
        assert older.end(soon(), commit=commit) is Outcome.FENCED
        if rival == "writes":
            assert newer.end(soon(), commit=True) is Outcome.COMMITTED
    finally:
        elsewhere.close()
