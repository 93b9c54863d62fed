"""How fast windows are, in the engine alone: ``python -m onceflow.bench.windows``.

Records of 200 keys, in the order of time, on one core, without Spark and Kafka, with the memory store. Tumbling and
hopping windows are compared with processors that do the same with a map and timers, one record after the other.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.state.api import serdes
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.engine.record_engine import Engine
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.windows.aggregates import Sum
from onceflow.state.windows.kinds import Hopping, Kind, Session, Sliding, Tumbling
from onceflow.state.windows.processor import WindowProcessor

KEYS, BATCH_RECORDS, STEP_MS, LATENESS_MS = 200, 5_000, 12, 10_000
MINUTE_MS = 60_000


class Sums(WindowProcessor):
    """The sum of a field over windows."""

    value = serdes.JSON
    allowed_lateness = LATENESS_MS / 1000
    aggregates = {"sum": Sum("n")}  # noqa: RUF012

    def __init__(self, window: Kind) -> None:
        self.window = window


class ByHand(Processor):
    """The same over windows of a number of minutes, one of which begins each minute."""

    value = output = serdes.JSON
    state = serdes.LONG
    allowed_lateness = LATENESS_MS / 1000

    def __init__(self, minutes: int) -> None:
        self.minutes = minutes

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> None:
        sums = state.map("minutes", key=serdes.LONG)
        for record in records:
            assert record.timestamp_ms is not None
            first = (record.timestamp_ms // MINUTE_MS + 1) * MINUTE_MS
            for end in range(first, first + self.minutes * MINUTE_MS, MINUTE_MS):
                sums.put(end, sums.get(end, 0) + record.value["n"])
                state.timers.register(f"{end}", end)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[Record]:
        sums = state.map("minutes", key=serdes.LONG)
        yield Record(key, {"end_ms": timer.at_ms, "sum": sums.get(timer.at_ms)})
        sums.delete(timer.at_ms)


def measure(processor: Processor, *, batches: int, step_ms: int) -> tuple[float, int, int]:
    """Records per second, results, and changed rows."""
    with tempfile.TemporaryDirectory() as folder:
        store = MemoryStore.open(Path(folder) / "store")
        rng = random.Random(1)
        watermark_ms, results, rows = None, 0, 0
        began = time.perf_counter()
        for batch in range(batches):
            times = [(batch * BATCH_RECORDS + n) * step_ms for n in range(BATCH_RECORDS)]
            engine = Engine(
                processor,
                store,
                flow="bench",
                table="windows",
                partition=0,
                batch=batch + 1,
                now_ms=0,
                keeps_time=False,
                watermark_ms=watermark_ms,
                late_topic="late",
                max_timers_per_batch=None,
            )
            engine.start()
            keys = pa.array([b"key-%d" % rng.randrange(KEYS) for _ in times], pa.binary())
            values = pa.array([b'{"n":1}'] * len(times), pa.binary())
            engine.feed(pa.RecordBatch.from_arrays([keys, values, pa.array(times)], ["key", "value", "timestamp"]))
            engine.finish()
            written, changes = engine.outputs(), engine.changes()
            results, rows = results + (0 if written is None else written.num_rows), rows + len(changes)
            store.write(changes, index=True)
            watermark_ms = times[-1] - LATENESS_MS
        seconds = time.perf_counter() - began
        MemoryStore.remove(Path(folder) / "store")
    return batches * BATCH_RECORDS / seconds, results, rows


def main() -> None:
    hour = Hopping("1 hour", every="1 minute")
    runs: list[tuple[str, Processor, int, int]] = [
        ("tumbling, by hand", ByHand(1), 20, STEP_MS),
        ("tumbling", Sums(Tumbling("1 minute")), 20, STEP_MS),
        ("hopping, by hand", ByHand(60), 10, STEP_MS),
        ("hopping", Sums(hour), 10, STEP_MS),
        ("hopping by hand, a result per record", ByHand(60), 20, 20 * STEP_MS),
        ("hopping, a result per record", Sums(hour), 20, 20 * STEP_MS),
        ("sessions", Sums(Session("5 seconds")), 20, STEP_MS),
        ("sliding", Sums(Sliding("5 seconds")), 20, STEP_MS),
    ]
    for name, processor, batches, step_ms in runs:
        rate, results, rows = measure(processor, batches=batches, step_ms=step_ms)
        print(f"{name:38} {rate:9,.0f} records/s  {results:9,} results  {rows:9,} changed rows", flush=True)


if __name__ == "__main__":
    main()
