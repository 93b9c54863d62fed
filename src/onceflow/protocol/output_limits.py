"""What a topic takes: how large a record may be, and whether it needs a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.protocol.batches import too_large
from onceflow.protocol.compression import PRODUCER
from onceflow.protocol.headers import Header
from onceflow.protocol.timestamps import ANY_TIME, ORIGINAL_TIMESTAMP, AcceptedTimes

# More than what a header has besides its name and its value.
_HEADER_BYTES = 20


@dataclass(frozen=True)
class OutputLimits:
    """What a topic takes, as its settings say.

    Args:
        max_message_bytes: the largest record batch, as it is stored.
        compacted: whether records need a key (``cleanup.policy``).
        stored: how brokers compress what they store (``compression.type``).
        compression: with which the flow compresses its records.
        times: the timestamps that it accepts.
    """

    topic: str
    max_message_bytes: int
    compacted: bool = False
    stored: str = PRODUCER
    compression: str = "none"
    times: AcceptedTimes = ANY_TIME

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> OutputLimits:
        """The limits whose fields were written as JSON."""
        return cls(**{**fields, "times": AcceptedTimes(*fields["times"])})

    @property
    def small_bytes(self) -> int:
        """A key, a value and headers of at most so many bytes each are surely not too large."""
        return max(-1, self.max_message_bytes // 4 - 250)

    def headers_as_written(self, headers: Iterable[Header], time_ms: int | None, now_ms: int) -> list[Header]:
        """The headers of a record, with the one for its time if the topic may refuse that.

        Args:
            time_ms: the time of the record; None: that of writing.
        """
        if time_ms is None or not self.times.may_refuse(time_ms, now_ms):
            return list(headers)
        return [*headers, (ORIGINAL_TIMESTAMP, str(time_ms).encode())]

    def refusal(self, key: bytes | None, value: bytes | None, headers: Sequence[Header] = ()) -> str:
        """Why a record cannot be written, in words; empty: it can."""
        if key is None and self.compacted:
            return f"topic {self.topic} is compacted, so its records need a key"
        why = too_large(
            key,
            value,
            headers,
            compression=self.compression,
            max_batch_bytes=self.max_message_bytes,
            stored=self.stored,
        )
        return f"{why} of topic {self.topic} (max.message.bytes)" if why else ""

    def doubtful(self, keys: pa.Array, values: pa.Array, headers: pa.Array) -> npt.NDArray[np.int64]:
        """The positions of records that need a closer look."""
        found = _header_bytes(headers) > self.small_bytes
        if self.compacted:
            found = found | keys.is_null().to_numpy(zero_copy_only=False)
        for column in (keys, values):
            lengths = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            found = found | (lengths > self.small_bytes)
        positions: npt.NDArray[np.int64] = np.flatnonzero(found)
        return positions


def _header_bytes(headers: pa.Array) -> npt.NDArray[np.int64]:
    """How many bytes the headers of each record have at most."""
    if headers.null_count == len(headers):
        return np.zeros(len(headers), np.int64)
    entries = headers.values
    sizes = np.full(len(entries) + 1, _HEADER_BYTES, np.int64)
    for part in entries.flatten():
        sizes[1:] += pc.binary_length(part).fill_null(0).to_numpy(zero_copy_only=False)
    sizes[0] = 0
    ends = np.cumsum(sizes)
    offsets = headers.offsets.to_numpy(zero_copy_only=False)
    found: npt.NDArray[np.int64] = ends[offsets[1:]] - ends[offsets[:-1]]
    return found


def _anything(topic: str | None) -> None:
    return None


@dataclass(frozen=True)
class WriteLimits:
    """What may be written of a process step.

    Args:
        of: returns what a topic takes, or None if that is not known. The topic None is that of outputs that name none.
        rows: what the topics of the table take; None: any row.
    """

    of: Callable[[str | None], OutputLimits | None] = _anything
    rows: OutputLimits | None = None

    @property
    def small_row_bytes(self) -> int:
        """A row of at most so many bytes is surely not too large."""
        return UNLIMITED if self.rows is None else self.rows.small_bytes


UNLIMITED = 1 << 62
ANYTHING = WriteLimits()
