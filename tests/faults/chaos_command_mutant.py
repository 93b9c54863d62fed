"""Broken commands of a chaos run: a repartition loses rows, and a replay does not know which letters were replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onceflow.admin.change import row_moves as repartitioner
from onceflow.admin.records import letter_replay
from onceflow.cli.main import main
from onceflow.protocol.names import INTERNAL_SUFFIX

move: Any = repartitioner.Repartitioner.move


class Forgetful:
    """A writer that forgets the first value of each list. (Without a timer, a run would wait for its alarm.)"""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write(self, topic: str, partition: int, rows: Sequence[tuple[bytes, Any]]) -> None:
        is_value = not topic.endswith(INTERNAL_SUFFIX)
        kept = [row for number, row in enumerate(rows) if number or row[1].value is None or not is_value]
        self._writer.write(topic, partition, kept)


broken: Any = repartitioner.Repartitioner
broken.move = lambda self, writer, *given, **options: move(self, Forgetful(writer), *given, **options)
replays: Any = letter_replay
replays.replayed = lambda cluster, topic, deadline: set()

if __name__ == "__main__":
    main()
