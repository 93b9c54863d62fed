"""A flow with state: the balance of every account. It follows the two flows that validate and settle deposits.

python service.py --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import onceflow


class Balance(onceflow.Processor):
    """Adds deposits up per account; a statement for each of them. Amounts are whole cents."""

    value = state = output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        account = state.get({"balance": 0, "count": 0})
        for record in records:
            deposit = record.value
            account = {"balance": account["balance"] + deposit["amount"], "count": account["count"] + 1}
            statement = {name: deposit[name] for name in ("id", "account", "amount")}
            yield onceflow.Record(key, {**statement, **account})
        state.put(account)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    given = parser.parse_args()

    # Tells when state was read back from the table topic, how much and how fast.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("onceflow.state").setLevel(logging.INFO)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    spark = onceflow.session("balance", master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"balance{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    settled = flow.read(f"settled{given.suffix}", max_records_per_batch=given.batch)
    statements = flow.process(settled, Balance(), table=f"balances{given.suffix}", state_dir=given.state_dir)
    query, told = flow.write(statements, topic=f"statements{given.suffix}", trigger="200 milliseconds").start(), 0
    while query.isActive and not stop.wait(0.1):
        for batch in query.batches:
            if batch.batch > told:
                told = batch.batch
                print(json.dumps({"flow": flow.name, "batch": told, "records": batch.records}), flush=True)
    if query.isActive:
        query.stop()
    query.awaitTermination()  # raises why it stopped, if nobody asked it to


if __name__ == "__main__":
    main()
