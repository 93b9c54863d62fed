"""Which engine runs a query: what was asked for, where it can be, and a reason that a person understands."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow import UnsupportedQueryError
from onceflow.planning.engine import choose
from onceflow.task.direct_plan import DirectPlan

PLAN = DirectPlan((), ("key", "value"))
FILTER = "the query has a filter (where)"


def chosen(wanted: str = "auto", plan: Any = PLAN, **more: Any) -> tuple[str, str]:
    facts = {"checkpoint": False, "stateful": False, "local": True, "small_batch_rows": None, **more}
    found = choose(wanted, plan, flow="deposits", **facts)
    assert (found.plan is None) == (found.engine == "spark")
    return found.engine, found.reason


@pytest.mark.parametrize(
    "given, engine, reason",
    [
        ({}, "direct", "its plan needs no Spark job"),
        ({"plan": FILTER}, "spark", FILTER),
        ({"checkpoint": True}, "spark", "checkpoint="),
        ({"small_batch_rows": 0}, "spark", "small_batch_rows=0"),
        ({"small_batch_rows": 100}, "direct", "no Spark job"),
        ({"small_batch_rows": 0, "wanted": "direct"}, "direct", "engine='direct'"),
        ({"local": False}, "direct", "no Spark job"),
        ({"local": False, "stateful": True}, "spark", "other machines"),
        ({"local": False, "stateful": True, "wanted": "direct"}, "direct", "engine='direct'"),
        ({"wanted": "direct"}, "direct", "engine='direct'"),
        ({"wanted": "spark"}, "spark", "engine='spark'"),
        ({"wanted": "spark", "plan": FILTER}, "spark", "engine='spark'"),
    ],
)
def test_the_choice_and_its_reason(given: dict[str, Any], engine: str, reason: str) -> None:
    found, why = chosen(**given)
    assert found == engine
    assert reason in why


def test_the_direct_engine_refuses_what_it_cannot_run() -> None:
    with pytest.raises(
        UnsupportedQueryError, match=r"(?s)cannot run the query: the query has a filter.*deposits.*Flow.map"
    ):
        chosen("direct", FILTER)
    with pytest.raises(UnsupportedQueryError, match="checkpoint="):
        chosen("direct", checkpoint=True)
