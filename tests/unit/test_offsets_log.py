"""Spark's offset log: read as Spark writes it, refused when it is anything else; batches continue each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.driver.record.offset_log import (
    SourceRange,
    TopicOffsets,
    check_contiguous,
    read_range,
)
from onceflow.errors import ProgressConflictError

METADATA = json.dumps(
    {
        "batchWatermarkMs": 0,
        "batchTimestampMs": 1_700_000_000_000,
        "conf": {"spark.sql.shuffle.partitions": "200", "spark.sql.streaming.join.stateFormatVersion": "2"},
        "sourceMetadataInfo": {},
    },
    separators=(",", ":"),
)


def kafka_json(offsets: TopicOffsets) -> str:
    """As ``org.apache.spark.sql.kafka010.JsonUtils.partitionOffsets`` writes it."""
    return json.dumps({t: {str(p): o for p, o in ps.items()} for t, ps in offsets.items()}, separators=(",", ":"))


def write_log(checkpoint: Path, batch: int, *sources: TopicOffsets | str) -> Path:
    """``OffsetSeqLog.serialize``: version, metadata, one line for each source; no newline at the end."""
    path = checkpoint / "offsets" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["v1", METADATA, *(s if isinstance(s, str) else kafka_json(s) for s in sources)]
    path.write_bytes("\n".join(lines).encode())
    return path


def write_initial(checkpoint: Path, source: int, offsets: TopicOffsets | str) -> Path:
    """``KafkaSourceInitialOffsetWriter.serialize``: a zero byte (for Spark 2.1.0), then version and offsets."""
    path = checkpoint / "sources" / str(source) / "0"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = offsets if isinstance(offsets, str) else kafka_json(offsets)
    path.write_bytes(b"\0v1\n" + text.encode())
    return path


# ---- reading -----------------------------------------------------------------------------------------


def test_first_batch_starts_at_the_initial_offsets(tmp_path: Path) -> None:
    write_initial(tmp_path, 0, {"in": {0: 5, 1: 0}})
    write_log(tmp_path, 0, {"in": {0: 8, 1: 4}})
    assert read_range(tmp_path, 0) == SourceRange({"in": {0: 5, 1: 0}}, {"in": {0: 8, 1: 4}})


def test_later_batches_start_where_the_one_before_ended(tmp_path: Path) -> None:
    write_initial(tmp_path, 0, {"in": {0: 5}})
    for batch in range(12):
        write_log(tmp_path, batch, {"in": {0: 10 * batch + 8}})
    assert read_range(tmp_path, 11) == SourceRange({"in": {0: 108}}, {"in": {0: 118}})
    assert read_range(tmp_path, 1) == SourceRange({"in": {0: 8}}, {"in": {0: 18}})


def test_several_sources(tmp_path: Path) -> None:
    for number in range(11):
        write_initial(tmp_path, number, {f"in-{number}": {0: number}})
    write_log(tmp_path, 0, *({f"in-{number}": {0: number + 1}} for number in range(11)))
    found = read_range(tmp_path, 0)
    assert found.start == {f"in-{number}": {0: number} for number in range(11)}
    assert found.end == {f"in-{number}": {0: number + 1} for number in range(11)}
    assert found.max_rows == 11


def test_a_source_without_offset_yet(tmp_path: Path) -> None:
    write_log(tmp_path, 3, {"a": {0: 5}}, "-")
    write_log(tmp_path, 4, {"a": {0: 7}}, "-")
    assert read_range(tmp_path, 4) == SourceRange({"a": {0: 5}}, {"a": {0: 7}})
    # One that appears later has no start that could be checked.
    write_log(tmp_path, 5, {"a": {0: 9}}, {"b": {0: 3}})
    with pytest.raises(ProgressConflictError, match="start and end disagree about b"):
        read_range(tmp_path, 5)


def test_sources_that_keep_other_files_or_none(tmp_path: Path) -> None:
    """Only a Kafka source has initial offsets; Hadoop writes a checksum file beside them."""
    path = write_initial(tmp_path, 0, {"in": {0: 5}})
    (path.parent / ".0.crc").write_bytes(b"crc\0\0\0\2\0")
    (tmp_path / "sources" / "1").mkdir()
    write_log(tmp_path, 0, {"in": {0: 8}}, "-")
    assert read_range(tmp_path, 0).start == {"in": {0: 5}}


def test_topic_names_and_large_offsets(tmp_path: Path) -> None:
    offsets: TopicOffsets = {"a.b_c-D": {2**31 - 1: 2**63 - 1}}
    write_initial(tmp_path, 0, offsets)
    write_log(tmp_path, 0, offsets)
    assert read_range(tmp_path, 0) == SourceRange(offsets, offsets)


def test_the_clock_that_wakes_timers_up_has_nothing_to_commit(tmp_path: Path) -> None:
    """Spark's rate source counts seconds; it is a source of flows with timers."""
    write_log(tmp_path, 0, {"in": {0: 1}}, "50")
    write_log(tmp_path, 1, {"in": {0: 4}}, "51")
    assert read_range(tmp_path, 1) == SourceRange({"in": {0: 1}}, {"in": {0: 4}})


@pytest.mark.parametrize("missing", [4, 3])
def test_missing_file(tmp_path: Path, missing: int) -> None:
    write_log(tmp_path, 7 - missing, {"in": {0: 1}})
    with pytest.raises(ProgressConflictError, match="checkpoint of this query cannot be read") as caught:
        read_range(tmp_path, 4)
    assert f"offsets/{missing}" in caught.value.detail
    assert "progress is in Kafka" in caught.value.next_step


@pytest.mark.parametrize(
    "line",
    [
        "true",
        '"x"',
        "[]",
        "{",
        '{"logOffset":3}',
        '{"offset":1,"timestamp":2}',
        '{"in":[1]}',
        '{"in":{"x":1}}',
        '{"in":{"0":null}}',
        '{"in":{"0":"many"}}',
    ],
)
@pytest.mark.parametrize("where", ["start", "end", "initial"])
def test_what_is_no_kafka_source_is_refused(tmp_path: Path, where: str, line: str) -> None:
    good: TopicOffsets = {"other": {0: 1}}
    if where == "initial":
        write_initial(tmp_path, 0, good)
        write_initial(tmp_path, 1, line)
    write_log(tmp_path, 0, good, line if where == "start" else "-")
    write_log(tmp_path, 1, good, line if where == "end" else "-")
    with pytest.raises(ProgressConflictError, match="not a Kafka source") as caught:
        read_range(tmp_path, 0 if where == "initial" else 1)
    assert repr(line[:100]) in caught.value.detail
    assert "Flow.read" in caught.value.next_step


@pytest.mark.parametrize("where", ["initial", "end"])
def test_one_topic_read_twice(tmp_path: Path, where: str) -> None:
    write_initial(tmp_path, 0, {"in": {0: 1}})
    write_initial(tmp_path, 1, {"in" if where == "initial" else "b": {0: 1}})
    write_log(tmp_path, 0, {"in": {0: 2}}, {"in" if where == "end" else "b": {0: 2}})
    with pytest.raises(ProgressConflictError, match="'in' is read twice") as caught:
        read_range(tmp_path, 0)
    assert caught.value.topic == "in"


@pytest.mark.parametrize(
    "damage",
    ["empty initial file", "initial cut", "initial of another version", "initial not text", "log not text"],
)
def test_damage_is_one_of_our_errors(tmp_path: Path, damage: str) -> None:
    log = write_log(tmp_path, 0, {"in": {0: 2}})
    initial = write_initial(tmp_path, 0, {"in": {0: 1}})
    if damage == "log not text":
        log.write_bytes(b"v1\n{}\n\xff\xfe")
    else:
        initial.write_bytes(
            {
                "empty initial file": b"\0",
                "initial cut": b"\0v1\n",
                "initial of another version": b'\0v2\n{"in":{"0":1}}',
                "initial not text": b"\0v1\n\xff\xfe{}",
            }[damage]
        )
    with pytest.raises(ProgressConflictError, match="checkpoint of this query cannot be read") as caught:
        read_range(tmp_path, 0)
    assert str(log if damage == "log not text" else initial) in caught.value.detail


def test_a_source_that_the_end_of_the_batch_says_nothing_of(tmp_path: Path) -> None:
    """Its topic would be read and its progress not moved."""
    write_initial(tmp_path, 0, {"a": {0: 1}})
    write_initial(tmp_path, 1, {"b": {0: 1}})
    write_log(tmp_path, 0, {"a": {0: 2}}, "-")
    with pytest.raises(ProgressConflictError, match="cannot be read") as caught:
        read_range(tmp_path, 0)
    assert "offsets/0: start and end disagree about b" in caught.value.detail


@pytest.mark.parametrize("text", ["", "v1", "v1\n{}", "v2\n{}\n-", "garbage\n{}\n-"])
def test_unknown_versions_and_cut_files_are_refused(tmp_path: Path, text: str) -> None:
    """Taken for a log without sources, they would let a batch commit without moving any offset."""
    write_log(tmp_path, 0, {"in": {0: 2}})
    write_log(tmp_path, 1).write_text(text)
    write_log(tmp_path, 2, {"in": {0: 4}})
    with pytest.raises(ProgressConflictError, match="cannot be read"):
        read_range(tmp_path, 1)
    with pytest.raises(ProgressConflictError, match="cannot be read"):
        read_range(tmp_path, 2)


@pytest.mark.parametrize("lost", ["sources folder", "initial file of one source"])
def test_a_lost_start_is_refused(tmp_path: Path, lost: str) -> None:
    """Nothing says where the batch starts, so nothing says that it continues progress (I2)."""
    if lost != "sources folder":
        write_initial(tmp_path, 0, {"a": {0: 5}})
        (tmp_path / "sources" / "1").mkdir()
    write_log(tmp_path, 0, {"a": {0: 8}}, {"b": {0: 90}})
    with pytest.raises(ProgressConflictError):  # noqa: PT012
        found = read_range(tmp_path, 0)
        check_contiguous(found.start, {"a": {0: 5}, "b": {0: 1}}, {}, flow="orders", batch=0)


def test_a_source_that_the_end_of_a_later_batch_says_nothing_of(tmp_path: Path) -> None:
    write_log(tmp_path, 3, {"a": {0: 1}}, {"b": {0: 1}})
    write_log(tmp_path, 4, {"a": {0: 2}}, "-")
    with pytest.raises(ProgressConflictError):
        read_range(tmp_path, 4)


# ---- how much ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, end, rows",
    [
        ({}, {}, 0),
        ({"a": {0: 5}}, {"a": {0: 5}}, 0),
        ({"a": {0: 5, 1: 1}}, {"a": {0: 9, 1: 3}}, 6),
        ({"a": {0: 5}, "b": {0: 0}}, {"a": {0: 6}, "b": {0: 10}}, 11),
        # Partitions without a known start (added while the flow runs): an upper bound counts them from 0.
        ({"a": {0: 5}}, {"a": {0: 6, 1: 10}}, 11),
        ({}, {"a": {0: 6}}, 6),
    ],
)
def test_max_rows(start: TopicOffsets, end: TopicOffsets, rows: int) -> None:
    assert SourceRange(start, end).max_rows == rows


# ---- I2 ----------------------------------------------------------------------------------------------


def check(planned: TopicOffsets, committed: TopicOffsets, new: TopicOffsets | None = None) -> None:
    check_contiguous(planned, committed, new or {}, flow="orders", batch=8)


def test_a_batch_that_continues_progress() -> None:
    check({"a": {0: 5, 1: 0}, "b": {0: 7}}, {"a": {0: 5, 1: 0}, "b": {0: 7}})
    check({}, {})


def test_topics_that_are_not_read_any_more_are_no_part_of_the_check() -> None:
    """They keep their offsets in progress."""
    check({"a": {0: 5}}, {"a": {0: 5}, "gone": {0: 7}})


@pytest.mark.parametrize("starts", [{0: 0, 1: 3}, {}], ids=["partitions", "no partition"])
def test_a_topic_without_committed_start(starts: dict[int, int]) -> None:
    with pytest.raises(ProgressConflictError, match="Topic b is read but has no committed start") as caught:
        check({"a": {0: 5}, "b": starts}, {"a": {0: 5}}, {"b": starts})
    assert (caught.value.flow, caught.value.batch, caught.value.topic) == ("orders", 8, "b")
    assert "Flow.read" in caught.value.next_step


@pytest.mark.parametrize(
    "planned, words",
    [
        ({"a": {0: 6, 1: 3}}, ["a-0 leaves a gap", "ends at 5, the batch starts at 6"]),
        ({"a": {0: 4, 1: 3}}, ["a-0 overlaps", "ends at 5, the batch starts at 4"]),
        ({"a": {0: 5, 1: 0}}, ["a-1 overlaps", "ends at 3, the batch starts at 0"]),
        ({"a": {0: 5}}, ["a-1 is missing"]),
        ({"a": {}}, ["a-0 is missing"]),
    ],
)
def test_gap_overlap_and_missing(planned: TopicOffsets, words: list[str]) -> None:
    with pytest.raises(ProgressConflictError) as caught:
        check(planned, {"a": {0: 5, 1: 3}})
    assert (caught.value.flow, caught.value.batch) == ("orders", 8)
    assert caught.value.topic is not None
    assert caught.value.topic.startswith("a-")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("known_start", [2, None], ids=["at its beginning", "beginning not known"])
def test_new_partition(known_start: int | None) -> None:
    new = {} if known_start is None else {"a": {0: 0, 1: known_start}}
    check({"a": {0: 5, 1: 2}}, {"a": {0: 5}}, new)


@pytest.mark.parametrize("got", [0, 3])
def test_new_partition_that_does_not_start_at_its_beginning(got: int) -> None:
    with pytest.raises(ProgressConflictError, match="New partition a-1 does not start at its beginning") as caught:
        check({"a": {0: 5, 1: got}}, {"a": {0: 5}}, {"a": {0: 0, 1: 2}})
    assert f"its log starts at 2, the batch starts at {got}" in caught.value.detail
    assert caught.value.topic == "a-1"


offsets = st.dictionaries(
    st.sampled_from(["a", "b"]), st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=3), max_size=2
)


@settings(max_examples=200, deadline=None, derandomize="CI" in os.environ)
@given(planned=offsets, committed=offsets, new=offsets)
def test_accepted_means_contiguous(planned: TopicOffsets, committed: TopicOffsets, new: TopicOffsets) -> None:
    def flat(given: TopicOffsets) -> dict[tuple[str, int], Any]:
        return {(topic, p): offset for topic, ps in given.items() for p, offset in ps.items()}

    starts, ends, allowed = flat(planned), flat(committed), flat(new)
    contiguous = (
        planned.keys() <= committed.keys()
        and all(starts.get(place) == end for place, end in ends.items() if place[0] in planned)
        and all(place in ends or place not in allowed or start == allowed[place] for place, start in starts.items())
    )
    if contiguous:
        check(planned, committed, new)
    else:
        with pytest.raises(ProgressConflictError):
            check(planned, committed, new)
