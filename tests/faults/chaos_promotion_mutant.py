"""A driver of a chaos run with a broken hand-over: it writes outputs that the earlier version has written already."""

from __future__ import annotations

from typing import Any

from onceflow.driver.batch import retries
from onceflow_workshop.chaos import driver

broken: Any = retries.Attempt
broken.without_outputs = property(lambda self: False, lambda self, value: None)

if __name__ == "__main__":
    driver.main()
