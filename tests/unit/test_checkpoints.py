"""Checkpoint and progress: whether they belong together, read from a folder as Spark writes it, batch by batch."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.driver.record.numbering import Numbering
from onceflow.driver.record.offset_log import (
    SourceRange,
    TopicOffsets,
    check_contiguous,
    digest_of,
    read_digest,
    read_ends,
    read_range,
)
from onceflow.driver.start.checkpoint_location import moved_since
from onceflow.errors import ProgressConflictError
from onceflow.planning.checkpoints import CheckpointStart, plan_checkpoint
from onceflow.protocol.progress import CheckpointProgress, Progress
from onceflow.spark.checkpoint_files import CheckpointState, LocalFolder, look_at

FLOW = "orders"
PLACE = "/data/orders-checkpoint"
RESET = f"onceflow reset {FLOW}"
GOES_ON = CheckpointStart()


def progress(batch: int | None, *, batch_id: int = 7, query_id: str = "ours", digest: str = "d") -> Progress:
    """Of a flow that has committed ``batch`` of a checkpoint; None: the last one was committed without any."""
    known = None if batch is None else CheckpointProgress(query_id, batch, digest)
    return Progress(FLOW, batch_id, {"in": {0: 5}}, {"in": "id-1"}, time_ms=0, checkpoint=known)


def plan(checkpoint: CheckpointState, known: Progress, **options: Any) -> CheckpointStart:
    given = {"digest": "d", "location": PLACE, "on_conflict": "refuse", "other_sources": False, "flow": FLOW}
    return plan_checkpoint(checkpoint, known, **{**given, **options})


def refused(checkpoint: CheckpointState, known: Progress, **options: Any) -> ProgressConflictError:
    """The error, which must name flow, checkpoint and what can be done."""
    with pytest.raises(ProgressConflictError) as caught:
        plan(checkpoint, known, **options)
    error = caught.value
    assert error.flow == FLOW
    assert PLACE in error.detail
    assert RESET in error.next_step
    return error


def ours(planned: int, committed: int) -> CheckpointState:
    return CheckpointState("ours", planned, committed)


NOTHING_YET = CheckpointState(None)


# ---- they belong together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "checkpoint, known",
    [
        (NOTHING_YET, progress(None, batch_id=0)),
        (ours(-1, -1), progress(None, batch_id=0)),  # started and stopped before its first batch
        (ours(0, -1), progress(None, batch_id=0)),  # died in its first batch
        (ours(0, 0), progress(0)),
        (ours(8, 8), progress(8)),  # at rest
        (ours(9, 8), progress(8)),  # planned and not committed: will be written
        (ours(1, 0), progress(0)),
    ],
)
@pytest.mark.parametrize("on_conflict", ["refuse", "resume"])
@pytest.mark.parametrize("other_sources", [False, True])
def test_goes_on(checkpoint: CheckpointState, known: Progress, on_conflict: str, other_sources: bool) -> None:
    assert plan(checkpoint, known, on_conflict=on_conflict, other_sources=other_sources) == GOES_ON


@pytest.mark.parametrize("batch", [0, 1, 8])
@pytest.mark.parametrize("on_conflict", ["refuse", "resume"])
def test_a_batch_that_kafka_has_committed_and_spark_has_not(batch: int, on_conflict: str) -> None:
    start = plan(ours(batch, batch - 1), progress(batch), on_conflict=on_conflict)
    assert start.drains == batch


# ---- they do not -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_conflict", ["refuse", "resume"])
@pytest.mark.parametrize(
    "checkpoint, batch",
    [(ours(7, 7), 8), (ours(7, 6), 8), (ours(3, 3), 8), (ours(-1, -1), 0), (ours(-1, -1), 8)],
    ids=["by one", "by one and in the middle of a batch", "by more", "without its logs", "without its logs, by more"],
)
def test_behind(checkpoint: CheckpointState, batch: int, on_conflict: str) -> None:
    """Also one that was emptied but for its metadata: resume is for a checkpoint that never was the flow's."""
    error = refused(checkpoint, progress(batch), digest=None, on_conflict=on_conflict)
    assert error.what == "The checkpoint is older than the flow's progress"
    assert f"batches up to {checkpoint.planned}, Kafka has committed batch {batch};" in error.detail
    assert "backup" in error.detail
    assert_choices(error)


@pytest.mark.parametrize("on_conflict", ["refuse", "resume"])
@pytest.mark.parametrize("checkpoint, batch", [(ours(8, 8), 7), (ours(9, 8), 7), (ours(8, 8), 0)])
def test_ahead(checkpoint: CheckpointState, batch: int, on_conflict: str) -> None:
    error = refused(checkpoint, progress(batch), on_conflict=on_conflict)
    assert error.what == "The checkpoint is ahead of the flow's progress"
    assert f"has finished batch {checkpoint.committed}, Kafka has committed batch {batch};" in error.detail
    assert "would be lost" in error.detail
    assert_choices(error)


@pytest.mark.parametrize("digest", ["another", "", None], ids=["another", "empty", "the log has no such batch"])
@pytest.mark.parametrize("checkpoint", [ours(8, 8), ours(8, 7), ours(9, 8)])
def test_diverged(checkpoint: CheckpointState, digest: str | None) -> None:
    error = refused(checkpoint, progress(8), digest=digest)
    assert error.what == "The checkpoint and the flow's progress have diverged"
    assert "batch 8 ends at other offsets" in error.detail
    assert_choices(error)


@pytest.mark.parametrize("on_conflict", ["refuse", "resume"])
@pytest.mark.parametrize(
    "known, words",
    [
        (progress(8), "the flow's is that of query ours"),
        (progress(None, batch_id=3), "the flow has committed 3 batches without a checkpoint since"),
        (progress(None, batch_id=0), "the flow has never committed a batch, or was reset"),
    ],
    ids=["progress of a checkpoint", "progress of none", "no progress"],
)
def test_foreign(known: Progress, words: str, on_conflict: str) -> None:
    error = refused(CheckpointState("theirs", 9, 8), known, on_conflict=on_conflict)
    assert error.what == "The checkpoint belongs to another query"
    assert "that of query theirs and has finished batch 8;" in error.detail
    assert words in error.detail
    assert_choices(error)


EMPTY = [NOTHING_YET, CheckpointState("theirs"), CheckpointState("theirs", 0)]


@pytest.mark.parametrize("checkpoint", EMPTY, ids=["nothing", "started", "died in its first batch"])
@pytest.mark.parametrize(
    "known, words",
    [
        (progress(None, batch_id=3), "has committed 3 batches without a checkpoint"),
        (progress(8), "has committed 7 batches with the checkpoint of query ours"),
        (progress(0, batch_id=1), "has committed 1 batch with the checkpoint of query ours"),
    ],
    ids=["without a checkpoint", "with another one", "with another one's first batch"],
)
def test_empty_over_progress(checkpoint: CheckpointState, known: Progress, words: str) -> None:
    error = refused(checkpoint, known)
    assert error.what.startswith("The checkpoint is empty")
    assert words in error.what
    assert "was the old one deleted" in error.detail
    assert_choices(error)
    start = plan(checkpoint, known, on_conflict="resume")
    assert start.drains is None
    assert (
        start.warning
        == f"checkpoint {PLACE} is empty: the flow continues at its committed offsets with empty Spark state"
    )


@pytest.mark.parametrize("checkpoint", EMPTY)
def test_resume_needs_all_positions_in_kafka(checkpoint: CheckpointState) -> None:
    """Files would be read again from the first, records of topics would not."""
    error = refused(checkpoint, progress(8), on_conflict="resume", other_sources=True)
    assert "position was in the old one" in error.what
    assert "restore the old checkpoint" in error.next_step


def assert_choices(error: ProgressConflictError) -> None:
    for words in ("belongs to the flow", 'on_checkpoint_conflict="resume"', RESET, "an empty folder"):
        assert words in error.next_step


# ---- any state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned, committed, known", [(5, 3, 5), (5, 3, 4), (5, 3, 3), (2, -1, 1)])
def test_a_commit_log_that_ends_too_early_is_damage(planned: int, committed: int, known: int) -> None:
    error = refused(ours(planned, committed), progress(known))
    assert "damaged" in error.what
    assert f"planned batch {planned}" in error.detail


def test_a_partition_that_is_new_before_the_first_batch(tmp_path: Path) -> None:
    """Spark has noted where batch 0 starts, then the driver died; the next start has found another partition."""
    write_initial(tmp_path, 0, '\0v1\n{"in":{"0":0}}')
    write_log(tmp_path, 0, {"in": {0: 5, 1: 0}})
    known = Progress(FLOW, 0, {"in": {0: 0, 1: 0}}, {"in": "id-1"}, time_ms=0)
    moved = moved_since(LocalFolder(tmp_path), CheckpointState("ours", 0, -1), known)
    start = numbering(tmp_path, moved).bridged(read_range(tmp_path, 0, {"in"}), known).start
    check_contiguous(start, {"in": {0: 0, 1: 0}}, {}, flow=FLOW, batch=1)


batches = st.integers(-1, 4)
# As Spark leaves a checkpoint: it finishes a batch before it plans the next one.
states = st.builds(
    lambda query_id, committed, more: CheckpointState(query_id, committed + more, committed),
    st.sampled_from(["ours", "theirs"]),
    batches,
    st.integers(0, 1),
) | st.just(NOTHING_YET)
known_progress = st.builds(
    lambda batch, more: progress(batch, batch_id=0 if batch is None and not more else 1 + (batch or 0) + more),
    st.none() | st.integers(0, 5),
    st.integers(0, 2),
)


@settings(max_examples=400, deadline=None, derandomize="CI" in os.environ)
@given(
    checkpoint=states,
    known=known_progress,
    digest=st.sampled_from(["d", "e", None]),
    on_conflict=st.sampled_from(["refuse", "resume"]),
    other_sources=st.booleans(),
)
def test_any_state(
    checkpoint: CheckpointState, known: Progress, digest: str | None, on_conflict: str, other_sources: bool
) -> None:
    """Each state has one outcome, which is the same when asked again; nothing is lost or read twice by any of them."""
    at = known.checkpoint

    def outcome() -> CheckpointStart | str:
        try:
            return plan(checkpoint, known, digest=digest, on_conflict=on_conflict, other_sources=other_sources)
        except ProgressConflictError as error:
            complete = error.flow == FLOW and RESET in error.next_step and PLACE in error.detail
            return error.what if complete else f"not all is said: {error}"

    start = outcome()
    assert outcome() == start
    same_query = at is not None and at.query_id == checkpoint.query_id
    if isinstance(start, str):
        assert not start.startswith("not all is said")
        # Nothing that fits is refused.
        assert not (
            same_query and at and digest == at.digest and checkpoint.committed <= at.batch <= checkpoint.planned
        )
        assert known.batch_id > 0 or checkpoint.committed >= 0
        return
    if same_query:
        assert at is not None
        # Whatever the conflict option is: state and progress are at the same batch, but for the one to be drained.
        assert digest == at.digest
        assert (start.drains is not None) == (at.batch == checkpoint.planned == checkpoint.committed + 1)
        assert start.drains in (None, at.batch)
        assert at.batch == (checkpoint.committed if start.drains is None else checkpoint.planned)
    else:
        assert start.drains is None
        assert checkpoint.committed == -1, "the state of another query"
        assert known.batch_id == 0 or (on_conflict == "resume" and not other_sources)
        assert bool(start.warning) == (known.batch_id > 0)


# ---- how far a checkpoint is -------------------------------------------------------------------------


def make_checkpoint(folder: Path, *, query_id: str | None = "ours", planned: int = -1, committed: int = -1) -> Path:
    """As Spark leaves it, with the checksum files that Hadoop writes beside others."""
    if query_id is not None:
        (folder / "metadata").write_text(json.dumps({"id": query_id}))
        (folder / ".metadata.crc").write_bytes(b"crc\0\0\0\2\0")
    for name, last in (("offsets", planned), ("commits", committed)):
        (folder / name).mkdir(exist_ok=True)
        for batch in range(last + 1):
            (folder / name / str(batch)).write_text("v1\n{}\n-")
            (folder / name / f".{batch}.crc").write_bytes(b"crc\0\0\0\2\0")
    return folder


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert look_at(LocalFolder(tmp_path / "none")) == NOTHING_YET


@pytest.mark.parametrize("planned, committed", [(-1, -1), (0, -1), (0, 0), (11, 10), (11, 11)])
def test_how_far_it_is(tmp_path: Path, planned: int, committed: int) -> None:
    folder = make_checkpoint(tmp_path, planned=planned, committed=committed)
    (folder / "offsets" / "99.tmp").write_text("being written")
    (folder / "commits" / ".99.compact").write_text("")
    assert look_at(LocalFolder(folder)) == ours(planned, committed)


def test_old_logs_are_gone(tmp_path: Path) -> None:
    """Spark keeps the last hundred."""
    folder = make_checkpoint(tmp_path, planned=101, committed=100)
    for name in ("offsets", "commits"):
        (folder / name / "0").unlink()
    assert look_at(LocalFolder(folder)) == ours(101, 100)


@pytest.mark.parametrize("lost", ["metadata", "offsets", "commits"])
def test_missing_parts(tmp_path: Path, lost: str) -> None:
    folder = make_checkpoint(tmp_path, planned=3, committed=2)
    path = folder / lost
    if path.is_dir():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
    else:
        path.unlink()
    expected = {"metadata": {"query_id": None}, "offsets": {"planned": -1}, "commits": {"committed": -1}}[lost]
    assert look_at(LocalFolder(folder)) == replace(ours(3, 2), **expected)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '"id"', "{}", '{"ID":"x"}', "v1\n{}"])
def test_damaged_metadata(tmp_path: Path, text: str) -> None:
    """It must not read as an empty checkpoint, which a flow may start with."""
    folder = make_checkpoint(tmp_path, planned=1, committed=1)
    (folder / "metadata").write_text(text)
    with pytest.raises(ProgressConflictError, match="cannot be read") as caught:
        look_at(LocalFolder(folder))
    assert f"{folder}/metadata: it holds {text!r}" in caught.value.detail
    assert "restore that folder first" in caught.value.next_step


def test_files_that_are_no_text(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for name in ("bytes", "folder"):
        with pytest.raises(ProgressConflictError, match="cannot be read") as caught:
            folder.text(name)
        assert str(tmp_path / name) in caught.value.detail
    assert folder.text("none") is None
    assert folder.text("none/at/all") is None
    assert folder.names("none") == folder.names("bytes") == []


# ---- what Spark's log says of sources that are no topics -----------------------------------------------

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}'
OTHERS = ['{"logOffset":3}', "12", '{"0":{"value":1,"runTimeMs":2}}', '{"offset":1,"timestamp":2}', '"x"', "{}"]


def write_log(folder: Path, batch: int, *sources: TopicOffsets | str, metadata: str = METADATA) -> None:
    path = folder / "offsets" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [s if isinstance(s, str) else json.dumps(s, separators=(",", ":")) for s in sources]
    path.write_text("\n".join(["v1", metadata, *lines]))


def write_initial(folder: Path, source: int, text: str) -> None:
    path = folder / "sources" / str(source) / "0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("line", OTHERS)
def test_other_sources_beside_a_topic(tmp_path: Path, line: str) -> None:
    write_log(tmp_path, 3, {"in": {0: 5}}, line)
    write_log(tmp_path, 4, line, {"in": {0: 7}})
    found = read_range(tmp_path, 4, ["in", "more"])
    assert found == SourceRange({"in": {0: 5}}, {"in": {0: 7}})
    assert found.others
    assert found.max_rows == 2


@pytest.mark.parametrize("line", [*OTHERS, "-"])
def test_other_sources_alone(tmp_path: Path, line: str) -> None:
    write_log(tmp_path, 3, line)
    write_log(tmp_path, 4, line)
    found = read_range(tmp_path, 4, [])
    assert found == SourceRange({}, {})
    assert found.others


def test_topics_alone(tmp_path: Path) -> None:
    write_log(tmp_path, 3, {"a": {0: 5}}, {"b": {0: 1}})
    write_log(tmp_path, 4, {"a": {0: 7}}, {"b": {0: 1}})
    found = read_range(tmp_path, 4, ["a", "b"])
    assert found == SourceRange({"a": {0: 5}, "b": {0: 1}}, {"a": {0: 7}, "b": {0: 1}})
    assert not found.others
    assert not read_range(tmp_path, 4).others


def test_a_source_that_has_rows_for_the_first_time(tmp_path: Path) -> None:
    write_log(tmp_path, 3, {"in": {0: 5}}, "-")
    write_log(tmp_path, 4, {"in": {0: 5}}, '{"logOffset":0}')
    assert read_range(tmp_path, 4, ["in"]) == SourceRange({"in": {0: 5}}, {"in": {0: 5}})


def test_first_batch_beside_other_sources(tmp_path: Path) -> None:
    """The file source keeps a log of its own where Kafka's keeps initial offsets; the rate source its start."""
    write_initial(tmp_path, 0, '\0v1\n{"in":{"0":5}}')
    write_initial(tmp_path, 1, 'v1\n{"path":"file:///a/1.txt","timestamp":1,"batchId":0}\n{"path":"b"}')
    write_initial(tmp_path, 2, 'v1\n{"path":"file:///a/1.txt","timestamp":1,"batchId":0}')
    write_initial(tmp_path, 3, "\0v1\n1700000000000")
    (tmp_path / "sources" / "4").mkdir()
    write_log(tmp_path, 0, {"in": {0: 8}}, '{"logOffset":0}', '{"logOffset":0}', "3", "-")
    found = read_range(tmp_path, 0, ["in"])
    assert found == SourceRange({"in": {0: 5}}, {"in": {0: 8}})
    assert found.others


def test_a_topic_that_loses_its_offsets_among_others(tmp_path: Path) -> None:
    """What looks like another source must not hide a topic: it would be read and its progress not moved."""
    write_log(tmp_path, 3, {"in": {0: 5}}, '{"logOffset":3}')
    write_log(tmp_path, 4, "-", '{"logOffset":4}')
    with pytest.raises(ProgressConflictError, match="cannot be read") as caught:
        read_range(tmp_path, 4, ["in"])
    assert "start and end disagree about in" in caught.value.detail


def test_the_digest_is_of_the_sources_only(tmp_path: Path) -> None:
    write_log(tmp_path, 3, {"in": {0: 5}}, "12")
    write_log(tmp_path, 4, {"in": {0: 7}}, "12")
    write_log(tmp_path, 5, {"in": {0: 7}}, "12", metadata='{"batchWatermarkMs":5}')
    write_log(tmp_path, 6, {"in": {0: 7}}, "13")
    folder = LocalFolder(tmp_path)
    digests = [read_digest(folder, batch) for batch in (3, 4, 5, 6)]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3
    assert read_range(tmp_path, 4, ["in"]).digest == read_range(tmp_path, 4, ["in", "12"]).digest == digests[1]
    assert read_digest(folder, 7) is None
    assert digest_of(["v1", METADATA, '{"in":{"0":7}}', "12"]) == digests[1]


# ---- batch by batch ------------------------------------------------------------------------------------


def numbering(folder: Path, moved: TopicOffsets | None = None, query_id: str | None = "ours") -> Numbering:
    session: Any = SimpleNamespace(_jvm=None)  # asked for nothing here
    return Numbering(session, LocalFolder(make_checkpoint(folder, query_id=query_id)), FLOW, moved)


def source(start: TopicOffsets | None = None, digest: str = "d") -> SourceRange:
    return SourceRange(start or {}, {}, digest=digest)


@pytest.mark.parametrize(
    "batch, known, committed",
    [
        (0, progress(None, batch_id=0), False),
        (0, progress(None), False),  # an empty checkpoint that was accepted
        (0, progress(8, query_id="before"), False),
        (0, progress(0), True),
        (8, progress(8), True),
        (9, progress(8), False),
        (1, progress(0), False),
    ],
)
def test_is_committed(tmp_path: Path, batch: int, known: Progress, committed: bool) -> None:
    assert numbering(tmp_path).is_committed(batch, source(), known) is committed


@pytest.mark.parametrize(
    "batch, known, words",
    [
        (8, progress(8, digest="e"), "Spark runs batch 8 of checkpoint {}; the last committed batch is the same"),
        (0, progress(0, digest="e"), "the last committed batch is the same batch with other offsets"),
        (7, progress(8), "Spark runs batch 7 of checkpoint {}; the last committed batch is its batch 8"),
        (0, progress(1), "Spark runs batch 0 of checkpoint {}; the last committed batch is its batch 1"),
        (10, progress(8), "Spark runs batch 10 of checkpoint {}; the last committed batch is its batch 8"),
        (1, progress(None, batch_id=0), "the last committed batch is not in this checkpoint"),
        (9, progress(8, query_id="before"), "the last committed batch is not in this checkpoint"),
    ],
)
def test_checkpoint_and_progress_that_do_not_belong_together(
    tmp_path: Path, batch: int, known: Progress, words: str
) -> None:
    with pytest.raises(ProgressConflictError, match="do not belong together any more") as caught:
        numbering(tmp_path).is_committed(batch, source(), known)
    assert (caught.value.flow, caught.value.batch) == (FLOW, known.batch_id + 1)
    assert words.format(tmp_path) in caught.value.detail
    assert caught.value.next_step


def test_what_progress_will_say(tmp_path: Path) -> None:
    one = numbering(tmp_path)
    assert one.current(has_run=False) is None
    one.planned(9, source(digest="e"))
    assert one.current(has_run=False) == CheckpointProgress("ours", 9, "e")


def test_a_run_of_batches(tmp_path: Path) -> None:
    """Each batch is written once, whenever the driver dies; Spark's numbers and the flow's stay side by side."""
    one = numbering(tmp_path)
    known = progress(None, batch_id=0)
    for batch in range(5):
        planned = source(digest=f"d{batch}")
        assert not one.is_committed(batch, planned, known)
        one.planned(batch, planned)
        known = replace(known, batch_id=known.batch_id + 1, checkpoint=one.current(has_run=False))
        assert numbering(tmp_path).is_committed(batch, planned, known)
        assert plan(ours(batch, batch - 1), known, digest=f"d{batch}").drains == batch
        assert plan(ours(batch, batch), known, digest=f"d{batch}") == GOES_ON


def bridged(folder: Path, start: TopicOffsets, moved: TopicOffsets, committed: TopicOffsets) -> TopicOffsets:
    known = replace(progress(8), offsets=committed)
    return numbering(folder, moved).bridged(source(start), known).start


@pytest.mark.parametrize(
    "start, moved, committed, expected",
    [
        ({"a": {0: 5}}, {}, {"a": {0: 5}}, {"a": {0: 5}}),
        # A partition that is new since the checkpoint's last batch.
        ({"a": {0: 5}}, {"a": {1: 2}}, {"a": {0: 5, 1: 2}}, {"a": {0: 5, 1: 2}}),
        ({"a": {0: 5}}, {"a": {1: 0}}, {"a": {0: 5, 1: 0}}, {"a": {0: 5, 1: 0}}),
        # Expired records that were given up.
        ({"a": {0: 5, 1: 3}}, {"a": {0: 8}}, {"a": {0: 8, 1: 3}}, {"a": {0: 8, 1: 3}}),
        # Nothing is bridged backwards, and nothing that progress does not say.
        ({"a": {0: 9}}, {"a": {0: 8}}, {"a": {0: 8}}, {"a": {0: 9}}),
        ({"a": {0: 5}}, {"a": {0: 8}}, {"a": {0: 7}}, {"a": {0: 5}}),
        ({"a": {0: 5}}, {"a": {0: 8}}, {}, {"a": {0: 5}}),
        # A topic that is not read any more.
        ({"a": {0: 5}}, {"b": {0: 8}}, {"a": {0: 5}, "b": {0: 8}}, {"a": {0: 5}}),
    ],
)
def test_bridged(
    tmp_path: Path, start: TopicOffsets, moved: TopicOffsets, committed: TopicOffsets, expected: TopicOffsets
) -> None:
    assert bridged(tmp_path, start, moved, committed) == expected


def test_only_the_first_batch_of_a_run_is_bridged(tmp_path: Path) -> None:
    """Later ones start where it ended; a gap there is a gap."""
    one = numbering(tmp_path, {"a": {0: 8}})
    known = replace(progress(8), offsets={"a": {0: 8}})
    planned = source({"a": {0: 5}}, digest="e")
    first = one.bridged(planned, known)
    assert (first.start, first.digest, first.end) == ({"a": {0: 8}}, "e", planned.end)
    assert planned.start == {"a": {0: 5}}, "what was given has changed"
    assert one.bridged(planned, known) == planned


@pytest.mark.parametrize(
    "ended, committed",
    [
        ({"a": {0: 5}}, {"a": {0: 5}}),
        ({"a": {0: 5}}, {"a": {0: 5, 1: 2}}),
        ({"a": {0: 5, 1: 3}}, {"a": {0: 8, 1: 3}}),
        ({"a": {0: 5}}, {"a": {0: 5}, "not read any more": {0: 7}}),
        ({"a": {0: 5}, "b": {0: 1}}, {"a": {0: 6, 1: 0}, "b": {0: 1}}),
    ],
    ids=["nothing", "a new partition", "expired records", "a topic that is gone", "several"],
)
def test_what_starts_have_moved_is_bridged(tmp_path: Path, ended: TopicOffsets, committed: TopicOffsets) -> None:
    """Whichever start it was: progress says where the next batch begins, the checkpoint where the last one ended."""
    write_log(tmp_path, 8, '{"logOffset":3}', *({topic: offsets} for topic, offsets in ended.items()))
    ends = read_ends(LocalFolder(tmp_path), 8, committed)
    assert ends == ended
    known = replace(progress(8), offsets=committed)
    moved = moved_since(LocalFolder(tmp_path), CheckpointState("ours", 8, 8), known)
    start = numbering(tmp_path, moved).bridged(source(ended), known).start
    assert start == {topic: committed[topic] for topic in ended}
    check_contiguous(start, committed, {}, flow=FLOW, batch=8)
