"""A source of committed records of which every chunk is looked at before it is passed on."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from onceflow.state.local.catch_up import Source
from onceflow.state.local.format import Columns


class WatchedSource(abc.ABC):
    """Reads as another source does."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @abc.abstractmethod
    def see(self, topic: str, partition: int, chunk: Columns) -> None:
        """Look at a chunk. An error ends the read."""

    def read_columns(self, topic: str, partition: int, start: int, end: int, *, headers: bool) -> Iterator[Columns]:
        for chunk in self._source.read_columns(topic, partition, start, end, headers=headers):
            self.see(topic, partition, chunk)
            yield chunk

    def end(self, topic: str, partition: int) -> int:
        return self._source.end(topic, partition)
