"""Flows that call a payment service once for each request.

python outbox.py pay      --bootstrap-servers localhost:9092 --service http://localhost:8080

For a service without idempotency keys, three flows:

python outbox.py intend   --bootstrap-servers localhost:9092
python outbox.py pay-once --bootstrap-servers localhost:9092 --service http://localhost:8080
python outbox.py watch    --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import onceflow
from onceflow import Record, serdes

FIELDS = {"account": str, "amount": int, "card": str}
HTTP_TIMEOUT_S = 1.0
WATCH_MS = 5_000


class DeclinedError(Exception):
    """The service says no, and will say so again."""


class BusyError(Exception):
    """The service did not do anything, and says so."""


class ConflictError(Exception):
    """Two requests with one token ask for different payments."""


# ---- the call ------------------------------------------------------------------------------------------


def charge(service: str, request: dict[str, Any], idempotency_key: str | None) -> str:
    """Ask the service to charge a card; the number of its receipt.

    Raises:
        DeclinedError, BusyError: nothing was charged.
        OSError, HTTPException: nobody knows whether the card was charged.
    """
    place = urlsplit(service)
    headers = {"Content-Type": "application/json"}
    if idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    connection = http.client.HTTPConnection(place.netloc, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("POST", "/charges", json.dumps(request), headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status == 402:
        raise DeclinedError(request["card"])
    if answer.status != 200:
        raise BusyError(f"HTTP status {answer.status}")
    return str(json.loads(body)["receipt"])


def checked(value: Any) -> dict[str, Any]:
    """What a payment is about, without what differs from one click to the next."""
    if not isinstance(value, dict):
        raise TypeError(f"a payment is an object, not {type(value).__name__}")
    for name, kind in FIELDS.items():
        if type(value[name]) is not kind:
            raise TypeError(f"{name} is {type(value[name]).__name__}, not {kind.__name__}")
    if value["amount"] <= 0:
        raise ValueError(f"amount {value['amount']} is not positive")
    return {name: value[name] for name in FIELDS}


# ---- with idempotency keys -----------------------------------------------------------------------------


class Pay(onceflow.Processor):
    """The key of a record is the token of the form. State: what was asked for, and its receipt."""

    key = serdes.STRING
    value = state = output = serdes.JSON

    def __init__(self, call: Callable[[dict[str, Any], str], str], repeated: str) -> None:
        self.charge = onceflow.concurrently(
            call,
            limit=16,
            timeout="2 seconds",  # the HTTP client gives up earlier
            retries=3,
            backoff="50 ms",
            transient=(OSError, http.client.HTTPException, BusyError),
        )
        self.repeated = repeated

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            wanted = checked(record.value)
            paid = state.get()
            if paid is None:
                receipt = self.charge(wanted, key)  # the token is the idempotency key
                state.put({"payment": wanted, "receipt": receipt})
                yield Record(key, {"amount": wanted["amount"], "receipt": receipt})
            elif paid["payment"] == wanted:
                yield Record(key, record.value, topic=self.repeated)
            else:
                raise ConflictError(f"{key} was another payment before")


# ---- without -------------------------------------------------------------------------------------------


class Intend(onceflow.Processor):
    """Lets the first request of a token pass. What it yields is committed before anybody acts on it."""

    key = serdes.STRING
    value = state = output = serdes.JSON

    def __init__(self, repeated: str) -> None:
        self.repeated = repeated

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            wanted, before = checked(record.value), state.get()
            if before is None:
                state.put(wanted)
                yield Record(key, wanted)
            elif before == wanted:
                yield Record(key, record.value, topic=self.repeated)
            else:
                raise ConflictError(f"{key} was another payment before")


def pay_once(service: str, record: Record) -> dict[str, Any]:
    """One attempt, whatever comes of it. What is not sure is said so: another attempt might pay twice."""
    try:
        return {"status": "paid", "receipt": charge(service, record.value, None)}
    except (DeclinedError, BusyError) as error:
        return {"status": "not paid", "cause": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"status": "unclear", "cause": f"{type(error).__name__}: {error}"}


class Watch(onceflow.Processor):
    """Lists intents whose result is unclear, or did not come: a person has to look at these. The list is a compacted
    topic; what was listed too early is deleted from it when the result comes."""

    key = serdes.STRING
    value = state = output = serdes.JSON
    ttl = "7 days"

    def __init__(self, unclear: str) -> None:
        self.unclear = unclear

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            before = state.get()
            if "status" not in record.value:
                if before is None:  # else the result was read first
                    state.put("waits")
                    state.timers.register("result", state.now_ms + WATCH_MS, "processing")
                continue
            state.put(record.value["status"])
            state.timers.cancel("result")
            if record.value["status"] == "unclear":
                yield Record(key, record.value, topic=self.unclear)
            elif before == "listed":
                yield Record(key, None, topic=self.unclear)

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[Record]:
        state.put("listed")
        yield Record(key, {"status": "unclear", "cause": "no result"}, topic=self.unclear)


# ---- flows ---------------------------------------------------------------------------------------------

TRIGGER = "200 milliseconds"


def pay_flow(
    flow: onceflow.Flow, service: str, suffix: str = "", state_dir: str | None = None, **read: Any
) -> onceflow.FlowWriter:
    """Pays, at a service that knows tokens again."""
    pay = Pay(functools.partial(charge, service), f"repeated{suffix}")
    rows = flow.process(
        flow.read(f"payments{suffix}", include_headers=True, **read),
        pay,
        table=f"paid{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"failed{suffix}",
        state_dir=state_dir,
    )
    return flow.write(rows, topic=f"receipts{suffix}", trigger=TRIGGER)


def intend_flow(
    flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any
) -> onceflow.FlowWriter:
    """Commits what is to be paid, before anybody pays it."""
    rows = flow.process(
        flow.read(f"payments{suffix}", include_headers=True, **read),
        Intend(f"repeated{suffix}"),
        table=f"intended{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"failed{suffix}",
        state_dir=state_dir,
    )
    return flow.write(rows, topic=f"intents{suffix}", trigger=TRIGGER)


def pay_once_flow(flow: onceflow.Flow, service: str, suffix: str = "", **read: Any) -> onceflow.FlowWriter:
    """Pays what is intended, at a service that knows no tokens."""
    calls = onceflow.concurrently(functools.partial(pay_once, service), timeout="5 seconds", retries=0)
    intents = flow.read(f"intents{suffix}", include_headers=True, **read)
    rows = flow.enrich(intents, calls, topic=f"results{suffix}", value=serdes.JSON, output=serdes.JSON)
    # Progress first: a batch never runs again.
    return flow.write(rows, trigger=TRIGGER, guarantee="at_most_once")


def watch_flow(flow: onceflow.Flow, suffix: str = "", state_dir: str | None = None, **read: Any) -> onceflow.FlowWriter:
    """Lists what people have to look at."""
    both = [flow.read(f"{topic}{suffix}", include_headers=True, **read) for topic in ("intents", "results")]
    rows = flow.process(
        both[0].unionByName(both[1]), Watch(f"unclear{suffix}"), table=f"watched{suffix}", state_dir=state_dir
    )
    return flow.write(rows, topic=f"unclear{suffix}", trigger=TRIGGER)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", choices=["pay", "intend", "pay-once", "watch"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--service", default="http://localhost:8080", help="URL  [default: %(default)s]")
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=1_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    spark = onceflow.session(given.flow, master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"{given.flow}{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    kept = {"suffix": given.suffix, "state_dir": given.state_dir, "max_records_per_batch": given.batch}
    if given.flow == "pay":
        write = pay_flow(flow, given.service, **kept)
    elif given.flow == "intend":
        write = intend_flow(flow, **kept)
    elif given.flow == "pay-once":
        write = pay_once_flow(flow, given.service, given.suffix, max_records_per_batch=given.batch)
    else:
        write = watch_flow(flow, **kept)
    onceflow.serve(write.start())


if __name__ == "__main__":
    main()
