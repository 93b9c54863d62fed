"""Columns of Avro against columns of JSON by Spark's from_json: ``python -m onceflow_workshop.bench.formats``.

The same records are in two topics. The same query reads one after the other, in turns, in one session, and all of its
outputs are counted and compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import onceflow
from onceflow.testing import independent
from onceflow.testing.broker import create_topic, running_broker

SCHEMA = {
    "type": "record",
    "name": "Payment",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "account", "type": "string"},
        {"name": "cents", "type": "int"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
COLUMNS = "id bigint, account string, cents int, note string, at timestamp"
AT = datetime(2026, 12, 1, tzinfo=timezone.utc)
PARTITIONS = 4


def payments(records: int) -> Iterator[dict[str, Any]]:
    """The records."""
    for n in range(records):
        note = None if n % 3 else "hello world"
        yield {"id": n, "account": f"acc-{n % 1000}", "cents": n, "note": note, "at": AT + timedelta(milliseconds=n)}


def run(spark: Any, servers: str, serde: Any, topic: str, kind: str) -> tuple[float, list[bytes]]:
    """Records per second of a run, and its sorted outputs."""
    target = f"{kind}-{uuid.uuid4().hex[:8]}"
    create_topic(servers, target, PARTITIONS)
    with onceflow.Flow(f"formats-{target}", spark, bootstrap_servers=servers) as flow:
        if kind == "avro":
            rows = flow.read(topic, until="latest", value_format=serde)
        else:
            rows = flow.read(topic, until="latest").selectExpr("key", f"from_json(string(value), '{COLUMNS}') AS value")
        text = "concat_ws('|', value.id, value.account, value.cents, value.note, unix_micros(value.at))"
        query = flow.write(rows.where("value.cents > 9").selectExpr("key", f"{text} AS value"), topic=target).start()
        started = time.monotonic()
        query.awaitTermination(600)
        seconds = time.monotonic() - started
    found = sorted(record.value or b"" for record in independent.read_topic(servers, target, decided=True))
    return len(found) / seconds, found


def main() -> None:
    """Fill both topics, run in turns, print a line for each run and the ratio of the best ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--turns", type=int, default=3)
    choices = parser.parse_args()
    serde = onceflow.SchemaRegistry("mock://formats").avro("payments-value", json.dumps(SCHEMA), register=True)
    with tempfile.TemporaryDirectory() as folder, running_broker(Path(folder, "broker")) as servers:
        topics = {kind: f"payments-{kind}" for kind in ("json", "avro")}
        for topic in topics.values():
            create_topic(servers, topic, PARTITIONS)
        keys = (b"acc-%d" % (n % 1000) for n in range(choices.records))
        sent = [*zip(keys, payments(choices.records), strict=True)]
        independent.fill(servers, topics["avro"], ((key, serde.encode(each)) for key, each in sent))
        texts = ((key, json.dumps({**each, "at": each["at"].isoformat()}).encode()) for key, each in sent)
        independent.fill(servers, topics["json"], texts)
        spark = onceflow.session("formats", "local[2]")
        best: dict[str, float] = {}
        outputs: list[list[bytes]] = []
        for _ in range(choices.turns):
            for kind, topic in topics.items():
                rate, found = run(spark, servers, serde, topic, kind)
                best[kind] = max(rate, best.get(kind, 0.0))
                outputs.append(found)
                print(f"{kind}: {rate:,.0f} records/s", flush=True)
        spark.stop()
    same = all(found == outputs[0] for found in outputs) and len(outputs[0]) == choices.records - 10
    print(f"avro / json: {best['avro'] / best['json']:.2f}; outputs {'are the same' if same else 'DIFFER'}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
