"""A flow that begins anew beside one of a similar name says so; others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onceflow.driver.start.takeover import _is_alike, warning_of
from onceflow.protocol.progress import Progress


@pytest.mark.parametrize(
    "one, other, alike",
    [
        ("orders", "orders-v2", True),
        ("orders-v2", "orders-v3", True),
        ("orders", "orders-next", True),
        ("orders_2", "orders", True),
        ("orders", "orders-eu", False),
        ("order-audit", "audit", False),
        ("windows2", "audit", False),
        ("flow-in-1", "flow-in-1-v2", True),
        ("totals", "orders", False),
    ],
)
def test_names_of_versions(one: str, other: str, alike: bool) -> None:
    assert _is_alike(one, other) is _is_alike(other, one) is alike


def test_who_is_warned() -> None:
    new = Progress("orders-v2", 0, {"in": {0: 0}}, {}, 0)
    old = Progress("orders", 7, {"in": {0: 9}}, {}, 0)
    told = warning_of(new, {"orders": old}, "orders-v2")
    assert told is not None
    assert "Flow orders reads in, too, and is at batch 7" in told
    assert "`onceflow fork orders orders-v2`" in told
    for other in (replace(old, offsets={"other": {0: 9}}), replace(old, batch_id=0), replace(old, became="orders-v3")):
        assert warning_of(new, {"orders": other}, "orders-v2") is None
