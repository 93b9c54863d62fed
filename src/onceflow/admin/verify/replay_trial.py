"""Processes the first records of a flow several times, to find out what the results depend on besides the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.admin.verify.replay import BATCH_RECORDS, CALLS, CLOCK, Replay, Replayed
from onceflow.admin.verify.replay_steps import Step
from onceflow.client.committed import CommittedReader
from onceflow.clock import clock_ms
from onceflow.errors import ProcessorError
from onceflow.protocol.progress import Offsets
from onceflow.state.engine import dead_letters
from onceflow.state.format import rows
from onceflow.state.local.format import KINDS

_RECORDS = 2_000
_LATER_MS = 400 * 24 * 3600 * 1000  # another minute, hour, weekday and year


def dependences(what: Replayed, reader: CommittedReader, begin: Offsets, end: Offsets, folder: Path) -> Iterator[str]:
    """What the results depend on, as reasons why a difference may be no mistake.

    One is how many records of a key process() gets at once, as one output for each call does. The other one is
    processing time, which a replay does not notice in a column processor. The first records are processed from an empty
    state each time.
    """
    share = max(1, _RECORDS // max(1, sum(len(end[topic]) for topic in what.sources)))
    start = {topic: {p: begin.get(topic, {}).get(p, 0) for p in end[topic]} for topic in what.sources}
    part = {topic: {p: min(end[topic][p], at + share) for p, at in each.items()} for topic, each in start.items()}
    now_ms = clock_ms()

    def results(name: str, at_once: int, now_ms: int) -> Counter[Any]:
        step = Step(start, part, None, None, now_ms, True)
        return _results(what, reader, step, folder / f"trial-{name}", at_once)

    try:
        together = results("together", BATCH_RECORDS, now_ms)
        if results("single", 1, now_ms) != together:
            yield CALLS
        if results("later", BATCH_RECORDS, now_ms + _LATER_MS) != together:
            yield CLOCK
    except ProcessorError:
        return  # for example, it needs the state that it begins with


def _results(what: Replayed, reader: CommittedReader, step: Step, folder: Path, at_once: int) -> Counter[Any]:
    found: Counter[Any] = Counter()

    def emit(batch: pa.RecordBatch, partition: int) -> None:
        for row in batch.to_pylist():
            # Where in onceflow's own code process() was called is no result.
            headers = [each for each in row["headers"] or () if each["key"] != dead_letters.ERROR_STACK]
            found[repr({**row, "headers": headers})] += 1

    trial = Replay(what, reader, folder, emit=emit, tell=lambda done: None, at_once=at_once)
    trial.run(step)
    for store in trial.stores().values():
        found.update(
            (key, rows.unpack(row).payload) for kind in sorted(KINDS) for key, row in store.scan(kind, rows.after(kind))
        )
        store.close()
    return found
