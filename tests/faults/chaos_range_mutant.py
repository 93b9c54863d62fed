"""A driver of a chaos run with a broken direct engine: tasks read a range from one record before it on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onceflow.driver.batch import range_rows
from onceflow.planning.range_tasks import dealt
from onceflow_workshop.chaos import driver


def begins_too_early(places: Iterable[tuple[str, int, int, int]], *more: Any) -> Any:
    return dealt([(topic, n, max(0, start - 1), end) for topic, n, start, end in places], *more)


broken: Any = range_rows
broken.dealt = begins_too_early

if __name__ == "__main__":
    driver.main()
