"""Whether a flow can take another one's place, what that one becomes, and which batches follow."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.admin.versions.promote import Promoted, _check_tables
from onceflow.admin.versions.promotion_plan import (
    check_can_promote,
    has_unfired,
    missing,
    pairs,
    positions,
    promoted_progress,
    was_promoted,
)
from onceflow.admin.versions.promotion_timers import TIMERS_MAX, check_unfired
from onceflow.cli.promote import _plan
from onceflow.client.deadline import Deadline
from onceflow.driver.record import handover
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import OptionError, PermissionDeniedError, ProgressConflictError, UnknownTopicError
from onceflow.planning.table_plan import check_not_replaced
from onceflow.protocol.names import Names
from onceflow.protocol.progress import (
    NO_TIMER,
    CheckpointProgress,
    ForkOrigin,
    HandOver,
    LocalTable,
    Progress,
    Promotion,
    TableProgress,
    TimerId,
    decode,
    encode,
)
from onceflow.state.windows.panes import TIMER as WINDOW_TIMER

OLD, NEW = Names("sums"), Names("next")


def old(at: Mapping[int, int], **changed: Any) -> Progress:
    found = Progress(
        "sums",
        7,
        {"in": at},
        {"in": "id", "t": "id-t", "t-internal": "id-i"},
        1000,
        changelogs={"t": {0: 5}, "t-internal": {0: 1}},
        tables={"t": TableProgress(1, fired={"event": 50}, processing_timers=False)},
        outputs=("out",),
    )
    return replace(found, **changed)


def new(at: Mapping[int, int], **changed: Any) -> Progress:
    found = Progress(
        "next",
        3,
        {"in": at},
        {"in": "id", "n": "id-n", "n-internal": "id-m"},
        1000,
        changelogs={"n": {0: 9}, "n-internal": {0: 2}},
        tables={"n": TableProgress(2, fired={"event": 40}, processing_timers=False)},
        outputs=("shadow",),
        forked=ForkOrigin("sums", 5, 900, {}, {"t": "n"}),
    )
    return replace(found, **changed)


def test_a_gap() -> None:
    before, after = old({0: 10, 1: 20}), new({0: 8, 1: 20})
    check_can_promote(before, after, OLD, NEW)
    assert missing(before, after, new_timers=False) == ""
    assert [each.gap for each in positions(before, after)] == [2, 0]
    found = promoted_progress(before, after, 2000)
    assert (found.flow, found.batch_id, found.offsets) == ("sums", 7, after.offsets)
    assert (found.tables, found.changelogs) == (after.tables, after.changelogs)
    assert found.topic_ids == after.topic_ids
    assert found.outputs == ("out",)
    assert found.promoted == Promotion("next", 2000, {"t": "n"}, 7, ("n",))
    assert found.handover == HandOver(before.offsets, {"n": {"event": 50}})
    assert decode(*encode(found)) == found
    assert was_promoted(found, None, NEW)
    assert not was_promoted(found, after, NEW)
    assert not was_promoted(before, None, NEW)
    # What follows: the gap, then the timers, then outputs.
    assert handover.first_range_end(found) == {"in": {0: 10, 1: 20}}
    assert not handover.owes_timers(found)
    assert handover.timers_until(found, "n") == {"event": 50}
    assert handover.timers_until(found, "another") == {}
    level = replace(found, offsets=before.offsets)
    level = replace(level, handover=handover.after(found, level.offsets, timers_left=False))
    assert handover.owes_timers(level)
    assert handover.first_range_end(level) is None
    assert handover.after(level, level.offsets, timers_left=True) == level.handover
    done = replace(level, handover=handover.after(level, level.offsets, timers_left=False))
    assert done.handover is None
    assert handover.timers_until(done, "n") is None
    assert not handover.owes_timers(done)


def test_a_topic_that_was_created_again() -> None:
    """Its new records have not been read by anybody."""
    progress = promoted_progress(old({0: 10}), new({0: 8}), 2000)
    assert handover.of_same_topic(progress, "in", "id") == progress.handover
    left = handover.of_same_topic(progress, "in", "another")
    assert left == HandOver({}, {"n": {"event": 50}})
    assert handover.first_range_end(replace(progress, handover=left, offsets={"in": {0: 0}})) is None


def test_no_gap() -> None:
    before = old({0: 8})
    assert promoted_progress(before, new({0: 8}), 2000).handover == HandOver({"in": {0: 8}}, {"n": {"event": 50}})
    same = {"n": TableProgress(2, fired={"event": 40}, soonest={"event": 51})}
    assert promoted_progress(before, new({0: 8}, tables=same), 2000).handover is None
    # Without timers, the gap is all there is to do.
    plain = promoted_progress(old({0: 9}, tables={"t": TableProgress()}), new({0: 8}), 2000)
    assert plain.handover == HandOver({"in": {0: 9}})
    assert handover.after(plain, {"in": {0: 9}}, timers_left=False) is None
    assert handover.after(plain, {"in": {0: 8}}, timers_left=False) == plain.handover


def plan_of(before: Progress, after: Progress) -> str:
    """What the command says before it asks."""
    found = Promoted("sums", "next", before, positions(before, after), bool(after.tables), copy=after)
    return "\n".join(_plan(found))


def test_the_plan_says_which_flow_is_ahead() -> None:
    assert "next is at most 2 records behind" in plan_of(old({0: 10}), new({0: 8}))
    assert "ahead" not in plan_of(old({0: 10}), new({0: 8}))
    text = plan_of(old({0: 790, 1: 1882}), new({0: 847, 1: 2025}))
    assert "next is ahead: sums has at most 200 records to go, and has to run until" in text
    assert "behind" not in text
    both = plan_of(old({0: 7, 1: 10}), new({0: 8, 1: 8}))
    assert "at most 1 record to go" in both
    assert "at most 2 records behind" in both
    assert plan_of(old({0: 8}), new({0: 8})).splitlines()[-1] == "next is as far as sums."
    stateless: dict[str, Any] = {"tables": {}, "changelogs": {}}
    assert "ahead" not in plan_of(old({0: 7}, **stateless), new({0: 8}, **stateless))


def test_the_plan_warns_of_what_was_not_tried() -> None:
    before = old({0: 8})
    assert "untried" not in plan_of(before, new({0: 8}))
    assert "Warning" not in plan_of(before, new({0: 8}))
    assert "next has committed no batch since it was copied: its program is untried" in plan_of(
        before, new({0: 8}, batch_id=0)
    )
    beside = plan_of(before, new({0: 8}, tables={"n": TableProgress(), "empty": TableProgress()}))
    assert "are not copies of tables of sums" in beside
    assert beside.endswith("there: empty.")


def test_other_topics() -> None:
    """The new version reads one more topic, and another one no longer."""
    before = old({0: 8}, offsets={"in": {0: 8}, "gone": {0: 4}})
    after = new({0: 8}, offsets={"in": {0: 6, 1: 3}, "more": {0: 7}})
    found = promoted_progress(before, after, 2000)
    assert found.offsets == {"in": {0: 6, 1: 3}, "gone": {0: 4}, "more": {0: 7}}
    assert handover.first_range_end(found) == {"in": {0: 8, 1: 3}, "gone": {0: 4}, "more": {0: 7}}
    assert "in-1: it is at 0, the new one at 3" in missing(before, after, new_timers=False)


@pytest.mark.parametrize("stateful", [True, False])
def test_a_topic_that_only_the_new_version_has_read(stateful: bool) -> None:
    """The outputs of what it has read of it are in no output of the flow that goes on."""
    state: dict[str, Any] = {} if stateful else {"tables": {}, "changelogs": {}, "topic_ids": {"in": "id"}}
    before = old({0: 8}, **state)
    after = new({0: 8}, offsets={"in": {0: 6}, "more": {0: 0, 1: 7}}, **state)
    with pytest.raises(ProgressConflictError, match="has read more, which 'sums' does not read") as caught:
        check_can_promote(before, after, OLD, NEW)
    assert "at most 7 records" in caught.value.detail
    assert "--new-topics" in caught.value.next_step
    check_can_promote(before, after, OLD, NEW, new_topics=True)
    check_can_promote(before, replace(after, offsets={"in": {0: 6}, "more": {0: 0}}), OLD, NEW)
    check_can_promote(replace(before, offsets=after.offsets), before_topics(after), OLD, NEW)


def before_topics(after: Progress) -> Progress:
    return replace(after, offsets={"in": after.offsets["in"]})


def test_a_source_that_is_left_out_after_a_promotion() -> None:
    before = old({0: 8}, offsets={"in": {0: 8}, "more": {0: 9, 1: 4}, "gone": {0: 4}})
    after = new({0: 8}, offsets={"in": {0: 6}, "more": {0: 7, 1: 4}})
    found = promoted_progress(before, after, 2000)
    handover.check_sources(found, ["in", "more"], flow="sums")
    with pytest.raises(ProgressConflictError, match="2 more records of topic more"):
        handover.check_sources(found, ["in"], flow="sums")
    handover.check_sources(replace(found, handover=None), [], flow="sums")


def test_what_would_be_lost() -> None:
    assert "in-0: it is at 7, the new one at 8" in missing(old({0: 7}), new({0: 8}), new_timers=False)
    ahead = {"n": TableProgress(2, fired={"event": 51})}
    assert "up to 50, those of n up to 51" in missing(old({0: 8}), new({0: 8}, tables=ahead), new_timers=False)
    none = old({0: 8}, tables={"t": TableProgress()})
    assert "--new-timers" in missing(none, new({0: 8}), new_timers=False)
    assert missing(none, new({0: 8}), new_timers=True) == ""
    stateless: dict[str, Any] = {"tables": {}, "changelogs": {}}
    assert missing(old({0: 7}, **stateless), new({0: 8}, **stateless), new_timers=False) == ""


def test_timers_that_are_left() -> None:
    """The old flow has not fired timers that are due before others which it has fired."""
    id_, other = TimerId("6b", "x", "event", 45), TimerId("6b", "y", "event", 30)
    before = old({0: 10}, tables={"t": TableProgress(1, fired={"event": 50}, soonest={"event": 30}, unfired=(0,))})
    after = new({0: 8})
    assert missing(before, after, new_timers=False) == ""
    assert has_unfired(before, after)
    names = pairs(before, after)
    with pytest.raises(ProgressConflictError, match="may have fired 1 timer of table n") as refused:
        check_unfired({"t": frozenset({id_, other})}, {}, before, after, names)
    assert "'y' of key b'k', event time 30" in refused.value.detail
    kept = check_unfired({"t": frozenset({id_, other})}, {"n": frozenset({other})}, before, after, names)
    found = promoted_progress(before, after, 2000, kept)
    assert found.handover == HandOver(before.offsets, {"n": {"event": 50}}, {"n": frozenset({id_, other})})
    assert decode(*encode(found)) == found
    assert handover.unfired(found, "n") == {id_, other}
    assert handover.unfired(found, "another") == handover.unfired(before, "n") == set()
    window = {"t": frozenset({TimerId("6b", WINDOW_TIMER, "event", 45)})}
    with pytest.raises(ProgressConflictError, match="has not closed all windows that are due in table t"):
        check_unfired(window, {}, before, after, names)
    many = frozenset(TimerId("6b", str(n), "event", 45) for n in range(TIMERS_MAX + 1))
    with pytest.raises(ProgressConflictError, match="2,001 timers that are due"):
        check_unfired({"t": many}, {}, before, after, names)


def test_a_clock_that_shows_less_has_fired_the_same_if_no_timer_is_left() -> None:
    after = new({0: 8}, tables={"n": TableProgress(2, fired={"event": 55}, soonest={"event": 70})})
    for soonest, is_missing in ((55, True), (56, False), (NO_TIMER, False)):
        table = TableProgress(1, fired={"event": 50}, soonest={"event": soonest})
        assert bool(missing(old({0: 8}, tables={"t": table}), after, new_timers=False)) == is_missing
        assert promoted_progress(old({0: 8}, tables={"t": table}), after, 1).handover is None


def test_without_state() -> None:
    stateless: dict[str, Any] = {"tables": {}, "changelogs": {}, "topic_ids": {"in": "id"}, "forked": None}
    before, after = old({0: 7}, **stateless), new({0: 9}, **stateless)
    check_can_promote(before, after, OLD, NEW)
    found = promoted_progress(before, after, 2000)
    assert replace(found, promoted=None, time_ms=1000) == before


def test_the_rows_of_both_versions_are_known() -> None:
    """A collection of a claim check must know that there are some."""
    for before, after in (("bank:t", ""), ("", "bank:t"), ("bank:t", "bank:t")):
        assert promoted_progress(old({0: 8}, external=before), new({0: 8}, external=after), 2000).external == "bank:t"


def test_a_third_version() -> None:
    second = replace(promoted_progress(old({0: 8}), new({0: 8}), 2000), handover=None)
    third = new({0: 8}, flow="third", forked=ForkOrigin("sums", 7, 0, {}, {"n": "m"}))
    third = replace(third, tables={"m": TableProgress(3)}, changelogs={"m": {0: 1}, "m-internal": {0: 1}})
    found = promoted_progress(second, third, 3000)
    assert found.promoted == Promotion("third", 3000, {"t": "m", "n": "m"}, 7, ("m",))
    for table in ("t", "n"):
        with pytest.raises(ProgressConflictError, match="not this flow's any more") as refused:
            check_not_replaced(table, found)
        assert "table='m'" in refused.value.next_step
    check_not_replaced("m", found)
    check_not_replaced("another", found)


def test_the_second_of_two_copies() -> None:
    """The first one has taken the flow's place: its table is compared with that of the second one."""
    first = replace(promoted_progress(old({0: 8}), new({0: 8}), 2000), handover=None)
    forked = ForkOrigin("sums", 5, 0, {}, {"t": "m", "unused": "k"})

    def second(**known: Any) -> Progress:
        known = {"fired": {"event": 40}, "processing_timers": False, **known}
        return new({0: 8}, flow="third", forked=forked, tables={"m": TableProgress(3, **known)})

    assert pairs(first, second()) == {"n": "m"}
    check_can_promote(first, second(), OLD, Names("third"))
    assert missing(first, second(), new_timers=False) == ""
    assert promoted_progress(first, second(soonest={"event": 41}), 3000).handover is None
    ahead = second(fired={"event": 41})
    assert "timers of n have fired up to 40, those of m up to 41" in missing(first, ahead, new_timers=False)
    behind = second(fired={"event": 30}, soonest={"event": 35})
    assert promoted_progress(first, behind, 3000).handover == HandOver({"in": {0: 8}}, {"m": {"event": 40}})
    with pytest.raises(ProgressConflictError, match="Table m of flow 'third' has timers in processing time"):
        check_can_promote(first, second(processing_timers=True), OLD, Names("third"))


@pytest.mark.parametrize("clock", ["event", "processing"])
def test_timers_of_a_table_that_only_the_copy_has(clock: str) -> None:
    """What they have written is in the outputs of the copy only."""
    both = {**new({}).tables, "more": TableProgress(fired={clock: 5}, processing_timers=clock == "processing")}
    copy = new({0: 8}, tables=both)
    check_can_promote(old({0: 8}), copy, OLD, NEW)
    assert "timers of more have fired, a table that only the new one has" in missing(
        old({0: 8}), copy, new_timers=False
    )
    assert missing(old({0: 8}), copy, new_timers=True) == ""
    unfired = {**both, "more": TableProgress(soonest={clock: 5}, processing_timers=clock == "processing")}
    assert missing(old({0: 8}), new({0: 8}, tables=unfired), new_timers=False) == ""


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"handover": HandOver({})}, "has not run since"),
        ({"checkpoint": CheckpointProgress("q", 1, "d")}, "Spark checkpoint"),
        ({"tables": {"x": TableProgress(local=LocalTable("t", 1))}}, "no exact state"),
        ({"tables": {"x": TableProgress(open_ended=True)}}, "no exact state"),
        ({"offsets": {"other": {0: 1}}}, "reads none of the topics"),
        ({"topic_ids": {"in": "another"}}, "deleted and created again"),
        ({"tables": {"t": TableProgress(), "n": TableProgress()}}, "does not say whether table . has timers"),
        ({"tables": dict.fromkeys("tn", TableProgress(processing_timers=True))}, "has timers in processing time"),
    ],
)
def test_what_cannot_be_promoted(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ProgressConflictError, match=text):
        check_can_promote(old({0: 8}), new({0: 8}, **changed), OLD, NEW)
    with pytest.raises(ProgressConflictError, match=text):
        check_can_promote(old({0: 8}, **changed), new({0: 8}), OLD, NEW)


def test_timers_in_processing_time() -> None:
    """The times of both flows are the same only if the user knows that."""
    rings = {"t": TableProgress(fired={"processing": 60}, processing_timers=True)}
    check_can_promote(old({0: 8}, tables=rings), new({0: 8}), OLD, NEW, same_timers=True)
    with pytest.raises(ProgressConflictError, match="Table t of flow 'sums' has timers") as refused:
        check_can_promote(old({0: 8}, tables=rings), new({0: 8}), OLD, NEW)
    assert "upgrade in place" in refused.value.next_step
    # A table that only one of both has is not handed over.
    more = {**new({}).tables, "m": TableProgress(processing_timers=True)}
    check_can_promote(old({0: 8}), new({0: 8}, tables=more), OLD, NEW)


@pytest.mark.parametrize(
    "there, text",
    [
        ({"n": "id-n", "n-internal": "id-m", "in": "id"}, ""),
        ({"n": "id-n"}, "Topic n-internal of flow 'next' does not exist"),
        ({"n": "another", "n-internal": "id-m"}, "Topic n of flow 'next' was deleted and created again"),
        ({"n": None, "n-internal": "id-m"}, ""),  # this principal may not see it
    ],
)
def test_the_copy_has_its_tables(there: dict[str, str | None], text: str) -> None:
    """Otherwise neither version could go on."""

    def topics(names: list[str], deadline: Deadline, once: bool) -> dict[str, Any]:
        (name,) = names
        if name not in there:
            raise UnknownTopicError(f"Topic {name} does not exist")
        if there[name] is None:
            raise PermissionDeniedError(f"No DESCRIBE on topic {name}")
        return {name: SimpleNamespace(topic_id=there[name])}

    cluster: Any = SimpleNamespace(topics=topics)
    with pytest.raises(ProgressConflictError, match=text) if text else nullcontext():
        _check_tables(cluster, new({0: 8}), NEW, Deadline(5, "a test"))


def test_whose_copy_it_is() -> None:
    for forked in (None, ForkOrigin("another", 1, 0)):
        with pytest.raises(ProgressConflictError, match="is not a copy of"):
            check_can_promote(old({0: 8}), new({0: 8}, forked=forked), OLD, NEW)
    with pytest.raises(ProgressConflictError, match="has none"):
        check_can_promote(old({0: 8}), new({0: 8}, tables={}), OLD, NEW)
    with pytest.raises(OptionError, match="cannot replace itself"):
        check_can_promote(old({0: 8}), old({0: 8}), OLD, OLD)


def test_a_batch_that_reads_too_much_is_refused() -> None:
    progress = promoted_progress(old({0: 10, 1: 20}), new({0: 8, 1: 20}), 2000)

    def check(ends: dict[int, int]) -> None:
        handover.check_range(progress, SourceRange({"in": {0: 8, 1: 20}}, {"in": ends}), flow="sums", batch=8)

    check({0: 10, 1: 20})
    check({0: 9, 1: 20})
    for ends in ({0: 11, 1: 20}, {0: 10, 1: 21}):
        with pytest.raises(ProgressConflictError, match="reads too much of in-"):
            check(ends)
