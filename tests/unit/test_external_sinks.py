"""What the start of a flow with an external sink decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onceflow import ProgressConflictError
from onceflow.planning.external_start import of_row, plan_external
from onceflow.protocol.progress import Progress


def progress(batch: int, **offsets: int) -> Progress:
    ids = {topic: f"id-{topic}" for topic in offsets}
    return Progress("f", batch, {topic: {0: offset} for topic, offset in offsets.items()}, ids, 1)


def planned(kafka: Progress, row: Progress | None) -> Any:
    return plan_external(kafka, row, ["a", "b"], target="t", flow="f", identity="onceflow.f@c")


def test_where_a_flow_with_an_external_sink_starts() -> None:
    assert planned(progress(0, a=5), None).progress.offsets == {"a": {0: 5}}
    with pytest.raises(ProgressConflictError, match=r"(?s)3 batches, but t has no progress row.*'onceflow\.f@c'"):
        planned(progress(3, a=5), None)
    # The last driver died before Kafka's progress had followed.
    start = planned(progress(2, a=5, b=1), progress(3, a=9))
    assert (start.progress, start.follows, start.warning) == (progress(3, a=9, b=1), True, "")
    # A topic that the row does not know has the leader epochs that the start has found.
    known = replace(progress(2, a=5, b=1), epochs={"a": {0: (0, 1)}, "b": {0: (0, 3)}})
    row = replace(progress(3, a=9), epochs={"a": {0: (0, 2)}})
    assert planned(known, row).progress.epochs == {"a": {0: (0, 2)}, "b": {0: (0, 3)}}
    # Starts have moved Kafka's progress: expired records were skipped, or the flow was reset.
    start = planned(progress(3, a=12, b=0), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=12, b=0), False)
    # An older state of the database was restored.
    start = planned(progress(5, a=20), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=9), True)
    assert "an older state of t was restored" in start.warning


def test_an_error_names_the_row_that_decides() -> None:
    found = of_row(ProgressConflictError("Topic a was deleted", topic="a", detail="id was 1"), "t", "onceflow.f@c")
    assert isinstance(found, ProgressConflictError)
    assert found.topic == "a"
    assert "id was 1; this is what the progress row 'onceflow.f@c' of t says" in str(found)
