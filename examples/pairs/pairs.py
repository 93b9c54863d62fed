"""Pairs of events: the sum for each timestamp that has an A and a B; what stays alone is reported.

python pairs.py --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

import onceflow

FIELDS = ("id", "type", "timestamp", "value")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MINUTE_MS = 60_000
# Date, time, fraction and offset. Python reads it, and Spark: no backslashes, and nothing the two see differently.
TIMESTAMP = (
    "([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]((?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9])"
    "(?:[.]([0-9]{1,6}))?(Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])?"
)
# A timer that is due is called about a second after its time, unless the service was busy or did not run.
PROMPT_MS = 5_000


class BadEvent(ValueError):
    """Not an event, or none that can be true."""


class Pairs(onceflow.Processor):
    """The state of a moment is its events, by type, until event time is five minutes past it.

    Beside them it has ``watermark`` (event time when the clock was looked at) and ``left`` (the event was reported).

    Args:
        unpaired: topic of events that stayed alone.
        late: topic of events that came after their partner had been reported.
        quiet_minutes: an event that has waited for so long by the clock is reported alone if event time stands still;
            0: only event time decides.

    Raises:
        ValueError: `quiet_minutes` is negative, or not finite.
    """

    key = onceflow.serdes.STRING
    value = state = output = onceflow.serdes.JSON
    allowed_lateness = "5 minutes"

    def __init__(self, unpaired: str = "unpaired", late: str = "late", quiet_minutes: float = 10) -> None:
        if not 0 <= quiet_minutes < float("inf"):
            raise ValueError(f"quiet_minutes is {quiet_minutes}: it must be 0 or a time in minutes")
        self.unpaired = unpaired
        self.late = late
        self.quiet_ms = int(quiet_minutes * MINUTE_MS)
        # So long event time must stand still. The flow looks for timers once a second.
        self.look_ms = max(self.quiet_ms // 10, 1000)

    def event_time(self, record: onceflow.Record) -> int:
        """Called before everything else: what raises here is a dead letter, and does not move event time."""
        return checked(record.value, record.timestamp_ms)

    def process(self, key: str, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        found = state.get({})
        events = {kind: found[kind] for kind in "AB" if kind in found}
        known = len(events)
        for record in records:
            event = {name: record.value[name] for name in FIELDS if record.value.get(name) is not None}
            if event["timestamp"] != key and canonical(event["timestamp"]) != key:
                raise BadEvent("the key is not its timestamp")  # a field is there twice, and Spark found neither
            if "id" not in event:
                event["place"] = f"offset {record.offset} of {record.topic}-{record.partition}"
            if "left" in found and event["type"] not in events:
                yield self.too_late(key, record)
                continue
            first = events.setdefault(event["type"], event)
            if any(first.get(name) != event.get(name) for name in ("id", "place")):
                raise BadEvent(f"{first.get('id') or first['place']} is the {event['type']} of this timestamp already")
        if len(events) == known:
            return  # every one of them was here before, or is late
        if known == 0:
            # A millisecond later than the event: from then on its partner would be late.
            state.timers.register("over", epoch_ms(key) + 1)
        state.put(events)
        if len(events) == 2:
            state.timers.cancel("quiet")
            yield onceflow.Record(key, {"timestamp": key, "sum": events["A"]["value"] + events["B"]["value"]})
        elif self.quiet_ms:
            state.timers.register("quiet", state.now_ms + self.quiet_ms - self.look_ms, clock="processing")

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        found = state.get()
        events = {kind: found[kind] for kind in "AB" if kind in found}
        if timer.name == "over":
            state.delete()
            state.timers.cancel("quiet")
        elif state.now_ms - timer.at_ms > PROMPT_MS or found.get("watermark", "none") != state.watermark_ms:
            # Event time moves, so it decides; or the service has just begun to read what came while it did not run.
            state.put({**events, "watermark": state.watermark_ms})
            state.timers.register("quiet", state.now_ms + self.look_ms, clock="processing")
            return
        else:
            # Remembered until event time is past it: a duplicate must not be reported again.
            state.put({**events, "left": True})
        if len(events) == 1 and "left" not in found:
            (event,) = events.values()
            event.pop("place", None)
            yield onceflow.Record(key, event, topic=self.unpaired)

    def too_late(self, key: str, record: onceflow.Record) -> onceflow.Record:
        """The record for the late topic, with headers as the late records of event time have them."""
        where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
        cause = {"class": "LateRecord", "message": "its partner has been reported as unpaired", **where}
        headers = [(f"onceflow.error.{name}", str(text).encode()) for name, text in cause.items()]
        return onceflow.Record(key, record.value, self.late, [*record.headers, *headers], record.timestamp_ms)


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
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= 64):
        raise BadEvent("id must be a text of 1 to 64 characters, if it is there")
    if kind not in ("A", "B"):
        raise BadEvent("type must be A or B")
    if type(value) is not int or abs(value) >= 10**15:
        raise BadEvent("value must be a whole number below 10^15")
    try:
        at_ms = epoch_ms(canonical(timestamp))
    except (TypeError, ValueError, OverflowError):
        raise BadEvent("timestamp must be like 2026-01-31 23:59:59 or 2026-01-31T23:59:59.999Z") from None
    if told_ms is not None and at_ms > told_ms + MINUTE_MS:
        raise BadEvent("timestamp is more than a minute after the record's own")
    return at_ms


def canonical(timestamp: str) -> str:
    """The one spelling of a moment, in UTC: two spellings would be two keys.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    found = re.fullmatch(TIMESTAMP, timestamp)
    if found is None:
        raise ValueError(timestamp)
    day, time, fraction, offset = found.groups()
    # Python 3.10 knows neither the Z nor every length of a fraction.
    offset = "+00:00" if offset in (None, "Z") else offset
    at = datetime.fromisoformat(f"{day}T{time}.{fraction or '':0<6}{offset}").astimezone(timezone.utc)
    return at.replace(tzinfo=None).isoformat(timespec="microseconds").removesuffix("000") + "Z"


def epoch_ms(key: str) -> int:
    """When it was, by its canonical spelling."""
    return (datetime.fromisoformat(key[:-1] + "+00:00") - EPOCH) // timedelta(milliseconds=1)


def key_of(value: Column) -> Column:
    """The timestamp of an event in its canonical spelling, in a session whose time zone is UTC.

    State is kept by key, so there is one for every record, whatever is wrong with it: the text that stands for the
    timestamp, or `none`.
    """
    # In brackets, because Spark's parser does not mind what follows a complete value.
    parsed = F.try_parse_json(F.concat(F.lit("["), F.try_validate_utf8(value.cast("string")), F.lit("]")))
    text = F.try_variant_get(parsed, "$[0].timestamp", "string")
    at = F.date_format(text.try_cast("timestamp"), "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'")
    spelled = F.when(text.rlike(rf"\A{TIMESTAMP}\z"), F.regexp_replace(at, "000Z$", "Z"))
    return F.coalesce(spelled, text, F.lit("none"))


def pairs_flow(
    flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, *, processor: Pairs | None = None, **read: Any
) -> onceflow.FlowWriter:
    """The flow, in a session whose time zone is UTC.

    Args:
        processor: with the topics that end with the suffix; None: as it is by default.
    """
    events = flow.read(f"events{suffix}", include_headers=True, **read)
    pairs = flow.process(
        events.withColumn("key", key_of(F.col("value"))),
        processor or Pairs(f"unpaired{suffix}", f"late{suffix}"),
        table=f"waiting{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"dead-letters{suffix}",
        late_topic=f"late{suffix}",
        state_dir=state_dir,
    )
    return flow.write(pairs, topic=f"pairs{suffix}", trigger="200 milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    quiet = "an event that has waited for so long is reported alone, also if no more events come; 0: never"
    parser.add_argument("--quiet-minutes", type=float, default=10, help=f"{quiet}  [default: %(default)s]")
    given = parser.parse_args()
    try:
        processor = Pairs(f"unpaired{given.suffix}", f"late{given.suffix}", given.quiet_minutes)
    except ValueError as error:
        parser.error(str(error))

    config = {"spark.driver.memory": "640m", "spark.sql.session.timeZone": "UTC"}
    spark = onceflow.session("pairs", master="local[2]", config=config)
    flow = onceflow.Flow(f"pairs{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    write = pairs_flow(flow, given.suffix, given.state_dir, processor=processor, max_records_per_batch=given.batch)
    onceflow.serve(write.start())


if __name__ == "__main__":
    main()
