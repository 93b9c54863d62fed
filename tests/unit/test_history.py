"""The checker of histories: valid ones pass, and every way of breaking one is called by its name."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow import Record, hooks
from onceflow.driver.record.offset_log import SourceRange
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.testing import recorder
from onceflow.testing.history import (
    ABORTED_READ,
    DUPLICATE,
    FAIL,
    FAILED,
    FOREIGN,
    GAP,
    HEADER,
    INFO,
    INVOKE,
    KINDS,
    LOST,
    OK,
    ORDER,
    PASSED,
    STATE,
    TORN,
    UNKNOWN,
    Final,
    History,
    Op,
    Read,
    Reads,
    Tag,
    Verdict,
    check,
)
from onceflow.testing.recorder import Recorder, load, tag_of

FLOW = "orders"
PLACES = [("left", 0), ("left", 1), ("right", 0)]
BATCHES = 9
# What becomes of the attempts of a batch; the last one commits. "gone": begun, and nothing of it is left.
PLANS = {
    2: ["fail", "ok"],
    3: ["gone", "ok"],
    4: ["late"],
    5: ["gone", "late"],
    6: ["fail", "gone", "fail", "ok"],
    7: ["ok"],
}


def nested(offsets: dict[tuple[str, int], int]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in offsets.items():
        found.setdefault(topic, {})[partition] = offset
    return found


@dataclass
class World:
    """A run of several drivers, and what is there in the end."""

    ops: list[Op] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    progress: list[tuple[int, dict[str, dict[int, int]]]] = field(default_factory=list)
    sources: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    state: dict[str, int] | None = None
    replay: dict[str, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    epoch: int = 0

    def check(self, **options: Any) -> Verdict:
        final = Final(
            FLOW, Reads(self.reads), self.progress, self.sources, not self.why, self.why, self.state, self.replay
        )
        return check(History.parse(op.to_json() for op in self.ops), final, **{**self.options, **options})

    # ---- to be mutated ---------------------------------------------------------------------------------

    def begin(self, batch: int, start: Any, end: Any) -> str:
        self.epoch += 1
        attempt = f"7:{self.epoch}"
        self.ops.append(Op(INVOKE, FLOW, batch, attempt, "driver-1", self.epoch, nested(start), nested(end)))
        return attempt

    def complete(self, kind: str, batch: int, attempt: str) -> None:
        self.ops.append(Op(kind, FLOW, batch, attempt, "driver-1", self.epoch))

    def attempts(self, batch: int) -> list[str]:
        return [op.attempt for op in self.ops if op.batch == batch and op.kind == INVOKE]

    def of(self, batch: int) -> list[Read]:
        return [read for read in self.reads if read.tag is not None and read.tag.batch == batch]

    def put(self, tag: Tag | None, like: Read | None = None) -> None:
        """One more record behind all others."""
        like = like or self.reads[0]
        self.reads.append(like._replace(offset=max(read.offset for read in self.reads) + 2, tag=tag))

    def next_batch(self) -> tuple[int, Any, Any]:
        """Number and range of a batch that is not there yet: its source records are."""
        last = {(t, p): offset for t, found in self.progress[-1][1].items() for p, offset in found.items()}
        end = {place: offset + 3 for place, offset in last.items()}
        for place, offset in last.items():
            self.sources[place] = sorted({*self.sources[place], *range(offset, offset + 3)})
        return self.progress[-1][0] + 1, last, end


def outputs_of_some(topic: str, partition: int, offset: int) -> int:
    return 2 if offset % 5 == 0 else offset % 3


def make(seed: int, outputs_of: Any = 1) -> World:
    rng = random.Random(seed)
    world = World(options={"outputs_of": outputs_of})
    position = {place: rng.randrange(3) for place in PLACES}
    world.progress = [(0, {"left": nested(position)["left"]}), (0, nested(position))]
    world.sources = {place: [o for o in range(300) if o % 10 == 5 or rng.random() < 0.9] for place in PLACES}
    ends = {partition: rng.randrange(5) for partition in range(3)}
    counts: dict[str, int] = {}
    for batch in range(1, BATCHES + 1):
        end = {place: offset + rng.randint(11, 25) for place, offset in position.items()}
        for outcome in PLANS.get(batch) or [
            *rng.choices(["fail", "gone"], k=rng.randrange(3)),
            rng.choice(["ok", "late"]),
        ]:
            attempt = world.begin(batch, position, end)
            if outcome == "fail":
                world.complete(FAIL, batch, attempt)
                ends = {partition: offset + rng.randrange(20) for partition, offset in ends.items()}
            if outcome == "gone" and rng.random() < 0.5:
                world.complete(INFO, batch, attempt)
        places = rng.sample(PLACES, len(PLACES))
        for topic, partition in places:
            for offset in world.sources[topic, partition]:
                if not position[topic, partition] <= offset < end[topic, partition]:
                    continue
                key = b"key-%d" % (offset % 4)
                for n in range(outputs_of(topic, partition, offset) if callable(outputs_of) else outputs_of):
                    tag = Tag(FLOW, batch, attempt, topic, partition, offset, n)
                    world.reads.append(Read("out", offset % 2, ends[offset % 2], key if offset % 7 else None, tag))
                    ends[offset % 2] += 1
                counts[key.decode()] = counts.get(key.decode(), 0) + 1
        ends = {partition: offset + 1 for partition, offset in ends.items()}  # the marker
        position = end
        world.progress.append((batch, nested(position)))
        if outcome == "ok":
            world.complete(OK, batch, attempt)
        if rng.random() < 0.2:
            world.progress.append(world.progress[-1])  # a start that decided something
    world.state, world.replay = counts, dict(counts)
    return world


seeds = st.integers(0, 2**32)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from([1, 2, outputs_of_some]))
def test_valid_histories_pass(seed: int, outputs_of: Any) -> None:
    world = make(seed, outputs_of)
    random.Random(seed).shuffle(world.reads)
    verdict = world.check()
    assert verdict.verdict == PASSED, verdict
    assert verdict.anomalies == ()
    assert verdict.counts["reads"] == verdict.counts["expected"] == len(world.reads)
    assert verdict.counts["committed"] == BATCHES
    assert verdict.counts["ok"] + verdict.counts["info"] >= BATCHES
    assert json.loads(json.dumps(verdict.as_json()))["verdict"] == PASSED


# ---- what can go wrong -----------------------------------------------------------------------------------

Mutation = Callable[[World, random.Random], None]
MUTATIONS: list[Any] = []


def mutation(*kinds: str) -> Callable[[Mutation], Mutation]:
    """A way to break a history, and every kind of anomaly that it must be called."""

    def register(mutate: Mutation) -> Mutation:
        MUTATIONS.append(pytest.param(mutate, set(kinds), id=mutate.__name__))
        return mutate

    return register


@mutation(LOST, TORN)
def one_output_is_missing(world: World, rng: random.Random) -> None:
    world.reads.remove(rng.choice(world.reads))


@mutation(LOST, TORN)
def one_source_record_has_no_output(world: World, rng: random.Random) -> None:
    gone = rng.choice(world.reads).tag
    assert gone is not None
    world.reads = [read for read in world.reads if read.tag is None or read.tag[3:6] != gone[3:6]]


@mutation(LOST, TORN)
def nothing_of_an_acknowledged_batch(world: World, rng: random.Random) -> None:
    world.reads = [read for read in world.reads if read not in world.of(7)]


@mutation(LOST, TORN)
def progress_without_outputs(world: World, rng: random.Random) -> None:
    world.reads = [read for read in world.reads if read not in world.of(4)]


@mutation(LOST, TORN)
def half_of_a_batch_that_nobody_acknowledged(world: World, rng: random.Random) -> None:
    found = world.of(5)
    world.reads = [read for read in world.reads if read not in rng.sample(found, len(found) // 2)]


@mutation(LOST, TORN)
def one_output_partition_of_a_batch_is_missing(world: World, rng: random.Random) -> None:
    world.reads = [read for read in world.reads if read not in world.of(6) or read.partition == 0]


@mutation(LOST)
def acknowledged_and_nothing_there(world: World, rng: random.Random) -> None:
    batch, start, end = world.next_batch()
    world.complete(OK, batch, world.begin(batch, start, end))


@mutation(LOST, TORN)
def acknowledged_and_progress_is_missing(world: World, rng: random.Random) -> None:
    world.progress = [(batch, offsets) for batch, offsets in world.progress if batch != BATCHES]
    world.complete(OK, BATCHES, world.attempts(BATCHES)[-1])


@mutation(TORN, GAP)
def progress_of_a_batch_is_missing(world: World, rng: random.Random) -> None:
    world.progress = [(batch, offsets) for batch, offsets in world.progress if batch != 4]


@mutation(TORN)
def no_progress_at_all(world: World, rng: random.Random) -> None:
    world.progress = []


@mutation(TORN)
def outputs_of_a_batch_without_progress(world: World, rng: random.Random) -> None:
    batch, start, end = world.next_batch()
    attempt = world.begin(batch, start, end)
    for offset in range(start["left", 0], start["left", 0] + rng.randint(1, 3)):
        world.put(Tag(FLOW, batch, attempt, "left", 0, offset, 0))


@mutation(TORN, ABORTED_READ)
def outputs_of_an_aborted_batch(world: World, rng: random.Random) -> None:
    batch, start, end = world.next_batch()
    attempt = world.begin(batch, start, end)
    world.complete(FAIL, batch, attempt)
    world.put(Tag(FLOW, batch, attempt, "left", 0, start["left", 0], 0))


@mutation(LOST, TORN, ABORTED_READ)
def progress_of_an_aborted_batch(world: World, rng: random.Random) -> None:
    batch, start, end = world.next_batch()
    world.complete(FAIL, batch, world.begin(batch, start, end))
    world.progress.append((batch, nested(end)))


@mutation(DUPLICATE, ABORTED_READ)
def an_aborted_attempt_is_visible_too(world: World, rng: random.Random) -> None:
    first = world.attempts(6)[0]
    for read in rng.sample(world.of(6), 3):
        assert read.tag is not None
        world.put(read.tag._replace(attempt=first), read._replace(key=None))


@mutation(ABORTED_READ)
def an_aborted_attempt_is_visible_instead(world: World, rng: random.Random) -> None:
    def moved(read: Read) -> Read:
        return (
            read if read not in world.of(2) or read.tag is None else read._replace(tag=read.tag._replace(attempt=first))
        )

    first = world.attempts(2)[0]
    world.reads = [moved(read) for read in world.reads]


@mutation(ABORTED_READ)
def another_attempt_than_the_acknowledged_one_is_visible(world: World, rng: random.Random) -> None:
    first = world.attempts(3)[0]  # nobody knows what became of it, but the second one is committed
    ours = world.of(3)
    world.reads = [r._replace(tag=r.tag._replace(attempt=first)) if r.tag and r in ours else r for r in world.reads]


@mutation(ABORTED_READ)
def an_output_of_an_aborted_source_record(world: World, rng: random.Random) -> None:
    read = rng.choice(world.reads)
    assert read.tag is not None
    world.sources[read.tag.topic, read.tag.partition].remove(read.tag.offset)


@mutation(DUPLICATE)
def an_output_is_there_twice(world: World, rng: random.Random) -> None:
    read = rng.choice(world.reads)
    world.put(read.tag, read._replace(key=None))


@mutation(DUPLICATE)
def an_output_is_there_twice_in_different_topics(world: World, rng: random.Random) -> None:
    read = rng.choice(world.reads)
    world.put(read.tag, read._replace(topic="other"))


@mutation(DUPLICATE)
def two_attempts_are_visible(world: World, rng: random.Random) -> None:
    first, _ = world.attempts(5)
    for read in world.of(5):
        assert read.tag is not None
        world.put(read.tag._replace(attempt=first), read._replace(key=None))


@mutation(DUPLICATE)
def two_attempts_share_a_batch(world: World, rng: random.Random) -> None:
    first, _ = world.attempts(5)
    index = world.reads.index(rng.choice(world.of(5)))
    read = world.reads[index]
    assert read.tag is not None
    world.reads[index] = read._replace(tag=read.tag._replace(attempt=first))


@mutation(DUPLICATE)
def two_attempts_are_acknowledged(world: World, rng: random.Random) -> None:
    world.complete(OK, 3, world.attempts(3)[0])


@mutation(DUPLICATE)
def more_outputs_than_there_should_be(world: World, rng: random.Random) -> None:
    read = rng.choice(world.reads)
    assert read.tag is not None
    world.put(read.tag._replace(n=world.options["outputs_of"]), read._replace(key=None))


def shift(world: World, batch: int, side: str, by: int) -> None:
    for index, op in enumerate(world.ops):
        if op.batch == batch and op.kind == INVOKE:
            offsets = {topic: dict(found) for topic, found in getattr(op, side).items()}
            offsets["left"][1] += by
            world.ops[index] = replace(op, **{side: offsets})


@mutation(GAP)
def a_batch_starts_behind_progress(world: World, rng: random.Random) -> None:
    shift(world, rng.randint(2, BATCHES), "start", 1)


@mutation(GAP)
def a_batch_starts_before_progress(world: World, rng: random.Random) -> None:
    shift(world, rng.randint(2, BATCHES), "start", -rng.randint(1, 5))


@mutation(GAP)
def progress_ends_behind_the_batch(world: World, rng: random.Random) -> None:
    shift(world, rng.randint(1, BATCHES), "end", -1)


@mutation(GAP)
def progress_ends_before_the_batch(world: World, rng: random.Random) -> None:
    shift(world, rng.randint(1, BATCHES), "end", 1)


@mutation(GAP)
def progress_goes_back(world: World, rng: random.Random) -> None:
    index = next(i for i, (batch, _) in enumerate(world.progress) if batch == 6)
    before = {topic: dict(found) for topic, found in world.progress[index - 1][1].items()}
    before["right"][0] -= 1
    world.progress[index] = 6, before


@mutation(GAP)
def progress_forgets_a_partition(world: World, rng: random.Random) -> None:
    batch, offsets = world.progress[-1]
    world.progress.append((batch, {"left": offsets["left"]}))


@mutation(GAP)
def progress_of_one_batch_is_moved_twice(world: World, rng: random.Random) -> None:
    index = next(i for i, (batch, _) in enumerate(world.progress) if batch == 6)
    world.progress[index:index] = [(5, world.progress[index][1])]


@mutation(GAP)
def a_batch_number_is_left_out(world: World, rng: random.Random) -> None:
    world.progress = [(batch + (batch >= 6), offsets) for batch, offsets in world.progress]
    world.ops = [replace(op, batch=op.batch + (op.batch >= 6)) for op in world.ops]
    world.reads = [
        read._replace(tag=read.tag._replace(batch=read.tag.batch + (read.tag.batch >= 6))) if read.tag else read
        for read in world.reads
    ]


@mutation(GAP)
def an_output_of_a_record_of_another_batch(world: World, rng: random.Random) -> None:
    index = world.reads.index(rng.choice(world.of(7)))
    read = world.reads[index]
    assert read.tag is not None
    world.reads[index] = read._replace(tag=read.tag._replace(batch=4, attempt=world.attempts(4)[0]))


@mutation(ORDER)
def two_outputs_of_a_key_change_places(world: World, rng: random.Random) -> None:
    groups: dict[Any, list[int]] = {}
    for index, read in enumerate(world.reads):
        if read.key is not None and read.tag is not None:
            groups.setdefault((read.partition, read.key, read.tag[3:5]), []).append(index)
    first, second = rng.sample(next(found for found in groups.values() if len(found) > 1), 2)
    a, b = world.reads[first], world.reads[second]
    world.reads[first], world.reads[second] = a._replace(offset=b.offset), b._replace(offset=a.offset)


@mutation(STATE)
def a_value_of_the_state_is_wrong(world: World, rng: random.Random) -> None:
    assert world.state is not None
    world.state[rng.choice(sorted(world.state))] += 1


@mutation(STATE)
def the_state_lacks_a_key(world: World, rng: random.Random) -> None:
    assert world.state is not None
    del world.state[rng.choice(sorted(world.state))]


@mutation(STATE)
def the_state_has_another_key(world: World, rng: random.Random) -> None:
    assert world.state is not None
    world.state["key-4"] = 1


@mutation(FOREIGN)
def an_output_without_a_tag(world: World, rng: random.Random) -> None:
    world.put(None)


@mutation(FOREIGN)
def an_output_of_another_flow(world: World, rng: random.Random) -> None:
    world.put(Tag("invoices", 1, "8:1", "left", 0, 7, 0))


@mutation(FOREIGN, LOST, TORN)
def a_tag_that_was_lost(world: World, rng: random.Random) -> None:
    index = rng.randrange(len(world.reads))
    world.reads[index] = world.reads[index]._replace(tag=None)


@mutation(FOREIGN)
def a_batch_that_nobody_recorded(world: World, rng: random.Random) -> None:
    world.ops = [op for op in world.ops if op.batch != 7]


@mutation(FOREIGN)
def an_attempt_that_nobody_recorded(world: World, rng: random.Random) -> None:
    last = world.attempts(5)[-1]
    world.ops = [op for op in world.ops if op.attempt != last]


@pytest.mark.parametrize("mutate, kinds", MUTATIONS)
@settings(max_examples=4, deadline=None)
@given(seed=seeds, outputs_of=st.sampled_from([1, 2]))
def test_mutations_are_called_by_their_names(mutate: Mutation, kinds: set[str], seed: int, outputs_of: int) -> None:
    world = make(seed, outputs_of)
    mutate(world, random.Random(seed))
    verdict = world.check()
    assert verdict.verdict == FAILED
    assert kinds <= verdict.kinds, verdict
    # Whatever else follows from it, nothing that has to do with other things.
    allowed = kinds | ({TORN, LOST, GAP, DUPLICATE} if kinds & {TORN, GAP} else set())
    assert verdict.kinds <= allowed, verdict
    assert sum(verdict.counts[kind] for kind in verdict.kinds) >= len(verdict.anomalies)
    json.dumps(verdict.as_json())


def test_every_kind_has_a_mutation() -> None:
    assert set().union(*(parameters.values[1] for parameters in MUTATIONS)) == set(KINDS)


def test_an_anomaly_says_where() -> None:
    world = make(1)
    gone = world.of(7)[3]
    assert gone.tag is not None
    world.reads.remove(gone)
    lost, torn = world.check().anomalies
    assert (lost.kind, lost.batch, lost.count) == (LOST, 7, 1)
    assert (lost.place, lost.offset) == ((gone.tag.topic, gone.tag.partition), gone.tag.offset)
    assert torn.batch == 7
    assert f"1 of its {len(world.of(7)) + 1} outputs" in torn.detail

    world = make(1)
    read = world.of(6)[0]
    assert read.tag is not None
    world.put(read.tag._replace(attempt=world.attempts(6)[0]), read._replace(key=None))
    aborted = next(anomaly for anomaly in world.check().anomalies if anomaly.kind == ABORTED_READ)
    assert (aborted.batch, aborted.attempt, aborted.count) == (6, world.attempts(6)[0], 1)


def test_examples_are_few_and_counts_are_whole() -> None:
    world = make(1)
    world.state = {}
    assert world.replay is not None
    world.replay = {f"key-{n}": n for n in range(100)}
    verdict = world.check()
    assert len(verdict.anomalies) == 20
    assert verdict.counts[STATE] == 100


def test_foreign_outputs_may_be_allowed() -> None:
    world = make(3)
    an_output_without_a_tag(world, random.Random(3))
    an_output_of_another_flow(world, random.Random(3))
    assert world.check().kinds == {FOREIGN}
    assert world.check(foreign=True).verdict == PASSED


def test_order_may_be_none() -> None:
    world = make(3)
    two_outputs_of_a_key_change_places(world, random.Random(3))
    assert world.check(ordered=False).verdict == PASSED


def test_outputs_of_one_source_record_are_in_order() -> None:
    world = make(3, 2)
    at = next(i for i, read in enumerate(world.reads) if read.key is not None and read.tag and read.tag.n == 0)
    first, second = world.reads[at : at + 2]
    world.reads[at : at + 2] = [first._replace(offset=second.offset), second._replace(offset=first.offset)]
    assert world.check().kinds == {ORDER}


def test_a_later_start() -> None:
    """Batches before the start are not looked at, for example those of drivers that did not record."""
    world = make(3)
    world.reads = [read for read in world.reads if read.tag is not None and read.tag.batch > 3]
    assert world.check().verdict == FAILED
    middle = next(offsets for batch, offsets in world.progress if batch == 3)
    assert world.check(start=middle).verdict == PASSED


def test_new_partitions_start_at_their_beginning() -> None:
    """A partition that progress does not know: the batch tells where it starts."""
    world = make(3)
    batch, start, end = world.next_batch()
    end["left", 2] = 9
    world.sources["left", 2] = [5, 6, 8]
    start["left", 2] = 5
    attempt = world.begin(batch, start, end)
    for (topic, partition), last in end.items():
        for offset in world.sources[topic, partition]:
            if start[topic, partition] <= offset < last:
                world.put(Tag(FLOW, batch, attempt, topic, partition, offset))
    world.progress.append((batch, nested(end)))
    assert world.check(ordered=False).verdict == PASSED
    del world.reads[-1]
    assert world.check(ordered=False).kinds == {LOST, TORN}


@pytest.mark.parametrize("left", [1, 2], ids=["one old record", "none"])
def test_compaction_of_the_progress_topic(left: int) -> None:
    """The first records are gone; what they told is not checked, the rest is."""
    world = make(3)
    of_batch = {batch: (batch, offsets) for batch, offsets in world.progress}
    world.progress = [of_batch[n] for n in ([2, 6, 7, 8, 9] if left == 1 else [6, 7, 8, 9])]
    assert world.check().verdict == PASSED
    world.reads.remove(world.of(8)[0])
    assert world.check().kinds == {LOST, TORN}


def test_topics_that_are_not_read_any_more_stay_in_progress() -> None:
    world = make(3)
    world.progress = [(batch, {**offsets, "old": {0: 17}}) for batch, offsets in world.progress]
    assert world.check().verdict == PASSED


# ---- unknown ---------------------------------------------------------------------------------------------


def test_nothing_recorded_is_unknown() -> None:
    world = make(1)
    world.ops = []
    assert (world.check().verdict, world.check().why) == (UNKNOWN, "nothing was recorded")
    assert check(History(), Final(FLOW, Reads(), [], {})).verdict == UNKNOWN


def test_another_flows_history_is_unknown() -> None:
    world = make(1)
    world.ops = [replace(op, flow="invoices") for op in world.ops]
    assert world.check().verdict == UNKNOWN


def test_an_incomplete_read_is_unknown() -> None:
    world = make(1)
    one_output_is_missing(world, random.Random(1))
    world.why = "out was not read to its end in time"
    verdict = world.check()
    assert verdict.verdict == UNKNOWN
    assert world.why in verdict.why
    assert verdict.anomalies == ()


def test_nothing_committed_is_unknown() -> None:
    world = World()
    attempt = world.begin(1, {("left", 0): 0}, {("left", 0): 5})
    world.sources = {("left", 0): [0, 1, 2]}
    world.progress = [(0, {"left": {0: 0}})]
    assert world.check().verdict == UNKNOWN
    world.complete(FAIL, 1, attempt)
    assert world.check().verdict == UNKNOWN
    assert "no batch was committed" in world.check().why


@pytest.mark.parametrize("missing", ["state", "replay"])
def test_half_of_a_comparison_is_unknown(missing: str) -> None:
    world = make(1)
    setattr(world, missing, None)
    assert world.check().verdict == UNKNOWN


# ---- lines and tags --------------------------------------------------------------------------------------


def test_a_torn_last_line() -> None:
    """A driver was killed while it wrote; another one goes on in a line of its own."""
    world = make(1)
    lines = [op.to_json() for op in world.ops]
    whole = History.parse(lines)
    assert whole.ops == world.ops
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        torn = History.parse([*lines[:-1], lines[-1][:cut]])
        assert (torn.ops, torn.torn) == (world.ops[:-1], 1)
    between = History.parse([*lines[:5], lines[5][:30], "", *lines[5:]])
    assert (between.ops, between.torn) == (world.ops, 1)


def test_an_acknowledgement_that_was_torn_counts_as_info() -> None:
    world = make(1)
    index = max(i for i, op in enumerate(world.ops) if op.kind == OK)
    gone = world.ops.pop(index)
    attempts = History(world.ops).attempts(FLOW)
    assert attempts[gone.batch, gone.attempt].status == INFO
    assert world.check().verdict == PASSED


@pytest.mark.parametrize("text", ["[]", "7", "{}", '{"kind": "ok"}', '{"kind":"done","start":{},"end":{}}'])
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a line of a history"):
        History.parse([text])


def test_a_file_that_is_no_history_is_refused() -> None:
    with pytest.raises(ValueError, match="not a history: 3 lines are no JSON"):
        History.parse(["once", "upon", "a"])


def test_an_identity_that_was_begun_again() -> None:
    """What became of it the first time does not hold for the second."""
    world = World()
    attempt = world.begin(1, {("left", 0): 0}, {("left", 0): 5})
    world.complete(FAIL, 1, attempt)
    world.ops.append(world.ops[0])
    assert History(world.ops).attempts(FLOW)[1, attempt].status == INFO
    world.complete(OK, 1, attempt)
    assert History(world.ops).attempts(FLOW)[1, attempt].status == OK


def test_tags() -> None:
    tag = Tag(FLOW, 7, "4711:12", "in", 3, 2**62, 1)
    assert tag.encode() == b'["orders",7,"4711:12","in",3,4611686018427387904,1]'
    assert Tag.decode(tag.encode()) == tag


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        b"7",
        b"[" * 100_000,
        b'["orders",7,"4:1","in",3,12]',
        b'["orders",7,"4:1","in",3,12,0,0]',
        b'["orders","7","4:1","in",3,12,0]',
        b'["orders",7,4,"in",3,12,0]',
        b'["orders",7,"4:1","in",3,12,true]',
        b'["orders",7,"4:1","in",3,1.5,0]',
        b'["orders",7,"4:1","in",3,-1,0]',
        b'["orders",7,"4:1","in",3,9223372036854775808,0]',
    ],
)
def test_unreadable_tags_are_foreign(data: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        Tag.decode(data)
    world = make(1)
    reads = Reads(world.reads)
    reads.add("out", 0, 10_000, b"key", data)
    verdict = check(History(world.ops), Final(FLOW, reads, world.progress, world.sources))
    assert verdict.kinds == {FOREIGN}
    assert verdict.anomalies[0].offset == 10_000


# ---- the recorder ----------------------------------------------------------------------------------------


def begin(batch: int, epoch: int, flow: str = FLOW) -> None:
    source = SourceRange({"in": {0: 7 * batch}}, {"in": {0: 7 * batch + 7}})
    hooks.at("begin", where="driver", flow=flow, batch=batch, producer=ProducerIdAndEpoch(4711, epoch), source=source)


def test_a_driver_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "history"
    hooks.at("end", where="driver", flow=FLOW, batch=0)
    with Recorder(path, driver="one"):
        hooks.at("plan", where="driver", flow=FLOW, batch=1)
        begin(1, 5)
        hooks.at("write", where="driver", flow=FLOW, batch=1)
        hooks.at("end", where="task", flow=FLOW, batch=1)
        begin(3, 9, "invoices")
        hooks.at("end", where="driver", flow=FLOW)  # of something else that is no batch
        hooks.at("end", where="driver", flow=FLOW, batch=1)
        hooks.at("settle", where="driver", flow=FLOW, batch=1)
        begin(2, 6)
        hooks.at(hooks.ABORTED, where="driver", flow=FLOW, batch=2)
        hooks.at(hooks.ABORTED, where="driver", flow=FLOW, batch=2)  # before the next attempt had a producer id
        begin(2, 7)
    hooks.at("end", where="driver", flow=FLOW, batch=2)  # nobody records any more
    history = load(path)
    assert [(op.kind, op.batch, op.attempt) for op in history.ops if op.flow == FLOW] == [
        (INVOKE, 1, "4711:5"),
        (OK, 1, "4711:5"),
        (INVOKE, 2, "4711:6"),
        (FAIL, 2, "4711:6"),
        (INVOKE, 2, "4711:7"),
    ]
    assert (history.ops[0].start, history.ops[0].end) == ({"in": {0: 7}}, {"in": {0: 14}})
    assert {op.driver for op in history.ops} == {"one"}
    found = history.attempts(FLOW)
    assert [attempt.status for attempt in found.values()] == [OK, FAIL, INFO]
    assert found[1, "4711:5"].end == {("in", 0): 14}
    assert list(history.attempts("invoices")) == [(3, "4711:9")]


def test_two_drivers_of_a_flow_in_one_process(tmp_path: Path) -> None:
    """The older one ends its attempt after the newer one has begun."""
    with Recorder(tmp_path / "history"):
        begin(1, 5)
        thread = threading.Thread(target=begin, args=(1, 6))
        thread.start()
        thread.join()
        hooks.at(hooks.ABORTED, where="driver", flow=FLOW, batch=1)
    found = load(tmp_path / "history").attempts(FLOW)
    assert {name: attempt.status for (_, name), attempt in found.items()} == {"4711:5": FAIL, "4711:6": INFO}


def test_a_driver_appends_to_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "history"
    assert load(path).ops == []
    for number in range(3):
        with Recorder(path) as attached:
            assert attached.attach() is attached
            begin(number, number)
        with path.open("ab") as file:
            file.write(b'{"kind":"ok","flow":"\xc3')
    history = load(path)
    assert [op.batch for op in history.ops] == [0, 1, 2]
    assert history.torn == 3
    assert len({op.driver for op in history.ops}) == 3


HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
HEADERS: list[Any] = [None, [], [("a", b"1")], [("a", b"1"), ("b", None), ("", b"")], None, [("c", b"3")]]


@pytest.mark.parametrize("headers", [None, HEADERS, [None] * 6, [[]] * 6])
@pytest.mark.parametrize("taken", [slice(0, 6), slice(2, 5), slice(3, 3)])
def test_rows_get_tags(tmp_path: Path, headers: list[Any] | None, taken: slice) -> None:
    """As ``Tag.encode`` makes them, behind the headers that are there; slices of longer arrays, too."""
    columns = {
        "key": pa.array([b"k", None, b"", b"k", b"l", b"m"]),
        "value": pa.array([b"v", b"", None, b"w", b"x", b"y"]),
        "topic": pa.array(["in", "in.b", "in", "in", "in-2", "in_3"]),
        "partition": pa.array(range(6), pa.int32()),
        "offset": pa.array([2**40 + n for n in range(6)]),
        "n": pa.array([0, 0, 1, 0, 2, 0]),
    }
    if headers is not None:
        columns["headers"] = pa.array(
            [None if found is None else [{"key": k, "value": v} for k, v in found] for found in headers], HEADERS_TYPE
        )
    rows = pa.RecordBatch.from_pydict(columns)[taken]
    with Recorder(tmp_path / "history"):
        begin(3, 5)
        result = recorder.tagged_rows(rows, FLOW)
    assert result.schema.field("headers").type == HEADERS_TYPE
    assert result.column("key").equals(rows.column("key"))
    assert result.column("value").equals(rows.column("value"))
    expected = []
    for number, row in enumerate(rows.to_pylist(), taken.start):
        tag = Tag(FLOW, 3, "4711:5", row["topic"], row["partition"], row["offset"], row["n"])
        before = (headers[number] if headers else None) or []
        expected.append([*before, (HEADER, tag.encode())])
    assert [[(h["key"], h["value"]) for h in found] for found in result.column("headers").to_pylist()] == expected


def test_outputs_of_a_processor_get_tags(tmp_path: Path) -> None:
    record = Record(b"key", 1, topic="in", partition=2, offset=17)
    with Recorder(tmp_path / "history"):
        begin(3, 5)
        assert tag_of(record, 1, flow=FLOW) == (HEADER, Tag(FLOW, 3, "4711:5", "in", 2, 17, 1).encode())
    # A flow that writes nothing: whatever the header is, it must not look like a tag.
    with pytest.raises(ValueError, match="Expecting value"):
        Tag.decode(tag_of(record, flow="never-begun")[1] or b"")
    with pytest.raises(ValueError, match="no topic, partition or offset"):
        tag_of(Record(b"key", 1, topic="in", partition=2), flow=FLOW)
