"""A driver of a chaos run with a broken direct engine: where a batch ends, its last record is in the next one, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onceflow.direct import fetched
from onceflow_workshop.chaos import driver


def begins_too_early(self: Any, offset: int) -> tuple[Any, Any]:
    return replace(self, end=offset), replace(self, start=offset - 1)


broken: Any = fetched.FetchedPart
broken.split = begins_too_early

if __name__ == "__main__":
    driver.main()
