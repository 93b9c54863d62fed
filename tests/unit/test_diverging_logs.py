"""What a `LongPoll` does when a leader does not know the record before the position. Answers are made up here."""

from __future__ import annotations

import struct
import time
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.client import long_poll
from onceflow.client.cluster import TopicInfo
from onceflow.client.long_poll import LongPoll, PollResult
from onceflow.errors import DataLossError
from onceflow.planning.source_starts import check_log
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single

PLACE = ("in", 0)
NOBODY = ProducerIdAndEpoch(-1, -1, transactional=False)


@pytest.fixture
def poll() -> LongPoll[Any]:
    """It is at offset 20, and the record before has epoch 4."""
    found = LongPoll(SimpleNamespace(), [TopicInfo("in", str(UUID(int=1)), {0: 1})], {PLACE: 20})  # type: ignore[arg-type]
    found.followed[PLACE].leader_epoch = 4
    return found


def records(offset: int, epoch: int) -> bytes:
    """A batch with one record, as a leader with this epoch has appended it."""
    batch = encode_single(b"k", b"v", timestamp_ms=0, identity=NOBODY, base_sequence=-1)
    data = bytearray(batch.head + batch.body)
    struct.pack_into(">q", data, 0, offset)
    struct.pack_into(">i", data, 12, epoch)
    return bytes(data)


def answer(
    poll: LongPoll[Any], *, diverging: tuple[int, int] | None = None, data: bytes = b"", stable: int = 99
) -> Any:
    """What comes of this answer of the leader."""
    epoch = None if diverging is None else SimpleNamespace(epoch=diverging[0], end_offset=diverging[1])
    partition = SimpleNamespace(
        partition_index=0,
        error_code=0,
        last_stable_offset=stable,
        diverging_epoch=epoch,
        records=data,
        aborted_transactions=[],
    )
    topic = SimpleNamespace(topic="in", topic_id=None, partitions=[partition])
    response = SimpleNamespace(error_code=0, throttle_time_ms=0, responses=[topic])
    asked = [poll.followed[PLACE]]
    return list(poll._answered(PollResult(asked, 0, time.monotonic(), 0, response, None)))


def last_epoch_asked(poll: LongPoll[Any], version: int) -> int:
    request = poll._request([poll.followed[PLACE]], version, 0)
    return int(request.topics[0].partitions[0].last_fetched_epoch)


def test_the_leader_is_told_the_last_epoch(poll: LongPoll[Any]) -> None:
    assert [last_epoch_asked(poll, version) for version in (11, 12)] == [-1, 4]


def test_records_that_are_gone_are_a_loss(poll: LongPoll[Any]) -> None:
    with pytest.raises(DataLossError, match="in-0") as caught:
        answer(poll, diverging=(3, 12))
    assert "truncated at offset 12" in caught.value.what
    assert "offsets 12 to 19 were read" in caught.value.what


@pytest.mark.parametrize("end", [20, 25])
def test_an_epoch_without_records_is_none(poll: LongPoll[Any], end: int) -> None:
    """Progress may know the epoch of a leader that has appended nothing. The leader of now knows another one."""
    assert answer(poll, diverging=(3, end)) == []
    assert last_epoch_asked(poll, 12) == 3
    ((_, chunk),) = answer(poll, data=records(20, 5))
    assert (chunk.next_offset, poll.followed[PLACE].position) == (21, 21)
    assert last_epoch_asked(poll, 12) == 5


def test_what_is_not_stable_yet_is_not_the_last_record(poll: LongPoll[Any]) -> None:
    answer(poll, data=records(20, 5) + records(21, 6), stable=21)
    assert last_epoch_asked(poll, 12) == 5


def test_another_position_has_another_last_record(poll: LongPoll[Any]) -> None:
    poll.seek(*PLACE, 3)
    assert last_epoch_asked(poll, 12) == -1


# ---- holes that compaction leaves --------------------------------------------------------------------------


def test_who_has_appended_what_is_gone_is_not_known(poll: LongPoll[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last records of the log are compacted away. A later leader may have appended them than the last one that is
    there: it would be told that the log ends before the position."""
    monkeypatch.setattr(long_poll, "is_hole", lambda *_: True)
    ((_, chunk),) = answer(poll, stable=30)
    assert (chunk.next_offset, chunk.whole, poll.followed[PLACE].position) == (30, False, 30)
    assert last_epoch_asked(poll, 12) == -1
    answer(poll, data=records(30, 6))
    assert last_epoch_asked(poll, 12) == 6


def test_records_in_remote_storage_are_no_hole(poll: LongPoll[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "is_hole", lambda *_: False)
    assert answer(poll, stable=30) == []
    assert (poll.followed[PLACE].position, last_epoch_asked(poll, 12)) == (20, 4)


@settings(deadline=None, max_examples=60)
@given(
    history=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=8),  # a new leader; its records
    gone=st.sets(st.integers(0, 31)),
    reads=st.sets(st.integers(1, 32), min_size=1),
)
def test_a_compacted_log_never_looks_truncated(
    history: list[tuple[bool, int]], gone: set[int], reads: set[int]
) -> None:
    """At whatever end of the log it was read, compacted or not, and whoever leads it then."""
    log: list[int] = []  # the epoch of each record
    epoch = 0
    for elected, count in history:
        epoch += elected
        log += [epoch] * count
    followed = LongPoll(SimpleNamespace(), [TopicInfo("in", str(UUID(int=1)), {0: 1})], {PLACE: 0})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(long_poll, "is_hole", lambda *_: True)
        for end in sorted(end for end in reads if end <= len(log)):
            start = followed.followed[PLACE].position
            there = [offset for offset in range(start, end) if offset not in gone]
            answer(followed, data=b"".join(records(offset, log[offset]) for offset in there), stable=end)
            if followed.followed[PLACE].position < end:  # a hole behind the last record
                answer(followed, stable=end)
            position, known = followed.followed[PLACE].position, followed.followed[PLACE].leader_epoch
            assert position == end
            if known >= 0:
                # Kafka: LeaderEpochFileCache.endOffsetFor. Compaction does not change it.
                told = next((offset for offset, each in enumerate(log) if each > known), len(log))
                check_log("in", {0: told}, {0: position}, {0: (position, known)}, "f")
