"""Committed records as Arrow columns: for whoever passes records on without looking at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onceflow.client.chunk_form import ChunkForm
from onceflow.protocol.decode import RawBatch, Section
from onceflow.protocol.record_columns import RecordColumns, decode_columns

_TOGETHER_BYTES = 16_000_000  # after decompression


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """Consecutive committed records of one partition.

    Args:
        records: in ascending order of offsets.
        next_offset: where reading continues. All committed records below it have been returned.
        whole: whether the log still has every batch and record from the end of the last chunk to ``next_offset``, with
            those of aborted transactions. False: compaction or retention has removed some.
        expired_from: None, or: the records from this offset to ``next_offset`` were removed before they were read,
            because the log begins later. Such a chunk has no records.
        nbytes: size of the record batches after decompression.
    """

    records: RecordColumns
    next_offset: int
    whole: bool
    expired_from: int | None
    nbytes: int

    def __len__(self) -> int:
        return len(self.records)


@dataclass(slots=True)
class GatheredSections:
    """Record batches whose records are decompressed, but not decoded."""

    next_offset: int
    whole: bool = True
    expired_from: int | None = None
    nbytes: int = 0
    sections: list[Section] = field(default_factory=list)
    _begin: int | None = None  # the first batch begins before it
    _end: int | None = None  # the last batch ends behind it

    def take(self, raw: RawBatch, start: int, end: int) -> None:
        """See `onceflow.client.chunk_form.Gathered`."""
        section = raw.section()
        self.sections.append(section)
        self.nbytes += section.end - section.start
        if raw.base_offset < start:
            self._begin = start
        if raw.last_offset >= end:
            self._end = end

    def cut(self, records: RecordColumns) -> RecordColumns:
        """The records that were asked for."""
        low, high = 0, len(records)
        if self._begin is not None:
            low = int(np.searchsorted(records.offsets, self._begin))
        if self._end is not None:
            high = int(np.searchsorted(records.offsets, self._end))
        return records.slice(low, high)


class ColumnForm(ChunkForm[GatheredSections, ColumnChunk]):
    """Makes `ColumnChunk`.

    Args:
        headers: whether the headers are wanted.
    """

    together_bytes = _TOGETHER_BYTES

    def __init__(self, *, headers: bool) -> None:
        self._headers = headers

    def begin(self, next_offset: int) -> GatheredSections:
        return GatheredSections(next_offset)

    def finish(self, gathered: Sequence[GatheredSections]) -> list[ColumnChunk]:
        decoded = decode_columns([each.sections for each in gathered], headers=self._headers)
        return [
            ColumnChunk(each.cut(records), each.next_offset, each.whole, each.expired_from, each.nbytes)
            for each, records in zip(gathered, decoded, strict=True)
        ]
