"""What the start of a flow with an external sink decides."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow import ProgressConflictError
from onceflow.planning.external_start import plan_external
from onceflow.protocol.progress import Progress


def progress(batch: int, **offsets: int) -> Progress:
    ids = {topic: f"id-{topic}" for topic in offsets}
    return Progress("f", batch, {topic: {0: offset} for topic, offset in offsets.items()}, ids, 1)


def planned(kafka: Progress, row: Progress | None) -> Any:
    return plan_external(kafka, row, ["a", "b"], target="t", flow="f", identity="onceflow.f@c")


def test_where_a_flow_with_an_external_sink_starts() -> None:
    assert planned(progress(0, a=5), None).progress.offsets == {"a": {0: 5}}
    with pytest.raises(ProgressConflictError, match="committed 3 batches, but t has no progress row"):
        planned(progress(3, a=5), None)
    # The last driver died before Kafka's progress had followed.
    start = planned(progress(2, a=5, b=1), progress(3, a=9))
    assert (start.progress, start.follows, start.warning) == (progress(3, a=9, b=1), True, "")
    # Starts have moved Kafka's progress: expired records were skipped, or the flow was reset.
    start = planned(progress(3, a=12, b=0), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=12, b=0), False)
    # An older state of the database was restored.
    start = planned(progress(5, a=20), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=9), True)
    assert "an older state of t was restored" in start.warning
