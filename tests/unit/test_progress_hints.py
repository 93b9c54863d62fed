"""The hint in a group's offsets: where a flow's progress record is, and whose record that is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.client.deadline import Deadline
from onceflow.client.decided import Decided
from onceflow.client.log_reader import LogRecord
from onceflow.driver.record import progress_log
from onceflow.driver.record.progress_log import hint, offset_of_hint, partition_of
from onceflow.errors import DeadlineExceededError, ProgressConflictError
from onceflow.protocol.progress import Progress, encode

keys = st.text(alphabet="abc.", min_size=1, max_size=4)


@given(keys, keys, st.integers(0, 1 << 62))
def test_whose_it_is(one: str, other: str, offset: int) -> None:
    assert offset_of_hint(hint(one, offset), one) == offset
    assert offset_of_hint(hint(other, offset), one) == (offset if one == other else None)


@given(keys, st.integers(0, 1 << 62), st.text(max_size=20))
def test_those_of_earlier_builds_and_of_others(flow: str, offset: int, text: str) -> None:
    for partition in range(progress_log.PROGRESS_PARTITIONS):
        found = offset_of_hint(f"onceflow:{partition}:{offset}", flow)
        assert found == (offset if partition == partition_of(flow) else None)
    assert offset_of_hint(text, flow) is None
    assert offset_of_hint(f"{hint(flow, offset)}0", flow) is None


#: Two flows with one name, and prefixes of the transactional id. Their records are in one partition.
MINE, OTHER = "dev.orders", "qa.orders"


def read(monkeypatch: pytest.MonkeyPatch, metadata: str, decided: Decided) -> Progress | None:
    """What flow `MINE` finds, if its group has this metadata, and its partition these records."""
    assert partition_of(MINE) == partition_of(OTHER)

    def offsets(cluster: Any, partitions: Any, *_: Any) -> dict[str, dict[int, int]]:
        return {topic: dict.fromkeys(numbers, 0) for topic, numbers in partitions.items()}

    monkeypatch.setattr(progress_log.kafka_offsets, "list_offsets", offsets)
    monkeypatch.setattr(progress_log.kafka_offsets, "fetch_committed", lambda *_, **__: {"in": {0: (90, metadata)}})
    monkeypatch.setattr(progress_log, "read_decided", lambda *_, **__: decided)
    cluster: Any = None
    return progress_log.read_progress(cluster, MINE, "orders", {"in": [0]}, Deadline(0.05, "a test"))


def test_a_flow_that_is_new_in_the_group_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that its progress is gone, and to reset: that would have deleted the other flow's group."""
    assert read(monkeypatch, hint(OTHER, 1234), Decided(stable=2000)) is None
    with pytest.raises(ProgressConflictError, match="its progress record is gone"):
        read(monkeypatch, hint(MINE, 1234), Decided(stable=2000))


def test_the_hint_of_another_flow_does_not_decide_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record before the hint counts as committed although its marker is missing: only of the flow's own."""
    key, value = encode(Progress(MINE, 7, {}, {}, 0))
    undecided = Decided(stable=5, undecided=[LogRecord(5, key, value, 0, 1, 0)])
    found = read(monkeypatch, hint(MINE, 5), undecided)
    assert found is not None
    assert found.batch_id == 7
    with pytest.raises(DeadlineExceededError, match="is about to change the flow's progress, and is still open"):
        read(monkeypatch, hint(OTHER, 1234), undecided)
