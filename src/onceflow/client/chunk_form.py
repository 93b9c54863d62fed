"""What readers of committed records make of batches: lists (``committed.py``) or columns (``column_chunks.py``)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from onceflow.protocol.decode import RawBatch


class Gathered(Protocol):
    """Consecutive record batches of one partition that a chunk is made of.

    Attributes:
        next_offset, whole, expired_from: as in the chunk, see `onceflow.client.committed.Chunk`.
        nbytes: size of the records after decompression.
    """

    next_offset: int
    whole: bool
    expired_from: int | None
    nbytes: int

    def take(self, raw: RawBatch, start: int, end: int) -> None:
        """Add the records of a batch whose offsets are in ``[start, end)``.

        Raises:
            ProtocolError: the batch does not follow the format.
        """


G = TypeVar("G", bound=Gathered)
C = TypeVar("C")


class ChunkForm(abc.ABC, Generic[G, C]):
    """A kind of chunk.

    Attributes:
        together_bytes: up to which size it is faster to make several chunks at once. 0: it is not faster.
    """

    together_bytes: int

    @abc.abstractmethod
    def begin(self, next_offset: int) -> G:
        """Nothing yet."""

    @abc.abstractmethod
    def finish(self, gathered: Sequence[G]) -> list[C]:
        """The chunk of each of them.

        Raises:
            ProtocolError: a batch does not follow the format.
        """

    def without_records(self, next_offset: int, *, whole: bool, expired_from: int | None = None) -> C:
        """A chunk that only says how far has been read."""
        gathered: Any = self.begin(next_offset)
        gathered.whole, gathered.expired_from = whole, expired_from
        return self.finish([gathered])[0]
