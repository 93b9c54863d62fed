"""Progress is found whether it is committed, hidden by an open transaction, or anything in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.admin.records import tables
from onceflow.client import decided
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord
from onceflow.client.offsets import EARLIEST
from onceflow.errors import OnceflowError
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, encode

STABLE, END = 100, 300


class Log:
    """The progress topic, with a record of a flow at each of some offsets. A transaction that is open at `STABLE` ends
    at one of the requests.

    Args:
        ends_at: the number of the request that first sees it.
    """

    def __init__(self, flows: Mapping[int, str], ends_at: int) -> None:
        self._flows, self._ends_at = flows, ends_at
        self.requests = 0

    def _request(self) -> int:
        """The last stable offset."""
        self.requests += 1
        return END if self.requests > self._ends_at else STABLE

    def find_topic(self, *_: object) -> Any:
        return SimpleNamespace(leaders={0: 1})

    def list_offsets(self, _: object, __: object, place: int, ___: object, *, committed: bool = True) -> Any:
        stable = self._request()
        return {PROGRESS_TOPIC: {0: 0 if place == EARLIEST else stable if committed else END}}

    def records(self, start: int, end: int) -> Iterator[LogRecord]:
        for offset, flow in self._flows.items():
            if start <= offset < end:
                key, value = encode(Progress(flow, 0, {"source": {0: 0}}, {}, 0, external="bank:ledger"))
                yield LogRecord(offset, key, value, 0, 7, 0)

    def read_log(self, _: object, __: str, ___: int, start: int, end: int, ____: object) -> Iterator[LogRecord]:
        self._request()
        return self.records(start, end)

    def read(self, _: str, __: int, start: int, end: int) -> Iterator[Any]:
        found = list(self.records(start, min(end, self._request())))
        yield SimpleNamespace(keys=[each.key for each in found], values=[each.value for each in found])


@pytest.mark.parametrize("ends_at", range(6))
def test_a_transaction_that_ends_meanwhile_hides_no_flow(monkeypatch: pytest.MonkeyPatch, ends_at: int) -> None:
    """A collection of a claim check that does not know of a flow deletes what this flow refers to."""

    def unreadable(key: str, error: OnceflowError) -> None:
        raise AssertionError(key) from error

    log = Log({50: "before", 100: "hanging", 150: "hidden", 299: "last"}, ends_at)
    for name in ("find_topic", "list_offsets", "read_log"):
        monkeypatch.setattr(tables, name, getattr(log, name))
    monkeypatch.setattr(decided, "list_offsets", log.list_offsets)
    monkeypatch.setattr(tables, "CommittedReader", lambda *_: log)
    found = tables.possible_progress(None, Deadline(60, "test"), unreadable=unreadable)  # type: ignore[arg-type]
    assert {each.flow for each in found} == {"before", "hanging", "hidden", "last"}
    assert log.requests <= 5
