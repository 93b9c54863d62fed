"""Tells the functions of a query, wherever they run, what they have to know of an attempt of a batch."""

from __future__ import annotations

from typing import Any

from onceflow.driver.fetched_rows import FetchedRows, Rows
from onceflow.messages import set_driver_property


def set_property(rows: Rows, name: str, value: str | None) -> None:
    """Set a property for the attempt that this thread runs; see `messages.batch_property`.

    Args:
        value: None: nothing is known.
    """
    if isinstance(rows, FetchedRows):
        set_driver_property(name, value)
        return
    context: Any = rows.sparkSession.sparkContext
    context.setLocalProperty(name, value)
