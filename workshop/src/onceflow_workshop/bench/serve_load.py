"""Requests to a query server, from a process of its own: raw sockets, so that the load takes little from the server.

A closed loop: each connection sends its next request when it has the answer to the last one. All requests are made
beforehand, and of an answer only its status, its length and its age are read.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from onceflow_workshop.bench.latency import percentile

KEYS_AT_ONCE = 100
_REQUESTS = 2_000  # different ones
_WARM_S = 0.5
_LATE_S = 30.0
_ROWS = re.compile(rb'"count":(\d+)')
_TAIL = 1_000


@dataclass(frozen=True)
class Plan:
    """What is asked.

    Args:
        url: of the instance. keys: how many the table has, see `key_of`.
        what: one of `KINDS`. seconds: how long answers count.
    """

    url: str
    topic: str
    keys: int
    what: str
    connections: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """What came back.

    Args:
        per_s: answers in a second; rows, if ranges were streamed.
        cores: how much of a core the load took.
        ages_ms: the lag that answers named. wrong: answers that were not as expected, and one of them.
    """

    per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    age_p50_ms: float | None
    age_p99_ms: float | None
    answers: int
    cores: float
    wrong: str


def key_of(number: int) -> str:
    """The keys of the table."""
    return f"key-{number:07d}"


def load(plan: Plan) -> Loaded:
    """Run the load in a process of its own.

    Raises:
        RuntimeError: it failed, with its last words.
    """
    return Loaded(**child("onceflow_workshop.bench.serve_load", plan.__dict__, plan.seconds + _LATE_S))


def child(module: str, argument: dict[str, Any], seconds: float) -> Any:
    """Run ``main`` of a module in a process of its own: one JSON argument, one JSON line as its answer.

    Raises:
        RuntimeError: it failed, with its last words.
    """
    code = f"from {module} import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(argument)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the command alone, which ends this one
    )
    try:
        answer, words = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{module} did not end within {seconds:g} s") from late
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"{module} failed: {' '.join(words.strip().splitlines()[-1:])}")
    return json.loads(answer.splitlines()[-1])


# ---- the process of its own --------------------------------------------------------------------------------


def main() -> None:
    """Child process: asks, prints one JSON line."""
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run  # type: ignore[assignment]
    plan = Plan(**json.loads(sys.argv[1]))
    print(json.dumps(run(_run(plan)).__dict__), flush=True)


def _one(topic: str, key: str, _: Sequence[str]) -> bytes:
    return _get(f"/tables/{topic}/keys/{key}")


def _one_with_parameter(topic: str, key: str, _: Sequence[str]) -> bytes:
    return _get(f"/tables/{topic}/keys/{key}?max_staleness=30s")


def _many(topic: str, _: str, keys: Sequence[str]) -> bytes:
    body = json.dumps({"keys": keys}).encode()
    head = f"POST /tables/{topic}/multi-get HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _range(topic: str, _: str, __: Sequence[str]) -> bytes:
    return _get(f"/tables/{topic}/range", "Accept: application/x-ndjson\r\n")


#: How a request is made, of each kind: of a topic, a key by chance, and many of them.
KINDS: dict[str, Callable[[str, str, Sequence[str]], bytes]] = {
    "one key": _one,
    "one key, max_staleness": _one_with_parameter,
    f"{KEYS_AT_ONCE} keys": _many,
    "range, streamed": _range,
}


def _get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n{headers}\r\n".encode()


async def _run(plan: Plan) -> Loaded:
    choose = random.Random(7)
    make = KINDS[plan.what]
    streamed = make is _range
    requests = []
    for _ in range(1 if streamed else _REQUESTS):
        keys = [key_of(choose.randrange(plan.keys)) for _ in range(KEYS_AT_ONCE)]
        requests.append(make(plan.topic, keys[0], keys))
    url = urlsplit(plan.url)
    run = _Results(begin=time.perf_counter() + min(_WARM_S, plan.seconds / 4), seconds=plan.seconds)
    kind = _Stream if streamed else _Connection
    connections = [
        kind(run, requests, number * len(requests) // plan.connections) for number in range(plan.connections)
    ]
    since, spent_s = time.perf_counter(), time.process_time()
    for each in connections:
        await asyncio.get_running_loop().create_connection(partial(_itself, each), url.hostname or "", url.port or 80)
    await asyncio.wait_for(asyncio.gather(*(each.ended for each in connections)), _WARM_S + plan.seconds + _LATE_S)
    cores = (time.process_time() - spent_s) / (time.perf_counter() - since)
    return run.loaded(streamed, round(cores, 2))


def _itself(connection: _Connection) -> _Connection:
    return connection


class _Results:
    """Of all connections."""

    def __init__(self, begin: float, seconds: float) -> None:
        self.begin, self.end = begin, begin + seconds
        self.times: list[float] = []
        self.ages: list[int] = []
        self.rows = 0
        self.first, self.last = float("inf"), begin
        self.wrong: list[str] = []

    def loaded(self, streamed: bool, cores: float) -> Loaded:
        ms = [1000 * each for each in self.times]
        if not ms:
            raise RuntimeError(f"there was no answer: {self.wrong[:1]}")
        seconds = self.last - self.first if streamed else self.end - self.begin
        p50, p99, most = (round(percentile(ms, percent), 2) for percent in (50, 99, 100))
        age_p50, age_p99 = (percentile(self.ages, percent) if self.ages else None for percent in (50, 99))
        wrong = f"{len(self.wrong)} answers, such as {self.wrong[0]}" if self.wrong else ""
        count = self.rows if streamed else len(ms)
        return Loaded(round(count / seconds), p50, p99, most, age_p50, age_p99, len(ms), cores, wrong)


class _Connection(asyncio.Protocol):
    """One connection, and the answer that it waits for."""

    def __init__(self, run: _Results, requests: Sequence[bytes], first: int) -> None:
        self._run, self._requests, self._next = run, requests, first
        self._head = self._got = b""
        self._since = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        got = self._got = self._got + data if self._got else data
        if (body := got.find(b"\r\n\r\n")) < 0:
            return
        at = got.find(b"content-length: ", 0, body) + 16
        if len(got) < body + 4 + int(got[at : got.find(b"\r", at)]):
            return
        self._answered(got, got.startswith(b"HTTP/1.1 200"), body)

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self._run.wrong.append("the connection was closed")
            self.ended.set_result(None)

    def _send(self) -> None:
        self._head = self._got = b""
        self._since = time.perf_counter()
        self._transport.write(self._requests[self._next])
        self._next = (self._next + 1) % len(self._requests)

    def _answered(self, got: bytes, right: bool, body: int) -> None:
        now, run = time.perf_counter(), self._run
        if not right:
            run.wrong.append(got[:500].decode(errors="replace"))
        if self._counts(now):
            run.times.append(now - self._since)
            run.first, run.last = min(run.first, self._since), max(run.last, now)
            if (at := got.find(b"onceflow-lag-ms: ", 0, body)) >= 0:
                run.ages.append(int(got[at + 17 : got.find(b"\r", at)]))
        if now < run.end and right:
            self._send()
        else:
            self.ended.set_result(None)
            self._transport.close()

    def _counts(self, now: float) -> bool:
        return self._run.begin <= now <= self._run.end


class _Stream(_Connection):
    """One connection that reads a table again and again. An answer that has begun is read to its end."""

    def data_received(self, data: bytes) -> None:
        self._head = self._head or data
        self._got = (self._got + data)[-_TAIL:]
        if not self._head.startswith(b"HTTP/1.1 200"):
            self._answered(self._head, False, len(self._head))
            return
        if not self._got.endswith(b"\r\n0\r\n\r\n"):
            return
        rows = _ROWS.search(self._got)
        right = rows is not None and b'"cursor":null' in self._got
        if rows is not None and self._counts(time.perf_counter()):
            self._run.rows += int(rows[1])
        head = self._head
        self._answered(head, right, len(head))

    def _counts(self, now: float) -> bool:
        return self._since >= self._run.begin
