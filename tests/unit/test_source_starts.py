"""Where a flow starts: a decision from facts, for every state that progress and a topic can be in."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.errors import DataLossError, OnceflowError, OptionError, ProgressConflictError
from onceflow.planning import source_starts
from onceflow.planning.source_starts import SourceTopic, Start
from onceflow.protocol.progress import Progress

FLOW = "orders"


def topic(earliest: dict[int, int], latest: dict[int, int], topic_id: str = "id-1") -> SourceTopic:
    return SourceTopic("in", topic_id, earliest, latest)


def progress(offsets: dict[int, int] | None, topic_ids: dict[str, str] | None = None, *, batch_id: int = 7) -> Progress:
    known = {} if offsets is None else {"in": offsets}
    return Progress(FLOW, batch_id, known, {"in": "id-1"} if topic_ids is None else topic_ids, time_ms=0)


def plan(source: SourceTopic, known: Progress | None, **options: Any) -> Start:
    return source_starts.plan(
        source, known, **{"starting_offsets": "earliest", "fail_on_data_loss": True, "flow": FLOW, **options}
    )


# ---- first start -------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [None, progress(None)], ids=["no progress", "progress of other topics"])
@pytest.mark.parametrize(
    "starting, expected",
    [
        ("earliest", {0: 3, 1: 0}),
        ("latest", {0: 9, 1: 5}),
        ({0: 3, 1: 5}, {0: 3, 1: 5}),
        ({1: 0, 0: 9}, {0: 9, 1: 0}),
        ({0: 4, 1: 4}, {0: 4, 1: 4}),
    ],
)
def test_first_start_is_pinned(known: Progress | None, starting: Any, expected: dict[int, int]) -> None:
    source = topic({0: 3, 1: 0}, {0: 9, 1: 5})
    assert plan(source, known, starting_offsets=starting) == Start(expected, must_commit=True)


@pytest.mark.parametrize(
    "starting, words",
    [
        ("newest", ["starting_offsets='newest' is unknown", '"earliest"']),
        ("", ["starting_offsets='' is unknown"]),
        ({}, ["every partition of in", "missing [0, 1], unknown []"]),
        ({0: 3}, ["missing [1], unknown []"]),
        ({0: 3, 1: 0, 2: 0}, ["missing [], unknown [2]"]),
        ({0: 2, 1: 0}, ["in-0 is 2, the log holds 3 to 9"]),
        ({0: 3, 1: 6}, ["in-1 is 6, the log holds 0 to 5"]),
        ({0: -1, 1: 0}, ["in-0 is -1"]),
    ],
)
def test_bad_starting_offsets(starting: Any, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        plan(topic({0: 3, 1: 0}, {0: 9, 1: 5}), None, starting_offsets=starting)
    assert caught.value.flow == FLOW
    assert caught.value.next_step
    for word in words:
        assert word in str(caught.value)


# ---- later starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("starting", ["earliest", "latest", {0: 4}])
def test_starting_offsets_are_ignored_once_there_is_progress(starting: Any) -> None:
    start = plan(topic({0: 0, 1: 0}, {0: 9, 1: 9}), progress({0: 5, 1: 0}), starting_offsets=starting)
    assert (start.offsets, start.must_commit) == ({0: 5, 1: 0}, False)
    if starting == "earliest":  # the default: nobody has asked for anything
        assert start.warnings == ()
    else:
        (told,) = start.warnings
        assert "first start only" in told
        assert f"onceflow reset {FLOW}" in told


@pytest.mark.parametrize("starting", [{0: 5.5}, {0: True}, {0: "5"}, {0: None}, {0.0: 5}, {True: 5}, {"0": 5}])
@pytest.mark.parametrize("is_first", [True, False])
def test_starting_offsets_that_are_no_numbers(starting: Any, is_first: bool) -> None:
    """Half an offset was in range: the flow would have read from there, and progress would have said something else."""
    topic = SourceTopic("in", "id", {0: 0}, {0: 10})
    known = None if is_first else Progress("f", 1, {"in": {0: 3}}, {"in": "id"}, 0)
    with pytest.raises(OptionError, match=r"is not \{partition: offset\}"):
        source_starts.plan(topic, known, starting_offsets=starting, fail_on_data_loss=True, flow="f")


def test_starting_offsets_that_nobody_knows_are_refused_at_every_start() -> None:
    with pytest.raises(OptionError, match="'lastest' is unknown"):
        plan(topic({0: 0}, {0: 9}), progress({0: 5}), starting_offsets="lastest")


@pytest.mark.parametrize("committed", [3, 9], ids=["at the log's start", "at its end"])
def test_progress_at_the_edges_of_the_log_is_no_loss(committed: int) -> None:
    assert plan(topic({0: 3}, {0: 9}), progress({0: committed})) == Start({0: committed}, must_commit=False)


def test_new_partition_is_read_from_its_beginning_and_pinned() -> None:
    start = plan(topic({0: 0, 1: 2}, {0: 9, 1: 4}), progress({0: 5}))
    assert (start.offsets, start.must_commit) == ({0: 5, 1: 2}, True)
    assert start.warnings == ("in-1 is new and is read from offset 2",)


def test_expired_records_stop_the_flow() -> None:
    with pytest.raises(DataLossError) as caught:
        plan(topic({0: 0, 1: 8}, {0: 9, 1: 9}), progress({0: 5, 1: 6}))
    assert (caught.value.flow, caught.value.topic) == (FLOW, "in-1")
    assert "offsets 6 to 7 have expired" in caught.value.detail
    assert "fail_on_data_loss=False" in caught.value.next_step


def test_expired_records_can_be_given_up() -> None:
    start = plan(topic({0: 0, 1: 8}, {0: 9, 1: 9}), progress({0: 5, 1: 6}), fail_on_data_loss=False)
    assert (start.offsets, start.must_commit) == ({0: 5, 1: 8}, True)
    assert len(start.warnings) == 1
    assert "offsets 6 to 7 have expired" in start.warnings[0]
    assert "skipped" in start.warnings[0]


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_truncated_log(fail_on_data_loss: bool) -> None:
    with pytest.raises(ProgressConflictError, match="Progress is ahead of in-0") as caught:
        plan(topic({0: 0}, {0: 4}), progress({0: 5}), fail_on_data_loss=fail_on_data_loss)
    assert caught.value.topic == "in-0"
    assert "progress ends at 5, the log's last stable offset is 4" in caught.value.detail


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_topic_created_again(fail_on_data_loss: bool) -> None:
    source = topic({0: 0}, {0: 9}, topic_id="id-2")
    with pytest.raises(ProgressConflictError, match="deleted and created again") as caught:
        plan(source, progress({0: 5}), fail_on_data_loss=fail_on_data_loss)
    assert "was id-1, is id-2" in caught.value.detail
    assert "{0: 5}" in caught.value.detail
    assert "onceflow reset" in caught.value.next_step


def test_topic_whose_id_progress_does_not_know() -> None:
    assert plan(topic({0: 0}, {0: 9}, topic_id="id-2"), progress({0: 5}, {})) == Start({0: 5}, must_commit=False)


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_lost_partitions(fail_on_data_loss: bool) -> None:
    with pytest.raises(ProgressConflictError, match=r"has lost partitions \[1, 3\]"):
        plan(topic({0: 0, 2: 0}, {0: 9, 2: 0}), progress({0: 5, 1: 0, 2: 0, 3: 8}), fail_on_data_loss=fail_on_data_loss)


def test_the_given_offsets_are_not_aliased() -> None:
    """What the caller does with its dictionaries later must not move the decision."""
    earliest = {0: 0}
    start = plan(topic(earliest, {0: 9}), None)
    earliest[0] = 5
    assert start.offsets == {0: 0}


# ---- any state ---------------------------------------------------------------------------------------

spans = st.dictionaries(
    st.integers(0, 5), st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p))), min_size=1
)
committed_offsets = st.dictionaries(st.integers(0, 5), st.integers(0, 22))
starts = st.one_of(st.sampled_from(["earliest", "latest"]), committed_offsets)


@pytest.mark.parametrize("examples", [100, pytest.param(300, marks=pytest.mark.long)])
def test_any_state(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    @given(
        span=spans, known=st.none() | committed_offsets, starting=starts, strict=st.booleans(), same_id=st.booleans()
    )
    def check(
        span: dict[int, tuple[int, int]], known: dict[int, int] | None, starting: Any, strict: bool, same_id: bool
    ) -> None:
        source = topic({p: low for p, (low, _) in span.items()}, {p: high for p, (_, high) in span.items()})
        before = None if known is None else progress(known, {"in": "id-1" if same_id else "id-0"})
        options = {"starting_offsets": starting, "fail_on_data_loss": strict}
        exact = (
            known is not None
            and known.keys() == span.keys()
            and all(low <= known[p] <= high for p, (low, high) in span.items())
        )
        if (exact and same_id) or (known is None and isinstance(starting, str)):
            start = plan(source, before, **options)  # what can be continued exactly is not refused
        else:
            try:
                start = plan(source, before, **options)
            except OnceflowError as problem:
                error = problem
            else:
                error = None
            if error is not None:
                assert error.flow == FLOW
                assert error.next_step
                return
        assert start.offsets.keys() == span.keys()
        for partition, offset in start.offsets.items():
            low, high = span[partition]
            assert low <= offset <= high
            if known is not None and partition in known:
                assert offset >= known[partition], "records would be written twice"
                if strict:
                    assert offset == known[partition], "records would be skipped"
                elif offset > known[partition]:
                    assert offset == low, "more is skipped than has expired"
            elif known is not None:
                assert offset == low, "a new partition is not read from its beginning"
        assert start.must_commit == (start.offsets != known)
        if known is not None:
            assert same_id
            assert known.keys() <= span.keys()
            changed = [p for p, offset in start.offsets.items() if known.get(p) != offset]
            told = [warning for warning in start.warnings if not warning.startswith("starting_offsets=")]
            assert len(told) == len(changed)

    check()
