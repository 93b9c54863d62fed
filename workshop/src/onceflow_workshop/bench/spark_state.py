"""The balance service with Spark's own ``transformWithState``: what a ``Processor`` is compared with."""

from __future__ import annotations

import importlib
from typing import Any

from onceflow_workshop.bench.environment import Bench


def transform_with_state(bench: Bench, source: str, target: str, records_per_batch: int, *, pandas: bool) -> Any:
    """The same by Spark's operator and Spark's sink: at-least-once."""
    from pyspark.sql import functions as F

    from onceflow.client.settings import ClientSettings

    df = (
        bench.spark.readStream.format("kafka")
        .options(**ClientSettings(bench.servers).spark_reader())
        .option("kafka.bootstrap.servers", bench.servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("kafka.isolation.level", "read_committed")
        .option("maxOffsetsPerTrigger", records_per_batch)
        .load()
    )
    parsed = F.from_json(F.col("value").cast("string"), "account string, amount long, id long")
    grouped = df.select(parsed.alias("v")).select("v.*").groupBy("account")
    run = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
    out = run(spark_processor(pandas=pandas), "account string, id long, balance long, count long", "Update", "None")
    value = F.to_json(F.struct("account", "id", "balance", "count"))
    return (
        out.select(F.col("account").alias("key"), value.alias("value"))
        .writeStream.format("kafka")
        .outputMode("update")
        .option("kafka.bootstrap.servers", bench.servers)
        .option("topic", target)
        .option("kafka.acks", "all")
        .option("checkpointLocation", (bench.folder / target).as_uri())
        .trigger(availableNow=True)
        .start()
    )


def why_no_transform_with_state() -> str:
    """What ``transformWithState`` lacks here, in a line; empty when it lacks nothing."""
    from onceflow.spark import versions

    if versions.current() < versions.QUERY_SINCE["transformWithState"]:
        return versions.refuse("transformWithState").what
    try:
        importlib.import_module("google.protobuf.descriptor")  # PySpark itself does not bring it
    except ImportError:
        return "its Python workers need protobuf (pip install protobuf)"
    return ""


def spark_processor(*, pandas: bool) -> Any:
    """A ``StatefulProcessor`` that keeps balance and count of an account."""
    import pandas as pd
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Rows(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.known = handle.getValueState("known", "balance long, count long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            balance, count = self.known.get() if self.known.exists() else (0, 0)
            for row in rows:
                balance += row.amount
                count += 1
                yield Row(account=key[0], id=row.id, balance=balance, count=count)
            self.known.update((balance, count))

        def close(self) -> None:
            pass

    class Frames(Rows):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            balance, count = self.known.get() if self.known.exists() else (0, 0)
            for frame in rows:
                balances = frame["amount"].cumsum() + balance
                counts = range(count + 1, count + 1 + len(frame))
                yield pd.DataFrame({"account": key[0], "id": frame["id"], "balance": balances, "count": counts})
                balance, count = int(balances.iloc[-1]), count + len(frame)
            self.known.update((balance, count))

    return Frames() if pandas else Rows()
