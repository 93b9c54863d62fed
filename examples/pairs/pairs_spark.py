"""The pairs of pairs.py with Spark's own state: as a full outer join of two streams, or as an aggregation.

python pairs_spark.py sort    --bootstrap-servers localhost:9092
python pairs_spark.py join    --bootstrap-servers localhost:9092 --checkpoint ./join
python pairs_spark.py grouped --bootstrap-servers localhost:9092 --checkpoint ./grouped

`sort` checks the events and divides them into the topics `as` and `bs`; the other two read these.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import onceflow

FIELDS = ("id", "type", "timestamp", "value")
SCHEMA = "id string, type string, timestamp string, value bigint"
# As in pairs.py: no backslashes, because Spark reads it, too.
TIMESTAMP = (
    "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
    "(?:[.][0-9]{1,6})?(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])?"
)
# In brackets, because Spark's parser does not mind what follows a complete value.
PARSED = "try_parse_json('[' || try_validate_utf8(string(value)) || ']')"
CAUSE = """
    CASE WHEN value IS NOT NULL AND (event IS NULL OR variant_get(parsed, '$[1]', 'variant') IS NOT NULL)
              THEN 'not JSON'
         WHEN NOT coalesce(schema_of_variant(event) LIKE 'OBJECT<%', false) THEN 'not a JSON object'
         WHEN coalesce(schema_of_variant(variant_get(event, '$.id', 'variant')), 'VOID') <> 'VOID'
              AND NOT coalesce(length(e.id) BETWEEN 1 AND 64, false)
              THEN 'id must be a text of 1 to 64 characters, if it is there'
         WHEN NOT coalesce(e.type IN ('A', 'B'), false) THEN 'type must be A or B'
         WHEN NOT coalesce(e.value BETWEEN -999999999999999 AND 999999999999999, false)
              THEN 'value must be a whole number below 10^15'
         WHEN at IS NULL THEN 'timestamp must be like 2026-01-31 23:59:59 or 2026-01-31T23:59:59.999Z'
         WHEN at > timestamp + INTERVAL 1 MINUTE THEN "timestamp is more than a minute after the record's own"
    END"""
PLACES = {f"{kind}.{name}": name for kind in ("error", "origin") for name in ("topic", "partition", "offset")}
# The headers that a processor's dead letters have.
DEAD_LETTER = {"error.class": "'BadEvent'", "error.message": "cause", "attempt": "1", **PLACES}


def field(name: str, kind: str) -> Column:
    """A field of the event if it is of this type: a number is no text, though Spark could make one of it."""
    is_of_kind = f"schema_of_variant(variant_get(event, '$.{name}', 'variant')) = '{kind}'"
    return F.expr(f"CASE WHEN {is_of_kind} THEN try_variant_get(event, '$.{name}', '{kind}') END")


def time_of(text: Column) -> Column:
    """When it was, in a session whose time zone is UTC; null for what is no time, or is not spelled as it should be."""
    return F.when(text.rlike(rf"\A{TIMESTAMP}\z"), text.try_cast("timestamp"))


def canonical(at: Column) -> Column:
    """The one spelling of a moment, in UTC."""
    return F.regexp_replace(F.date_format(at, "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'"), "000Z$", "Z")


def sort(events: DataFrame, suffix: str) -> DataFrame:
    """Every record, as it was, to one of three topics, each with as many partitions as the source."""
    fields = [field(name, "BIGINT" if name == "value" else "STRING").alias(name) for name in FIELDS]
    checked = (
        events.withColumn("parsed", F.expr(PARSED))
        .withColumn("event", F.expr("variant_get(parsed, '$[0]', 'variant')"))
        .withColumn("e", F.struct(*fields))
        .withColumn("at", time_of(F.col("e.timestamp")))
        .withColumn("cause", F.expr(CAUSE))
    )
    dead_letter = [
        F.struct(F.lit(f"onceflow.{name}").alias("key"), F.expr(f"binary(string({sql}))").alias("value"))
        for name, sql in DEAD_LETTER.items()
    ]
    good = F.col("cause").isNull()
    return checked.select(
        F.when(good, F.concat(F.lower("e.type"), F.lit(f"s{suffix}")))
        .otherwise(f"dead-letters-sort{suffix}")
        .alias("topic"),
        "partition",  # the same: so the partitions stay at about the same event time
        "key",
        "value",
        F.when(good, F.col("headers"))
        .otherwise(F.concat(F.coalesce("headers", F.expr("array()")), F.array(*dead_letter)))
        .alias("headers"),
        "timestamp",
    )


def join(a: DataFrame, b: DataFrame) -> DataFrame:
    """What has no partner when the watermark gets there comes out alone: Spark's outer joins wait that long."""
    known_by = ["id", "place"]
    a = a.dropDuplicatesWithinWatermark(known_by).select(F.col("at").alias("a_at"), F.struct(*FIELDS).alias("a"))
    b = b.dropDuplicatesWithinWatermark(known_by).select(F.col("at").alias("b_at"), F.struct(*FIELDS).alias("b"))
    return a.join(b, F.col("a_at") == F.col("b_at"), "full_outer").withColumn("at", F.coalesce("a_at", "b_at"))


def grouped(a: DataFrame, b: DataFrame) -> DataFrame:
    """The greatest of equal events is that event, so duplicates do no harm. Pairs come out late, too."""
    event = F.struct(*FIELDS)
    of_type = [F.max(F.when(F.col("type") == kind, event)).alias(kind.lower()) for kind in "AB"]
    return a.union(b).groupBy("at").agg(*of_type)


def written(rows: DataFrame, what: str, suffix: str) -> DataFrame:
    """A sum for what has both, the event itself for what is alone."""
    both = F.col("a").isNotNull() & F.col("b").isNotNull()
    key = canonical(F.col("at"))
    total = F.struct(key.alias("timestamp"), (F.col("a.value") + F.col("b.value")).alias("sum"))
    return rows.select(
        F.when(both, f"pairs-{what}{suffix}").otherwise(f"unpaired-{what}{suffix}").alias("topic"),
        key.alias("key"),
        F.when(both, F.to_json(total)).otherwise(F.to_json(F.coalesce("a", "b"))).alias("value"),
    )


def state_rows(query: Any) -> dict[str, int]:
    """How many rows Spark keeps, as of its last finished batch."""
    progress = query.lastProgress
    return {"state_rows": sum(part["numRowsTotal"] for part in progress["stateOperators"])} if progress else {}


def sort_flow(flow: onceflow.Flow, suffix: str = "", **read: Any) -> onceflow.FlowWriter:
    """Checks events and divides them."""
    events = flow.read(f"events{suffix}", include_headers=True, **read)
    return flow.write(sort(events, suffix), trigger="200 milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sort", "join", "grouped"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--checkpoint", help="Spark's state: a folder that must not get lost")
    given = parser.parse_args()
    if (given.checkpoint is None) != (given.what == "sort"):
        parser.error("join and grouped need --checkpoint, sort has no state")

    config = {"spark.driver.memory": "640m", "spark.sql.session.timeZone": "UTC"}
    spark = onceflow.session(f"pairs-{given.what}", master="local[2]", config=config)
    flow = onceflow.Flow(f"pairs-{given.what}{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)

    def read(topic: str) -> DataFrame:
        """A topic of checked events. Its own watermark: the query's is the least of its topics'."""
        rows = flow.read(f"{topic}{given.suffix}", max_records_per_batch=max(1, given.batch // 2))
        event = F.from_json(F.col("value").cast("string"), SCHEMA)
        # An event without an id is known by its place: two that are equal are two.
        place = F.concat_ws(" ", "topic", "partition", "offset")
        events = rows.select(event.alias("event"), F.when(event["id"].isNull(), place).alias("place"))
        events = events.select("event.*", "place")
        return events.withColumn("at", time_of(F.col("timestamp"))).withWatermark("at", "5 minutes")

    if given.what == "sort":
        write = sort_flow(flow, given.suffix, max_records_per_batch=given.batch)
    else:
        rows = (join if given.what == "join" else grouped)(read("as"), read("bs"))
        write = flow.write(written(rows, given.what, given.suffix), checkpoint=given.checkpoint)
    onceflow.serve(write.start(), more=state_rows)


if __name__ == "__main__":
    main()
