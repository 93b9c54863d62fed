"""`onceflow table list`, `describe`, `get`, `range`, `prefix`, `count` and `tail` on a real Kafka."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from click.testing import CliRunner, Result

from onceflow.cli.main import cli
from onceflow.client import cluster
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.record import progress_log
from onceflow.errors import BrokerUnreachableError, OptionError, UnknownTopicError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.tables import following
from onceflow.tables.following import Follower
from onceflow.testing import independent

pytestmark = pytest.mark.integration

Call = Callable[..., Result]
Command = Callable[..., AbstractContextManager[Popen[str]]]


@pytest.fixture
def call(onceflow_broker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """A command of the group, with its local copies in the test's folder."""
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))

    def run(*arguments: str, code: int = 0) -> Result:
        answer = CliRunner().invoke(cli, ["table", *arguments])
        assert answer.exit_code == code, answer.output + repr(answer.exception)
        return answer

    return run


@pytest.fixture
def rates(make_topic: Callable[..., str], onceflow_broker: str) -> str:
    topic = make_topic("rates", 3, cleanup_policy="compact")
    independent.fill(onceflow_broker, topic, [(b"k%d" % n, b'{"n": %d}' % n) for n in range(5)])
    return topic


def line_of(stream: Any) -> str:
    assert stream is not None
    return str(stream.readline())


def test_the_commands_of_the_page(call: Call, rates: str, onceflow_broker: str) -> None:
    """All but the one that runs until Ctrl-C."""
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    (block,) = re.findall(r"^```sh\n(onceflow table list.*?)^```", page, re.MULTILINE | re.DOTALL)
    independent.fill(onceflow_broker, rates, [(b"ada", b'{"n": 7}'), (b"bob", b'{"n": 8}')])
    said = {}
    for line in block.splitlines():
        _, _, name, *words = shlex.split(line, comments=True)
        said[name] = (
            "" if name == "tail" else call(name, *(rates if word == "balances" else word for word in words)).stdout
        )
    assert rates in said["list"]
    assert said["describe"].startswith(f"{rates}: a compacted topic, 3 partitions, at most 7 records\n")
    assert said["get"] == 'ada\t{"n": 7}\nbob\t{"n": 8}\n'
    assert [json.loads(line)["value"] for line in said["range"].splitlines()] == [{"n": 7}, {"n": 8}]
    assert (said["prefix"], said["count"]) == ('ada\t{"n": 7}\n', "7\n")
    assert said.keys() == {"list", "describe", "get", "range", "prefix", "count", "tail"}


# ---- list and describe -----------------------------------------------------------------------------------


def test_tables_and_their_flows(
    call: Call, onceflow_broker: str, rates: str, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    balances, plain = make_topic("balances", 2, cleanup_policy="compact"), make_topic("plain", 1)
    owned = make_topic("owned", 1, cleanup_policy="compact")
    for table in (balances, owned):
        answer = CliRunner().invoke(cli, ["topic", "create", f"{table}-internal", "--config", "cleanup.policy=compact"])
        assert answer.exit_code == 0, answer.output
    flow = f"flow-of-{balances}"
    ends = {0: 5, 1: 7}
    with closing(Cluster(ClientSettings(onceflow_broker))) as known:
        deadline = Deadline(60, "test")
        progress_log.ensure_topic(known, deadline)
        topic_ids = {balances: known.topic(balances, deadline).topic_id, owned: "of a topic that was deleted"}
        done = Progress(flow, 3, {}, topic_ids, 1_700_000_000_000, changelogs={balances: ends, owned: {0: 1}})
        progress_log.write_progress(known, None, Names(flow), done, {}, deadline)

    # A processor with windows has entries and timers only.
    independent.fill(onceflow_broker, f"{balances}-internal", [(b"a", b"1"), (b"b", b"2"), (b"b", b"3")])
    found = {each["table"]: each for each in map(json.loads, call("list", "--json").stdout.splitlines())}
    counts = {"records_at_most": 5, "companion_records_at_most": 0}
    assert found[rates] == {"table": rates, "partitions": 3, "companion": None, "flow": None, **counts}
    assert (found[balances]["records_at_most"], found[balances]["companion_records_at_most"]) == (0, 3)
    assert (found[balances]["flow"], found[balances]["companion"]) == (flow, f"{balances}-internal")
    assert (found[owned]["flow"], found[owned]["companion"]) == (None, f"{owned}-internal")
    assert not [name for name in found if name == plain or name.startswith("__") or name.endswith("-internal")]
    columns, *rows = [line.split() for line in call("list").stdout.splitlines()]
    assert columns == ["TABLE", "PARTITIONS", "RECORDS", "INTERNAL", "FLOW"]
    assert [rates, "3", "5", "-", "-"] in rows
    assert [balances, "2", "0", "3", flow] in rows
    assert [owned, "1", "0", "0", "?"] in rows
    counted = call("count", balances)
    assert counted.stdout == "0\n"
    assert f"{balances}-internal has at most 3 records: entries of maps and lists" in counted.stderr

    told = json.loads(call("describe", balances, "--json").stdout)
    assert (told["flow"], told["batch"], told["position"]) == (flow, 3, f"{balances}@{topic_ids[balances]}:5.7")
    assert told["settings"]["cleanup.policy"] == "compact"
    assert told["settings"].keys() == {"cleanup.policy", "delete.retention.ms", "min.compaction.lag.ms"}
    assert [each["committed_offset"] for each in told["partitions"]] == [5, 7]
    first, companion, position, *_ = call("describe", balances).stdout.splitlines()
    assert first == f"{balances}: a table of flow {flow}, 2 partitions, at most 0 records"
    assert companion.startswith(f"companion topic {balances}-internal: entries of maps and lists")
    assert "at most 3 records" in companion
    assert position == f"position {balances}@{topic_ids[balances]}:5.7, committed by batch 3"
    told = json.loads(call("describe", rates, "--json").stdout)
    assert sum(each["stable_offset"] for each in told["partitions"]) == 5
    assert sum(each["end_offset"] - each["first_offset"] for each in told["partitions"]) == 5
    assert (told["flow"], told["companion"], told["position"]) == (None, None, None)
    refused = call("describe", plain, code=1).exception
    assert isinstance(refused, OptionError)
    assert f"Topic {plain} is not compacted" in str(refused)


# ---- lookups ---------------------------------------------------------------------------------------------


def test_lookups(call: Call, rates: str) -> None:
    answer = call("get", rates, "k3", "k1", "k3")
    assert (answer.stdout, answer.stderr) == ('k3\t{"n": 3}\nk1\t{"n": 1}\n', "")
    answer = call("get", rates, "k0", "nobody", "--value", "json", "--json", code=1)
    assert json.loads(answer.stdout) == {"key": "k0", "value": {"n": 0}}
    assert answer.stderr == f"Table {rates} has no key 'nobody'.\n"

    def keys(*arguments: str) -> list[str]:
        return [line.split("\t")[0] for line in call(*arguments).stdout.splitlines()]

    assert keys("range", rates) == ["k0", "k1", "k2", "k3", "k4"]
    assert keys("range", rates, "--start", "k1", "--end", "k4", "--reverse", "--limit", "2") == ["k3", "k2"]
    assert keys("prefix", rates, "k", "--limit", "2") == ["k0", "k1"]
    assert keys("prefix", rates, "6b33", "--key", "hex") == ["6b33"]
    assert keys("prefix", rates, "x") == []
    assert call("count", rates).stdout == "5\n"
    assert json.loads(call("count", rates, "--json").stdout) == {"table": rates, "count": 5}
    parts = [json.loads(call("count", rates, "--json", "--partition", str(n)).stdout)["count"] for n in range(3)]
    assert sum(parts) == 5
    both = call("count", rates, "--partition", "0", "--partition", "1").stdout
    assert int(both) == parts[0] + parts[1]


def test_negative_numbers(call: Call, make_topic: Callable[..., str], onceflow_broker: str) -> None:
    longs = make_topic("longs", 2, cleanup_policy="compact")
    numbers = (42, -5, 0, -1, 7)
    independent.fill(onceflow_broker, longs, [(n.to_bytes(8, "big", signed=True), b"x") for n in numbers])
    assert call("get", longs, "--key", "long", "--", "42", "-5").stdout == "42\tx\n-5\tx\n"
    for arguments, found in ((("--start", "-5"), "-5 -1"), (("--end", "8"), "0 7"), ((), "0 7 42 -5 -1")):
        lines = call("range", longs, "--key", "long", *arguments).stdout.splitlines()
        assert [line.split("\t")[0] for line in lines] == found.split()
    assert "comes after" in call("range", longs, "--key", "long", "--start", "-5", "--end", "5", code=2).output


@pytest.mark.long
def test_what_is_not_there(call: Call, make_topic: Callable[..., str], rates: str) -> None:
    empty = make_topic("empty", 2, cleanup_policy="compact")
    assert (call("range", empty).output, call("count", empty).output) == ("", "0\n")
    unknown = call("get", rates.upper(), "k", code=1).exception
    assert isinstance(unknown, UnknownTopicError)
    assert f"did you mean {rates}?" in str(unknown)
    assert "has no partition 3" in str(call("count", rates, "--partition", "3", code=1).exception)
    refused = call("count", make_topic("plain", 1), code=1).exception
    assert isinstance(refused, OptionError)
    server = "localhost:1"
    away = call("count", rates, "--timeout", "1 second", "--bootstrap-servers", server, code=1).exception
    assert isinstance(away, BrokerUnreachableError)


@pytest.mark.long
def test_the_second_call_reads_only_what_is_new(
    call: Call, onceflow_broker: str, rates: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onceflow.tables")
    for expected in (5, 1):
        caplog.clear()
        assert call("count", rates).stdout == "5\n"
        read = [int(record.args[1]) for record in caplog.records if "records read" in record.msg]  # type: ignore[index,arg-type]
        assert sum(read) == expected
        independent.fill(onceflow_broker, rates, [(b"k0", b"new")])
    assert call("get", rates, "k0").stdout == "k0\tnew\n"


@pytest.mark.long
def test_a_reader_that_goes_away(
    command: Command,
    onceflow_broker: str,
    make_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`| head -1`: no error, and no trace of one."""
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))
    topic = make_topic("long", 1, cleanup_policy="compact")
    independent.fill(onceflow_broker, topic, [(b"%06d" % n, b"x" * 100) for n in range(20_000)])
    with command("table", "range", topic, "--bootstrap-servers", onceflow_broker) as reader:
        assert line_of(reader.stdout) == "000000\t" + "x" * 100 + "\n"
        assert reader.stdout
        reader.stdout.close()
        reader.wait(30)
        assert reader.stderr
        assert reader.stderr.read() == ""


# ---- tail ------------------------------------------------------------------------------------------------


def test_changes_as_they_are_committed(
    command: Command, onceflow_broker: str, rates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path))
    where = ("--bootstrap-servers", onceflow_broker)
    with (
        command("table", "tail", rates, "--json", *where) as one,
        command("table", "tail", rates, "--limit", "7", "--from-start", *where) as two,
    ):
        for tail in (one, two):
            assert line_of(tail.stderr) == f"Following {rates}, 5 keys. Ctrl-C ends it.\n"
        assert [line_of(two.stdout) for _ in range(5)] == [f'k{n}\t{{"n": {n}}}\n' for n in range(5)]
        independent.fill(onceflow_broker, rates, [(b"k1", b"new"), (b"k1", None)])
        assert two.stdout
        assert two.stdout.read() == "k1\tnew\nk1\tnull\n"  # it has seen its seven lines
        assert two.wait(30) == 0
        first, second = (json.loads(line_of(one.stdout)) for _ in range(2))
        assert (first["key"], first["value"], first["before"]) == ("k1", "new", '{"n": 1}')
        assert (second["value"], second["before"], second["offset"]) == (None, "new", first["offset"] + 1)
        assert first.keys() == {"key", "value", "before", "partition", "offset", "timestamp_ms"}
        assert second["deleted"] is True
        one.send_signal(signal.SIGINT)
        assert one.wait(30) == 130
        assert one.stderr
        assert one.stderr.read().strip() == ""


@pytest.mark.long
def test_a_tail_ends_with_its_topic(call: Call, rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = Follower.listen

    def then_delete(follower: Follower, listener: Any) -> Any:
        end = listen(follower, listener)
        assert CliRunner().invoke(cli, ["topic", "delete", rates, "--yes"]).exit_code == 0
        return end

    monkeypatch.setattr(Follower, "listen", then_delete)
    monkeypatch.setattr(following, "_METADATA_S", 0.5)
    monkeypatch.setattr(cluster, "UNKNOWN_TOPIC_S", 0.5)
    assert isinstance(call("tail", rates, code=1).exception, UnknownTopicError)
