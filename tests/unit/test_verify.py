"""The logic of `onceflow verify`: which records are lost, doubled or foreign, and whether progress continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onceflow.admin.verify import tally as tallies
from onceflow.admin.verify.audit import readings
from onceflow.admin.verify.identity import identity_of
from onceflow.admin.verify.progress_history import breaks
from onceflow.admin.verify.tally import (
    LETTER,
    OUTPUT,
    SOURCE,
    UNDECIDED,
    RecordComparison,
    RecordOffset,
    Reordered,
    digest_of,
)
from onceflow.client.log_reader import LogRecord
from onceflow.errors import OptionError
from onceflow.protocol import progress as records
from onceflow.protocol.progress import Progress
from onceflow.protocol.versions import HandOver


def tally(folder: Path, sides: dict[tuple[int, str], Sequence[int]]) -> RecordComparison:
    made = RecordComparison(folder)
    for (side, topic), ids in sides.items():
        made.add(side, topic, 0, [(offset, digest_of(str(each).encode())) for offset, each in enumerate(ids)])
    return made


@pytest.mark.parametrize(
    "sides, in_each, wrong",
    [
        ({(SOURCE, "s"): [1, 2], (OUTPUT, "o"): [2, 1]}, (), {}),
        ({(SOURCE, "s"): [1, 2], (OUTPUT, "o"): [2]}, (), {1: (1, 0)}),
        ({(SOURCE, "s"): [1], (OUTPUT, "o"): [1, 1]}, (), {1: (1, 2)}),
        ({(SOURCE, "s"): [1, 1], (OUTPUT, "o"): [1, 1]}, (), {}),
        ({(SOURCE, "s"): [1], (OUTPUT, "o"): [1, 9]}, (), {9: (0, 1)}),
        ({(SOURCE, "s"): [1, 2], (OUTPUT, "o"): [1], (LETTER, "d"): [2]}, (), {}),
        ({(SOURCE, "s"): [1], (OUTPUT, "o"): [1], (LETTER, "d"): [1]}, (), {1: (1, 2)}),
        ({(SOURCE, "s"): [1], (OUTPUT, "o"): [1], (OUTPUT, "p"): [1]}, ("o", "p"), {}),
        ({(SOURCE, "s"): [1], (OUTPUT, "o"): [1], (OUTPUT, "p"): [1]}, (), {1: (1, 2)}),
        ({(SOURCE, "s"): [1, 2], (OUTPUT, "o"): [1, 2], (OUTPUT, "p"): [1]}, ("o", "p"), {2: (1, 0)}),
        ({(SOURCE, "s"): [1], (OUTPUT, "o"): [1]}, ("o", "p"), {1: (1, 0)}),
        ({(SOURCE, "s"): [1], (UNDECIDED, "s"): [2, 3], (OUTPUT, "o"): [1, 3]}, (), {}),
        ({(SOURCE, "s"): [1], (UNDECIDED, "s"): [2], (OUTPUT, "o"): [1, 2, 2]}, (), {2: (0, 2)}),
        ({(SOURCE, "s"): []}, (), {}),
    ],
)
def test_what_differs(
    tmp_path: Path,
    sides: dict[tuple[int, str], Sequence[int]],
    in_each: Sequence[str],
    wrong: dict[int, tuple[int, int]],
) -> None:
    with tally(tmp_path, sides) as made:
        found = list(made.differences(in_each=in_each))
        ids = {
            RecordOffset(topic, 0, offset): each
            for (_, topic), all_ in sides.items()
            for offset, each in enumerate(all_)
        }
        several = {topic for (_, topic) in sides}
        if len(several) == len(sides):  # a topic on two sides has two records at an offset here
            assert {ids[each.places[0]]: (each.expected, each.found) for each in found} == wrong
        else:
            assert [(each.expected, each.found) for each in found] == list(wrong.values())
    assert list(tmp_path.iterdir()) == [], "the scratch folder is gone"


def test_many_records_with_a_few_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are kept in memory for each file; lost and doubled ones are found, and nothing else."""
    monkeypatch.setattr(tallies, "_BUFFERED", 50)
    source = list(range(20_000))
    random = Random(7)
    lost, doubled = set(random.sample(source, 5)), set(random.sample(source, 5))
    output = [each for each in source if each not in lost] + sorted(doubled - lost)
    random.shuffle(output)
    with tally(tmp_path, {(SOURCE, "s"): source, (OUTPUT, "o"): output}) as made:
        found = {next(p.offset for p in each.places if p.topic == "s"): each.found for each in made.differences()}
    assert found == {**dict.fromkeys(lost, 0), **dict.fromkeys(doubled - lost, 2)}


def ordered(folder: Path, source: Sequence[tuple[int, str]], output: Sequence[tuple[int, str]]) -> list[Reordered]:
    """What is out of order, of records with an id and a key each."""
    with RecordComparison(folder) as made:
        for side, topic, records_ in ((SOURCE, "s", source), (OUTPUT, "o", output)):
            found = [(offset, digest_of(str(each).encode())) for offset, (each, _) in enumerate(records_)]
            made.add(side, topic, 0, found, [key.encode() if key else None for _, key in records_])
        list(made.differences(ordered=True))
        return list(made.reordered())


@pytest.mark.parametrize(
    "source, output, wrong",
    [
        ([(1, "a"), (2, "a"), (3, "b")], [(3, "b"), (1, "a"), (2, "a")], []),
        ([(1, "a"), (2, "a"), (3, "a")], [(1, "a"), (3, "a"), (2, "a")], [(1, 2, 2, 1)]),
        ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], []),  # of two keys
        ([(1, "a"), (2, "a")], [(2, "x"), (1, "x")], []),  # the flow changes keys
        ([(1, ""), (2, "")], [(2, ""), (1, "")], []),  # without a key
        ([(1, "a"), (2, "a"), (2, "a")], [(2, "a"), (1, "a"), (2, "a")], []),  # ids that are not unique
    ],
)
def test_order(
    tmp_path: Path,
    source: Sequence[tuple[int, str]],
    output: Sequence[tuple[int, str]],
    wrong: Sequence[tuple[int, int, int, int]],
) -> None:
    found = ordered(tmp_path, source, output)
    places = [(each.before, each.after, each.source_before, each.source_after) for each in found]
    assert [tuple(place.offset for place in each) for each in places] == list(wrong)
    assert all([place.topic for place in each] == ["o", "o", "s", "s"] for each in places)


@pytest.mark.long
def test_order_of_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "_BUFFERED", 50)
    source = [(n, f"key-{n % 1000}") for n in range(15_000)]
    output = sorted(source, key=lambda each: each[0] % 7)  # a key's records are 1000 apart
    by_key: dict[str, int] = {}
    wrong = 0
    for each, key in output:
        wrong += each < by_key.get(key, -1)
        by_key[key] = each
    assert len(ordered(tmp_path, source, output)) == wrong > 0
    assert ordered(tmp_path, source, source) == []


def test_order_is_of_partitions_and_topics(tmp_path: Path) -> None:
    """Nothing is said of two partitions of a source, or of an output; what is undecided counts, too."""
    digests = [digest_of(b"%d" % n) for n in range(4)]
    with RecordComparison(tmp_path) as made:
        for n, (side, partition) in enumerate([(SOURCE, 0), (SOURCE, 1), (SOURCE, 0), (UNDECIDED, 0)]):
            made.add(side, "s", partition, [(n, digests[n])], [b"k"])
        for offset, (topic, partition, n) in enumerate(
            [("o", 0, 1), ("o", 0, 0), ("o", 1, 2), ("p", 0, 3), ("p", 0, 2), ("p", 0, 1), ("p", 0, 0)]
        ):
            made.add(OUTPUT, topic, partition, [(offset, digests[n])], [b"k"])
        list(made.differences(in_each=["o", "p"], ordered=True))
        found = sorted((each.source_before.offset, each.source_after.offset) for each in made.reordered())
    assert found == [(2, 0), (3, 2)]


# ---- what was read ---------------------------------------------------------------------------------------


def read_to(batch: int, offset: int, **more: Any) -> Progress:
    return Progress("f", batch, {"s": {0: offset}}, {}, 0, **more)


@pytest.mark.parametrize(
    "life, once, again",
    [
        ([(0, 0), (1, 10), (2, 30)], [(0, 30)], []),
        ([(0, 5), (1, 10)], [(5, 10)], []),
        ([(7, 70), (8, 80)], [(0, 80)], []),  # the first records are gone
        ([(0, 0), (1, 10), (1, 4), (2, 6), (3, 12)], [(0, 12)], [(4, 10)]),
        ([(0, 0), (1, 10), (1, 0), (2, 10), (2, 0), (3, 4)], [(0, 10)], [(0, 10), (0, 4)]),
        ([(0, 0), (1, 10), (1, 20), (2, 25), (2, 5), (3, 30)], [(0, 30)], [(5, 10), (20, 25)]),
        ([(0, 0), (1, 10), (1, 20), (2, 25)], [(0, 10), (20, 25)], []),
    ],
)
def test_what_a_flow_has_read(
    life: list[tuple[int, int]], once: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    found = readings([read_to(*each) for each in life], None)["s", 0]
    assert (found.once, found.again) == (once, again)


def test_what_a_flow_has_not_read() -> None:
    found = readings([read_to(*each) for each in [(0, 5), (1, 10), (1, 20), (2, 25)]], None)["s", 0]
    assert found.missing(0, 30) == [(0, 5), (10, 20), (25, 30)]
    assert found.missing(7, 22) == [(10, 20)]
    assert found.missing(5, 10) == []
    assert readings([read_to(0, 5), read_to(1, 10)], {"s": {0: 7}})["s", 0].once == [(7, 10)]


def test_what_is_read_after_a_promotion_was_written_once() -> None:
    handover = HandOver({"s": {0: 10}})
    life = [read_to(1, 10), read_to(1, 6, handover=handover), read_to(2, 10), read_to(3, 15)]
    found = readings(life, None)["s", 0]
    assert (found.once, found.again) == ([(0, 15)], [])


def test_identities() -> None:
    field = identity_of("$.order.id")
    assert field(b"k", b'{"order":{"id":7},"x":1}', ()) == field(None, b'{"order": {"id": 7}}', ())
    assert field(b"k", b'{"order":{"id":7}}', ()) != field(b"k", b'{"order":{"id":"7"}}', ())
    for value in (b"no json", None, b'{"order":7}', b"[]"):
        assert field(b"k", value, ()) == digest_of(b"k", value), "found again in a dead letter, which keeps both"
    header = identity_of("header:id")
    assert header(None, b"1", [("x", b"0"), ("id", b"5")]) == header(b"k", b"2", [("id", b"5")])
    assert header(b"k", b"v", ()) == identity_of("record")(b"k", b"v", ())
    assert identity_of("key")(b"k", b"1", ()) == identity_of("key")(b"k", b"2", ())
    assert digest_of(None) != digest_of(b"")
    assert digest_of(b"a", b"b") != digest_of(b"ab", b"")


@pytest.mark.parametrize("text", ["", "id", "$", "$.", "$.a[0]", "header:", "$..a", "$.*"])
def test_an_identity_that_is_none(text: str) -> None:
    with pytest.raises(OptionError, match="not a place in a record"):
        identity_of(text)


FIRST = Progress("f", 1, {"s": {0: 10, 1: 5}}, {"s": "id"}, 0, {"t": {0: 3}}, producer_id=7, producer_epoch=2)


def written(*history: Progress | None) -> list[LogRecord]:
    found = []
    for offset, each in enumerate(history):
        value = None if each is None else records.encode(each)[1]
        found.append(LogRecord(offset, b"f", value, 0, 7, 0))
    return found


NEXT = replace(FIRST, batch_id=2, offsets={"s": {0: 12, 1: 5}})


@pytest.mark.parametrize(
    "history, wrong",
    [
        ([FIRST, NEXT], []),
        ([FIRST, replace(NEXT, offsets={"s": {0: 9, 1: 5}})], ["source s-0 went back from 10 to 9"]),
        ([FIRST, replace(NEXT, changelogs={"t": {0: 2}})], ["table t-0 went back from 3 to 2"]),
        ([FIRST, replace(NEXT, producer_epoch=1)], ["the producer epoch went back from 2 to 1"]),
        ([FIRST, replace(NEXT, topic_ids={"s": "new"}, offsets={"s": {0: 1}})], []),
        ([FIRST, None, replace(NEXT, offsets={"s": {0: 0}})], []),
        ([FIRST, replace(FIRST, offsets={"s": {0: 0, 1: 0}})], []),  # a move in time keeps the number of the batch
        ([FIRST, replace(NEXT, batch_id=9, offsets={"s": {0: 0}})], []),  # what was between is compacted away
    ],
)
def test_progress_that_goes_back(history: Sequence[Progress | None], wrong: Sequence[str]) -> None:
    found = list(breaks(written(*history)))
    assert [each.split(": ", 1)[1] for each in found] == wrong
