"""Durations that are options of a flow: in seconds, with the option's name in the error."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow.errors import OptionError
from onceflow.options.durations import duration_ms, option_seconds


@pytest.mark.parametrize(
    "value, seconds",
    [
        ("60 seconds", 60.0),
        ("1500 ms", 1.5),
        ("1.5 min", 90.0),
        ("1 Minute", 60.0),
        ("2 hours", 7_200.0),
        ("60", 60.0),
        (60, 60.0),
        (1.5, 1.5),
    ],
)
def test_a_duration(value: Any, seconds: float) -> None:
    assert option_seconds(value, "transaction_timeout", "orders") == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 parsecs", "-1 s", -1, float("nan"), float("inf"), True, None, "s"])
def test_no_duration(value: Any) -> None:
    with pytest.raises(OptionError, match="is not a duration") as caught:
        option_seconds(value, "trigger", "orders")
    assert caught.value.what == f"trigger={value!r} is not a duration"
    assert caught.value.flow == "orders"


@pytest.mark.parametrize(
    "value", ["9" * 400 + " days", "1" * 309 + " ms", "400000000 years", 1e306, 1e308, 2**64, 10**400]
)
def test_a_duration_that_no_time_can_have(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_ms(value)
    with pytest.raises(OptionError, match="is not a duration"):
        option_seconds(value, "trigger", "orders")
    assert duration_ms("106751991167 days") < 2**63


def test_a_duration_that_is_too_short() -> None:
    with pytest.raises(OptionError, match="transaction_timeout='100 ms' is too short"):
        option_seconds("100 ms", "transaction_timeout", "orders")
    assert option_seconds("100 ms", "trigger", "orders", at_least=0.0) == 0.1
