"""For tests: sources of committed records that are made of lists are read in columns, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.client.column_chunks import ColumnChunk
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.record_columns import RecordColumns


class ReadsColumns:
    """Adds ``read_columns`` to a source that has ``read``."""

    def read_columns(self: Any, topic: str, partition: int, start: int, end: int, *, headers: bool) -> Iterator[Any]:
        assert headers
        for chunk in self.read(topic, partition, start, end):
            count = len(chunk.keys)
            records = RecordColumns(
                pa.array(chunk.keys, pa.binary()),
                pa.array(chunk.values, pa.binary()),
                np.arange(count),
                np.zeros(count, np.int64),
                np.zeros(count, np.int32),
                pa.array([chunk.headers.get(at) for at in range(count)], HEADERS),
            )
            yield ColumnChunk(records, chunk.next_offset, getattr(chunk, "whole", True), None, 0)
