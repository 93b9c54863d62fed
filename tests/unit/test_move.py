"""Where a flow goes when it is moved in time, and what becomes of its state: decisions without Kafka."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from onceflow.admin.change.move_plan import DELETE, KEEP, PartitionMove, check_state, meaning, plan_move, without_state
from onceflow.admin.change.progress_file import export, parse
from onceflow.admin.change.progress_import import TableTopic, plan_import
from onceflow.admin.change.target import BEGINNING, EARLIEST, LATEST, OFFSETS, TIMESTAMP, OffsetSpec, parse_target
from onceflow.errors import DataLossError, OptionError, ProgressConflictError
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import CheckpointProgress, HandOver, LocalTable, Progress, TableProgress

IN = SourceTopic("in", "id-in", {0: 10, 1: 0, 2: 0}, {0: 50, 1: 7, 2: 3})
FLOW = Progress("f", 4, {"in": {0: 40, 1: 7}, "gone": {0: 1}}, {"in": "id-in"}, 1)
CHECKPOINT = CheckpointProgress("query", 3, "digest")
WITH_TABLE = replace(
    FLOW,
    changelogs={"t": {0: 5, 1: 6}, "t-internal": {0: 0, 1: 2}},
    topic_ids={"in": "id-in", "t": "id-t", "t-internal": "id-i"},
    tables={"t": TableProgress(2, watermark_ms=9), "l": TableProgress(local=LocalTable("made-up", 2, {0: (4, 1, 1)}))},
)
SAME = {
    name: TableTopic(WITH_TABLE.topic_ids[name], {p: end + 1 for p, end in ends.items()}, True)
    for name, ends in WITH_TABLE.changelogs.items()
}


@pytest.mark.parametrize(
    "text, target",
    [
        ("earliest", OffsetSpec(EARLIEST)),
        (" Latest ", OffsetSpec(LATEST)),
        ("beginning", OffsetSpec(BEGINNING)),
        ("timestamp=1738310400000", OffsetSpec(TIMESTAMP, 1_738_310_400_000)),
        ("timestamp=2025-01-31T08:00:00Z", OffsetSpec(TIMESTAMP, 1_738_310_400_000)),
        (
            "offsets=a.b-c_d:0=1, a.b-c_d:1=22,e:0=0",
            OffsetSpec(OFFSETS, offsets={"a.b-c_d": {0: 1, 1: 22}, "e": {0: 0}}),
        ),
        ('offsets={"a": {"0": 1, "11": 2}}', OffsetSpec(OFFSETS, offsets={"a": {0: 1, 11: 2}})),
    ],
)
def test_targets(text: str, target: OffsetSpec) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "end", "earliest=1", "timestamp", "timestamp=", "offsets", "offsets=a", "offsets=a:0=1,,", "offsets={}"),
        *(
            'offsets={"a": {"0": 1, "0": 2}}',
            'offsets={"a": {}}',
            'offsets={"a": {"x": 1}}',
            'offsets={"a": {"0": true}}',
        ),
    ],
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(OptionError, match=r"(?s)--to.*offsets=TOPIC"):
        parse_target(text)


def moves(target: OffsetSpec, at_time: Any = None, before: Progress = FLOW) -> dict[int, tuple[int, int, int]]:
    """By partition: where it goes, offsets that are read again, and those that are skipped."""
    found = plan_move(before, {"in": IN}, target, {"in": at_time or {}})
    assert found.gone == ("gone",)
    return {each.partition: (each.after, each.again, each.skipped) for each in found.moves}


def test_where_it_goes() -> None:
    assert moves(OffsetSpec(EARLIEST)) == {0: (10, 30, 0), 1: (0, 7, 0), 2: (0, 0, 0)}
    assert moves(OffsetSpec(LATEST)) == {0: (50, 0, 10), 1: (7, 0, 0), 2: (3, 0, 3)}
    assert moves(OffsetSpec(TIMESTAMP, 5), {0: 45, 1: -1, 2: 9}) == {0: (45, 0, 5), 1: (7, 0, 0), 2: (3, 0, 3)}
    assert moves(OffsetSpec(OFFSETS, offsets={"in": {1: 5}})) == {0: (40, 0, 0), 1: (5, 2, 0), 2: (0, 0, 0)}
    after = plan_move(FLOW, {"in": IN}, OffsetSpec(EARLIEST), {}).after(FLOW)
    assert after == replace(FLOW, offsets={"in": {0: 10, 1: 0, 2: 0}, "gone": {0: 1}})


def test_a_move_accepts_that_a_log_was_truncated() -> None:
    """What progress knows of the leaders of before is forgotten: the next start would refuse the log again."""
    before = replace(FLOW, epochs={"in": {0: (40, 3), 1: (7, 1)}, "gone": {0: (1, 0)}})
    found = plan_move(before, {"in": IN}, parse_target("latest"), {})
    assert found.after(before).epochs == {"gone": {0: (1, 0)}}


def test_expired_records_are_not_skipped_by_the_move() -> None:
    assert PartitionMove("in", 0, before=5, after=12, earliest=10).skipped == 2


def test_a_topic_that_was_created_again_has_no_position() -> None:
    before = replace(FLOW, topic_ids={"in": "older"})
    found = plan_move(before, {"in": IN}, OffsetSpec(LATEST), {})
    assert [each.before for each in found.moves] == [None] * 3
    assert found.after(before).topic_ids == {"in": "id-in"}


def test_where_it_cannot_go() -> None:
    with pytest.raises(DataLossError, match="the log starts at 10"):
        moves(OffsetSpec(BEGINNING))
    for offsets, why in (
        ({"in": {0: 9}}, "out of range: the log holds 10 to 50"),
        ({"in": {0: 51}}, "out of range"),
        ({"in": {3: 0}}, "no partition 3"),
        ({"out": {0: 0}}, "does not read out"),
    ):
        with pytest.raises(OptionError, match=why):
            moves(OffsetSpec(OFFSETS, offsets=offsets))
    with pytest.raises(ProgressConflictError, match=r"(?s)no source.*gone, in"):
        plan_move(FLOW, {}, OffsetSpec(LATEST), {})


def test_state_is_chosen() -> None:
    assert check_state(FLOW, None) == KEEP
    assert [check_state(WITH_TABLE, state) for state in (KEEP, DELETE)] == [KEEP, DELETE]
    with pytest.raises(OptionError, match=r"(?s)tables: l, t.*--state keep.*--state delete"):
        check_state(WITH_TABLE, None)
    in_spark = replace(FLOW, checkpoint=CHECKPOINT)
    assert check_state(in_spark, DELETE) == DELETE
    for state in (None, KEEP):
        with pytest.raises(OptionError, match=r"(?s)Spark checkpoint.*resume"):
            check_state(in_spark, state)
    assert meaning(FLOW, KEEP) == ""
    assert "The watermark of t stays" in meaning(WITH_TABLE, KEEP)
    assert "are deleted" in meaning(WITH_TABLE, DELETE)
    assert "empty checkpoint folder" in meaning(in_spark, DELETE)


def test_without_state() -> None:
    empty = without_state(replace(WITH_TABLE, checkpoint=CHECKPOINT), {"t": {1: 8}})
    assert empty.changelogs == {"t": {0: 5, 1: 8}, "t-internal": {0: 0, 1: 2}}
    assert empty.tables["t"] == TableProgress(2, processing_timers=False)
    local = empty.tables["l"].local
    assert local is not None
    assert (local.table_id != "made-up", local.partitions, local.last) == (True, 2, {})
    assert (empty.checkpoint, empty.offsets) == (None, FLOW.offsets)


# ---- import ----------------------------------------------------------------------------------------------


def test_a_file_gives_what_was_exported() -> None:
    content = export(WITH_TABLE, "f", 1_738_310_400_123)
    assert (content["version"], content["exported_at"]) == (1, "2025-01-31T08:00:00.123Z")
    assert parse(json.dumps(content), "x.json") == WITH_TABLE


FILE = replace(WITH_TABLE, offsets={"in": {0: 30, 1: 2}})


def imported(before: Progress | None, *, state: str | None = None, tables: Any = SAME, flow: str = "f") -> Any:
    return plan_import(Names(flow), FILE, before, {"in": IN}, tables, state)


def test_an_import_with_the_state_of_the_file() -> None:
    """A partition that the file does not know begins at its first offset."""
    for before in (None, WITH_TABLE):
        found = imported(before)
        assert found.after.offsets["in"] == {0: 30, 1: 2, 2: 0}
        assert (found.after.changelogs, found.after.tables) == (FILE.changelogs, FILE.tables)
        assert not found.deletes
    assert imported(WITH_TABLE, state=DELETE).deletes


def test_tables_without_rows_have_no_fields() -> None:
    """After that the processor may declare others."""
    before = replace(WITH_TABLE, tables={"t": TableProgress(2, fields="aggregates(n=Count()) of Tumbling")})
    assert without_state(before, {}).tables["t"].fields is None


def test_an_import_of_a_promoted_flow_that_has_not_run_yet() -> None:
    """What it must not write again comes with the state of the file."""
    handover = HandOver({"in": {0: 40}}, {"t": {"event": 7}})
    file = replace(FILE, handover=handover)
    for before in (None, WITH_TABLE, replace(WITH_TABLE, handover=handover)):
        for state, expected in ((None, handover), (DELETE, None)):
            found = plan_import(Names("f"), file, before, {"in": IN}, SAME, state)
            assert found.after.handover == expected
    changed = {**SAME, "t": replace(SAME["t"], is_same=False)}
    assert plan_import(Names("f"), file, WITH_TABLE, {"in": IN}, changed, KEEP).after.handover is None


def test_an_import_after_the_state_has_changed() -> None:
    changed = {**SAME, "t": replace(SAME["t"], is_same=False)}
    for before, ends in ((None, {0: 6, 1: 7}), (replace(WITH_TABLE, batch_id=9), {0: 5, 1: 6})):
        with pytest.raises(OptionError, match=r"(?s)changed since the export.*--state keep"):
            imported(before, tables=changed)
        kept = imported(before, tables=changed, state=KEEP)
        assert (kept.after.changelogs["t"], kept.deletes) == (ends, False)
        assert kept.after.batch_id == (4 if before is None else 9)
        assert imported(before, tables=changed, state=DELETE).deletes
    with pytest.raises(OptionError, match="changed since"):  # the flow got another table
        imported(replace(WITH_TABLE, tables={**WITH_TABLE.tables, "u": TableProgress(local=LocalTable("x", 1))}))
    with pytest.raises(ProgressConflictError, match="Table topic t is gone"):
        imported(None, tables={"t-internal": SAME["t-internal"]}, state=DELETE)


def test_an_import_for_another_flow() -> None:
    with pytest.raises(ProgressConflictError, match="has state"):
        imported(None, flow="g")
    without = plan_import(Names("g"), replace(FLOW, offsets={"in": {0: 30}}), None, {"in": IN}, {}, None)
    assert (without.after.flow, without.after.batch_id) == ("g", 0)


def test_an_import_of_a_flow_with_state_in_spark() -> None:
    file = replace(FLOW, offsets={"in": {0: 30}}, checkpoint=CHECKPOINT)

    def found(before: Progress | None, state: str | None = None) -> Any:
        return plan_import(Names("f"), file, before, {"in": IN}, {}, state)

    assert found(None).after.checkpoint == CHECKPOINT
    with pytest.raises(OptionError, match="Spark checkpoint"):
        found(replace(FLOW, checkpoint=CHECKPOINT))
    assert found(replace(FLOW, checkpoint=CHECKPOINT), DELETE).deletes
