"""The service: rows of the ledger from deposits; and the demo as people run it."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from ledger_table import TABLE, ledger_flow, ledger_rows

import onceflow
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.postgres import LocalPostgres

pytestmark = pytest.mark.integration


def test_rows(onceflow_spark: Any) -> None:
    values = ['{"id": "d1", "amount": "12.5", "made": 1750000000000, "note": null}', "no JSON"]
    schema = "key binary, value binary, partition int, offset bigint"
    given = onceflow_spark.createDataFrame([(b"acc", text.encode(), 2, n) for n, text in enumerate(values)], schema)
    (row,) = ledger_rows(given.limit(1)).collect()
    assert (row.id, row.account, row.amount, row.note) == ("d1", "acc", Decimal("12.50"), None)
    assert (row.made.timestamp(), row.partition, row.offset) == (1_750_000_000, 2, 0)
    with pytest.raises(Exception, match=r"(?i)malformed"):
        ledger_rows(given).collect()


def test_the_flow_on_topics_in_memory(onceflow_spark: Any) -> None:
    with LocalPostgres() as server, psycopg.connect(dsn := server.schema(), autocommit=True) as database:
        database.execute(TABLE)
        with FlowDriver(lambda flow: ledger_flow(flow, onceflow.PostgresSink(dsn, "ledger"))) as flow:
            flow.send("deposits", "acc", {"id": "d1", "amount": 12.5, "made": 1750000000000})
            flow.send("deposits", "acc", {"id": "d2", "amount": 1, "made": 1750000000000, "note": "rent"})
        rows = database.execute('SELECT id, account, amount, note, "offset" FROM ledger ORDER BY id').fetchall()
    assert rows == [("d1", "acc", Decimal("12.50"), None, 0), ("d2", "acc", Decimal("1.00"), "rent", 1)]


@pytest.mark.long
@pytest.mark.faults
def test_driver_and_server_are_killed(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("postgres", records=20_000, kills=2)
    assert (result["out"], result["wrong_sums"], result["torn"]) == (20_000, 0, 0)
    assert (result["kills"], result["server_kills"]) == (2, 2)
    assert result["looks"] > 10
