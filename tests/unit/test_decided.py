"""Which records of a partition are committed, and for whose transaction a start waits. Logs are made up here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.admin.change import settled_progress
from onceflow.client import decided
from onceflow.client.cluster import TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.decided import Decided, read_decided
from onceflow.client.log_reader import LogRecord, Marker
from onceflow.driver.record import committed_progress, progress_log
from onceflow.errors import DeadlineExceededError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC

KEYS = (b"copy", b"old", b"other")
WRITE, COMMIT, ABORT, PLAIN = "write", "commit", "abort", "plain"


@dataclass
class Log:
    """A partition: what is in it, and what each transaction has become."""

    items: list[LogRecord | Marker] = field(default_factory=list)
    outcome: dict[int, str] = field(default_factory=dict)  # by offset of a record
    open: dict[int, list[int]] = field(default_factory=dict)  # by producer id, offsets of records

    def add(self, act: str, producer: int, key: bytes) -> None:
        offset = len(self.items)
        if act in (COMMIT, ABORT):
            for at in self.open.pop(producer, []):
                self.outcome[at] = act
            self.items.append(Marker(offset, producer, 0, act == COMMIT))
            return
        self.items.append(LogRecord(offset, key, b"", 0, -1 if act == PLAIN else producer, 0))
        if act == PLAIN:
            self.outcome[offset] = COMMIT
        else:
            self.open.setdefault(producer, []).append(offset)

    @property
    def stable(self) -> int:
        return min((at for all_ in self.open.values() for at in all_), default=len(self.items))

    def records(self, key: bytes | None, start: int) -> Iterator[LogRecord]:
        for item in self.items[start:]:
            if isinstance(item, LogRecord) and key in (None, item.key):
                yield item

    def read(self, start: int, key: bytes | None) -> Decided:
        """Through the code under test. Below the last stable offset, all commit markers have been compacted away."""

        def stable(_: Any, topic: str, partition: int, begin: int, end: int, deadline: Any) -> Iterator[LogRecord]:
            return (each for each in self.records(None, begin) if each.offset < end and self.is_committed(each))

        def log(_: Any, topic: str, partition: int, begin: int, end: int, deadline: Any) -> Iterator[Any]:
            gone = [each for each in self.items[: self.stable] if isinstance(each, Marker) and each.committed]
            return (each for each in self.items[begin:end] if each not in gone)

        def ends(_: Any, span: Any, *__: Any, committed: bool = True) -> Any:
            return {topic: {0: self.stable if committed else len(self.items)} for topic in span}

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(decided, "read_stable", stable)
            patched.setattr(decided, "read_log", log)
            patched.setattr(decided, "list_offsets", ends)
            return read_decided(None, "t", 0, start, Deadline(5, "a test"), key=key)  # type: ignore[arg-type]

    def is_committed(self, record: LogRecord) -> bool:
        return self.outcome.get(record.offset) == COMMIT


@given(
    acts=st.lists(
        st.tuples(st.sampled_from([WRITE, WRITE, COMMIT, ABORT, PLAIN]), st.integers(1, 3), st.sampled_from(KEYS)),
        max_size=25,
    ),
    start=st.integers(0, 30),
    key=st.sampled_from([*KEYS, None]),
)
def test_each_record_is_what_its_transaction_has_become(acts: list[Any], start: int, key: bytes | None) -> None:
    log = Log()
    for act in acts:
        log.add(*act)
    found = log.read(start, key)
    wanted = list(log.records(key, start))
    offsets = [each.offset for each in found.committed]
    assert offsets == [each.offset for each in wanted if log.is_committed(each)]
    assert [each.offset for each in found.undecided] == [
        each.offset for each in wanted if each.offset not in log.outcome
    ]
    assert found.stable == log.stable


def test_an_abort_behind_a_commit_without_its_marker() -> None:
    """The marker of the commit is compacted away, and those of an aborted attempt after it are still there."""
    log = Log()
    for act in ((WRITE, 7, b"copy"), (COMMIT, 7, b""), (WRITE, 7, b"copy"), (ABORT, 7, b"")):
        log.add(*act)
    assert [each.offset for each in log.read(0, b"copy").committed] == [0]


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from([WRITE, WRITE, COMMIT, ABORT, PLAIN]), st.integers(1, 3), st.sampled_from(KEYS)),
            st.just("look"),
        ),
        max_size=30,
    )
)
def test_progress_of_all_flows_is_read_again_and_again(acts: list[Any]) -> None:
    """Each look finds what is committed then, whatever transactions were open at the looks before."""
    log, known = Log(), committed_progress.CommittedProgress()
    info = TopicInfo(PROGRESS_TOPIC, "id", {0: 1})
    reads: list[int] = []

    def read(_: Any, topic: str, partition: int, start: int, deadline: Any, *, ends: tuple[int, int]) -> Decided:
        assert ends == (log.stable, len(log.items))
        reads.append(start)
        return log.read(start, None)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(committed_progress, "find_topic", lambda *_: info)
        patched.setattr(committed_progress, "list_offsets", lambda *_: {PROGRESS_TOPIC: {0: 0}})
        patched.setattr(committed_progress, "ends_of", lambda *_: {0: (log.stable, len(log.items))})
        patched.setattr(committed_progress, "read_decided", read)
        for act in [*acts, "look"]:
            if act != "look":
                log.add(*act)
                continue
            last = {each.key: each.offset for each in log.records(None, 0) if log.is_committed(each)}
            found = known.read(None, Deadline(5, "a test"))  # type: ignore[arg-type]
            assert {key: each.offset for key, (_, each) in found.items()} == last
            count = len(reads)
            assert known.read(None, Deadline(5, "a test")) == found  # type: ignore[arg-type]
            assert len(reads) == count + (log.stable < len(log.items)), "without news, nothing is read"


class Progress:
    """The partition with a flow's progress, while a test lets it change: one state for each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Decided) -> None:
        self._looks = list(looks)
        self.starts: list[int] = []
        monkeypatch.setattr(progress_log, "read_decided", self._read)

    def _read(self, cluster: Any, topic: str, partition: int, start: int, deadline: Any, *, key: bytes) -> Decided:
        assert key == b"copy"
        self.starts.append(start)
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def latest(self, seconds: float = 5, hinted: int | None = None) -> LogRecord | None:
        deadline = Deadline(seconds, "starting flow copy")
        return progress_log._latest(None, "copy", 3, 0, hinted, deadline)  # type: ignore[arg-type]


def record(offset: int, value: bytes | None = b"{}", producer_id: int = 7) -> LogRecord:
    return LogRecord(offset, b"copy", value, 0, producer_id, 0)


OWN, END = record(4), record(9, None, producer_id=8)


@pytest.mark.parametrize("first", [[OWN], []], ids=["with progress", "without"])
@pytest.mark.parametrize("committed", [True, False])
def test_a_start_waits_for_the_transaction_of_another_flow(
    monkeypatch: pytest.MonkeyPatch, first: list[LogRecord], committed: bool
) -> None:
    """That of `onceflow promote`. Without a marker, its record counts neither as committed nor as aborted."""
    waiting = Decided(first, [END], 9)
    there = Progress(monkeypatch, waiting, waiting, Decided([*first, *([END] if committed else [])], [], 11))
    assert there.latest() == (END if committed else first[0] if first else None)
    assert there.starts == [0, *([4, 4] if first else [9, 9])], "what is decided is not read again"


def test_an_older_record_that_stays_undecided_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last record by offset counts, as it does for compaction."""
    newer = record(12)
    assert Progress(monkeypatch, Decided([newer], [END], 9)).latest() == newer


def test_a_record_without_marker_that_the_group_points_to_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka may leave a marker out, and forget the transactional id."""
    there = Progress(monkeypatch, Decided([OWN], [record(9)], 9))
    assert there.latest(hinted=9) == record(9)
    with pytest.raises(DeadlineExceededError):
        there.latest(0.02, hinted=4)


def test_a_transaction_that_stays_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Progress(monkeypatch, Decided([OWN], [END], 9))
    with pytest.raises(DeadlineExceededError, match="is about to change the flow's progress") as caught:
        there.latest(0.02)
    assert (caught.value.flow, caught.value.topic) == ("copy", "__onceflow_progress-3")
    assert "producer id 8, offset 9" in caught.value.detail
    assert "onceflow transactions list" in caught.value.next_step


# ---- the progress of a flow that runs ------------------------------------------------------------------


def settled(monkeypatch: pytest.MonkeyPatch, looks: Iterator[Decided], seconds: float) -> Decided:
    def read(cluster: Any, topic: str, partition: int, start: int, deadline: Any, *, key: bytes) -> Decided:
        assert key == b"copy"
        return next(looks)

    monkeypatch.setattr(settled_progress, "read_decided", read)
    deadline = Deadline(seconds, "reading the progress of flow copy")
    return settled_progress.settled_records(None, Names("copy"), 0, deadline)  # type: ignore[arg-type]


def test_what_a_running_flow_begins_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that commits often nearly always has an open transaction."""
    looks = (Decided([record(at) for at in range(3, last)], [record(last)], last) for last in range(5, 1_000_000))
    found = settled(monkeypatch, looks, 5)
    assert [each.offset for each in found.committed] == [3, 4, 5]


def test_what_stays_open_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = (Decided([record(3)], [record(5), record(last)], 5) for last in range(6, 1_000_000))
    with pytest.raises(DeadlineExceededError, match="stays open") as caught:
        settled(monkeypatch, looks, 0.02)
    assert caught.value.flow == "copy"
    assert "progress record at offset 5, of producer id 7" in caught.value.detail
