"""Pairs of events: the sum for each timestamp that has an A and a B; what stays alone is reported five minutes later.

python pairs.py --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql import functions as F

import onceflow

TIMESTAMP = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}\.[0-9]{3}Z")
FIELDS = ("id", "type", "timestamp", "value")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MINUTE_MS, DAY_MS = 60_000, 86_400_000
# State is kept by key: one for every record, whatever is wrong with it. In brackets, because Spark's parser does not
# mind what follows a complete value.
KEY = """coalesce(try_variant_get(try_parse_json('[' || try_validate_utf8(string(value)) || ']'),
                              '$[0].timestamp', 'string'), 'none')"""


class BadEvent(ValueError):
    """Not an event, or none that can be true."""


class Pairs(onceflow.Processor):
    """The state of a timestamp is its events, by type, until event time is five minutes past it.

    Args:
        unpaired: topic of events that stayed alone.
    """

    key = onceflow.serdes.STRING
    value = state = output = onceflow.serdes.JSON
    allowed_lateness = "5 minutes"

    def __init__(self, unpaired: str = "unpaired") -> None:
        self.unpaired = unpaired

    def event_time(self, record: onceflow.Record) -> int:
        """Called before everything else: what raises here is a dead letter, and does not move event time."""
        return checked(record.value, record.timestamp_ms)

    def process(self, key: str, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        events = state.get({})
        known = len(events)
        for record in records:
            event = {name: record.value[name] for name in FIELDS}
            if event["timestamp"] != key:
                raise BadEvent("the key is not its timestamp")  # a field is there twice, and Spark found neither
            first = events.setdefault(event["type"], event)
            if first["id"] != event["id"]:
                raise BadEvent(f"{first['id']} is the {first['type']} of this timestamp already")
        if len(events) == known:
            return  # every one of them was here before
        if known == 0:
            # A millisecond later than the event: from then on its partner would be late.
            state.timers.register("over", epoch_ms(key) + 1)
        state.put(events)
        if len(events) == 2:
            yield onceflow.Record(key, {"timestamp": key, "sum": events["A"]["value"] + events["B"]["value"]})

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        events = state.get()
        state.delete()
        if len(events) == 1:
            (event,) = events.values()
            yield onceflow.Record(key, event, topic=self.unpaired)


def checked(event: Any, told_ms: int | None) -> int:
    """When an event happened, in epoch milliseconds.

    Args:
        told_ms: the record's own timestamp. An event that is years ahead of it would make all others late.

    Raises:
        BadEvent: it is none.
    """
    if not isinstance(event, dict):
        raise BadEvent("not a JSON object")
    fields: list[Any] = [event.get(name) for name in FIELDS]
    name, kind, timestamp, value = fields
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise BadEvent("id is not a short text")
    if kind not in ("A", "B"):
        raise BadEvent("type is neither A nor B")
    if type(value) is not int or abs(value) >= 10**15:
        raise BadEvent("value is not a whole number below 10^15")
    try:
        at_ms = epoch_ms(timestamp)
    except (TypeError, ValueError):
        raise BadEvent("timestamp is not like 2026-01-31T23:59:59.999Z") from None
    if told_ms is not None and not told_ms - DAY_MS <= at_ms <= told_ms + MINUTE_MS:
        raise BadEvent("timestamp is far from the record's own")
    return at_ms


def epoch_ms(timestamp: str) -> int:
    """Of a timestamp in its one spelling: two spellings would be two keys."""
    if not TIMESTAMP.fullmatch(timestamp):
        raise ValueError(timestamp)
    # Python 3.10 does not know the Z.
    return (datetime.fromisoformat(timestamp[:-1] + "+00:00") - EPOCH) // timedelta(milliseconds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    given = parser.parse_args()

    spark = onceflow.session("pairs", master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"pairs{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    events = flow.read(f"events{given.suffix}", max_records_per_batch=given.batch, include_headers=True)
    pairs = flow.process(
        events.withColumn("key", F.expr(KEY)),
        Pairs(f"unpaired{given.suffix}"),
        table=f"waiting{given.suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"dead-letters{given.suffix}",
        late_topic=f"late{given.suffix}",
        state_dir=given.state_dir,
    )
    onceflow.serve(flow.write(pairs, topic=f"pairs{given.suffix}", trigger="200 milliseconds").start())


if __name__ == "__main__":
    main()
