"""A flow with ``Flow.enrich``, for crash tests. ``drivers.py`` starts it in a process of its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import ledger
from pyspark import cloudpickle

import onceflow
from onceflow.driver.kafka import output_writer
from onceflow.task.call_rows import CallRows
from onceflow.testing import independent


def located(trap: dict[str, Any] | None, record: onceflow.Record) -> bytes:
    """Another service that refuses every tenth record."""
    n = ledger.answer(trap, int(record.value))
    if n % 10 == 7:
        raise ValueError(f"{n} is refused")
    return b"%d at %s" % (n, onceflow.idempotency_key(record).encode())


def start(given: dict[str, Any], spark: Any) -> Any:
    """Start the flow."""
    output_writer._TASK_BYTES = given.get("task_bytes", output_writer._TASK_BYTES)
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    try:
        rows = flow.enrich(
            flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 500)),
            onceflow.concurrently(partial(located, given.get("trap")), limit=8, timeout="30 seconds", retries=0),
            topic=given["target"],
            dead_letter_topic=given["failed"],
        )
        return flow.write(rows, **given.get("write", {})).start()
    except BaseException:
        flow.close()
        raise


def run(given: dict[str, Any], spark: Any) -> Any:
    """Start the flow, let it write everything there is, stop it."""
    query = start(given, spark)
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return query


def check(pipe: Any, failed: str) -> None:
    """Every record of the source once, as a result or as a dead letter; those of a key in their order."""
    places = {
        seen.value: f"{seen.topic}/{seen.partition}/{seen.offset}"
        for seen in independent.read_topic(pipe.bootstrap, pipe.source, decided=True)
    }
    good, bad = [], []
    for key, value in pipe.sent:
        n = int(value)
        if n % 10 == 7:
            bad.append((key, value))
        else:
            good.append((key, f"{n} at {places[value]}".encode()))
    replace(pipe, sent=good).check()
    letters = replace(pipe, sent=bad, target=failed).check()
    for letter in letters:
        headers = {name: (value or b"").decode() for name, value in letter.headers}
        origin = "/".join(headers[f"onceflow.origin.{part}"] for part in ("topic", "partition", "offset"))
        assert origin == places[letter.value]
        assert headers["onceflow.error.class"] == "ValueError"


class Shifted(CallRows):
    """A broken build: every row gets the result of the row before it."""

    def _written(self, records: Any, outcomes: Any, report: Any, limits: Any) -> Any:
        return super()._written(records, [outcomes[-1], *outcomes[:-1]], report, limits)


class Unordered(CallRows):
    """A broken build: results come in any order."""

    def _written(self, records: Any, outcomes: Any, report: Any, limits: Any) -> Any:
        return super()._written(records[::-1], outcomes[::-1], report, limits)


def use() -> None:
    """Make tasks get this module's functions with their code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ledger.use()
