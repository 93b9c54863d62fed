"""Which flows can be copied; and a copy of a table is exact while its flow writes and compaction removes records."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from onceflow.admin.versions.fork_plan import check_fresh, forked_progress, plan_tables, topics_of
from onceflow.admin.versions.table_copy import TableCopy
from onceflow.client.committed import Chunk
from onceflow.client.deadline import Deadline
from onceflow.errors import DeadlineExceededError, OptionError, ProgressConflictError
from onceflow.planning.process import StepOptions
from onceflow.planning.table_plan import check_inherited, is_beside, without_tables
from onceflow.protocol.names import Names
from onceflow.protocol.progress import (
    CheckpointProgress,
    DriverProcess,
    ForkOrigin,
    HandOver,
    LocalTable,
    Progress,
    Promotion,
    TableProgress,
    decode,
    encode,
)
from onceflow_workshop.testing.columns import ReadsColumns

OLD, NEW = Names("balances"), Names("next")


def progress(**changed: Any) -> Progress:
    found = Progress(
        "balances",
        7,
        {"deposits": {0: 10, 1: 20}},
        {"deposits": "id-d", "sums": "id-s", "sums-internal": "id-i"},
        1000,
        changelogs={"sums": {0: 5, 1: 6}, "sums-internal": {0: 1, 1: 2}},
        tables={"sums": TableProgress(3, 99)},
        watermark_ms=99,
        outputs=("out",),
        producer_id=4,
        producer_epoch=5,
    )
    return replace(found, **changed)


def test_names() -> None:
    assert plan_tables(progress(), OLD, NEW, {}) == {"sums": "next-sums"}
    assert plan_tables(progress(), OLD, NEW, {"sums": "other"}) == {"sums": "other"}
    assert topics_of({"sums": "other"}) == {"sums": "other", "sums-internal": "other-internal"}
    for name in ("sums", "deposits", "out", "sums-internal", "a b", "", "__own", "x" * 241):
        with pytest.raises(OptionError, match="cannot be named"):
            plan_tables(progress(), OLD, NEW, {"sums": name})
    with pytest.raises(OptionError, match="no table 'sum'"):
        plan_tables(progress(), OLD, NEW, {"sum": "other"})
    two = progress(tables={"sums": TableProgress(), "more": TableProgress()})
    with pytest.raises(OptionError, match="table sums cannot be named 'same'"):
        plan_tables(two, OLD, NEW, {"sums": "same", "more": "same"})


@pytest.mark.parametrize(
    "flow, promoted, table, expected",
    [
        ("minutes", None, "minutes-table", "minutes-v3-table"),
        ("minutes", None, "minutes", "minutes-v3"),
        ("minutes", "minutes-v2", "minutes-v2-table", "minutes-v3-table"),
        ("minutes", "minutes-v2", "minutes-v2-minutes-table", "minutes-v3-table"),
        ("minutes", "minutes-v2", "minutes-v2", "minutes-v3"),
        ("minutes", "another", "minutes-v2-table", "minutes-v3-v2-table"),
        ("minutes", None, "table", "minutes-v3-table"),
        ("min", None, "minutes-table", "minutes-v3-minutes-table"),
        ("prod-flow", "my.prod-v2", "prod-v2-x", "minutes-v3-x"),
    ],
)
def test_default_names_do_not_grow(flow: str, promoted: str | None, table: str, expected: str) -> None:
    found = progress(
        tables={table: TableProgress()},
        promoted=None if promoted is None else Promotion(promoted, 900),
    )
    names, new = Names(flow, "my." if promoted and promoted.startswith("my.") else ""), Names("minutes-v3")
    assert plan_tables(found, names, new, {}) == {table: expected}


def test_default_names_that_are_the_same() -> None:
    two = progress(tables={"balances-sums": TableProgress(), "sums": TableProgress()})
    with pytest.raises(OptionError, match="table sums cannot be named 'next-sums'") as refused:
        plan_tables(two, OLD, NEW, {})
    assert "--table sums=NAME" in refused.value.next_step
    assert plan_tables(two, OLD, NEW, {"sums": "other"}) == {"balances-sums": "next-sums", "sums": "other"}


# ---- the first run of a copy -----------------------------------------------------------------------------


def options(table: str, **changed: Any) -> StepOptions:
    given = StepOptions(table, None, "fail", None, None, None, "memory", None, False, "30 seconds")
    return replace(given, **changed)


def copy_of(tables: dict[str, str]) -> Progress:
    return progress(
        flow="next",
        batch_id=0,
        tables={copy: TableProgress() for copy in tables.values()},
        forked=ForkOrigin("balances", 7, 900, {}, tables),
    )


def test_a_program_that_does_not_use_the_copied_table() -> None:
    """It would begin empty at the position of the copy, which the records before that have led to."""
    found = copy_of({"sums": "next-sums", "more": "next-more"})
    beside = [name for name in ("next-sums", "next-sum") if is_beside(options(name), found)]
    assert beside == ["next-sum"]
    with pytest.raises(ProgressConflictError, match="is a copy of 'balances'") as refused:
        check_inherited(found, {"next-more", "next-sum"}, beside, flow="next")
    text = str(refused.value)
    assert "does not use table next-sums: it names next-sum, which would begin empty" in text
    assert "its tables: next-more (a copy of more), next-sums (a copy of sums)" in text
    assert "give table='next-sums'" in text
    assert "adopt_existing=True" in text


@pytest.mark.parametrize(
    "changed, used, beside",
    [
        ({}, {"next-sums", "new"}, {"new"}),
        ({}, set(), set()),
        ({"batch_id": 1}, {"new"}, {"new"}),
        ({"forked": None}, {"new"}, {"new"}),
        # Another flow was promoted to it since then: the tables are the ones of that flow.
        ({"tables": {"third-sums": TableProgress()}, "promoted": Promotion("third", 950)}, {"third-sums"}, set()),
        (
            {"promoted": Promotion("third", 950), "driver": DriverProcess("host", 1, 2), "batch_id": 8},
            {"new"},
            {"new"},
        ),
    ],
    ids=["a new one beside the copies", "no table", "a batch of its own", "no copy", "promoted", "promoted, then run"],
)
def test_programs_that_may_leave_it_unused(changed: dict[str, Any], used: set[str], beside: set[str]) -> None:
    found = replace(copy_of({"sums": "next-sums"}), **changed)
    check_inherited(found, used, beside, flow="next")


def test_the_first_run_after_a_promotion() -> None:
    found = progress(tables={"third-sums": TableProgress()}, promoted=Promotion("third", 950, {"sums": "third-sums"}))
    assert is_beside(options("third-sum"), found)
    assert not is_beside(options("third-sums"), found)
    with pytest.raises(ProgressConflictError, match="has the tables of 'third', which was promoted") as refused:
        check_inherited(found, {"third-sum"}, {"third-sum"}, flow="balances")
    assert "give table='third-sums'" in refused.value.next_step


def test_a_first_run_after_a_promotion_that_ended_before_its_first_batch() -> None:
    """Progress has its driver, and the table that its program has named, but no batch has used it."""
    promotion = Promotion("third", 950, {"sums": "third-sums"}, 7, ("third-sums",))
    tables = {"third-sums": TableProgress(), "third-sum": TableProgress()}
    found = progress(batch_id=7, tables=tables, promoted=promotion, driver=DriverProcess("host", 1, 2))
    assert decode(*encode(found)) == found
    assert is_beside(options("third-sum"), found)
    with pytest.raises(ProgressConflictError, match="its program does not use table third-sums: it names third-sum"):
        check_inherited(found, {"third-sum"}, {"third-sum"}, flow="balances")
    later = replace(found, batch_id=8, driver=None)  # it has run, and a command has moved it
    assert not is_beside(options("third-sum"), later)
    check_inherited(later, {"third-sum"}, {"third-sum"}, flow="balances")


def test_a_table_that_is_meant_to_begin_empty() -> None:
    found = copy_of({"sums": "next-sums"})
    assert is_beside(options("new"), found)
    assert not is_beside(options("new", adopt_existing=True), found)
    assert not is_beside(options("new", changelog=False), found)
    assert not is_beside(options("new"), progress())


def test_progress_forgets_a_table_that_no_batch_has_used() -> None:
    before = progress()
    ends = {"new": {0: 0}, "new-internal": {0: 0}}
    after = replace(
        before,
        changelogs={**before.changelogs, **ends},
        topic_ids={**before.topic_ids, "new": "n", "new-internal": "m"},
        tables={**before.tables, "new": TableProgress()},
    )
    assert without_tables(after, ["new"]) == before


# ---- what cannot be copied -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"checkpoint": CheckpointProgress("q", 3, "d")}, "Spark checkpoint"),
        ({"tables": {"sums": TableProgress(local=LocalTable("t", 2))}}, "no changelog"),
        ({"tables": {"sums": TableProgress(open_ended=True)}}, "without transactions"),
        ({"handover": HandOver({})}, "has not run since"),
    ],
)
def test_what_cannot_be_copied(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ProgressConflictError, match=text) as refused:
        plan_tables(progress(**changed), OLD, NEW, {})
    assert "from the source" in refused.value.next_step or "start it" in refused.value.next_step


def test_the_new_flow() -> None:
    found = forked_progress(
        progress(),
        NEW,
        {"sums": "next-sums"},
        ends={"next-sums": {0: 3, 1: 0}, "next-sums-internal": {0: 0, 1: 0}},
        topic_ids={"next-sums": "id-n", "next-sums-internal": "id-m"},
        outputs={"out": {0: 8}},
        time_ms=2000,
    )
    assert found.flow == "next"
    assert (found.batch_id, found.offsets, found.watermark_ms) == (0, progress().offsets, 99)
    assert found.topic_ids == {"deposits": "id-d", "next-sums": "id-n", "next-sums-internal": "id-m"}
    assert found.tables == {"next-sums": TableProgress(3, 99)}
    assert found.forked == ForkOrigin("balances", 7, 2000, progress().offsets, {"sums": "next-sums"}, {"out": {0: 8}})
    assert (found.outputs, found.producer_id) == ((), -1)
    wrote = progress(external="bank:t", tables={})
    again = forked_progress(wrote, NEW, {}, ends={}, topic_ids={}, outputs={}, time_ms=2000)
    assert again.external == "", "it has written nothing there"
    assert decode(*encode(found)) == found
    # Once it exists.
    assert check_fresh(found, NEW, OLD) == found.forked
    for other in (replace(found, batch_id=1), replace(found, forked=None)):
        with pytest.raises(ProgressConflictError, match="exists"):
            check_fresh(other, NEW, OLD)
    with pytest.raises(ProgressConflictError, match="exists"):
        check_fresh(found, NEW, Names("third"))
    with pytest.raises(OptionError, match="copy of itself"):
        check_fresh(None, OLD, OLD)


# ---- the copy --------------------------------------------------------------------------------------------


@dataclass
class World(ReadsColumns):
    """A table of one partition, its flow, and the cleaner of the broker. Something may happen between any two reads.

    Attributes:
        log: offset, key, value; the key is None for a marker.
        history: the same, without what compaction removes.
    """

    rng: random.Random
    busy: bool = True
    log: list[tuple[int, bytes | None, bytes | None]] = field(default_factory=list)
    history: list[tuple[int, bytes | None, bytes | None]] = field(default_factory=list)
    end: int = 0
    progress: list[Progress] = field(default_factory=list)
    cleaner: Callable[[World], int] = lambda world: world.rng.randrange(world.end + 1)

    def commit(self) -> None:
        """A batch of the flow: some rows and their marker, in the transaction of a progress record."""
        for _ in range(self.rng.randrange(4)):
            value = None if self.rng.random() < 0.2 else b"%d" % self.end
            self.history.append((self.end, b"k%d" % self.rng.randrange(12), value))
            self.log.append(self.history[-1])
            self.end += 1
        ends = {"sums": {0: self.end}, "sums-internal": {0: 0}}
        self.progress.append(progress(batch_id=len(self.progress), changelogs=ends))
        self.log.append((self.end, None, None))
        self.end += 1

    def clean(self) -> None:
        """Compaction up to some offset: of each key, the last record below it stays."""
        until = self.cleaner(self)
        last = {key: offset for offset, key, _ in self.log if offset < until}
        self.log = [each for each in self.log if each[0] >= until or each[1] is None or last[each[1]] == each[0]]

    def happens(self) -> None:
        for _ in range(self.rng.randrange(3) if self.busy else 0):
            self.rng.choice([self.commit, self.commit, self.clean])()

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        while topic == "sums" and start < end:
            self.happens()
            upto = min(end, start + 1 + self.rng.randrange(5))
            there = [each for each in self.log if start <= each[0] < upto]
            rows = [each for each in there if each[1] is not None]
            chunk = Chunk([each[1] for each in rows], [each[2] for each in rows], next_offset=upto)
            chunk.stamps.append(np.array([each[0] for each in rows], np.int64))
            chunk.whole = len(there) == upto - start
            yield chunk
            start = upto

    def stable(self) -> dict[str, dict[int, int]]:
        self.happens()
        return {"sums": {0: self.end}, "sums-internal": {0: 0}}

    def settled(self) -> Progress:
        self.happens()
        return self.progress[-1]

    def state(self, end: int) -> dict[bytes, bytes]:
        """A fold of all that was ever written below an offset."""
        return fold((key, value) for offset, key, value in self.history if offset < end)


def fold(rows: Iterator[tuple[bytes | None, bytes | None]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for key, value in rows:
        assert key is not None
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


class Written:
    """What a copy writes."""

    def __init__(self) -> None:
        self.rows: list[tuple[bytes | None, bytes | None]] = []

    def write(self, topic: str, partition: int, found: Any) -> None:
        assert (topic, partition) == ("next-sums", 0)
        self.rows += [(key, row.value) for key, row in found]

    def finish(self) -> None:
        pass


def copied(world: World, settled: Callable[[], Progress | None] | None = None, **more: Any) -> tuple[Any, Any, Any]:
    """The state of the copy, the record that it is of, and the copy."""
    topics = topics_of({"sums": "next-sums"})
    copy = TableCopy(world, world.stable, settled or world.settled, OLD, topics, **{"tombstone_ms": 10**9, **more})
    written: Any = Written()
    found = copy.run(written, world.progress[-1], Deadline(60, "copying", sleep=lambda _: None))
    return fold(iter(written.rows)), found, copy


def world(seed: int, **more: Any) -> World:
    made = World(random.Random(seed), **more)
    for _ in range(12):
        made.commit()
    return made


@pytest.mark.parametrize("seed", range(150))
def test_a_copy_is_exact(seed: int) -> None:
    there = world(seed)
    rows, found, _ = copied(there)
    assert rows == there.state(found.changelogs["sums"][0])


def test_progress_of_before_the_copy_would_not_do() -> None:
    """The mistake that the order of the steps is there for: the keys of some copies are missing."""
    wrong = 0
    for seed in range(100):
        there = world(seed)
        before = there.progress[-1]
        rows = fold(
            (key, value)
            for chunk in there.read("sums", 0, 0, before.changelogs["sums"][0])
            for key, value in zip(chunk.keys, chunk.values, strict=True)
        )
        wrong += rows != there.state(before.changelogs["sums"][0])
    assert wrong > 20


@pytest.mark.slow
def test_holes_in_the_rest_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that does not look for holes copies some tables wrong."""
    assert max(copied(world(seed))[2].rounds for seed in range(40)) > 1
    monkeypatch.setattr(Chunk, "whole", property(lambda self: True, lambda self, value: None))
    wrong = 0
    for seed in range(150):
        there = world(seed)
        rows, found, _ = copied(there)
        wrong += rows != there.state(found.changelogs["sums"][0])
    assert wrong > 3


def test_an_idle_flow_is_copied_at_once() -> None:
    there = world(1, busy=False)
    rows, found, copy = copied(there)
    assert copy.rounds == 1
    assert found is there.progress[-1]
    assert rows == there.state(there.end)


def test_what_ends_a_copy() -> None:
    with pytest.raises(ProgressConflictError, match="was reset"):
        copied(world(1), lambda: None)
    with pytest.raises(ProgressConflictError, match="other tables"):
        copied(world(1), lambda: progress(topic_ids={"sums": "another"}, changelogs={"sums": {0: 3}}))
    stuck = world(1, busy=False)
    first = stuck.progress[-1]
    stuck.log.append((stuck.end, b"foreign", b""))
    stuck.end += 1
    with pytest.raises(ProgressConflictError, match="Another program has written to table topic sums"):
        copied(stuck, lambda: first)
    seconds = iter([0.0, *[40.0] * 9])
    with pytest.raises(ProgressConflictError, match=r"deleted meanwhile") as slow:
        copied(world(1), tombstone_ms=60_000, clock=lambda: next(seconds))
    assert "delete.retention.ms" in slow.value.next_step


def test_a_cleaner_that_is_always_faster() -> None:
    there = world(1)
    there.cleaner = lambda world: world.end

    def settled() -> Progress:
        for _ in range(30):
            there.commit()
        there.clean()
        return there.progress[-1]

    topics = topics_of({"sums": "next-sums"})
    copy = TableCopy(there, there.stable, settled, OLD, topics, tombstone_ms=10**9)
    with pytest.raises(DeadlineExceededError, match="copying") as slow:
        copy.run(Written(), there.progress[-1], Deadline(0.3, "copying"))  # type: ignore[arg-type]
    assert "compaction" in slow.value.detail or "is read up to" in slow.value.detail
