"""``FlowDriver`` and a real broker: the same flows over the same records write the same, in every partition.

On the broker the flows are real ones, each in its thread, in as many batches as it takes. So what is compared does not
depend on batches: for each partition and key the records in their order, without times and without the place of a dead
letter in a topic that a transaction has written to, where markers take offsets.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

import onceflow
from onceflow import Record, serdes, windows
from onceflow.protocol.partitioners import key_partitions
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.flow_driver import FlowDriver
from onceflow_workshop.demos.outbox_server import PaymentServer

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
START_MS = 1_750_000_000_000
UNSTEADY = ("onceflow.error.stack", "onceflow.error.offset", "onceflow.origin.offset", "onceflow.expires")

Contents = dict[str, dict[int, dict[bytes | None, list[Any]]]]


@dataclass(frozen=True)
class Sent:
    """One record for a source."""

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = START_MS


@dataclass(frozen=True)
class Case:
    """Flows, and what is sent to them.

    Args:
        flows: each is called with a flow and a suffix of names.
        topics: with their numbers of partitions, without the suffix. tables: of flows; each has one rows only.
        steps: each is sent when the one before was processed.
        compacted: topics that are. steady: topics whose places in headers are the same on both sides.
        loose: of these topics only the fields of values that are named are compared, in any order: the order of records
            that come from several partitions is not determined.
        timers: whether timers have to fire by the clock.
    """

    flows: Sequence[Callable[..., Any]]
    topics: Mapping[str, int]
    steps: Sequence[Sequence[Sent]]
    tables: Sequence[str] = ()
    compacted: Sequence[str] = ()
    steady: Sequence[str] = ()
    loose: Mapping[str, Sequence[str]] = field(default_factory=dict)
    timers: bool = False


def sent(topic: str, partitions: int, key: Any, value: Any, **more: Any) -> Sent:
    """A record where Kafka's default partitioner puts it; without a key, in the first partition."""
    raw_key = key.encode() if isinstance(key, str) else key
    raw = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    place = 0 if raw_key is None else int(key_partitions(pa.array([raw_key], pa.binary()), partitions)[0])
    return Sent(topic, raw_key, raw, place, **more)


# ---- both sides ----------------------------------------------------------------------------------------


def check(case: Case, servers: str, spark: Any, tmp_path: Path) -> None:
    """Run a case on both sides, and compare."""
    suffix = f"-{uuid.uuid4().hex[:8]}"
    in_memory = _in_memory(case, suffix, spark)
    on_broker = _on_broker(case, suffix, servers, spark, tmp_path, _sizes(in_memory))
    for topic in {**on_broker, **in_memory}:
        assert in_memory.get(topic) == on_broker.get(topic), topic
    written = {*on_broker} - {each.topic for step in case.steps for each in step}
    assert written, "nothing was compared"


def _on_broker(case: Case, suffix: str, servers: str, spark: Any, tmp_path: Path, sizes: Mapping[str, int]) -> Contents:
    """``sizes``: so many records are expected in topics. Timers fire in later batches than those with the records."""
    for topic, partitions in case.topics.items():
        policy = "compact" if topic in case.compacted else "delete"
        create_topic(servers, f"{topic}{suffix}", partitions, {"cleanup.policy": policy})
    with ExitStack() as stack:
        queries = []
        for number, build in enumerate(case.flows):
            flow = onceflow.Flow(f"flow-{number}{suffix}", spark, bootstrap_servers=servers)
            stack.callback(flow.close)
            queries.append(build(flow, suffix, state_dir=str(tmp_path)).start())
        for step in case.steps:
            _produce(servers, step, suffix)
            for query in queries * len(queries):  # what the last one writes, the first one may read
                query.processAllAvailable()
        found = _read(case, suffix, servers)
        end = time.monotonic() + 30
        while _sizes(found) != sizes and time.monotonic() < end:
            found = _read(case, suffix, servers)
        return found


def _read(case: Case, suffix: str, servers: str) -> Contents:
    found: Contents = {}
    for topic in [*case.topics, *case.tables]:
        for each in independent.read_topic(servers, f"{topic}{suffix}", decided=True):
            record = Record(each.key, each.value, None, each.headers, None, each.partition)
            _add(found.setdefault(topic, {}), record, case, topic)
    return found


def _sizes(found: Contents) -> dict[str, int]:
    return {
        topic: sum(len(records) for by_key in partitions.values() for records in by_key.values())
        for topic, partitions in found.items()
    }


def _produce(servers: str, step: Sequence[Sent], suffix: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    for each in step:
        producer.produce(
            f"{each.topic}{suffix}", each.value, each.key, each.partition,
            timestamp=each.timestamp_ms, headers=list(each.headers),
        )  # fmt: skip
    assert producer.flush(30) == 0


def _in_memory(case: Case, suffix: str, spark: Any) -> Contents:
    topics = {f"{topic}{suffix}": count for topic, count in case.topics.items()}
    flows = [
        _named(functools.partial(_built, build, suffix), f"flow_{number}{suffix.replace('-', '_')}")
        for number, build in enumerate(case.flows)
    ]
    with FlowDriver(
        *flows,
        topics=topics,
        compacted=[f"{topic}{suffix}" for topic in case.compacted],
        now_ms=time.time_ns() // 1_000_000,
        spark=spark,
        key=serdes.BYTES,
        value=serdes.BYTES,
    ) as driver:
        for step in case.steps:
            for each in step:
                driver.send(
                    f"{each.topic}{suffix}", each.key, each.value, run=False,
                    partition=each.partition, headers=each.headers, timestamp_ms=each.timestamp_ms,
                )  # fmt: skip
            driver.run()
        for _ in range(10 * case.timers):
            driver.advance(5)
        found: Contents = {}
        for topic in [*case.topics, *case.tables]:
            for record in driver.read(f"{topic}{suffix}", places=True):
                _add(found.setdefault(topic, {}), record, case, topic)
        return found


def _built(build: Callable[..., Any], suffix: str, flow: onceflow.Flow) -> Any:
    return build(flow, suffix)


def _named(function: Any, name: str) -> Callable[..., Any]:
    def named(flow: onceflow.Flow) -> Any:
        return function(flow)

    named.__name__ = name
    return named


def _add(found: dict[int, dict[bytes | None, list[Any]]], record: Record, case: Case, topic: str) -> None:
    headers = [each for each in record.headers if topic in case.steady or each[0] not in UNSTEADY]
    by_key = found.setdefault(record.partition or 0, {})
    if topic in case.tables:
        by_key[record.key] = [(record.value, headers)]  # only the last one counts; batches decide how many there are
    elif topic in case.loose:
        value = json.loads(record.value)
        by_key[record.key] = sorted(
            [*by_key.get(record.key, []), [value.get(name) for name in case.loose[topic]]], key=str
        )
    else:
        # Letters of one key may come from several partitions of a source; only those of one of them have an order.
        origin = dict(record.headers).get("onceflow.error.partition")
        key = record.key if origin is None else b"%s of partition %s" % (record.key or b"", origin)
        by_key.setdefault(key, []).append((record.value, headers))


# ---- generated -----------------------------------------------------------------------------------------


class Sums(onceflow.Processor):
    key = serdes.STRING
    value = state = output = serdes.JSON

    def __init__(self, large: str) -> None:
        self.large = large

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        total = state.get(0)
        for record in records:
            if record.value["n"] % 13 == 0:
                raise ValueError(f"{record.value['n']} is unlucky")
            total += record.value["n"]
            rate = state.table("rates").get(key)
            topic = self.large if record.value["n"] > 90 else None
            yield Record(key, {"total": total, "rate": rate}, topic, record.headers)
            if total % 7 == 0:
                total = 0
        if total:
            state.put(total)
        else:
            state.delete()


def rates_of(suffix: str, state_dir: str | None) -> onceflow.JoinTable:
    return onceflow.JoinTable(f"rates{suffix}", key=serdes.STRING, value=serdes.JSON, state_dir=state_dir)


def sums_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rows = flow.read(f"in{suffix}", include_headers=True).unionByName(flow.read(f"more{suffix}", include_headers=True))
    rows = rows.where("coalesce(from_json(CAST(value AS STRING), 'n bigint').n, 0) <> 50")
    step = flow.process(
        rows,
        Sums(f"large{suffix}"),
        table=f"sums{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"failed{suffix}",
        state_dir=state_dir,
        tables={"rates": rates_of(suffix, state_dir)},
    )
    return flow.write(step, topic=f"out{suffix}")


def sums(seed: int) -> Case:
    rng = random.Random(seed)
    topics = {"in": 3, "more": 2, "rates": 2, "out": 4, "failed": 1, "large": 2}

    def one() -> Sent:
        topic = rng.choice(["in", "in", "more"])
        value: Any = {"n": rng.randrange(100)}
        value = rng.choice([value] * 12 + [b"no JSON", None, {"other": 1}])
        headers = rng.choice([(), (("trace", b"%d" % rng.randrange(9)),)])
        return sent(topic, topics[topic], f"{topic}-{rng.randrange(9)}", value, headers=headers)

    rates = [sent("rates", 2, f"in-{n}", {"rate": n / 2}) for n in range(6)]
    steps: list[list[Sent]] = [rates]
    for _ in range(4):
        steps.append([one() for _ in range(rng.choice([1, 5, 40]))])
    steps.insert(3, [sent("rates", 2, "in-1", None), sent("rates", 2, "in-2", {"rate": 99})])
    return Case([sums_flow], topics, steps, ["sums"], ["rates"])


class Minutes(windows.WindowProcessor):
    key = serdes.STRING
    value = serdes.JSON
    window = windows.Hopping("1 minute", every="20 seconds")
    allowed_lateness = "10 seconds"
    aggregates = {"n": windows.Sum("n"), "count": windows.Count()}  # noqa: RUF012


def minutes_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rows = flow.process(
        flow.read(f"in{suffix}"), Minutes(), table=f"minutes{suffix}", late_topic=f"late{suffix}", state_dir=state_dir
    )
    return flow.write(rows, topic=f"out{suffix}")


def minutes(seed: int) -> Case:
    """Records of a step are at most as late as they may be, so it does not matter in which batches they come; then some
    that are too late for all windows of the step before."""
    rng = random.Random(seed)
    steps = []
    for step in range(5):
        at = START_MS + step * 300_000
        records = [
            Sent(
                "in",
                f"key-{n % 5}".encode(),
                json.dumps({"n": n}).encode(),
                n % 2,
                timestamp_ms=at + rng.randrange(9_000),
            )
            for n in range(rng.choice([4, 30]))
        ]
        # Both partitions reach the same time in the end.
        steps.append([*records, *(Sent("in", b"end", b'{"n": 0}', p, timestamp_ms=at + 9_000) for p in (0, 1))])
        if step:
            old = at - 290_000 - 60_000
            steps.append([Sent("in", b"key-1", b'{"n": 1000}', rng.randrange(2), timestamp_ms=old) for _ in range(3)])
    return Case([minutes_flow], {"in": 2, "out": 3, "late": 1}, steps, ["minutes"], steady=["late"])


def first_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rows = flow.read(f"in{suffix}", include_headers=True)
    rows = flow.deduplicate(
        rows, id="key", within="1 hour", table=f"ids{suffix}", duplicates_topic=f"again{suffix}", late=f"late{suffix}",
        state_dir=state_dir,
    )  # fmt: skip
    return flow.write(rows, topic=f"middle{suffix}")


def ask(record: Record) -> Any:
    if record.value["n"] % 10 == 3:
        raise ValueError("three")
    return None if record.value["n"] % 10 == 4 else {"asked": record.value["n"]}


def asked_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rates = rates_of(suffix, state_dir)
    rows = flow.join_table(flow.read(f"middle{suffix}"), rates, on="key", columns={"rate": "double"}, how="left")
    rows = rows.selectExpr(
        "key", "CAST(to_json(struct(get_json_object(CAST(value AS STRING), '$.n') AS n, rate)) AS BINARY) AS value"
    ).where("value IS NOT NULL")
    numbers = rows.selectExpr(
        "key", "to_json(struct(CAST(get_json_object(CAST(value AS STRING), '$.n') AS INT) AS n)) AS value"
    )
    calls = onceflow.concurrently(ask, limit=4, retries=0)
    asked = flow.enrich(
        numbers,
        calls,
        topic=f"asked{suffix}",
        dead_letter_topic=f"failed{suffix}",
        value=serdes.JSON,
        output=serdes.JSON,
    )
    return flow.write(asked)


def chained(seed: int) -> Case:
    rng = random.Random(seed)
    topics = {"in": 2, "middle": 3, "again": 1, "late": 1, "rates": 1, "asked": 2, "failed": 1}
    steps = [[sent("rates", 1, f"id-{n}", {"rate": n}) for n in range(0, 40, 2)]]
    for _ in range(3):
        steps.append([sent("in", 2, f"id-{rng.randrange(40)}", {"n": rng.randrange(40)}) for _ in range(25)])
    return Case([first_flow, asked_flow], topics, steps, ["ids"], ["rates"])


GENERATED = {"sums": sums, "minutes": minutes, "chained": chained}


@pytest.mark.parametrize(
    "name", ["sums", pytest.param("minutes", marks=pytest.mark.long), pytest.param("chained", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_generated(name: str, seed: int, onceflow_broker: str, onceflow_spark: Any, tmp_path: Path) -> None:
    check(GENERATED[name](seed), onceflow_broker, onceflow_spark, tmp_path)


# ---- examples ------------------------------------------------------------------------------------------


def deposits(module: Any) -> Case:
    rng = random.Random(7)
    accounts = [f"acc-{number:05d}" for number in range(6)]
    topics = {"deposits": 3, "validated": 3, "rejected": 1, "ledger": 2}
    opened = [{"kind": "open", "id": f"open-{a}", "account": a, "limit": 1000} for a in accounts[:5]]

    def asked(number: int) -> dict[str, Any]:
        common = {"id": f"op-{number % 90}", "account": rng.choice(accounts), "amount": rng.randrange(-5, 1100)}
        return rng.choice([{"kind": "deposit"}, {"kind": "transfer", "to": rng.choice(accounts)}]) | common

    def step(values: Sequence[dict[str, Any]]) -> list[Sent]:
        return [sent("deposits", 3, value["account"], value, headers=(("n", b"1"),)) for value in values]

    steps = [step(opened), *(step([asked(10 * n + m) for m in range(30)]) for n in range(5))]
    steps.append([sent("deposits", 3, "acc-00001", b"no JSON"), sent("deposits", 3, None, {"kind": "gift"})])
    flows = [module.validate_flow, module.book_flow]
    # How often an account was booked comes from several partitions; its balance in the end does not depend on that.
    return Case(flows, topics, steps, ["accounts", "balances"], loose={"ledger": ("id", "account", "amount")})


def moving_average(module: Any) -> Case:
    rng = random.Random(3)

    def measured(number: int) -> Sent:
        series = f"series-{rng.randrange(4)}"
        time_ = f"2010-01-{1 + number // 24:02d}T{number % 24:02d}:00:00Z"
        value: Any = {"series": series, "time": time_, "value": rng.randrange(-1000, 1000)}
        return sent("measurements", 2, series, rng.choice([value] * 9 + [b"no JSON", value | {"value": None}]))

    topics = {"measurements": 2} | {
        f"{name}{end}": 2 for name in ("averages", "bad-measurements") for end in ("", "-columns")
    }
    flows = [functools.partial(_version, module, version) for version in ("records", "columns")]
    steps = [[measured(20 * step + n) for n in range(20)] for step in range(6)]
    return Case(flows, topics, steps, ["windows", "windows-columns"])


def _version(module: Any, version: str, flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    return module.averages_flow(flow, version, suffix, state_dir)


def pairs(module: Any) -> Case:
    topics = {"events": 2, "pairs": 2, "unpaired": 1, "late": 1, "dead-letters": 1}
    return Case([module.pairs_flow], topics, event_steps(), ["waiting"])


def event_steps() -> list[list[Sent]]:
    rng = random.Random(4)
    steps = []
    for minute in range(0, 50, 7):
        at = START_MS + 60_000 * minute
        events = []
        for _ in range(12):
            moment = at + 1000 * rng.randrange(8)
            kind = rng.choice("AB")
            value: Any = {
                "id": f"{kind}-{moment}",
                "type": kind,
                "timestamp": _utc(moment),
                "value": rng.randrange(100),
            }
            value = rng.choice([value] * 8 + [b"no JSON", value | {"type": "C"}])
            # The same place for the same moment: so its events have one order.
            events.append(Sent("events", None, _json(value), moment // 1000 % 2, timestamp_ms=at + 10_000))
        ends = [{"id": f"end-{at}-{p}", "type": "A", "timestamp": _utc(at + 8_000 + p), "value": 1} for p in (0, 1)]
        steps.append(
            [*events, *(Sent("events", None, _json(end), p, timestamp_ms=at + 10_000) for p, end in enumerate(ends))]
        )
    return steps


def pairs_spark(module: Any) -> Case:
    steps = event_steps()
    topics = {"events": 2, "as": 2, "bs": 2, "dead-letters-sort": 2}
    return Case([functools.partial(_sort, module)], topics, steps)


def _sort(module: Any, flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    return module.sort_flow(flow, suffix)


def _json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def _utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def retry(module: Any) -> Case:
    cards = ["ok", "busy-1", "slow-2", "declined", "down", "ok"]
    orders = [{"id": f"ord-{n}", "amount": 5, "at": START_MS, "card": card} for n, card in enumerate(cards)]
    topics = dict.fromkeys(("orders", "retry", "failed", "parked", "charged"), 2)
    steps = [[sent("orders", 2, order["id"], order) for order in orders], [sent("orders", 2, "ord-0", orders[0])]]
    return Case([module.charge_flow, module.retry_flow], topics, steps, ["charges"], timers=True)


def balances_api(module: Any) -> Case:
    rng = random.Random(5)
    topics = {"movements": 3, "statements": 2, "rejected": 1}

    def movement() -> Sent:
        value = rng.choice([{"amount": rng.randrange(-50, 50)}] * 8 + [{"close": True}, b"no JSON"])
        return sent("movements", 3, f"account-{rng.randrange(5)}", value)

    return Case([module.balances_flow], topics, [[movement() for _ in range(25)] for _ in range(4)], ["balances"])


def outbox(module: Any, services: Iterator[str]) -> Case:
    topics = dict.fromkeys(("payments", "intents", "results", "repeated", "failed", "unclear", "receipts"), 2)

    def payment(number: int, card: str) -> Sent:
        value = {"account": f"acc-{number}", "amount": 5, "card": card}
        return sent("payments", 2, f"token-{number}", value)

    steps = [
        [payment(n, card) for n, card in enumerate(["ok", "declined", "lost", "ok"])],
        [payment(0, "ok"), payment(1, "ok"), sent("payments", 2, "token-9", b"no JSON")],
    ]
    flows = [module.intend_flow, functools.partial(_pay_once, module, services), module.watch_flow]
    return Case(flows, topics, steps, ["intended", "watched"], loose={"results": ("status", "cause")})


def _pay_once(
    module: Any, services: Iterator[str], flow: onceflow.Flow, suffix: str, state_dir: str | None = None
) -> Any:
    return module.pay_once_flow(flow, next(services), suffix)


def files(module: Any, folder: Path) -> Case:
    head = "id,account,amount,date,text"
    (folder / "a.csv").write_text(f"{head}\n1,a,12.50,2024-02-29,rent\nbad\n2,b,1.00,2024-02-29,\n")
    (folder / "b.csv").write_text("no columns\n")
    links = ["a.csv", "b.csv", "missing.csv", "../outside.csv", "a.csv"]
    topics = dict.fromkeys(("links", "transactions", "bad-rows", "loaded", "failed", "skipped"), 2)
    steps = [[Sent("links", None, json.dumps({"link": link}).encode(), n % 2)] for n, link in enumerate(links)]
    return Case([functools.partial(_files, module, folder)], topics, steps, ["link-table"])


def _files(module: Any, folder: Path, flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    places, limits = module.downloads.Places(root=str(folder)), module.downloads.Limits()
    return module.files_flow(flow, places, limits, suffix, state_dir=state_dir)


@pytest.fixture
def utc(onceflow_spark: Any) -> Any:
    spark = onceflow_spark.newSession()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark


PLAIN = {
    "deposits": ("deposits", deposits),
    "moving-average": ("moving_average", moving_average),
    "pairs": ("pairs", pairs),
    "pairs-spark": ("pairs_spark", pairs_spark),
    "retry": ("retry", retry),
    "balances-api": ("balances_api", balances_api),
}


def example(folder: str, module: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of an example."""
    monkeypatch.syspath_prepend(EXAMPLES / folder.removesuffix("-spark"))
    return importlib.import_module(module)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "deposits" else pytest.mark.long) for each in PLAIN]
)
def test_examples(name: str, onceflow_broker: str, utc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, case = PLAIN[name]
    check(case(example(name, module, monkeypatch)), onceflow_broker, utc, tmp_path)


@pytest.mark.long
def test_outbox(onceflow_broker: str, utc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PaymentServer().serving() as one, PaymentServer().serving() as other:  # it knows accounts again
        case = outbox(example("outbox", "outbox", monkeypatch), iter([one.url, other.url]))
        check(case, onceflow_broker, utc, tmp_path)


@pytest.mark.long
def test_files(onceflow_broker: str, utc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    check(files(example("files", "files", monkeypatch), folder), onceflow_broker, utc, tmp_path)
