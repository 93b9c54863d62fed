"""Whether the sources of a batch are still those that its range was planned for. Logs and leaders are made up here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.client.deadline import Deadline
from onceflow.client.leader_epochs import LeaderView
from onceflow.driver.batch import source_watch
from onceflow.driver.batch.source_watch import SourceWatch
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import DataLossError, ProgressConflictError, UnknownTopicError
from onceflow.planning import source_starts
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import Progress

Record = tuple[int, int]
NUMBERS = itertools.count()


def soon() -> Deadline:
    return Deadline(5, "a test")


@dataclass
class Partition:
    """A partition, as its leaders know it: its records, each with an epoch and a number of its own."""

    epoch: int = 0
    log: list[Record] = field(default_factory=list)
    topic_id: str = "id"
    truncated_at: int = 10**9  # the lowest offset of a record that was lost
    leaderless: bool = False
    silent: bool = False  # it has a leader that does not say where epochs end

    def append(self, count: int) -> None:
        self.log += [(self.epoch, next(NUMBERS)) for _ in range(count)]

    def elect(self, *, lost: int = 0) -> None:
        """Another leader, whose log lacks the last records: an unclean one, if there are any."""
        end = max(0, len(self.log) - lost)
        if end < len(self.log):
            self.truncated_at = min(self.truncated_at, end)
        del self.log[end:]
        self.epoch += 1

    def end_of(self, epoch: int) -> int:
        """Kafka: LeaderEpochFileCache.endOffsetFor. The leader's own epoch ends where its log does."""
        return next((offset for offset, (each, _) in enumerate(self.log) if each > epoch), len(self.log))


class Cluster:
    """Its leaders answer about the partitions of one topic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *partitions: Partition) -> None:
        self.partitions = {("in", number): partition for number, partition in enumerate(partitions)}
        self.looks = 0
        monkeypatch.setattr(source_watch, "look_at_leaders", self._look)
        monkeypatch.setattr(source_watch, "epoch_ends", self._ends)

    def _look(self, cluster: Any, places: Any, deadline: Any) -> LeaderView:
        assert deadline.seconds <= source_watch._LOOK_S
        self.looks += 1
        led = {place: self.partitions[place] for place in places if not self.partitions[place].leaderless}
        ids = {topic: self.partitions[topic, number].topic_id for topic, number in led}
        return LeaderView(ids, {place: partition.epoch for place, partition in led.items()})

    def _ends(
        self, cluster: Any, epochs: Mapping[TopicPartition, int], deadline: Any, *, partial: bool
    ) -> dict[TopicPartition, int]:
        assert partial
        led = {place: epoch for place, epoch in epochs.items() if not self.partitions[place].silent}
        return {place: self.partitions[place].end_of(epoch) for place, epoch in led.items()}


def range_of(start: int, end: int, **more: Any) -> SourceRange:
    return SourceRange({"in": {0: start}}, {"in": {0: end}}, **more)


def progress_at(offset: int, **more: Any) -> Progress:
    return Progress("f", 1, {"in": {0: offset}}, {"in": "id"}, 0, **more)


class Flow:
    """Batches whose records tasks read."""

    def __init__(self, *partitions: Partition) -> None:
        self.partitions = partitions
        self.progress = Progress("f", 1, {"in": dict.fromkeys(range(len(partitions)), 0)}, {"in": "id"}, 0)
        self.watch = SourceWatch(None, "f")  # type: ignore[arg-type]
        self.reads: list[list[Record]] = [[] for _ in partitions]
        self.unknown: list[set[int]] = [set() for _ in partitions]  # offsets of which progress does not know the leader
        self.planned_to = [0 for _ in partitions]

    @property
    def read(self) -> list[Record]:
        return self.reads[0]

    def batch(self, during: Any = lambda: None) -> None:
        start = dict(self.progress.offsets["in"])
        end = {number: len(each.log) for number, each in enumerate(self.partitions)}  # as Spark plans it
        if end == start:
            return
        source = SourceRange({"in": start}, {"in": end})
        self.planned_to = [max(start[number], end[number]) for number in end]
        unknown = [each.leaderless for each in self.partitions]
        known = self.progress.epochs.get("in", {})
        unchecked = [  # one pair of progress has no place for two ranges
            each.silent and number in known and known[number][1] != each.epoch
            for number, each in enumerate(self.partitions)
        ]
        self.watch.planned(source, self.progress, soon())
        during()
        if any(len(each.log) < end[number] for number, each in enumerate(self.partitions)):
            return  # tasks wait for records that are gone, until the batch is aborted
        found = [each.log[start[number] : end[number]] for number, each in enumerate(self.partitions)]
        self.watch.was_read(source, soon())
        for number, records in enumerate(found):
            self.reads[number] += records
            partition = self.partitions[number]
            if unknown[number] or (unchecked[number] and (partition.leaderless or partition.silent)):
                self.unknown[number] |= {*range(start[number], end[number])}
        self.progress = replace(
            self.progress, offsets={"in": end}, epochs=self.watch.epochs(source, self.progress.epochs)
        )

    def start(self) -> None:
        """A start: the decision of `source_starts`, with the answers of the leaders."""
        known = self.progress.epochs.get("in", {})
        offsets = self.progress.offsets["in"]
        topic = SourceTopic(
            "in",
            "id",
            dict.fromkeys(offsets, 0),
            {number: max(len(self.partitions[number].log), offset) for number, offset in offsets.items()},
            {number: self.partitions[number].end_of(epoch) for number, (_, epoch) in known.items()},
        )
        source_starts.plan(topic, self.progress, starting_offsets="earliest", fail_on_data_loss=True, flow="f")

    def check_read(self) -> None:
        """What was read is the log, but where leaders have not answered before it was read (see the module)."""
        for number, partition in enumerate(self.partitions):
            for offset, record in enumerate(self.reads[number]):
                assert partition.log[offset : offset + 1] == [record] or offset in self.unknown[number], (
                    number,
                    offset,
                )


_MOVES = st.tuples(
    st.integers(0, 1),
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 6)),
        st.tuples(st.just("elect"), st.sampled_from([0, 0, 1, 3, 7])),
        st.tuples(st.sampled_from(["leaderless", "silent"]), st.just(0)),
    ),
)
_Moves = list[tuple[int, tuple[str, int]]]


def _happen(partitions: Sequence[Partition], moves: _Moves) -> None:
    for number, (kind, count) in moves:
        partition = partitions[number]
        if kind == "append":
            partition.append(count)
        elif kind == "elect":
            partition.elect(lost=count)
        else:
            setattr(partition, kind, not getattr(partition, kind))


_SOME_MOVES = st.lists(_MOVES, max_size=4)


def after_a_batch(monkeypatch: pytest.MonkeyPatch, records: int) -> tuple[Partition, Flow]:
    """A source partition, and a flow that has read so many records of it in one batch."""
    partition = Partition()
    Cluster(monkeypatch, partition)
    flow = Flow(partition)
    partition.append(records)
    flow.batch()
    return partition, flow


@given(st.lists(st.tuples(_SOME_MOVES, st.booleans(), _SOME_MOVES), max_size=6), st.booleans())
def test_no_record_is_read_in_place_of_another_one(rounds: list[tuple[_Moves, bool, _Moves]], starts: bool) -> None:
    """What a batch has committed is the log up to there, or the next batch or start is refused as soon as the leaders
    answer. It is only refused if a record of it is gone.

    Args:
        rounds: what happens before a batch, whether the flow was stopped then, and what happens during the batch.
        starts: whether the flow is started again at the end, or has another batch.
    """
    partitions = (Partition(), Partition())
    with pytest.MonkeyPatch.context() as patched:
        Cluster(patched, *partitions)
        flow = Flow(*partitions)
        try:
            for before, stopped, during in rounds:
                _happen(partitions, before)
                if stopped and not any(each.leaderless or each.silent for each in partitions):
                    flow.start()
                    flow.check_read()
                flow.batch(lambda during=during: _happen(partitions, during))
                assert [len(found) for found in flow.reads] == [*flow.progress.offsets["in"].values()]
            for partition in partitions:
                partition.leaderless = partition.silent = False
                partition.append(20)
            (flow.start if starts else flow.batch)()
        except DataLossError:
            lost = zip(partitions, flow.planned_to, strict=True)
            assert any(partition.truncated_at < planned_to for partition, planned_to in lost)
            return
        flow.check_read()


def test_clean_elections_are_no_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Partition()
    flow = Flow(partition)
    cluster = Cluster(monkeypatch, partition)
    for _ in range(5):
        partition.append(3)
        flow.batch(partition.elect)
        flow.start()
    assert flow.read == partition.log
    assert flow.progress.epochs == {"in": {0: (15, 4)}}
    assert cluster.looks == 10


@pytest.mark.parametrize("lost, noticed", [(0, False), (2, True)])
def test_a_start_after_an_election(lost: int, noticed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    partition, flow = after_a_batch(monkeypatch, 10)
    partition.elect(lost=lost)
    partition.append(20)
    if not noticed:
        flow.start()
        flow.batch()
        assert len(flow.read) == 30
        return
    for see in (flow.start, flow.batch):
        with pytest.raises(DataLossError, match="truncated at offset 8") as caught:
            see()
        assert caught.value.topic == "in-0"
        assert "onceflow reset f --to offsets=in:0=8" in caught.value.next_step


def test_a_log_that_is_replaced_while_a_batch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows which of the records were read. The batch is aborted, so the next start reads what is there now."""
    partition, flow = after_a_batch(monkeypatch, 5)
    partition.append(5)

    def replace_end() -> None:
        partition.elect(lost=2)
        partition.append(9)

    with pytest.raises(DataLossError, match="truncated at offset 8"):
        flow.batch(replace_end)
    flow.start()
    flow.batch()
    assert flow.read == partition.log


def test_a_topic_that_is_created_again_while_a_batch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Partition()
    Cluster(monkeypatch, partition)
    flow = Flow(partition)
    partition.append(5)

    def again() -> None:
        partition.topic_id, partition.epoch, partition.log = "new", 0, []
        partition.append(50)

    with pytest.raises(UnknownTopicError, match="deleted and created again") as caught:
        flow.batch(again)
    assert flow.progress.offsets == {"in": {0: 0}}
    assert "is new" in caught.value.detail
    with pytest.raises(UnknownTopicError):
        flow.batch()


@pytest.mark.parametrize("knows_epochs", [True, False])
@pytest.mark.parametrize("how", ["truncated", "created again", "restored"])
def test_progress_never_goes_back_with_a_log(how: str, knows_epochs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark plans a range that ends before its start, if it may lose data. Not all that is gone was unread."""
    partition, flow = after_a_batch(monkeypatch, 9)
    if not knows_epochs:
        flow.progress = replace(flow.progress, epochs={})
    if how == "truncated":
        partition.elect(lost=4)
    else:
        del partition.log[5:]
    if how == "created again":
        partition.topic_id = "another"
    expected = UnknownTopicError if how == "created again" else DataLossError
    with pytest.raises(expected, match="created again" if how == "created again" else "offset 5") as caught:
        flow.batch()
    assert caught.value.topic in ("in", "in-0")
    assert flow.progress.offsets == {"in": {0: 9}}


@pytest.mark.parametrize("news", [0, 3])
def test_progress_forgets_no_partition(news: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark leaves out what it does not see, if it may lose data. When it is seen again, it would be read anew."""
    partition, flow = after_a_batch(monkeypatch, 9)
    partition.append(news)
    source = SourceRange({"in": {0: 9, 1: 4}}, {"in": {0: 9 + news}})
    with pytest.raises(ProgressConflictError, match="Partition in-1, which this flow has read, is not there"):
        flow.watch.planned(source, flow.progress, soon())


def test_what_the_driver_has_fetched_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, Partition(epoch=7))
    watch = SourceWatch(None, "f")  # type: ignore[arg-type]
    source = range_of(4, 9, epochs={("in", 0): 3})
    before = {"in": {0: (4, 2), 1: (8, 1)}}
    watch.planned(source, progress_at(4), soon())
    watch.was_read(source, soon())
    assert watch.epochs(source, before) == {"in": {0: (9, 3), 1: (8, 1)}}
    assert cluster.looks == 0
    assert watch.epochs(range_of(9, 9), before) == before, "a batch without records"


def test_progress_of_an_earlier_onceflow_knows_no_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, Partition(epoch=7))
    watch = SourceWatch(None, "f")  # type: ignore[arg-type]
    source = range_of(4, 9)
    watch.planned(source, progress_at(4), soon())
    watch.was_read(source, soon())
    assert watch.epochs(source, {}) == {"in": {0: (9, 7)}}


def test_a_partition_without_a_leader_does_not_hold_up_the_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known then who has led it to the end of the batch. The next batch is checked again."""
    partition, flow = after_a_batch(monkeypatch, 5)
    assert flow.progress.epochs == {"in": {0: (5, 0)}}
    partition.append(5)
    flow.batch(lambda: setattr(partition, "leaderless", True))
    assert flow.progress.offsets == {"in": {0: 10}}
    assert flow.progress.epochs == {"in": {0: (10, 0)}}, "the leader that had the range when it was planned"
    partition.append(5)

    def elect() -> None:
        partition.elect()
        partition.leaderless = False

    flow.batch(elect)  # not known before it was read
    assert flow.progress.epochs == {"in": {0: (10, 0)}}, "what is known of an earlier offset"
    partition.append(5)
    flow.batch()
    assert flow.progress.epochs == {"in": {0: (20, 1)}}
    assert flow.read == partition.log
    partition.elect()
    partition.silent = True
    partition.append(5)
    flow.batch()
    assert flow.progress.epochs == {"in": {0: (20, 1)}}, "whether the log has what is before this batch is not known"
    partition.append(5)
    flow.batch(partition.elect)
    assert flow.progress.epochs == {"in": {0: (20, 1)}}
    partition.silent = False
    partition.append(5)
    flow.batch()
    assert flow.progress.epochs == {"in": {0: (35, 3)}}
    assert flow.read == partition.log


@pytest.mark.parametrize("see", [Flow.start, Flow.batch])
def test_a_check_that_could_not_be_done_in_a_batch_is_done_later(see: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader of the whole batch does not say whether it has what was read before. So progress keeps what it knows
    of that."""
    partition, flow = after_a_batch(monkeypatch, 10)
    partition.elect(lost=3)
    partition.append(9)
    partition.silent = True
    flow.batch()
    assert flow.progress.offsets == {"in": {0: 16}}
    assert flow.progress.epochs == {"in": {0: (10, 0)}}
    partition.silent = False
    partition.append(3)
    with pytest.raises(DataLossError, match="truncated at offset 7"):
        see(flow)


def test_what_could_not_be_checked_before_the_batch_is_checked_when_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition, flow = after_a_batch(monkeypatch, 10)
    partition.elect(lost=4)
    partition.append(9)
    partition.leaderless = True
    with pytest.raises(DataLossError, match="truncated at offset 6"):
        flow.batch(lambda: setattr(partition, "leaderless", False))


@pytest.mark.parametrize("answers", ["leaderless", "silent"])
@pytest.mark.parametrize("see", [Flow.start, Flow.batch])
def test_what_was_planned_is_known_though_no_leader_answers_after_the_batch(
    see: Any, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the batch that are lost afterwards are noticed: the leader before it had all of its range."""
    partition, flow = after_a_batch(monkeypatch, 5)
    partition.append(5)

    def fall_silent() -> None:
        partition.elect()
        setattr(partition, answers, True)

    flow.batch(fall_silent)
    assert flow.progress.epochs == {"in": {0: (10, 0)}}
    setattr(partition, answers, False)
    partition.elect(lost=3)
    partition.append(9)
    with pytest.raises(DataLossError, match="truncated at offset 7"):
        see(flow)


def test_a_leader_that_was_silent_before_the_batch_and_is_the_same_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has led all the time, so what is known of it is true of the records of the batch."""
    partition, flow = after_a_batch(monkeypatch, 5)
    partition.leaderless = True
    partition.append(5)
    flow.batch(lambda: setattr(partition, "leaderless", False))
    assert flow.progress.epochs == {"in": {0: (10, 0)}}


def test_leaders_are_asked_about_logs_even_if_the_look_has_taken_all_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One partition has no leader. The leader of the other one has changed, and has lost records."""
    left: list[float] = []

    def look(cluster: Any, places: Any, deadline: Any) -> LeaderView:
        time.sleep(deadline.remaining)
        return LeaderView({"in": "id"}, {("in", 1): 6})

    def ends(cluster: Any, epochs: Any, deadline: Any, *, partial: bool) -> dict[TopicPartition, int]:
        left.append(deadline.remaining)
        return {("in", 1): 8}

    monkeypatch.setattr(source_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(source_watch, "look_at_leaders", look)
    monkeypatch.setattr(source_watch, "epoch_ends", ends)
    source = SourceRange({"in": {0: 10, 1: 10}}, {"in": {0: 20, 1: 20}})
    progress = Progress("f", 1, source.start, {"in": "id"}, 0, epochs={"in": {0: (10, 5), 1: (10, 5)}})
    with pytest.raises(DataLossError, match="truncated at offset 8"):
        SourceWatch(None, "f").planned(source, progress, soon())  # type: ignore[arg-type]
    assert 0.5 < left[0] <= 1


def test_progress_that_is_written_before_the_records_are_read_keeps_what_was_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with ``at_most_once``."""
    Cluster(monkeypatch, Partition(epoch=1, silent=True))
    watch = SourceWatch(None, "f")  # type: ignore[arg-type]
    source = range_of(10, 16)
    progress = progress_at(10, epochs={"in": {0: (10, 0)}})
    watch.planned(source, progress, soon())
    assert watch.epochs(source, progress.epochs) == {"in": {0: (10, 0)}}


def test_a_move_accepts_the_truncation() -> None:
    """A position before the one that is known asks only for what is before it; `onceflow reset --to` forgets it."""
    progress = progress_at(10, epochs={"in": {0: (10, 1)}})
    topic = SourceTopic("in", "id", {0: 0}, {0: 30}, {0: 8})

    def start(found: Progress) -> None:
        source_starts.plan(topic, found, starting_offsets="earliest", fail_on_data_loss=False, flow="f")

    with pytest.raises(DataLossError, match="truncated at offset 8"):
        start(progress)
    start(replace(progress, offsets={"in": {0: 8}}))
