"""Keeps the balance of every account in a table, which `onceflow table serve` answers from.

python balances_api.py --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

import onceflow
from onceflow import Record

JSON, STRING = onceflow.serdes.JSON, onceflow.serdes.STRING
ACCOUNT = re.compile(r"[A-Za-z0-9-]{1,40}")
AMOUNT_MAX = 1_000_000_000  # whole cents; sums stay far below 64 bits


class Balances(onceflow.Processor):
    """Adds movements up. Whatever is raised for a record is the cause in its dead letter.

    A row has ``through``: the offset of the last movement in it. So whoever has written a movement knows whether a row
    includes it.
    """

    key = STRING
    value = state = output = JSON

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            if not ACCOUNT.fullmatch(key):
                raise ValueError(f"{key!r:.50} is no account")
            account = state.get({"balance": 0, "count": 0})
            if record.value == {"close": True}:
                if account["balance"]:
                    raise ValueError(f"account {key} has {account['balance']} cents")
                state.delete()  # a tombstone in the table
                yield Record(key, {"closed": True})
                continue
            balance = account["balance"] + amount_of(record.value)
            account = {"balance": balance, "count": account["count"] + 1, "through": record.offset}
            state.put(account)
            yield Record(key, account)


def amount_of(movement: Any) -> int:
    """The cents of a movement: in, or out if they are negative."""
    if not isinstance(movement, dict) or type(amount := movement["amount"]) is not int:
        raise TypeError('a movement is {"amount": CENTS} or {"close": true}')
    if not 0 < abs(amount) <= AMOUNT_MAX:
        raise ValueError(f"an amount is from 1 to {AMOUNT_MAX} cents, or from -{AMOUNT_MAX} to -1")
    return amount


def balances_flow(
    flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any
) -> onceflow.FlowWriter:
    rows = flow.process(
        flow.read(f"movements{suffix}", **read),
        Balances(),
        table=f"balances{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"rejected{suffix}",
        state_dir=state_dir,
    )
    return flow.write(rows, topic=f"statements{suffix}", trigger="200 milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    given = parser.parse_args()

    spark = onceflow.session("balances", master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"balances{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    write = balances_flow(flow, given.suffix, given.state_dir, max_records_per_batch=given.batch)
    # How far the table is committed after each batch: what --min-position and min_position= take.
    onceflow.serve(write.start(), more=lambda each: {"position": each.position})


if __name__ == "__main__":
    main()
