"""A processor for tests of the engine, and how its batches are run."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from onceflow.state.api.processor import Processor
from onceflow.state.api.serdes import JSON, STRING
from onceflow.state.engine.record_engine import Engine
from onceflow_workshop.testing.engines import engine_of


class Text(Processor):
    """Keys and values as text, JSON state; runs a function given to it."""

    key = value = output = STRING
    state = JSON

    def __init__(self, run: Any = None, on_timer: Any = None, **attributes: Any) -> None:
        self._run = run
        self._on_timer = on_timer
        for name, value in attributes.items():
            setattr(self, name, value)

    def process(self, key: str, records: Any, state: Any) -> Any:
        return self._run and self._run(key, records, state)

    def on_timer(self, key: str, timer: Any, state: Any) -> Any:
        return self._on_timer and self._on_timer(key, timer, state)


def engine(processor: Processor, store: Any, *, now_ms: int = 0, **options: Any) -> Engine:
    if "allowed_lateness" in vars(processor):
        options.setdefault("late_topic", "late")
    return engine_of(Engine, processor, store, now_ms=now_ms, **options)


def batch(*pairs: tuple[Any, Any], **columns: Any) -> pa.RecordBatch:
    given = {
        "key": pa.array([key for key, _ in pairs], pa.binary()),
        "value": pa.array([value for _, value in pairs], pa.binary()),
        **columns,
    }
    return pa.RecordBatch.from_arrays(list(given.values()), names=list(given))


def commit(run: Engine, store: Any) -> None:
    assert store.write(run.changes(), index=True)
