"""Which engine runs a query: what was asked for, where it can be, and a reason that a person understands."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow import UnsupportedQueryError
from onceflow.planning.direct_plan import DirectPlan
from onceflow.planning.engine import ENGINES, choose

PLAN = DirectPlan((), ("key", "value"))
FILTER = "the query has a filter (where)"


def chosen(wanted: str = "auto", plan: Any = PLAN, **more: Any) -> tuple[str, str, str]:
    facts = {"checkpoint": False, "stateful": False, "local": True, **more}
    found = choose(wanted, plan, flow="deposits", **facts)
    return found.engine, found.place, found.reason


@pytest.mark.parametrize(
    "given, engine, place, reason",
    [
        ({}, "direct", "auto", "its plan needs no Spark job"),
        ({"local": False}, "direct", "auto", "no Spark job"),
        ({"wanted": "driver"}, "direct", "driver", "engine='driver': its plan needs no Spark job"),
        (
            {"wanted": "tasks"},
            "direct",
            "tasks",
            "engine='tasks': each of its batches is a Spark job; one takes 0.1 seconds",
        ),
        ({"stateful": True}, "direct", "auto", "no Spark job"),
        ({"local": False, "stateful": True}, "direct", "tasks", "on other machines; engine='driver' moves it"),
        ({"local": False, "stateful": True, "wanted": "driver"}, "direct", "driver", "engine='driver'"),
        ({"checkpoint": True}, "spark", "auto", "checkpoint="),
        ({"checkpoint": True, "wanted": "tasks", "plan": FILTER}, "spark", "tasks", "checkpoint="),
    ],
)
def test_the_choice_and_its_reason(given: dict[str, Any], engine: str, place: str, reason: str) -> None:
    *found, why = chosen(**given)
    assert found == [engine, place]
    assert reason in why


@pytest.mark.parametrize("wanted", ENGINES)
def test_what_only_micro_batches_run_needs_a_checkpoint(wanted: str) -> None:
    with pytest.raises(
        UnsupportedQueryError, match=r"(?s)without checkpoint=: the query has a filter.*deposits.*give checkpoint="
    ):
        chosen(wanted, FILTER)


@pytest.mark.parametrize("facts", [{"checkpoint": None}, {"stateful": True}])
def test_where_a_checkpoint_cannot_be_given_none_is_proposed(facts: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedQueryError, match="cannot be run: the query has a filter") as caught:
        chosen("auto", FILTER, **facts)
    assert "checkpoint" not in caught.value.next_step


def test_the_driver_has_no_state_of_spark() -> None:
    with pytest.raises(UnsupportedQueryError, match="checkpoint="):
        chosen("driver", checkpoint=True)
