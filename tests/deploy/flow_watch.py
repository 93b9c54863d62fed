"""A flow in another cluster, as anybody sees it: what its group has committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

COMMIT_S = 240.0


class FlowWatch:
    """``told``: what the error shows when something was awaited in vain. ``ended``: why there is no hope, if so."""

    def __init__(self, pipe: Any, told: Callable[[], str], ended: Callable[[], object]) -> None:
        self.pipe = pipe
        self._told = told
        self._ended = ended
        self._begun = False

    def committed(self) -> dict[Any, int]:
        """Nothing before there is output. librdkafka may crash when it asks for the first group of a broker too early:
        while the coordinator loads."""
        if not self._begun:
            self._begun = any(independent.end_offsets(self.pipe.bootstrap, self.pipe.target).values())
        return dict(independent.committed_offsets(self.pipe.bootstrap, self.pipe.flow)) if self._begun else {}

    def await_true(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, COMMIT_S, lambda: f"{what}\n{self._told()}", useless=self._ended, poll_s=0.2)

    def await_commits(self, count: int = 3) -> None:
        for _ in range(count):
            self._await_commit(sum(self.committed().values()))

    def await_end(self) -> None:
        ends = independent.end_offsets(self.pipe.bootstrap, self.pipe.source)
        self.await_true(lambda: self.committed() == ends, "all is read")

    def _await_commit(self, after: int) -> None:
        self.await_true(lambda: sum(self.committed().values()) > after, f"a commit after {after} records")
