"""Running balances of accounts: the processors that benchmarks of state run, and what must come out of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from onceflow.state.api.json_columns import format_json, parse_json
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import JSON

INPUT = pa.schema([("account", pa.string()), ("amount", pa.int64()), ("id", pa.int64())])
_FIXED = struct.Struct("<xqq")  # a state row of ColumnBalance: bitmap of nulls, balance, count


class Balance(Processor):
    """Balance and count of an account after every record, record by record."""

    value = state = output = JSON

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        known = state.get()
        balance, count = (0, 0) if known is None else (known["balance"], known["count"])
        for record in records:
            given = record.value
            balance += given["amount"]
            count += 1
            yield Record(key, {"account": given["account"], "id": given["id"], "balance": balance, "count": count})
        state.put({"balance": balance, "count": count})


class ColumnBalance(ColumnProcessor):
    """The same, a column at a time."""

    state_fields = {"balance": "int64", "count": "int64"}  # noqa: RUF012  # declared so in the base class

    def process(self, records: pa.Table, states: pa.Table, context: Any) -> tuple[pa.Table, pa.Table]:
        parsed = parse_json(records["value"], INPUT)
        codes = records["state"].to_numpy()
        balances, counts, final_balances, final_counts = running(
            codes,
            parsed["amount"].to_numpy(),
            states["balance"].fill_null(0).to_numpy(),
            states["count"].fill_null(0).to_numpy(),
        )
        rows = pa.table({"account": parsed["account"], "id": parsed["id"], "balance": balances, "count": counts})
        outputs = pa.table({"key": records["key"], "value": format_json(rows)})
        return outputs, pa.table({"key": states["key"], "balance": final_balances, "count": final_counts})


def running(codes: Any, amounts: Any, balances: Any, counts: Any) -> tuple[Any, Any, Any, Any]:
    """Running sums and counts by group.

    Args:
        codes: group of each record; every group has records.
        amounts: of each record.
        balances, counts: of each group before.

    Returns:
        Balance and count after each record, and of each group at the end.
    """
    order = np.argsort(codes, kind="stable")
    sums = np.cumsum(amounts[order])
    sizes = np.bincount(codes, minlength=len(balances))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    before = sums[starts] - amounts[order[starts]]
    after_balance, after_count = np.empty_like(sums), np.empty_like(sums)
    after_balance[order] = sums + np.repeat(balances - before, sizes)
    after_count[order] = np.arange(1, len(codes) + 1) + np.repeat(counts - starts, sizes)
    return after_balance, after_count, balances + sums[ends - 1] - before, counts + sizes


# ---- records, and what must come out of them -----------------------------------------------------------


def payments(records: int, accounts: int, seed: int = 7) -> Iterator[tuple[bytes, bytes]]:
    """Key and JSON value of each record; ids count from 0."""
    choose = random.Random(seed)
    for number in range(records):
        yield payment(choose.randrange(accounts), choose.randrange(-50, 101), number)


def payment(account: int, amount: int, number: int) -> tuple[bytes, bytes]:
    """One record."""
    key = b"acc-%07d" % account
    return key, b'{"account":"%s","amount":%d,"id":%d}' % (key, amount, number)


#: By id: account, balance and count; by account: balance and count in the end.
Expected = tuple[Mapping[int, tuple[bytes, int, int]], Mapping[bytes, tuple[int, int]]]


def expected(sent: Iterable[tuple[bytes, bytes]], before: Mapping[bytes, tuple[int, int]] | None = None) -> Expected:
    """What must come out, from accounts as they are before."""
    known = before or {}
    final: dict[bytes, tuple[int, int]] = {}
    by_id: dict[int, tuple[bytes, int, int]] = {}
    for key, raw in sent:
        value = orjson.loads(raw)
        balance, count = final.get(key) or known.get(key, (0, 0))
        final[key] = balance + value["amount"], count + 1
        by_id[value["id"]] = (key, *final[key])
    return by_id, final


def problem_of(
    outputs: Iterable[tuple[bytes | None, bytes | None]],
    rows: Mapping[bytes, tuple[int, int]] | None,
    want: Expected,
) -> str:
    """What is wrong with outputs and table (None: there is none to look at), in a few words; empty: nothing."""
    by_id, final = want
    seen: set[int] = set()
    ends: dict[bytes, tuple[int, int]] = {}
    total = wrong = 0
    for key, raw in outputs:
        value = orjson.loads(raw or b"{}")
        total += 1
        seen.add(value["id"])
        row = (value["account"].encode(), value["balance"], value["count"])
        wrong += by_id.get(value["id"]) != row or key != row[0]
        ends[row[0]] = max(ends.get(row[0], (0, 0)), (row[2], row[1]))
    ended = {account: (balance, count) for account, (count, balance) in ends.items()}
    found = {
        "missing": len(by_id.keys() - seen),
        "doubled": total - len(seen),
        "wrong outputs": wrong,
        "wrong last outputs": sum(ended.get(account) != end for account, end in final.items()),
        "wrong rows": 0 if rows is None else len(set(rows.items()) ^ set(final.items())),
    }
    return ", ".join(f"{count} {what}" for what, count in found.items() if count)


def row_of(raw: bytes) -> tuple[int, int]:
    """Balance and count of a record of the table topic, of either processor."""
    if raw.startswith(b"{"):
        value = orjson.loads(raw)
        return value["balance"], value["count"]
    balance, count = _FIXED.unpack(raw)
    return balance, count


def some_accounts(count: int, keys: int, seed: int = 11) -> Iterator[int]:
    """Accounts by chance."""
    choose = random.Random(seed)
    return (choose.randrange(keys) for _ in range(count))


def shuffled(keys: int, seed: int = 13) -> list[int]:
    """Every account once."""
    accounts = list(range(keys))
    random.Random(seed).shuffle(accounts)
    return accounts
