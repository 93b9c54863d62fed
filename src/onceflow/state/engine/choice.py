"""Which engine runs a processor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from onceflow.calls.concurrently import calls_of
from onceflow.calls.runner import CallRunner
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.time_joins import AsOfJoin, IntervalJoin
from onceflow.state.engine.as_of_engine import AsOfEngine
from onceflow.state.engine.call_engine import CallEngine
from onceflow.state.engine.column_engine import ColumnEngine
from onceflow.state.engine.dedup_engine import DedupEngine
from onceflow.state.engine.interval_engine import IntervalEngine
from onceflow.state.engine.record_engine import Engine

AnyEngine = Engine | ColumnEngine | DedupEngine | IntervalEngine | AsOfEngine


def makes_calls(processor: Processor | ColumnProcessor) -> bool:
    """Whether the processor's records wait for calls of other services."""
    return isinstance(processor, Processor) and bool(calls_of(processor))


def engine_for(processor: Processor | ColumnProcessor, runner: CallRunner | None = None) -> Callable[..., AnyEngine]:
    """What makes an engine for a processor, with the arguments of `BaseEngine`.

    Args:
        runner: makes its calls; None: it has one of its own if it needs one.
    """
    kind: Any = Engine
    if isinstance(processor, Deduplication):
        kind = DedupEngine
    elif isinstance(processor, IntervalJoin):
        kind = IntervalEngine
    elif isinstance(processor, AsOfJoin):
        kind = AsOfEngine
    elif isinstance(processor, ColumnProcessor):
        kind = ColumnEngine
    elif makes_calls(processor):
        kind = partial(CallEngine, runner=runner)
    return partial(kind, processor)
