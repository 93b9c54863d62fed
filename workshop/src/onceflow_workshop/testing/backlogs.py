"""Lets a test decide when tasks read the records of a flow, and when the driver does again."""

from __future__ import annotations

from unittest import mock

from onceflow.direct.backlog import Backlog


def tasks_above(records: int) -> mock._patch[object]:
    """A context in which tasks read when more records than this are left, and the driver when at most half are.

    It is for flows with ``engine="auto"``. Without it, how long batches have taken decides.
    """

    def looked(self: Backlog, left: int, *, now: float) -> None:
        if now >= self._paused_until:
            self.by_tasks = left > records or (self.by_tasks and left > records // 2)

    return mock.patch.object(Backlog, "looked", looked)
