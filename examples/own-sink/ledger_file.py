"""Deposits go to a table of an SQLite file, exactly once, through a sink that does not come with onceflow.

python ledger_file.py --bootstrap-servers localhost:9092 --database ledger.db
"""

from __future__ import annotations

import argparse
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlite_sink import SqliteSink

import onceflow

# Amounts are text, because SQLite has no decimals. Nothing in this table would stop a row that comes twice.
TABLE = """CREATE TABLE IF NOT EXISTS ledger (
    account TEXT NOT NULL,
    amount TEXT NOT NULL CHECK (CAST(amount AS REAL) > 0),
    "partition" INTEGER NOT NULL,
    "offset" INTEGER NOT NULL
)"""


def ledger(flow: onceflow.Flow, database: Path, deposits: str, failed: str, **options: Any) -> Any:
    """The flow: each deposit is a row. One that the table does not take is a dead letter.

    Args:
        deposits, failed: topics. options: of `Flow.write_external`.
    """
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(TABLE)
    rows = flow.read(deposits, include_headers=True).selectExpr(
        "string(key) AS account",
        "CAST(get_json_object(string(value), '$.amount') AS decimal(12,2)) AS amount",
        "partition",
        "offset",
        # The table lacks these: they make the dead letter.
        "key",
        "value",
        "headers",
        "topic",
        "timestamp",
    )
    return flow.write_external(rows, SqliteSink(database, "ledger"), dead_letter_topic=failed, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--database", type=Path, required=True)
    given = parser.parse_args()

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spark = onceflow.session("ledger-file", master="local[2]")
    flow = onceflow.Flow("ledger-file", spark, bootstrap_servers=given.bootstrap_servers)
    onceflow.serve(ledger(flow, given.database, "deposits", "failed", trigger="200 milliseconds").start())


if __name__ == "__main__":
    main()
