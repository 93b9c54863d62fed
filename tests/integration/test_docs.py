"""README and docs say what is true: examples run, links lead somewhere, commands, targets and options exist."""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import types
import uuid
import zipfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

import onceflow
from onceflow import Record
from onceflow.cli.main import cli
from onceflow.session import submit_settings
from onceflow.testing import independent
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.s3 import S3Server

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHANGE = ROOT / "docs" / "change.md"
DEVELOPMENT = ROOT / "docs" / "development.md"
REFERENCE = ROOT / "docs" / "reference.md"
STATE = ROOT / "docs" / "state.md"
DEDUPLICATION = ROOT / "docs" / "deduplication.md"
CLAIM_CHECK = ROOT / "docs" / "claim-check.md"
SCHEMA_REGISTRY = ROOT / "docs" / "schema-registry.md"
TABLES = ROOT / "docs" / "tables.md"
WINDOWS = ROOT / "docs" / "windows.md"
JOINS = ROOT / "docs" / "joins.md"
SPARK_STATE = ROOT / "docs" / "spark-state.md"
CALLS = ROOT / "docs" / "calls.md"
TROUBLE = ROOT / "docs" / "troubleshooting.md"
DEPLOY = ROOT / "docs" / "deploy.md"
EXTERNAL = ROOT / "docs" / "external.md"
MANIFEST = ROOT / "deploy" / "kubernetes.yaml"
SUBMIT = "PYSPARK_SUBMIT_ARGS"
PAGES = [
    README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "changes/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
# What `onceflow new` writes.
TEMPLATE = ROOT / "src" / "onceflow" / "templates" / "project" / "README.md.tmpl"
LINE_LENGTH_MAX = 140

per_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str, containing: str = "") -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if containing in block]


def only(found: list[str]) -> str:
    assert len(found) == 1
    return found[0]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def run_python(code: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def execute(code: str) -> dict[str, Any]:
    """Run code of a page in this process, as a program; the names it defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)  # noqa: S102
    return names


def run_tests(code: str) -> int:
    """Run the tests that a page shows; how many there are."""
    tests = [value for name, value in execute(code).items() if name.startswith("test_")]
    for test in tests:
        test()
    return len(tests)


# ---- examples --------------------------------------------------------------------------------------------


def test_the_quick_start_of_the_readme_and_the_resets_of_its_flow(
    onceflow_broker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every command but the first two, which test_quick_start.py runs, too: they install and start a broker."""
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    run = uuid.uuid4().hex[:8]
    deposits, validated, flow = f"deposits-{run}", f"validated-{run}", f"flow-{run}"
    names = {'"deposits"': deposits, 'topic="validated"': validated, '"validated-deposits"': flow}
    (shown,) = blocks(README, "text")
    commands = [line for block in blocks(README, "sh", "onceflow ") for line in block.splitlines()]
    assert commands[0].startswith("pip install ")
    assert commands[1].startswith("onceflow broker start ")
    assert commands[4] == "python validate.py"
    said = []
    for command in commands[2:]:
        if command == "python validate.py":
            said.append(run_python(adapted(only(blocks(README, "python", "onceflow.session")), onceflow_broker, names)))
        else:
            own = re.sub(r" (deposits|validated)\b", rf" \1-{run}", command)
            said.append(
                subprocess.run(["bash", "-c", own], capture_output=True, text=True, timeout=60, check=True).stdout
            )
    created, produced, batches, consumed = said
    assert created == "".join(f"Topic {name} created with 4 partitions.\n" for name in (deposits, validated))
    assert produced == f"3 records written to {deposits}.\n"
    direct = "direct engine: Spark evaluates its rows in the driver, without a job; that takes some 10 ms a batch, "
    assert batches == f"{direct}50 with Python\nbatch 1: 3 records in one transaction\n"
    assert consumed == shown
    ends = independent.end_offsets(onceflow_broker, deposits)
    assert independent.committed_offsets(onceflow_broker, flow) == ends

    assert progress_of(onceflow_broker, flow, deposits) is not None
    monkeypatch.chdir(tmp_path)
    forget, *others = re.findall(r"^onceflow ((?:reset|progress) .*)$", CHANGE.read_text(), re.MULTILINE)
    assert len(others) == 3
    for command in (*others, f"{forget} --yes"):  # forgotten at the end
        words = command.replace("validated-deposits", flow).replace("localhost:9092", onceflow_broker).split()
        arguments, file = (words[:-2], Path(words[-1])) if ">" in words else (words, None)
        answer = CliRunner().invoke(cli, arguments)
        assert answer.exit_code == 0, answer.output
        if file is not None:
            file.write_text(answer.stdout)
    assert progress_of(onceflow_broker, flow, deposits) is None


def adapted(code: str, bootstrap_servers: str, names: dict[str, str], *, servers: bool = True) -> str:
    """A broker that other runs use too needs other names; the master leaves a core to the broker.

    Args:
        servers: whether the code names the broker.
    """
    for name, other in {**({'"localhost:9092"': bootstrap_servers} if servers else {}), **names}.items():
        assert name in code, name
        code = code.replace(name, re.sub('".*"', repr(other), name))
    return code.replace("onceflow.session(", "onceflow.session(master='local[1]', app_name=")


def test_the_example_with_state(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It runs, twice; the outputs, the table topic and the local stores hold what the page says."""
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))
    settled, statements = make_topic("settled", 2), make_topic("statements", 2)
    table, flow = f"balances-{settled}", f"flow-{settled}"
    code = only(blocks(STATE, "python", "onceflow.session"))
    assert len(code.splitlines()) <= 25
    names = {'"settled"': settled, 'topic="statements"': statements, 'Flow("balances"': flow, 'table="balances"': table}
    assert code.endswith("    spark.stop()\n")
    code = adapted(code.removesuffix("    spark.stop()\n"), onceflow_broker, names)
    for _ in range(2):
        sent = [(name.encode(), json.dumps({"amount": 2}).encode()) for name in ("ada", "bob", "ada")]
        independent.fill(onceflow_broker, settled, sent)
        execute(code)  # in this process: onceflow.session hands out the session of the tests
    last = {b"ada": {"balance": 8, "count": 4}, b"bob": {"balance": 4, "count": 2}}
    for topic in (table, statements):
        seen = independent.read_topic(onceflow_broker, topic, decided=True)
        assert len(seen) == 4
        assert {record.key: json.loads(record.value or b"") for record in seen} == last
    reading = only(blocks(STATE, "python", "Table.of_flow"))
    folder = 'Path.home() / ".local/state/onceflow/balances/balances"'
    assert folder in reading
    capsys.readouterr()
    execute(reading.replace(folder, repr(str(tmp_path / flow / table))))
    first, _ = capsys.readouterr().out.splitlines()
    assert json.loads(ast.literal_eval(first)) == last[b"ada"]


def test_the_example_of_de_duplication(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs, twice: the second time, all records are repeated."""
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))
    orders, unique, repeated = make_topic("orders", 2), make_topic("unique", 2), make_topic("repeated", 1)
    names = {
        '"orders"': orders,
        'topic="unique-orders"': unique,
        'Flow("unique-orders"': f"flow-{orders}",
        'duplicates_topic="repeated-orders"': repeated,
    }
    code = only(blocks(DEDUPLICATION, "python", "flow.write(unique"))
    assert code.endswith("    spark.stop()\n")
    code = adapted(code.removesuffix("    spark.stop()\n"), onceflow_broker, names)
    sent = [(b"customer-%d" % (n % 3), b'{"id": "order-%d"}' % n) for n in range(9)]
    for expected in (0, 9):
        independent.fill(onceflow_broker, orders, sent)
        execute(code)
        assert len(independent.read_topic(onceflow_broker, repeated, decided=True)) == expected
        seen = independent.read_topic(onceflow_broker, unique, decided=True)
        assert sorted((record.key, record.value) for record in seen) == sorted(sent)


def test_the_examples_of_joins_by_time(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))

    read = functools.partial(independent.read_topic, onceflow_broker, decided=True)

    def written(count: int, function: str, left: str, right: str, output: str, table: str) -> list[Any]:
        topics = {name: make_topic(name, 1) for name in (left, right, output, "late")}
        names = {f'"{name}"': topic for name, topic in topics.items()} | {f'table="{table}"': f"{topics[left]}-waiting"}
        code = adapted(only(blocks(JOINS, "python", f"def {function}")), onceflow_broker, names, servers=False)
        producer = Producer({"bootstrap.servers": onceflow_broker})
        for topic, ms in itertools.product((right, left), (0, 1000, 600_000)):
            producer.produce(topics[topic], f"{topic} {ms}".encode(), b"k", timestamp=1_700_000_000_000 + ms)
        assert producer.flush(30) == 0
        with onceflow.Flow(f"flow-{topics[left]}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
            query = execute(code)[function](flow).start()
            wait_until(lambda: len(read(topics[output])) == count, 60, f"{count} results of {function}")
            query.stop()
        return [json.loads(record.value or b"0") for record in read(topics[output])]

    seen = {
        "clicks 0": {"orders 0", "orders 1000", "orders 600000"},
        "clicks 1000": {"orders 0", "orders 1000", "orders 600000"},
        "clicks 600000": {"orders 600000"},
    }
    pairs = written(7, "clicks_with_orders", "clicks", "orders", "clicks-with-orders", "clicks-waiting")
    assert {click: {each["order"] for each in pairs if each["click"] == click} for click in seen} == seen
    quotes = written(2, "trades_with_quotes", "trades", "quotes", "trades-with-quotes", "trades-waiting")
    assert [quote["quote"] for quote in quotes] == ["quotes 0", "quotes 1000"]
    assert [run_tests(code) for code in blocks(JOINS, "python", "FlowDriver")] == [1, 1]


def test_the_examples_of_tables(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All joins of the page run in flows, and write what it says; the look-ups print."""
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))
    rates, customers = (make_topic(name, 2, cleanup_policy="compact") for name in ("fx-rates", "customers"))
    payments, orders = make_topic("payments", 2), make_topic("orders", 2)
    independent.fill(onceflow_broker, rates, [(b"EUR", b'{"rate": 2}')])
    independent.fill(onceflow_broker, customers, [(b"c1", b'{"name": "Ada", "tier": 3}')])
    paid = b'{"currency": "EUR", "amount": 5}'
    independent.fill(onceflow_broker, payments, [(b"ada", paid), (b"ada", paid)])
    independent.fill(onceflow_broker, orders, [(b"o1", b'{"customer": "c1"}'), (b"o2", b'{"customer": "c9"}')])

    def written(make: Callable[[Any], Any]) -> list[Any]:
        output = make_topic("out", 2)
        flow = onceflow.Flow(f"flow-{output}", onceflow_spark, bootstrap_servers=onceflow_broker)
        query = flow.write(make(flow), topic=output, once=True).start()
        query.awaitTermination()
        flow.close()
        return [json.loads(record.value or b"0") for record in independent.read_topic(onceflow_broker, output)]

    code = adapted(
        only(blocks(TABLES, "python", "def totals")),
        onceflow_broker,
        {'"fx-rates"': rates, '"payments"': payments, 'table="totals"': f"totals-{payments}"},
        servers=False,
    )
    (last,) = (value for value in written(execute(code)["totals"]) if value["total"] == 20)
    assert last["rates"].startswith(f"{rates}:")
    names = {'"orders"': orders, '"customers"': customers}
    code = adapted(only(blocks(TABLES, "python", "def enriched")), onceflow_broker, names, servers=False)
    assert sorted(map(json.dumps, written(execute(code)["enriched"]))) == ['{"name": "Ada", "tier": 3}', "{}"]
    good, bad = make_topic("enriched", 1), make_topic("failed", 1)
    independent.fill(onceflow_broker, customers, [(b"c9", b"{garbage")])
    code = adapted(only(blocks(TABLES, "python", "def routed")), onceflow_broker, names, servers=False)
    code = code.replace("'enriched'", f"'{good}'").replace("'orders-failed'", f"'{bad}'")
    flow = onceflow.Flow(f"flow-{good}", onceflow_spark, bootstrap_servers=onceflow_broker)
    flow.write(execute(code)["routed"](flow), once=True).start().awaitTermination()
    flow.close()
    assert [seen.value for seen in independent.read_topic(onceflow_broker, good)] == [b'{"name":"Ada"}']
    assert [seen.value for seen in independent.read_topic(onceflow_broker, bad)] == [b'{"customer": "c9"}']
    independent.fill(onceflow_broker, customers, [(b"c9", None)])
    joined, own = make_topic("joined", 2), {'table="orders-customers"': f"joined-{orders}"}
    own['"orders-with-customers"'] = joined
    code = adapted(only(blocks(TABLES, "python", "def orders_with")), onceflow_broker, {**own, **names}, servers=False)
    with onceflow.Flow(f"flow-{joined}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        query = execute(code)["orders_with_customers"](flow).start()
        query.processAllAvailable()
        query.stop()
    rows = {
        seen.key: json.loads(seen.value or b"")
        for seen in independent.read_topic(onceflow_broker, joined, decided=True)
    }
    assert rows == {
        b"o1": {"order": '{"customer": "c1"}', "customer": '{"name": "Ada", "tier": 3}'},
        b"o2": {"order": '{"customer": "c9"}'},
    }
    tiers = execute(only(blocks(TABLES, "python", "class Tiers")))["Tiers"]()
    found = written(
        lambda flow: flow.process(
            flow.read(orders), tiers, table=f"tiers-{orders}", tables={"customers": customers}
        ).where("value is not null")
    )
    assert found == [{"name": "Ada", "tier": 3}]
    code = adapted(only(blocks(TABLES, "python", "multi_get")), onceflow_broker, {'"balances"': f"totals-{payments}"})
    capsys.readouterr()
    execute(code.replace("serdes.JSON", "serdes.JSON, state_dir='" + str(tmp_path) + "'"))
    assert capsys.readouterr().out.splitlines() == ["20", "{'ada': 20}", "{'ada': 20}", "1"]


def test_the_test_of_a_join() -> None:
    convert = execute(only(blocks(TABLES, "python", "class Convert")))["Convert"]
    execute(only(blocks(TABLES, "python", "ProcessorDriver")))["test_payments_are_converted"](convert())


def test_the_join_by_foreign_key() -> None:
    """An order yields a joined record, and so does every order of a customer that changes."""
    from onceflow.testing.processor_driver import ProcessorDriver

    driver = ProcessorDriver(execute(only(blocks(TABLES, "python", "OrdersOfCustomer")))["OrdersOfCustomer"]())
    driver.send_many(
        [("c1", {"order": "o1"}), ("c1", {"name": "Ada"}), ("c1", {"order": "o2"}), ("c1", {"name": "A."})]
    )
    joined = [(record.key, record.value["customer"]) for record in driver.take()]
    ada, new = {"name": "Ada"}, {"name": "A."}
    assert joined == [("o1", None), ("o1", ada), ("o2", ada), ("o1", new), ("o2", new)]


def example_with_a_checkpoint(source: tuple[str, str], output: tuple[str, str], broker: str, folder: Path) -> str:
    """The example of the page that writes a topic, with other topics and another checkpoint: (there, here) of each."""
    name = output[0]
    code = only(blocks(SPARK_STATE, "python", f'topic="{name}"'))
    names = {f'"{source[0]}"': source[1], f'topic="{name}"': output[1], f'Flow("{name}"': f"flow-{source[1]}"}
    code = adapted(code, broker, {**names, f'"/var/lib/{name}"': "ck"})
    return code.replace("'ck'", repr(str(folder / "checkpoint")))


def test_the_example_with_state_in_spark(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    """It runs, twice, with one checkpoint: the last counts of the windows add up to all records."""
    clicks, counts = make_topic("clicks", 2), make_topic("counts", 2)
    code = example_with_a_checkpoint(("clicks", clicks), ("counts", counts), onceflow_broker, tmp_path)
    for _ in range(2):
        independent.fill(onceflow_broker, clicks, [(name.encode(), b"") for name in ("ada", "bob", "ada")])
        execute(code)  # in this process: onceflow.session hands out the session of the tests
    last: dict[tuple[bytes | None, str], int] = {}
    for record in independent.read_topic(onceflow_broker, counts, decided=True):
        window = json.loads(record.value or b"")
        last[record.key, window["start"]] = window["count"]
    assert {key for key, _ in last} == {b"ada", b"bob"}
    assert sum(last.values()) == 6


def test_the_example_with_late_rows(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    """It counts what is in time, and stops at a row of days ago."""
    weather, hours = make_topic("weather", 1), make_topic("hours", 1)
    code = example_with_a_checkpoint(("weather", weather), ("hours", hours), onceflow_broker, tmp_path)

    def send(*days: int) -> None:
        rows = [{"station": "EWR", "time_hour": f"2013-01-{day:02}T05:00:00Z", "temp": 39.0} for day in days]
        independent.fill(onceflow_broker, weather, [(None, json.dumps(row).encode()) for row in rows])

    send(8, 9)
    execute(code)
    send(9, 3)
    with pytest.raises(onceflow.LateRowsError, match="1 row"):
        execute(code)
    assert len(independent.read_topic(onceflow_broker, hours, decided=True)) == 2


def test_the_example_of_a_map(onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str]) -> None:
    deposits, large = make_topic(partitions=1), make_topic(partitions=1)
    independent.fill(onceflow_broker, deposits, [(b"ada", b"%d" % amount) for amount in (100, 101, 7, 5000)])
    code = only(blocks(REFERENCE, "python", "flow.map("))
    code = adapted(code, onceflow_broker, {'"deposits"': deposits, 'topic="large-deposits"': large}, servers=False)
    with onceflow.Flow(f"map-{deposits}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        query = execute(code)["copy_large"](flow).start()
        assert query.engine == "direct"
        query.processAllAvailable()
        query.stop()
    assert [each.value for each in independent.read_topic(onceflow_broker, large, decided=True)] == [b"101", b"5000"]


def test_the_programs_of_the_calls_page() -> None:
    shown = blocks(CALLS, "python")
    names: dict[str, Any] = {"__name__": "shown"}
    for block in shown:
        exec(block, names)  # noqa: S102
        if test := names.pop("test_a_customer_is_asked_for_once", None):
            test()
    assert len(shown) == 5
    assert names["ask"].target.breaker == onceflow.Breaker(20, "30 seconds")


def test_the_processors_of_the_state_page(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("balances")
    whole = only(blocks(STATE, "python", "onceflow.session"))
    assert whole.startswith(only(blocks(README, "python", "class ")))  # the README shows the processor alone
    exec(whole, module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "balances", module)
    assert run_tests(only(blocks(STATE, "python", "from balances import"))) == 2
    assert run_tests(only(blocks(STATE, "python", "on_timer"))) == 1

    by_column = ProcessorDriver(execute(only(blocks(STATE, "python", "ColumnProcessor")))["Balance"]())
    by_column.send_many([("ada", {"amount": 5}), ("bob", {"amount": 3}), ("ada", {"amount": 2})])
    assert by_column.states == {b"ada": {"balance": 7}, b"bob": {"balance": 3}}
    assert [record.value for record in by_column.outputs] == [b'{"balance":7}', b'{"balance":3}']

    recent = ProcessorDriver(execute(only(blocks(STATE, "python", "class Recent")))["Recent"]())
    recent.send_many([("ada", b"1"), ("bob", b"2")])
    assert recent.send("ada", b"3") == []
    recent.advance(601)
    assert [record.value for record in recent.send("ada", b"4")] == [b"4"]

    class Old(onceflow.Processor):
        version = 1
        value = state = onceflow.serdes.JSON

        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.put(records[-1].value)

    driver = ProcessorDriver(Old())
    driver.send(b"ada", 7)
    driver.processor = execute(only(blocks(STATE, "python", "def migrate")))["Balance"]()
    assert driver.state(b"ada") == {"balance": 7, "count": 0}


def test_the_examples_of_the_claim_check_page(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    s3.filesystem().mkdir("pictures")
    monkeypatch.chdir(tmp_path)
    large = bytes(2_000_000)

    thumbnail = execute(only(blocks(CLAIM_CHECK, "python", "class Thumbnail")))
    raw = thumbnail["claims"].encode(large)
    driver = ProcessorDriver(thumbnail["Thumbnail"]())
    assert driver.send(b"ada", raw) == [Record(b"ada", large[:1_000_000])]
    assert driver.state(b"ada") == {"sizes": [2_000_000]}

    fingerprint = execute(only(blocks(CLAIM_CHECK, "python", "class Fingerprint")))
    expected = hashlib.blake2b(large).hexdigest().encode()
    assert ProcessorDriver(fingerprint["Fingerprint"]()).send(b"ada", raw) == [Record(b"ada", expected)]

    names = execute(only(blocks(CLAIM_CHECK, "python", "put_file")))
    assert names["first"] == b"y" * 1000
    assert (tmp_path / "copy.bin").read_bytes() == b"y" * 5_000_000


def test_the_example_of_the_schema_registry_page() -> None:
    code = only(blocks(SCHEMA_REGISTRY, "python", "class Balances")).replace("http://localhost:8081", "mock://docs")
    example = execute(code)
    payment = {"type": "record", "name": "Payment", "fields": [{"name": "cents", "type": "long"}]}
    raw = example["registry"].avro("payments-value", json.dumps(payment), register=True).encode({"cents": 5})
    driver = ProcessorDriver(example["Balances"]())
    assert driver.send("ada", raw) == [Record("ada", {"account": "ada", "balance": 5})]
    driver.send("ada", {"cents": 6})
    assert driver.state("ada") == {"account": "ada", "balance": 11}


def test_the_processors_of_the_windows_page() -> None:
    assert [run_tests(code) for code in blocks(WINDOWS, "python")] == [1, 1]


def progress_of(bootstrap_servers: str, flow: str, source: str) -> Any:
    """As a start of the flow would read it, with the hint of its group."""
    from onceflow.client.cluster import Cluster
    from onceflow.client.deadline import Deadline
    from onceflow.client.settings import ClientSettings
    from onceflow.driver.record.progress_log import read_progress

    cluster = Cluster(ClientSettings(bootstrap_servers))
    try:
        deadline = Deadline(30, "test")
        cluster.connect(deadline)
        return read_progress(cluster, flow, flow, {source: [0, 1, 2, 3]}, deadline)
    finally:
        cluster.close()


def test_the_example_test_of_the_development_page() -> None:
    """Its imports and fixtures exist. (Running it takes as long as the tests in tests/faults that do the same.)"""
    from onceflow.testing import plugin

    names = execute(only(blocks(DEVELOPMENT, "python", "onceflow_broker, ")))
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    for name in inspect.signature(test).parameters:
        assert hasattr(plugin, name) or name in ("tmp_path", "monkeypatch"), name


def test_the_tests_of_a_whole_flow(onceflow_spark: Any) -> None:
    assert run_tests(only(blocks(DEVELOPMENT, "python", "FlowDriver"))) == 2


@per_page
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


def test_the_messages_of_the_page_for_trouble_are_said() -> None:
    """What it quotes are texts of the sources; which of them come when is the business of other tests."""
    said = set()
    for file in Path(onceflow.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.strip()) >= 12:
                said.add(node.value.strip())
    messages = [block.strip() for block in blocks(TROUBLE, "text")]
    assert len(messages) >= 10
    unknown = [m for m in messages if not any(text in m or m in text for text in said)]
    assert not unknown


# ---- links -----------------------------------------------------------------------------------------------


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(text, target) of every link, inline or by reference."""
    text = prose(page)
    targets = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    for words, target, label in re.findall(r"\[([^\]\n]+)\](?:\(([^)\s]+)\)|\[([^\]\n]+)\])", text):
        if not target:
            assert label in targets, f"{page.name}: [{words}][{label}] has no target"
            target = targets[label]
        yield words, target


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@per_page
def test_links_lead_somewhere(page: Path) -> None:
    for words, target in links(page):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target} has no such heading"
        function = re.fullmatch(r"`(\w+)`", words)
        if function and file.suffix == ".py":
            found = re.search(rf"^def {function[1]}\(", file.read_text(), re.MULTILINE)
            assert found, f"{page.name}: {function[1]} is not in {target}"


@per_page
def test_lines_are_not_too_long(page: Path) -> None:
    long = [n for n, line in enumerate(page.read_text().splitlines(), 1) if len(line) > LINE_LENGTH_MAX]
    assert not long, f"{page.name}: lines {long} are longer than {LINE_LENGTH_MAX}"


# ---- commands and targets --------------------------------------------------------------------------------


def shell_lines(page: Path) -> list[str]:
    """Inline code and the lines of shell blocks, without comments."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(page))
    return [line.partition(" # ")[0].strip() for line in lines]


@pytest.mark.parametrize("page", [*PAGES, TEMPLATE], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    for line in shell_lines(page):
        words = shlex.split(line) if re.match(r"(\.venv/bin/)?onceflow ", line) else []
        command: click.Command = cli
        for word in words[1:]:
            if word == "--":  # arguments follow
                break
            if word.startswith("--"):
                known = {option for parameter in command.params for option in parameter.opts}
                assert word in known, f"{page.name}: {line}: no option {word}"
            elif isinstance(command, click.Group):
                found = command.get_command(click.Context(command), word)
                assert found is not None, f"{page.name}: {line}: no command {word}"
                command = found


@per_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines(page):
        if match := re.fullmatch(r"make ([a-z]+)", line):
            assert match[1] in targets, f"{page.name}: there is no target {match[1]}"


# ---- Spark's options and settings ------------------------------------------------------------------------

# Spark puts these together with names that the user chooses.
OPEN_ENDED = ("spark.executorEnv.", "spark.yarn.appMasterEnv.", "spark.kubernetes.executor.volumes.")
# Put together by Spark itself, of spark.kubernetes.authenticate.driver and .serviceAccountName.
JOINED = {"spark.kubernetes.authenticate.driver.serviceAccountName"}


@functools.cache
def words_of_spark() -> frozenset[str]:
    """Every setting and option that is a constant in Spark's own classes."""
    import pyspark

    found: set[str] = set()
    for jar in Path(pyspark.__file__).parent.glob("jars/spark-*.jar"):
        with zipfile.ZipFile(jar) as classes:
            for name in classes.namelist():
                if name.endswith(".class"):
                    words = re.findall(rb"spark(?:\.[A-Za-z][\w-]*)+|--[a-z][a-z-]+", classes.read(name))
                    found.update(word.decode() for word in words)
    return frozenset(found)


@pytest.mark.long
def test_settings_of_spark_exist() -> None:
    known = words_of_spark()
    assert "spark.no.such.setting" not in known
    text = DEPLOY.read_text()
    submissions = blocks(DEPLOY, "sh", "spark-submit")
    assert {master for block in submissions for master in re.findall(r"--master (\w+)", block)} == {
        "spark",
        "yarn",
        "k8s",
    }
    options = {option for block in submissions for option in re.findall(r"(?<=[ (])--[\w-]+", block)}
    settings = set(re.findall(r"--conf (spark[^= ]+)=", text)) | set(re.findall(r"`(spark\.[a-zA-Z.]+)[=`]", text))
    assert len(options) > 8
    assert len(settings) > 25
    for option in options:
        assert option in known, option
    for setting in settings - JOINED:
        assert setting in known or setting.startswith(OPEN_ENDED), setting


def test_commands_of_the_deploy_page_are_of_the_shell() -> None:
    for block in blocks(DEPLOY, "sh"):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, ""), block


def test_the_image_that_a_service_is_built_on_is_ours() -> None:
    (tag,) = re.findall(r"^docker build .* -t (\S+) \.$", only(blocks(DEPLOY, "sh", "docker build")), re.MULTILINE)
    (service,) = blocks(DEPLOY, "dockerfile")
    assert service.startswith(f"FROM {tag}\n")
    assert tag.endswith(f":{onceflow.__version__}")
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    (state_dir,) = re.findall(r"ONCEFLOW_STATE_DIR=(\S+)", image)
    assert f"volumes.persistentVolumeClaim.state.mount.path={state_dir} " in DEPLOY.read_text()


# ---- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        "Flow",
        "Flow.read",
        "Flow.process",
        "Flow.map",
        "Flow.enrich",
        "concurrently",
        "Breaker",
        "peek",
        "Flow.deduplicate",
        "Flow.join_table",
        "Flow.write",
        "Flow.write_external",
        "Flow.write_chain",
        "serve",
        "serve_metrics",
        "Telemetry",
        "Lineage",
        "ClaimCheck",
        "DeltaSink",
    ],
)
def test_options_are_those_of_the_code(what: str) -> None:
    section = re.search(rf"^### {re.escape(what)}\n(.*?)(?=^#|\Z)", REFERENCE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    documented = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? *\|", section[1], re.MULTILINE)
    parameters = dict(inspect.signature(attrgetter(what)(onceflow)).parameters)
    parameters.pop("self", None)
    assert [name for name, _ in documented] == list(parameters)
    for name, default in documented:
        actual = parameters[name].default
        assert default if actual is not inspect.Parameter.empty else not default, name
        if default:
            assert ast.literal_eval(default) == actual, name


def test_errors_that_docs_name_exist() -> None:
    for page in PAGES:
        if page.is_relative_to(ROOT / "examples"):
            continue  # services have errors of their own
        for name in re.findall(r"`([A-Z]\w+Error)`", prose(page)):
            assert name in onceflow.__all__ or hasattr(builtins, name), f"{page.name}: {name}"


@pytest.mark.long
def test_the_manifest_for_kubernetes(onceflow_spark: Any) -> None:
    """Read by the Kubernetes client that Spark has. Names agree with each other, with the page and with Spark."""
    text = MANIFEST.read_text()
    read = onceflow_spark._jvm.io.fabric8.kubernetes.client.utils.KubernetesSerialization().unmarshal(text)
    found = {thing.getKind(): thing for thing in read}
    assert list(found) == ["ServiceAccount", "Role", "RoleBinding", "Service", "Deployment"]
    assert {thing.getMetadata().getNamespace() for thing in found.values()} == {"streams"}
    assert found["RoleBinding"].getRoleRef().getName() == found["Role"].getMetadata().getName()
    template = found["Deployment"].getSpec().getTemplate()
    assert template.getSpec().getServiceAccountName() == found["ServiceAccount"].getMetadata().getName()
    labels = dict(template.getMetadata().getLabels())
    assert dict(found["Service"].getSpec().getSelector()) == labels
    assert dict(found["Deployment"].getSpec().getSelector().getMatchLabels()) == labels
    (container,) = template.getSpec().getContainers()
    things = [*found.values(), template, template.getSpec(), container, found["Service"].getSpec()]
    assert not [dict(thing.getAdditionalProperties()) for thing in things if thing.getAdditionalProperties()]

    settings = submit_settings({entry.getName(): entry.getValue() for entry in container.getEnv()}[SUBMIT])
    ports = {port.getName(): str(port.getPort()) for port in found["Service"].getSpec().getPorts()}
    assert settings["spark.driver.port"] == ports["driver"]
    assert settings["spark.driver.blockManager.port"] == ports["block-manager"]
    assert settings["spark.driver.host"].split(".")[0] == found["Service"].getMetadata().getName()
    assert settings["spark.kubernetes.container.image"] == container.getImage()
    assert f"container.image={container.getImage()} " in DEPLOY.read_text()
    assert settings["spark.master"].startswith("k8s://https://")
    known = words_of_spark()
    assert not [name for name in settings if name not in known]
