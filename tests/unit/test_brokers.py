"""Warnings about clusters: which settings are told, when an open transaction is told, and in which words."""

from __future__ import annotations

import pytest

from onceflow.client.brokers import (
    Held,
    OpenTransaction,
    Safety,
    StableOffsets,
    held_back_warning,
    settings_warnings,
)

GOOD = Safety("out", replicas=3, unclean=False, min_in_sync=2)


# ---- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topic, brokers",
    [
        (GOOD, 3),
        (Safety("out", replicas=1, unclean=False, min_in_sync=1), 1),  # a single broker can have no more
        (Safety("out", replicas=3), 3),  # settings may not be read
        (Safety("out", replicas=3, unclean=False, min_in_sync=3), 3),
        (Safety("out", replicas=1, unclean=False, min_in_sync=2), 1),  # brokers ask for no more than there are
    ],
)
def test_nothing_to_tell(topic: Safety, brokers: int) -> None:
    assert settings_warnings([topic], brokers) == []


@pytest.mark.parametrize(
    "topic, brokers, words",
    [
        (Safety("out", 3, True, 2), 3, "unclean.leader.election.enable=true for out: "),
        (Safety("out", 1, True, 1), 1, "unclean.leader.election.enable=true for out: "),
        (Safety("out", 1, False, 1), 2, "a single copy of out, in a cluster of 2 brokers: "),
        (Safety("out", 1), 5, "raise the replication factor to 3"),
        (Safety("out", 3, False, 1), 3, "min.insync.replicas=1 for out: "),
        (Safety("out", 2, False, 1), 2, "min.insync.replicas=1 for out: "),
    ],
)
def test_one_thing_to_tell(topic: Safety, brokers: int, words: str) -> None:
    (warning,) = settings_warnings([GOOD, topic], brokers)
    assert words in warning


def test_topics_with_the_same_fault_share_a_warning() -> None:
    topics = [Safety("b", 1, True, 1), Safety("a", 1, True, 1), Safety("c", 3, None, 1), GOOD]
    unclean, single, lonely = settings_warnings(topics, 3)
    assert "for a, b: " in unclean
    assert "of a, b, in" in single
    assert "for c: " in lonely


# ---- transactions of others ------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StableOffsets:
    return StableOffsets(60.0, clock=clock)


def look(watch: StableOffsets, stable: int, high: int) -> list[Held]:
    return watch.look({"in": {0: stable, 1: 5}}, {"in": {0: high, 1: 5}})


def test_told_when_it_stood_still_for_long(watch: StableOffsets, clock: Clock) -> None:
    assert look(watch, 7, 10) == []
    clock.now += 59.0
    assert look(watch, 7, 10) == []
    clock.now += 1.0
    assert look(watch, 7, 12) == [Held("in", 0, stable=7, high=12, seconds=60.0)]


def test_told_again_when_the_time_has_doubled(watch: StableOffsets, clock: Clock) -> None:
    told_at = []
    for _ in range(60):
        told_at += [held.seconds for held in look(watch, 7, 10)]
        clock.now += 10.0
    assert told_at == [60.0, 120.0, 240.0, 480.0]


def test_an_offset_that_moves_is_not_told(watch: StableOffsets, clock: Clock) -> None:
    """A busy topic always has open transactions; each is short."""
    for offset in range(100):
        assert look(watch, offset, offset + 3) == []
        clock.now += 30.0


def test_the_time_begins_anew_when_everything_was_decided(watch: StableOffsets, clock: Clock) -> None:
    look(watch, 7, 10)
    clock.now += 59.0
    look(watch, 10, 10)
    look(watch, 10, 11)
    clock.now += 59.0
    assert look(watch, 10, 11) == []
    clock.now += 1.0
    assert [held.seconds for held in look(watch, 10, 11)] == [60.0]


def test_a_quiet_topic_is_not_told(watch: StableOffsets, clock: Clock) -> None:
    for _ in range(5):
        assert look(watch, 7, 7) == []
        clock.now += 100.0


HELD = Held("in", 3, stable=17, high=40, seconds=65.4)
SEEN = OpenTransaction(producer_id=4001, producer_epoch=2, start_offset=17, last_write_ms=1_700_000_000_000)


@pytest.mark.parametrize(
    "transaction, words",
    [
        (None, ["offset 17 of in-3", "65 s", "23 offsets behind it", "could not be found out"]),
        (SEEN, ["4001", "epoch 2", "2023-11-14T22:13:20", "no coordinator", "--producer-id 4001 --topic"]),
        (
            OpenTransaction(4001, 2, 17, 1_700_000_000_000, "loader", "Ongoing", 1_699_999_999_000, 900_000),
            ["'loader'", "begun 2023-11-14T22:13:19", "900 s after", "4001", "`onceflow transactions abort loader`"],
        ),
        (
            OpenTransaction(4001, 2, 17, -1, "loader", "CompleteCommit", -1, 900_000),
            ["'loader' is CompleteCommit", "it hangs", "last write at an unknown time", "transactions describe"],
        ),
        (OpenTransaction(4001, 2, 17, 1_795_000_000_000_000), ["last write +58851-04-14T23:06:40+00:00"]),
        (OpenTransaction(4001, 2, 17, 2**63 - 1), ["last write +292278994-08-17T07:12:55+00:00"]),
    ],
)
def test_words(transaction: OpenTransaction | None, words: list[str]) -> None:
    text = held_back_warning(HELD, transaction)
    for word in words:
        assert word in text
    assert "abort" in text or transaction is None
