"""Writes to a table at a steady rate: a flow that copies a topic into it, or a plain transactional producer."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from typing import Any

from onceflow_workshop.bench.serve_load import key_of

_SLICE_S = 0.02
_COMMIT_S = 30.0


def row(number: int, version: int) -> bytes:
    """A value of the table."""
    return b'{"id":%d,"name":"customer %d","version":%d,"balance":%.2f}' % (number, number, version, 7.5 * number)


def main() -> None:
    """Child process: produces until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _write(**json.loads(sys.argv[1]))


def _write(servers: str, topic: str, keys: int, per_s: int, commit_ms: int | None) -> None:
    """Produce at a steady rate; with ``commit_ms``, in transactions of this length."""
    from confluent_kafka import Producer

    options: dict[str, Any] = {"bootstrap.servers": servers, "partitioner": "murmur2_random", "linger.ms": 20}
    if commit_ms is not None:
        options["transactional.id"] = "onceflow-bench-serve"
    producer = Producer(options)
    if commit_ms is not None:
        producer.init_transactions(_COMMIT_S)
    choose = random.Random(13)
    begin = time.monotonic()
    sent = 0
    committed_at = begin
    open_transaction = False
    while True:
        if commit_ms is not None and not open_transaction:
            producer.begin_transaction()
            open_transaction = True
        due = int((time.monotonic() - begin) * per_s)
        for version in range(sent, due):
            number = choose.randrange(keys)
            producer.produce(topic, row(number, version), key_of(number))
        sent = due
        producer.poll(0)
        if commit_ms is not None and time.monotonic() - committed_at >= commit_ms / 1000:
            producer.commit_transaction(_COMMIT_S)
            committed_at, open_transaction = time.monotonic(), False
        time.sleep(_SLICE_S)
