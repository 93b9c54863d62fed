"""De-duplication: ids per second of one core, and memory, with a few or with millions of ids that are remembered.

Everything that a task does with a partition's rows is measured but network and Spark: judging the ids, encoding the
changes of the table, leaving them in the local store as pending, and applying them. Every record that passes or not is
compared with what is known of the ids.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.bench.processes import memory_of
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.engine.dedup_engine import DedupEngine
from onceflow.state.format import segments, stamps
from onceflow.state.local.format import Commit, Pending
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.task import state_run as state_run

#: At least so many batches, and so many segments of new ids. Meanwhile as many old ones are deleted.
_BATCHES, _SEGMENTS = 10, 2
_COMMITTED_IDS = 2_000_000
#: Share of the records whose id is new.
_VARIANTS = {"all new": 1.0, "half new": 0.5, "one in ten new": 0.1}


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        ids: how many ids are remembered, one number for each window. records_per_batch: of one partition.
    """

    ids: tuple[int, ...]
    records_per_batch: int


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run all windows; yields one result (a JSON object) after the other. ``correct`` is what a check found."""
    for ids in choices.ids:
        with tempfile.TemporaryDirectory(prefix="onceflow-") as folder:
            say(f"{ids:,} ids: filling")
            # In a process of its own: what it keeps of its memory is not that of the batches.
            filling = multiprocessing.get_context("spawn").Process(
                target=_fill, args=(folder, ids, choices.records_per_batch)
            )
            filling.start()
            filling.join()
            before = _anonymous_mib()
            store = LmdbStore.open(Path(folder))
            window = _Window(store, ids, _share(ids, choices.records_per_batch))
            for name, share in _VARIANTS.items():
                yield {
                    "bench": "dedup",
                    "ids": ids,
                    "variant": name,
                    **window.measured(choices.records_per_batch, share),
                    "disk_mib": round(sum(file.stat().st_size for file in Path(folder).iterdir()) / (1 << 20)),
                    "rss_anon_mib_before": round(before),
                    "rss_anon_mib": round(_anonymous_mib()),
                }
            store.close()
            LmdbStore.remove(Path(folder))


def _anonymous_mib() -> float:
    """Memory of this process without the pages of files, which the kernel may drop."""
    return memory_of(Path("/proc/self/status").read_text())[1]


def _id(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).hexdigest().encode()


def _share(ids: int, records: int) -> int:
    """How many ids a segment has."""
    return max(ids // segments.SHARES, records)


def _fill(folder: str, ids: int, records: int) -> None:
    """Ids 0 to ``ids``, and one segment more, each with its number as its time."""
    store = LmdbStore.open(Path(folder))
    share = _share(ids, records)
    with store.bulk() as commit:
        uncommitted = 0
        for first in range(0, ids + share, share):
            numbers = np.arange(first, min(ids + share, first + share), dtype=np.int64)
            keys = [b"v" + _id(number) for number in numbers.tolist()]
            store.write(zip(keys, stamps.rows_of(numbers), strict=True), index=True)
            uncommitted += share
            if uncommitted > _COMMITTED_IDS:
                commit()
                uncommitted = 0


class _Window:
    """A window of so many ids that moves on with the new ones."""

    def __init__(self, store: LmdbStore, ids: int, share: int) -> None:
        self.store, self.ids, self.next = store, ids, ids + share
        self.share = share
        self._chance = np.random.default_rng(7)

    def measured(self, records: int, share: float) -> dict[str, Any]:
        cpu_s = wall_s = 0.0
        problems = []
        fresh = round(records * share)
        batches = max(_BATCHES, _SEGMENTS * self.share // max(1, fresh))
        deleted = 0
        for turn in range(batches + 1):
            repeated = self._chance.integers(self.next - self.ids // 2, self.next, records - fresh)
            numbers = np.concatenate([np.arange(self.next, self.next + fresh), repeated])
            self._chance.shuffle(numbers)
            rows = _rows(numbers)
            floor, self.next = self.next - self.ids, self.next + fresh
            began, began_cpu = time.monotonic(), time.process_time()
            passed, gone = self._batch(rows, floor)
            if turn:  # the first one warms up
                deleted += gone
                wall_s += time.monotonic() - began
                cpu_s += time.process_time() - began_cpu
            if passed != fresh:
                problems.append(f"{passed} records passed, {fresh} were new")
        count = records * batches
        return {
            "records_per_batch": records,
            "deleted_per_new_id": round(deleted / max(1, fresh * batches), 2),
            "ids_per_s": round(count / wall_s),
            "ids_per_cpu_s": round(count / cpu_s),
            "correct": "; ".join(problems) or "yes",
        }

    def _batch(self, rows: pa.RecordBatch, floor: int) -> tuple[int, int]:
        """How many records have passed, and how many ids were deleted."""
        engine = DedupEngine(
            Deduplication(within_ms=self.ids),
            self.store,
            flow="bench",
            table="ids",
            partition=0,
            batch=1,
            now_ms=0,
            keeps_time=False,
            watermark_ms=floor,
        )
        engine.start()
        for at in range(0, rows.num_rows, 10_000):  # as Spark sends them
            engine.feed(rows.slice(at, 10_000))
        engine.finish()
        outputs, changes, local = engine.outputs(), engine.changes(), engine.local_changes()
        table = state_run.table_batch(changes)
        encoded = encode_batches(
            table["key"],
            table["value"],
            None,
            None,
            identity=ProducerIdAndEpoch(1, 1),
            base_sequence=0,
            max_batch_bytes=1 << 20,
            default_timestamp_ms=0,
        )
        assert sum(1 for _ in encoded) or not changes
        pending = Pending(Commit(1, 1, 1), (1, 1), (0, 0), local).encode()
        self.store.write({}, {"pending": pending})
        applied = Pending.decode(self.store.blob("pending"))
        assert applied is not None
        self.store.write(dict(applied.changes), {"pending": None}, index=True)
        return 0 if outputs is None else outputs.num_rows, engine.counts["expired"]


def _rows(numbers: Any) -> pa.RecordBatch:
    ids = pa.array([_id(number) for number in numbers.tolist()], pa.binary())
    return pa.record_batch({"key": ids, "value": ids, "timestamp": pa.array(numbers, pa.int64())})
