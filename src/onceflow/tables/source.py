"""Reads the topic of a table until the table is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from onceflow.client.committed import CommittedReader
from onceflow.errors import OnceflowError
from onceflow.state.local.format import Chunk, Columns
from onceflow.state.local.watched_source import WatchedSource


class StoppingError(OnceflowError):
    """The thread is to end. A restore keeps what it has read so far, as for every error of onceflow."""


class StoppableSource(WatchedSource):
    """Reads committed records until the thread is to end.

    Args:
        tell: called with the partition and what was read.
    """

    def __init__(
        self, reader: CommittedReader, stopping: threading.Event, tell: Callable[[int, Chunk | Columns], None]
    ) -> None:
        super().__init__(reader)
        self._stopping = stopping
        self._tell = tell

    def see(self, topic: str, partition: int, chunk: Chunk | Columns) -> None:
        if self._stopping.is_set():
            raise StoppingError("the table is being closed")
        self._tell(partition, chunk)
