"""A web form that pays once, however often its button is clicked.

python form.py --bootstrap-servers localhost:9092              # then open http://127.0.0.1:8791

The form carries a token. It is the key of the record, so the flow `pay` recognises a request that it has had before.
Needs FastAPI and uvicorn (`pip install '.[serve]'`).
"""

from __future__ import annotations

import argparse
import html
import json
import uuid
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from confluent_kafka import Producer
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

import onceflow
from onceflow import serdes

ACKNOWLEDGED_S = 10.0
BODY_MAX = 10_000
PAGE = """<!doctype html><meta charset="utf-8"><title>Pay</title>
<form method="post" action="/payments">
<input type="hidden" name="token" value="{token}">
<label>Account <input name="account" required></label>
<label>Cents <input name="amount" type="number" min="1" required></label>
<label>Card <input name="card" required></label>
<button>Pay</button></form>
"""


def make_producer(bootstrap_servers: str) -> Any:
    """It repeats what is not acknowledged, without writing it twice, and puts keys where Kafka's Java client does."""
    settings = {"enable.idempotence": True, "partitioner": "murmur2_random", "message.timeout.ms": 8_000}
    return Producer({"bootstrap.servers": bootstrap_servers, **settings})


def make_app(producer: Any, topic: str, paid: Any) -> FastAPI:
    """The web server.

    Args:
        paid: has ``get(token)``: the row of the flow's table, None while there is none.
    """
    app = FastAPI(title="Payments")

    @app.get("/")
    def form() -> HTMLResponse:
        """A form with a token of its own. Who goes back and clicks again sends the same token again."""
        return HTMLResponse(PAGE.format(token=uuid.uuid4()), headers={"Cache-Control": "no-store"})

    @app.post("/payments")
    async def pay(request: Request) -> Response:
        fields = {name: values[-1] for name, values in parse_qs((await request.body())[:BODY_MAX].decode()).items()}
        try:
            token = str(uuid.UUID(fields["token"]))
            payment = {"account": fields["account"], "amount": int(fields["amount"]), "card": fields["card"]}
        except (KeyError, ValueError):
            return HTMLResponse("This form is not complete.", 422)
        if not await run_in_threadpool(written, producer, topic, token, payment):
            return HTMLResponse("Please send the form once more. It will pay once.", 503)
        # The browser then shows a page that can be loaded again without sending the form again.
        return RedirectResponse(f"/payments/{token}", 303)

    @app.get("/payments/{token}")
    def status(token: uuid.UUID) -> HTMLResponse:
        row = paid.get(str(token))
        if row is None:
            return HTMLResponse("Your payment is being processed.", headers={"Refresh": "1"})
        return HTMLResponse(f"Paid. Receipt {html.escape(row['receipt'])}.")

    return app


def written(producer: Any, topic: str, token: str, payment: dict[str, Any]) -> bool:
    """Write a request; whether the brokers have acknowledged it. If not, it may be there all the same."""
    problems: list[Any] = []
    producer.produce(topic, json.dumps(payment), token, on_delivery=lambda error, _: problems.append(error))
    producer.flush(ACKNOWLEDGED_S)
    return problems == [None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--port", type=int, default=8791, help="[default: %(default)s]")
    given = parser.parse_args()
    with onceflow.Table(
        "paid", bootstrap_servers=given.bootstrap_servers, key=serdes.STRING, value=serdes.JSON
    ) as paid:
        app = make_app(make_producer(given.bootstrap_servers), "payments", paid)
        uvicorn.run(app, host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
