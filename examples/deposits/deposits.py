"""Money in two flows: what an account may not do is rejected, all else is booked twice. Each is a process of its own.

python deposits.py validate --bootstrap-servers localhost:9092
python deposits.py book     --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import onceflow
from onceflow import FlowWriter, Record

JSON, STRING = onceflow.serdes.JSON, onceflow.serdes.STRING
CASH = "cash"  # the account that deposits come from
ACCOUNT = re.compile("acc-[0-9]{5}")
LIMIT_MAX = 1_000_000_000  # whole cents; sums stay far below 64 bits
VALUE_BYTES_MAX = 1_000
COMMON = {"kind": str, "id": str, "account": str}
FIELDS = {
    "open": {**COMMON, "limit": int},
    "deposit": {**COMMON, "amount": int},
    "transfer": {**COMMON, "to": str, "amount": int},
}


class Rejected(Exception):
    """A record can be read, and breaks a rule."""


class Validate(onceflow.Processor):
    """Lets pass what the account may do. Whatever is raised for a record is the cause in its dead letter."""

    key = STRING
    state = output = JSON

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        account, ids = state.get(), state.map("ids")
        for record in records:
            asked = read(record.value)
            if asked["account"] != key or not ACCOUNT.fullmatch(key):
                raise Rejected("not the account of the key")
            account = opened(account, asked) if asked["kind"] == "open" else moved(account, asked, ids)
            yield Record(key, asked, headers=record.headers)
        state.put(account)


def read(value: bytes | None) -> dict[str, Any]:
    """The fields that a record of its kind has, and nothing else: what goes on is what was checked."""
    if value is None or len(value) > VALUE_BYTES_MAX:
        raise ValueError("no value" if value is None else f"a value of {len(value)} bytes")
    asked = JSON.decode(value)
    fields = FIELDS[asked["kind"]]
    for name, kind in fields.items():
        if type(asked[name]) is not kind:
            raise TypeError(f"{name} is no {kind.__name__}")
    return {name: asked[name] for name in fields}


def opened(account: dict[str, int] | None, asked: dict[str, Any]) -> dict[str, int]:
    if account is not None:
        raise Rejected("already open")
    if not 0 < asked["limit"] <= LIMIT_MAX:
        raise Rejected("limit out of range")
    return {"limit": asked["limit"], "funds": 0}


def moved(account: dict[str, int] | None, asked: dict[str, Any], ids: Any) -> dict[str, int]:
    """The account after a deposit or a transfer. Money that was received does not count as funds: it is booked by the
    next flow, and of that this one knows nothing."""
    amount, to = asked["amount"], asked.get("to")
    if account is None:
        raise Rejected("unknown account")
    if asked["id"] in ids:
        raise Rejected("double id")
    if not 0 < amount <= account["limit"]:
        raise Rejected("not positive" if amount <= 0 else "over the limit")
    if to is not None and (to == asked["account"] or not ACCOUNT.fullmatch(to)):
        raise Rejected("no receiver")
    if to is not None and amount > account["funds"]:
        raise Rejected("insufficient funds")
    ids.put(asked["id"], True, ttl="7 days")
    return {**account, "funds": account["funds"] + (amount if to is None else -amount)}


def entries(validated: DataFrame) -> DataFrame:
    """Two rows for each movement, one per account: their amounts add up to zero."""
    fields = "kind string, id string, account string, to string, amount bigint"
    # It is not the parser that validated. Should it ever not understand a value, it must not pass it over.
    asked = F.from_json(F.col("value").cast("string"), fields, {"mode": "FAILFAST"})
    pair = F.expr(f"""array(
        struct(if(kind = 'deposit', '{CASH}', account) AS key, to_json(struct(id, -amount AS amount)) AS value),
        struct(if(kind = 'deposit', account, to) AS key, to_json(struct(id, amount)) AS value))""")
    moves = validated.withColumn("asked", asked).select("partition", "offset", "asked.*").where("kind <> 'open'")
    return moves.select("partition", "offset", F.inline(pair))


class Book(onceflow.Processor):
    """Adds up the entries of an account. Its table is a topic for everybody: account -> balance."""

    key = STRING
    value = state = output = JSON

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        account = state.get({"balance": 0, "count": 0})
        for record in records:
            account = {"balance": account["balance"] + record.value["amount"], "count": account["count"] + 1}
            yield Record(key, {"id": record.value["id"], "account": key, "amount": record.value["amount"], **account})
        state.put(account)


def validate_flow(flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any) -> FlowWriter:
    """Lets pass what accounts may do."""
    rows = flow.process(
        flow.read(f"deposits{suffix}", include_headers=True, **read),
        Validate(),
        table=f"accounts{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"rejected{suffix}",
        state_dir=state_dir,
    )
    return flow.write(rows, topic=f"validated{suffix}", trigger="200 milliseconds")


def book_flow(flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any) -> FlowWriter:
    """Books what was validated, twice."""
    moves = entries(flow.read(f"validated{suffix}", **read))
    rows = flow.process(moves, Book(), table=f"balances{suffix}", state_dir=state_dir)
    return flow.write(rows, topic=f"ledger{suffix}", trigger="200 milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", choices=["validate", "book"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    parser.add_argument("--until", help="where to stop: latest, or a time such as 2025-01-31T08:00:00Z")
    given = parser.parse_args()

    # Tells when state was read back from the table topic, how much and how fast.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("onceflow.state").setLevel(logging.INFO)
    spark = onceflow.session(given.flow, master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(given.flow + given.suffix, spark, bootstrap_servers=given.bootstrap_servers)
    build = {"validate": validate_flow, "book": book_flow}[given.flow]
    write = build(flow, given.suffix, given.state_dir, max_records_per_batch=given.batch, until=given.until)
    onceflow.serve(write.start())


if __name__ == "__main__":
    main()
