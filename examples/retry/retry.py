"""Two flows: one charges orders with an unreliable payment provider, the other one retries what has failed.

python retry.py charge --bootstrap-servers localhost:9092
python retry.py retry  --bootstrap-servers localhost:9092                       # in another terminal
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import onceflow

AMOUNT_MAX = 1_000_000
YEAR_2100_MS = 4_102_444_800_000


# Causes that are in the order itself, or in what the provider says of it for good.
NEVER_RETRIED = onceflow.Retry.PERMANENT | {
    "AlreadyChargedError",
    "KeyError",
    "PaymentDeclinedError",
    "TypeError",
    "ValueError",
}


class PaymentDeclinedError(Exception):
    """The provider says no, and will say so again."""


class AlreadyChargedError(Exception):
    """An order of this key was charged before."""


class Charge(onceflow.Processor):
    """Charges an order once. Whatever is raised here makes the record a dead letter."""

    value = state = output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            order = checked(record.value)
            if state.get() is not None:
                raise AlreadyChargedError(order["id"])
            attempt = int(dict(record.headers).get("onceflow.attempt") or 0) + 1
            ask_provider(order["card"], attempt)
            receipt = {"id": order["id"], "amount": order["amount"], "attempt": attempt}
            state.put(receipt)
            yield onceflow.Record(key, receipt)


def checked(order: Any) -> dict[str, Any]:
    """The order, if it is one."""
    if not isinstance(order, dict):
        raise TypeError(f"an order is an object, not {type(order).__name__}")
    for name, kind in (("id", str), ("amount", int), ("at", int), ("card", str)):
        if type(order[name]) is not kind:
            raise TypeError(f"{name} is {type(order[name]).__name__}, not {kind.__name__}")
    if not 0 < order["amount"] <= AMOUNT_MAX:
        raise ValueError(f"amount {order['amount']} is not from 1 to {AMOUNT_MAX}")
    if not 0 < order["at"] < YEAR_2100_MS:
        raise ValueError(f"at {order['at']} is no time of this century")
    return order


def ask_provider(card: str, attempt: int) -> None:
    """Stands for a call over the network. Its test cards tell how it answers: ``busy-2`` is busy twice."""
    kind, _, times = card.partition("-")
    if kind == "declined":
        raise PaymentDeclinedError(card)
    if kind == "down" or (kind == "busy" and attempt <= int(times)):
        raise ConnectionError(f"no answer at attempt {attempt}")
    if kind == "slow" and attempt <= int(times):
        raise TimeoutError(f"no answer in time at attempt {attempt}")
    if kind not in ("ok", "busy", "slow"):
        raise ValueError(f"unknown card {card!r:.50}")


def charge_flow(
    flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any
) -> onceflow.FlowWriter:
    """Charges orders, and those that come once more."""
    orders, again = (flow.read(f"{topic}{suffix}", include_headers=True, **read) for topic in ("orders", "retry"))
    rows = flow.process(
        orders.unionByName(again),
        Charge(),
        table=f"charges{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"failed{suffix}",
        state_dir=state_dir,
    )
    return flow.write(rows, topic=f"charged{suffix}", trigger="200 milliseconds")


def retry_flow(flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any) -> onceflow.FlowWriter:
    """Lets orders that have failed come once more, after a while."""
    policy = onceflow.Retry(
        retry_topic=f"retry{suffix}",
        parked_topic=f"parked{suffix}",
        base="0.2 seconds",
        ceiling="2 seconds",
        max_attempts=4,
        permanent=NEVER_RETRIED,
    )
    failed = onceflow.Retry.by_origin(flow.read(f"failed{suffix}", include_headers=True, **read))
    rows = flow.process(failed, policy, table=f"waiting{suffix}", state_dir=state_dir)
    return flow.write(rows, topic=f"retry{suffix}", trigger="200 milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", choices=["charge", "retry"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    given = parser.parse_args()

    spark = onceflow.session(given.flow, master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"{given.flow}{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    build = {"charge": charge_flow, "retry": retry_flow}[given.flow]
    write = build(flow, given.suffix, given.state_dir, max_records_per_batch=given.batch)
    onceflow.serve(write.start())


if __name__ == "__main__":
    main()
