"""A processor that counts keys, and the topics of its table, played by lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from onceflow import serdes
from onceflow.client.produce import Acknowledged
from onceflow.state.api.processor import Processor
from onceflow_workshop.testing.columns import ReadsColumns

Row = tuple[bytes, "bytes | None"]


class Count(Processor):
    """How many records a key has had."""

    key = serdes.STRING
    state = serdes.JSON

    def process(self, key: str, records: Sequence[Any], state: Any) -> None:
        state.put({"count": state.get({"count": 100})["count"] + len(records)})


@dataclass
class Part:
    keys: list[bytes | None]
    values: list[bytes | None]
    next_offset: int
    headers: dict[int, list[tuple[str, bytes | None]]] = field(default_factory=dict)


class Kafka(ReadsColumns):
    """The table's topics; a transaction ends with a marker in each partition that it wrote to."""

    def __init__(self) -> None:
        self.committed: dict[tuple[str, int], list[Row | None]] = {}
        self.open: dict[tuple[str, int], list[Row]] = {}
        self.read_records = 0

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Part]:
        rows = [row for row in self.committed.get((topic, partition), [])[start:end] if row is not None]
        self.read_records += len(rows)
        yield Part([key for key, _ in rows], [value for _, value in rows], end)

    def write_to(self, topic: str, partition: int, batch: pa.RecordBatch) -> None:
        rows = zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
        self.open.setdefault((topic, partition), []).extend(rows)

    def acknowledged(self) -> dict[tuple[str, int], Acknowledged]:
        begins = {place: len(self.committed.get(place, [])) for place in self.open}
        return {
            place: Acknowledged(begins[place], len(rows), 0, begins[place] + len(rows))
            for place, rows in self.open.items()
        }

    def commit(self) -> None:
        for place, rows in self.open.items():
            self.committed.setdefault(place, []).extend([*rows, None])
        self.open = {}
