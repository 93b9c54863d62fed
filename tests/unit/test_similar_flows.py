"""Errors about a flow that has no progress name flows of a similar name."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow.admin.change.move import known
from onceflow.admin.status.similar_flows import similar_flows
from onceflow.admin.verify.progress_history import last_of
from onceflow.client.log_reader import LogRecord
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.errors import OptionError, PermissionDeniedError, ProgressConflictError
from onceflow.protocol.names import Names


@pytest.fixture
def orders_there(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster with the progress of two flows, one of them with a prefix."""
    there = {key: (0, LogRecord(0, key, b"{}", 0, -1, -1)) for key in (b"orders", b"team-orders")}
    monkeypatch.setattr(CommittedProgress, "read", lambda *_: there)
    return object()


def test_errors_of_all_commands_name_similar_flows(orders_there: Any) -> None:
    for refuse in (lambda *about: known(None, *about), lambda *about: last_of([], *about)):
        with pytest.raises((ProgressConflictError, OptionError), match="no progress") as told:
            refuse(Names("oders"), orders_there)
        assert told.value.detail == "flows of a similar name: orders, team-orders"
        assert told.value.next_step.startswith("did you mean orders? If not, ")
        with pytest.raises((ProgressConflictError, OptionError)) as told:
            refuse(Names("xyzzy"), orders_there)
        assert told.value.detail == ""
        assert "did you mean" not in told.value.next_step


def test_a_similar_flow_is_named_as_it_is_given_with_its_prefix(
    orders_there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert similar_flows(orders_there, Names("oders", "team-")) == ["orders"]
    assert similar_flows(orders_there, Names("oders", "other-")) == []

    def denied(*_: Any) -> None:
        raise PermissionDeniedError("no")

    monkeypatch.setattr(CommittedProgress, "read", denied)
    assert similar_flows(orders_there, Names("oders")) == []
