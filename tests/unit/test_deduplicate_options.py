"""Arguments of ``Flow.deduplicate`` that need no DataFrame."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow.errors import OptionError
from onceflow.planning.deduplicate import DedupOptions, check_deduplication


def checked(**given: Any) -> Any:
    options = {"within": None, "records": None, "late": "drop", "duplicates_topic": None, "event_time": None, **given}
    return check_deduplication(DedupOptions("order", **options), "flow")


def test_within_is_the_lateness_of_the_watermark() -> None:
    found = checked(within="24 hours", duplicates_topic="twice")
    assert (found.within_ms, found.allowed_lateness, found.duplicates_topic) == (86_400_000, 86_400, "twice")
    assert found.state_fields != checked(records=3).state_fields, "a table is of one kind"
    assert checked(records=3).allowed_lateness is None


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "neither is given"),
        ({"within": "1 hour", "records": 3}, "both are given"),
        ({"within": "1 fortnight"}, "within='1 fortnight'"),
        ({"within": 0}, "it must be positive"),
        ({"within": []}, "within="),
        ({"records": 0}, "records=0 is no count"),
        ({"records": True}, "records=True is no count"),
        ({"records": 1 << 50}, "too many"),
        ({"records": 3, "late": "topic"}, "late= cannot be combined with records="),
        ({"records": 3, "event_time": "at"}, "event_time= cannot be combined with records="),
        ({"within": "1 hour", "late": None}, "late=None is no topic"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        checked(**given)
    assert message in str(caught.value)
    assert caught.value.next_step
