"""Reads the topic of a table until the table is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from onceflow.client.committed import Chunk, CommittedReader
from onceflow.errors import OnceflowError


class StoppingError(OnceflowError):
    """The thread is to end. A restore keeps what it has read so far, as for every error of onceflow."""


class StoppableSource:
    """Reads committed records until the thread is to end."""

    def __init__(self, reader: CommittedReader, stopping: threading.Event, tell: Callable[[int, Chunk], None]) -> None:
        self._reader = reader
        self._stopping = stopping
        self._tell = tell

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        for chunk in self._reader.read(topic, partition, start, end):
            if self._stopping.is_set():
                raise StoppingError("the table is being closed")
            self._tell(partition, chunk)
            yield chunk

    def end(self, topic: str, partition: int) -> int:
        return self._reader.end(topic, partition)
