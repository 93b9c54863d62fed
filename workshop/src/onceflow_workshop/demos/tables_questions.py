"""Questions to a query server, and what is read in its answers. Pure, and without any code of the server."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from onceflow_workshop.demos.tables_check import Answer
from onceflow_workshop.demos.tables_data import ACCOUNTS, account_of

_LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Question:
    """One request.

    Args:
        path: after ``/tables/T``.
        keys: those that are asked for one by one; None: all keys of a range, or a count.
        span: the first key and the end of a range.
        least: the position that is demanded.
    """

    kind: str
    path: str
    keys: tuple[str, ...] | None = None
    body: bytes | None = None
    span: tuple[str, str | None] | None = None
    reverse: bool = False
    least: str = ""
    accept: str = "application/json"


def offsets_of(position: str) -> dict[int, int]:
    """The offsets in a position of one topic, such as ``balances:52..17``."""
    offsets = position.rpartition(":")[2].split(".")
    return {partition: int(offset) for partition, offset in enumerate(offsets) if offset}


def read_answer(question: Question, body: bytes, place: str, ended_at: float) -> Answer:
    """The answer in a response of 200 or 404.

    Raises:
        ValueError, KeyError, TypeError: there is none.
    """
    rows: dict[str, Any] = {}
    whole, count = None, None
    if question.accept == _LINES:
        *found, document = [json.loads(line) for line in body.splitlines()]
    else:
        document = json.loads(body)
        found = document.get("rows", ())
    if question.keys is not None:
        rows = dict.fromkeys(question.keys)
        if "value" in document:
            rows[question.keys[0]] = document["value"]
    elif question.span is None:
        count = document["count"]
    for row in found:
        if "error" in row:
            raise ValueError(row["error"])
        rows[row["key"]] = row["value"]
    if question.span is not None:
        whole = _whole(question, [row["key"] for row in found], document["cursor"])
    return Answer(
        question.kind,
        place,
        ended_at,
        offsets_of(document["position"]),
        offsets_of(question.least) if question.least else {},
        rows,
        whole,
        count,
    )


def _whole(question: Question, keys: Sequence[str], cursor: str | None) -> tuple[str, str | None]:
    """From which key to which end the rows of a range are all that there are."""
    start, end = question.span or ("", None)
    if keys != sorted(keys, reverse=question.reverse) or len(set(keys)) < len(keys):
        raise ValueError(f"the keys of a range are out of order: {keys}")
    if cursor is None:
        return start, end
    return (keys[-1], end) if question.reverse else (start, keys[-1] + "\0")


# ---- questions ---------------------------------------------------------------------------------------


def one_key(rng: random.Random) -> Question:
    """Accounts that were never opened among them."""
    return key_of(account_of(rng.randrange(ACCOUNTS + ACCOUNTS // 20)), "key")


def key_of(key: str, kind: str, least: str = "") -> Question:
    """The question for one key."""
    return Question(kind, f"/keys/{quote(key)}", (key,), least=least)


def many_keys(rng: random.Random) -> Question:
    keys = tuple(account_of(each) for each in rng.sample(range(ACCOUNTS + 10), 20))
    return Question("multi-get", "/multi-get", keys, body=json.dumps({"keys": keys}).encode())


def a_range(rng: random.Random) -> Question:
    """A part of the keys, forwards or backwards, often more than fit on a page."""
    low, high = sorted(rng.sample(range(ACCOUNTS), 2))
    span, reverse = (account_of(low), account_of(high)), rng.random() < 0.5
    more = {"start": span[0], "end": span[1], "limit": rng.choice((10, 50, 1000)), "reverse": str(reverse).lower()}
    return Question("range", f"/range?{urlencode(more)}", span=span, reverse=reverse)


def all_rows(rng: random.Random | None = None, *, kind: str = "all rows", least: str = "") -> Question:
    """The whole table, streamed."""
    return Question(kind, "/range", span=("", None), accept=_LINES, least=least)


def a_count(rng: random.Random) -> Question:
    return Question("count", "/count")
