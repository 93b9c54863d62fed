"""Deposits go to a table of a PostgreSQL database, exactly once.

LEDGER_DSN=postgresql://ada@localhost/bank python ledger_table.py --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import psycopg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import onceflow

# Nothing in this table would stop a row that comes twice: that it does not is up to the flow.
TABLE = """CREATE TABLE IF NOT EXISTS ledger (
    id text NOT NULL,
    account text NOT NULL,
    amount numeric(12, 2) NOT NULL CHECK (amount > 0),
    made timestamptz NOT NULL,
    note text,
    "partition" int NOT NULL,
    "offset" bigint NOT NULL
)"""
FIELDS = "id string, amount decimal(12,2), made bigint, note string"


def ledger_rows(deposits: DataFrame) -> DataFrame:
    """A row of the ledger for each deposit. A value that is no JSON stops the flow."""
    deposit = F.from_json(F.col("value").cast("string"), FIELDS, {"mode": "FAILFAST"})
    return deposits.withColumn("deposit", deposit).selectExpr(
        "deposit.id AS id",
        "string(key) AS account",
        "deposit.amount AS amount",
        "timestamp_millis(deposit.made) AS made",
        "deposit.note AS note",
        "partition",
        "offset",
    )


def ledger_flow(flow: onceflow.Flow, sink: onceflow.ExternalSink, suffix: str = "", **read: Any) -> onceflow.FlowWriter:
    rows = ledger_rows(flow.read(f"deposits{suffix}", **read))
    return flow.write_external(rows, sink, trigger="200 milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of the names of topic and flow")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    given = parser.parse_args()
    dsn = os.environ["LEDGER_DSN"]  # it may have a password, which other users could read in an argument

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spark = onceflow.session("ledger", master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"ledger{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    with psycopg.connect(dsn) as database:
        database.execute(TABLE)
    sink = onceflow.PostgresSink(dsn, "ledger")
    onceflow.serve(ledger_flow(flow, sink, given.suffix, max_records_per_batch=given.batch).start())


if __name__ == "__main__":
    main()
