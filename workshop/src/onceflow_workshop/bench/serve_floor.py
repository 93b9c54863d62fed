"""The floor of the query server: the same look-ups in the process of a `Table`, without HTTP."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from onceflow_workshop.bench.latency import percentile
from onceflow_workshop.bench.serve_load import KEYS_AT_ONCE, key_of

_DIFFERENT = 2_000


def main() -> None:
    """Child process: reads, prints one JSON line."""
    print(json.dumps(_floor(**json.loads(sys.argv[1]))), flush=True)


def _floor(servers: str, topic: str, keys: int, seconds: float, folder: str) -> list[dict[str, Any]]:
    from onceflow import Table, serdes

    choose = random.Random(11)
    ones = [key_of(choose.randrange(keys)) for _ in range(_DIFFERENT)]
    many = [[key_of(choose.randrange(keys)) for _ in range(KEYS_AT_ONCE)] for _ in range(_DIFFERENT // 10)]
    with Table(topic, bootstrap_servers=servers, key=serdes.STRING, value=serdes.JSON, state_dir=folder) as table:
        return [
            _measured("get", lambda turn: table.get(ones[turn % len(ones)]), seconds, 1),
            _measured("multi_get", lambda turn: table.multi_get(many[turn % len(many)]), seconds, KEYS_AT_ONCE),
        ]


def _measured(what: str, read: Callable[[int], Any], seconds: float, keys: int) -> dict[str, Any]:
    begin = time.perf_counter()
    end = begin + seconds
    times: list[float] = []
    missing = 0
    before = begin
    while before < end:
        missing += not read(len(times))
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return {
        "what": what,
        "keys_per_s": round(keys * len(times) / (before - begin)),
        **{f"p{percent}_ms": round(1000 * percentile(times, percent), 4) for percent in (50, 99)},
        "max_ms": round(1000 * max(times), 2),
        "answers": len(times),
        "wrong": f"{missing} look-ups found nothing" if missing else "",
    }
