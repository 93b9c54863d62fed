"""Collects changes on disk until there are enough for one commit, so that few of them are in memory."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from onceflow.state.local.format import Changes
from onceflow.state.stores.base import unusable

_T = TypeVar("_T")


class Spool(Generic[_T]):
    """Parts in the order in which they were added. The last part stays in memory, and often there is only one.

    Args:
        folder: where an unnamed temporary file is created when a second part is added. Nothing remains of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._parts = 0
        self._last: tuple[_T, Changes] | None = None
        self.rows = 0

    def __enter__(self) -> Spool[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # what the disk did not take is written again now; nobody needs it any more
                self._file.close()

    def add(self, mark: _T, changes: Changes) -> None:
        """Add a part and its mark.

        Raises:
            EnvironmentUnusableError: the disk is full, or the folder cannot be written.
        """
        if self._last is not None:
            try:
                if self._file is None:
                    self._folder.mkdir(parents=True, exist_ok=True)  # not every store has files there
                    self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed with the spool)
                pickle.dump(self._last, self._file, pickle.HIGHEST_PROTOCOL)
                self._file.flush()
            except OSError as refused:
                raise unusable(self._folder, "The local state cannot be written", refused) from refused
            self._parts += 1
        self._last = (mark, changes)
        self.rows += len(changes)

    def take(self) -> Iterator[tuple[_T, Changes]]:
        """Return all parts, and remove them from the spool."""
        if self._file is not None and self._parts:
            self._rewind(self._file)
            for _ in range(self._parts):
                part: Any = pickle.load(self._file)
                yield part
            self._file.seek(0)
            self._file.truncate()
        if self._last is not None:
            yield self._last
        self._last, self._parts, self.rows = None, 0, 0

    def _rewind(self, file: IO[bytes]) -> None:
        try:
            file.seek(0)
        except OSError as refused:  # a part that did not fit is tried again
            raise unusable(self._folder, "The local state cannot be written", refused) from refused
