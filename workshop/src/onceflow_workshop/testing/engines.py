"""Engines for tests of one batch in one partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onceflow.protocol.versions import TimerId
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.engine.base import BatchTimes, EngineOptions
from onceflow.state.engine.choice import engine_for


def engine_of(
    kind: Callable[..., Any] | None,
    processor: Any,
    store: Any,
    *,
    partition: int = 0,
    batch: int = 7,
    now_ms: int = 0,
    watermark_ms: int | None = None,
    timers_until: Mapping[str, int] | None = None,
    unfired: frozenset[TimerId] = frozenset(),
    tables: Mapping[str, JoinedTable] | None = None,
    **options: Any,
) -> Any:
    """An engine of flow ``f`` and table ``t``.

    Args:
        kind: its class; None: the one that `engine_for` chooses.
        batch, now_ms, watermark_ms, timers_until, unfired: see `BatchTimes`.
        options: `EngineOptions` by name.
    """
    times = BatchTimes(batch, now_ms, watermark_ms, timers_until, unfired)
    given = (store, partition, times, EngineOptions("f", "t", **options), tables)
    return engine_for(processor)(*given) if kind is None else kind(processor, *given)
