"""What is sent of progress before the rows of its batch are acknowledged: compared in the end, and never too early."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow import BatchAbortedError, UnknownTopicError
from onceflow.client import coordinators
from onceflow.client import transactions as transactions_module
from onceflow.client.cluster import ConnectionFailedError
from onceflow.client.connections import SentRequest
from onceflow.client.coordinators import repeat
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import offsets_code, offsets_unknown
from onceflow.client.transaction_requests import end_transaction
from onceflow.client.transactions import Transactions
from onceflow.driver.record.progress_ahead import ProgressAhead, RecordPosition
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress

IDENTITY = ProducerIdAndEpoch(4711, 3)
OFFSETS = {"in": {0: 7}}


def soon() -> Deadline:
    return Deadline(5, "a test")


# ---- where the record is going to be -----------------------------------------------------------------------


def test_the_next_record_is_behind_the_marker_of_the_last_one() -> None:
    position = RecordPosition()
    assert position.next is None
    for offset in (40, 42, 44):
        position.written(offset)
        assert position.next == offset + 2


def test_nobody_guesses_while_other_flows_write_to_the_partition() -> None:
    position = RecordPosition()
    position.written(40)
    position.written(45)
    assert position.next is None
    guessed = 0
    for offset in range(50, 350, 2):
        position.written(offset)
        guessed += position.next is not None
    assert 0 < guessed < 100
    position.written(-1)  # the broker had the record already, and does not tell its offset
    assert position.next is None


def test_nobody_guesses_behind_an_abort() -> None:
    position = RecordPosition()
    position.written(40)
    position.forget()
    assert position.next is None
    position.written(47)
    assert position.next == 49


# ---- the record --------------------------------------------------------------------------------------------


class Sent:
    """In the place of `Transactions`."""

    identity = IDENTITY

    def __init__(self) -> None:
        self.offsets: list[Any] = []

    def send_offsets(self, group: str, offsets: Any, deadline: Deadline, *, metadata: str) -> None:
        self.offsets.append((group, offsets, metadata))


def ahead_of(progress: Progress) -> ProgressAhead:
    session: Any = SimpleNamespace(names=Names("flow"), transactions=Sent())
    return ProgressAhead(session, lambda topics: replace(progress, outputs=tuple(sorted(topics))))


PROGRESS = Progress("flow", 3, {"in": {0: 7}}, {}, 1_000)


def test_the_record_counts_if_the_batch_comes_to_the_same() -> None:
    ahead = ahead_of(PROGRESS)
    record = ahead.record({"out"})
    assert record is not None
    assert record.count == 1
    known = ahead.checked(replace(PROGRESS, outputs=("out",), time_ms=2_000))
    assert known == ahead.written == replace(PROGRESS, outputs=("out",))


@pytest.mark.parametrize(
    "other", [{"offsets": {"in": {0: 8}}}, {"batch_id": 4}, {"outputs": ()}, {"epochs": {"in": {0: (7, 1)}}}], ids=str
)
def test_an_attempt_that_comes_to_something_else_is_aborted(other: dict[str, Any]) -> None:
    ahead = ahead_of(PROGRESS)
    ahead.record({"out"})
    with pytest.raises(BatchAbortedError, match="not that of the batch"):
        ahead.checked(replace(replace(PROGRESS, outputs=("out",)), **other))


def test_without_progress_only_the_offsets_are_sent() -> None:
    session: Any = SimpleNamespace(names=Names("flow"), transactions=Sent())
    ahead = ProgressAhead(session, None)
    ahead.send_offsets(OFFSETS, 42, soon())
    assert ahead.record({"out"}) is None
    assert ahead.written is None
    ((group, offsets, metadata),) = session.transactions.offsets
    assert (group, offsets) == ("flow", OFFSETS)
    assert ":42" in metadata


# ---- the offsets -------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of a transactional id: what they say, and for which response they wait."""
    seen: list[Any] = []

    def send(cluster: Any, tid: str, identity: Any, group: str, offsets: Any, deadline: Any, *, metadata: str) -> Any:
        seen.append(("send", metadata))
        return SentRequest(1, metadata)

    def commit(*owner_and_more: Any, metadata: str, sent: SentRequest | None = None) -> None:
        seen.append(("commit", metadata, None if sent is None else sent.future))

    monkeypatch.setattr(transactions_module.requests, "send_offsets", send)
    monkeypatch.setattr(transactions_module.requests, "commit_offsets", commit)
    return seen


def transactions(version: int = 2) -> Transactions:
    cluster: Any = SimpleNamespace(transaction_version=version)
    return Transactions(cluster, "onceflow.flow", identity=IDENTITY)


def test_the_response_is_waited_for_and_nothing_is_sent_twice(requests: list[Any]) -> None:
    ours = transactions()
    ours.send_offsets("flow", OFFSETS, soon(), metadata="a")
    ours.commit_offsets("flow", OFFSETS, soon(), metadata="a")
    ours.commit_offsets("flow", OFFSETS, soon(), metadata="b")  # of the next transaction
    assert requests == [("send", "a"), ("commit", "a", "a"), ("commit", "b", None)]


def test_the_right_offsets_follow_wrong_ones_when_these_are_answered(requests: list[Any]) -> None:
    ours = transactions()
    ours.send_offsets("flow", OFFSETS, soon(), metadata="a")
    ours.commit_offsets("flow", OFFSETS, soon(), metadata="b")
    assert requests == [("send", "a"), ("commit", "a", "a"), ("commit", "b", None)]


def test_those_of_an_aborted_attempt_are_nobodys(requests: list[Any]) -> None:
    ours = transactions()
    ours.send_offsets("flow", OFFSETS, soon(), metadata="a")
    ours._identity = ProducerIdAndEpoch(4711, 4)
    ours.commit_offsets("flow", OFFSETS, soon(), metadata="a")
    assert requests == [("send", "a"), ("commit", "a", None)]


def test_with_transaction_version_1_nothing_is_sent_ahead(requests: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="version 2 only"):
        transactions(1).send_offsets("flow", OFFSETS, soon(), metadata="a")
    assert not requests


class Coordinator:
    """In the place of `Cluster`: a request that was sent has this response, or none; every other one succeeds."""

    def __init__(self, code: int | None) -> None:
        self.code = code
        self.asked: list[Any] = []

    def ask_coordinator(self, request: Any, kind: int, key: str, deadline: Deadline, *, sent: Any = None) -> Any:
        self.asked.append(sent)
        if sent is None:
            return SimpleNamespace(error_code=0)
        if self.code is None:
            raise ConnectionFailedError("gone")
        return SimpleNamespace(error_code=self.code)

    def forget_coordinator(self, kind: int, key: str) -> None: ...


@pytest.mark.parametrize("code, again", [(0, False), (None, True), (51, True), (16, True), (47, False)])
def test_what_was_sent_ahead_is_repeated_as_everything_else_is(code: int | None, again: bool) -> None:
    cluster: Any = Coordinator(code)
    sent = SentRequest(1, None)
    response = repeat(cluster, "request", "TxnOffsetCommit", 0, "flow", soon(), sent=sent)
    assert cluster.asked == [sent, *([None] if again else [])]
    assert response.error_code == (0 if again else code)


def partition(code: int) -> SimpleNamespace:
    return SimpleNamespace(error_code=code)


class Forgetful:
    """Answers an offset commit: a topic is not known, or only for a while."""

    def __init__(self, clock: list[float], known_after: float) -> None:
        self._clock, self._known_after = clock, known_after

    def ask_coordinator(self, request: Any, kind: int, key: str, deadline: Deadline, *, sent: Any = None) -> Any:
        self._clock[0] += 0.5
        code = 0 if self._clock[0] >= self._known_after else 3
        there, gone = SimpleNamespace(name="there", partitions=[partition(0)]), [partition(0), partition(code)]
        return SimpleNamespace(topics=[there, SimpleNamespace(name="gone", partitions=gone)])


def test_the_offsets_of_a_topic_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit was repeated until the transaction timed out, four times: minutes, for a topic that is gone. A broker
    that has just started does not know its topics for a while."""
    now = [0.0]
    monkeypatch.setattr(coordinators, "monotonic", lambda: now[0])
    deadline = Deadline(60, "test", clock=lambda: now[0], sleep=lambda _: None)

    def commit(known_after: float) -> Any:
        now[0] = 0.0
        cluster: Any = Forgetful(now, known_after)
        codes = {"code_of": offsets_code, "unknown": offsets_unknown}
        return repeat(cluster, "request", "TxnOffsetCommit", 0, "flow", deadline, **codes)

    assert offsets_code(commit(8.0)) == 0
    with pytest.raises(UnknownTopicError, match="Topic 'gone' does not exist"):
        commit(float("inf"))
    assert 10 < now[0] < 15


# ---- EndTxn --------------------------------------------------------------------------------------------------


class Ending:
    """In the place of `Cluster`: in which order EndTxn is sent and answered. The first response may be lost."""

    transaction_version = 2

    def __init__(self, *, lost: bool) -> None:
        self.lost = lost
        self.seen: list[str] = []

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        return max_version

    def coordinator(self, kind: int, key: str, deadline: Deadline) -> int:
        return 1

    def send(self, request: Any, node: int, deadline: Deadline) -> SentRequest:
        self.seen.append("sent")
        return SentRequest(node, None)

    def ask_coordinator(self, request: Any, kind: int, key: str, deadline: Deadline, *, sent: Any = None) -> Any:
        self.seen.append("asked" if sent is None else "answered")
        if sent is not None and self.lost:
            raise ConnectionFailedError("gone")
        return SimpleNamespace(error_code=0, producer_id=4711, producer_epoch=4)


@pytest.mark.parametrize("lost", [False, True])
def test_something_else_is_done_while_the_end_is_decided(lost: bool) -> None:
    cluster: Any = Ending(lost=lost)
    code, following = end_transaction(
        cluster, "onceflow.flow", IDENTITY, soon(), commit=True, meanwhile=lambda: cluster.seen.append("meanwhile")
    )
    assert (code, following.producer_epoch) == (0, 4)
    assert cluster.seen == ["sent", "meanwhile", "answered", *(["asked"] if lost else [])]
