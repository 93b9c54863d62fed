"""A driver of a chaos run with a broken sink: it commits all rows that are staged, those of failed attempts, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onceflow_workshop.chaos import driver, external

SqliteSink = external.sqlite_sink()
commit = SqliteSink.commit


def commits_all_that_is_staged(self: Any, attempt: Any, receipts: Sequence[bytes], progress: str) -> None:
    staged = [path.name.encode() for path in sorted(self._staging(attempt.flow).glob("*.arrow"))]
    commit(self, attempt, staged, progress)
    for number in range(1, attempt.attempt + 1):
        remove(self, replace(attempt, attempt=number))


remove = SqliteSink.abort
broken: Any = SqliteSink
broken.commit = commits_all_that_is_staged
broken.abort = lambda self, attempt: None

if __name__ == "__main__":
    driver.main()
