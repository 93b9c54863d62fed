"""A source of committed records of which every chunk is looked at before it is passed on."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import TypeVar

from onceflow.state.local.catch_up import Source
from onceflow.state.local.format import Chunk, Columns

C = TypeVar("C", bound="Chunk | Columns")


class WatchedSource(abc.ABC):
    """Reads as another source does."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @abc.abstractmethod
    def see(self, topic: str, partition: int, chunk: Chunk | Columns) -> None:
        """Look at a chunk. An error ends the read."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        return self._seen(topic, partition, self._source.read(topic, partition, start, end))

    def read_columns(self, topic: str, partition: int, start: int, end: int, *, headers: bool) -> Iterator[Columns]:
        found = self._source.read_columns(topic, partition, start, end, headers=headers)
        return self._seen(topic, partition, found)

    def end(self, topic: str, partition: int) -> int:
        return self._source.end(topic, partition)

    def _seen(self, topic: str, partition: int, chunks: Iterator[C]) -> Iterator[C]:
        for chunk in chunks:
            self.see(topic, partition, chunk)
            yield chunk
