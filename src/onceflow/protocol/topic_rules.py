"""What a topic takes: how large a record may be, and whether it needs a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.protocol.batches import too_large
from onceflow.protocol.compression import PRODUCER


@dataclass(frozen=True)
class TopicRules:
    """What a topic takes, as its settings say.

    Args:
        max_message_bytes: the largest record batch, as it is stored.
        compacted: whether records need a key (``cleanup.policy``).
        stored: how brokers compress what they store (``compression.type``).
        compression: with which the flow compresses its records.
    """

    topic: str
    max_message_bytes: int
    compacted: bool = False
    stored: str = PRODUCER
    compression: str = "none"

    @property
    def small_bytes(self) -> int:
        """A key and a value of at most so many bytes each, without headers, are surely not too large."""
        return max(-1, self.max_message_bytes // 4 - 250)

    def refusal(self, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]] = ()) -> str:
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
        found = headers.is_valid().to_numpy(zero_copy_only=False)
        if self.compacted:
            found = found | keys.is_null().to_numpy(zero_copy_only=False)
        for column in (keys, values):
            lengths = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            found = found | (lengths > self.small_bytes)
        positions: npt.NDArray[np.int64] = np.flatnonzero(found)
        return positions


def _anything(topic: str | None) -> None:
    return None


@dataclass(frozen=True)
class WriteRules:
    """What may be written of a process step.

    Args:
        of: returns what a topic takes, or None if that is not known. The topic None is that of outputs that name none.
        rows: what the topics of the table take; None: any row.
    """

    of: Callable[[str | None], TopicRules | None] = _anything
    rows: TopicRules | None = None

    @property
    def small_row_bytes(self) -> int:
        """A row of at most so many bytes is surely not too large."""
        return UNLIMITED if self.rows is None else self.rows.small_bytes


UNLIMITED = 1 << 62
ANYTHING = WriteRules()
