"""`onceflow status` without Kafka: what it says, its exit codes, and which progress is committed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from onceflow.admin.status.flow_status import (
    FlowStatus,
    PartitionStatus,
    SourceStatus,
    TableStatus,
    TransactionStatus,
    exceeded,
    expired,
    signs_of_life,
    unknown_flow,
)
from onceflow.admin.status.flow_status_reader import StatusReader
from onceflow.admin.status.standby_status import StandbyDriver, standby_warnings
from onceflow.admin.status.table_counts import TableCounts
from onceflow.cli.main import cli
from onceflow.cli.text import span
from onceflow.client import first_connection
from onceflow.errors import BrokerUnreachableError, DeadlineExceededError
from onceflow.protocol.progress import DriverProcess

Call = Callable[..., Result]


def flow(name: str = "orders", lag: int = 3, age_s: float = 9.5) -> FlowStatus:
    parts = [
        PartitionStatus(0, 7, 0, 7 + lag, 12 + lag, lag, 4.25 if lag else 0.0, 5),
        PartitionStatus(1, None, 0, 0, 0, 0, 0.0, 0),
    ]
    return FlowStatus(
        name,
        batch=4,
        last_commit_ms=1_700_000_000_000,
        age_s=age_s,
        producer_id=17,
        producer_epoch=2,
        transaction=TransactionStatus(f"onceflow.{name}", "Ongoing", 17, 3, 1.5),
        sources=[SourceStatus("in", {0: 7}, parts)],
        tables=[TableStatus("sums", {0: 5, 1: 6}, 9, 1_600_000_000_000)],
    )


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[FlowStatus]:
    flows: list[FlowStatus] = []
    monkeypatch.setattr(StatusReader, "read", lambda *_: flows)
    return flows


@pytest.fixture
def call() -> Call:
    def run(*arguments: str, code: int = 0) -> Result:
        answer = CliRunner().invoke(cli, ["status", *arguments, "--bootstrap-servers", "h:1"], standalone_mode=False)
        returned = answer.return_value if isinstance(answer.return_value, int) else 0
        assert (answer.exit_code or returned) == code, answer.output + repr(answer.exception)
        return answer

    return run


def test_a_table_of_flows(found: list[FlowStatus], call: Call) -> None:
    blind = FlowStatus("blind", warnings=["w"], missing=["READ on topic in"])
    found += [flow(), blind]
    columns, orders, unknown, *more = call().stdout.splitlines()
    assert columns.split() == ["FLOW", "BATCH", "LAG", "TIME", "LAG", "LAST", "COMMIT", "WARNINGS"]
    assert orders.split() == ["orders", "4", "3", "4.2", "s", "2023-11-14T22:13:20+00:00", "0"]
    assert unknown.split() == ["blind", "?", "?", "?", "?", "2"]
    assert more == ["blind: warning: w", "blind: not permitted: READ on topic in"]


def test_details(found: list[FlowStatus], call: Call) -> None:
    found.append(flow())
    found[0].notes.append("quiet")
    assert call("orders").stdout.splitlines() == [
        "orders: batch 4, a lag of 3 records, 4.2 s",
        "last commit 2023-11-14T22:13:20+00:00, 9.5 s ago",
        "committed by producer id 17, epoch 2",
        (
            "transactional id onceflow.orders: Ongoing, producer id 17, epoch 3 "
            "(each attempt and each start raises it), open for 1.5 s"
        ),
        (
            "driver: not asked (give --endpoint); its transaction has been open for 2 s: "
            "a batch is being written, or its driver has ended in one"
        ),
        "SOURCE  OFFSET  FIRST  STABLE  END  LAG  TIME LAG  HELD BACK",
        "in-0         7      0      10   15    3     4.2 s          5",
        "in-1         -      0       0    0    0       0 s          0",
        "TABLE  RECORDS AT MOST  END OFFSETS                  WATERMARK",
        "sums                 9          5.6  2020-09-13T12:26:40+00:00",
        "note: quiet",
    ]


@pytest.mark.parametrize(
    "seconds, told",
    [
        (None, "?"),
        (0, "0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (119, "119 s"),
        (600, "10 min"),
        (7_200, "2 h"),
        (86_400, "24 h"),
        (9 * 86_400, "9 days"),
        (438_706_646, "14 years"),
    ],
)
def test_spans_of_time(seconds: float | None, told: str) -> None:
    """The lag of historic records was printed as 438,706,646 s."""
    assert span(seconds) == told


def test_the_driver_that_committed_last(found: list[FlowStatus], call: Call) -> None:
    found.append(replace(flow(), committed_by=DriverProcess("web-1\x1b", 412, 1_700_000_000_000)))
    assert call("orders").stdout.splitlines()[5] == (
        "the driver that committed last: host web-1\N{REPLACEMENT CHARACTER}, process 412, "
        "since 2023-11-14T22:13:20+00:00"
    )
    (told,) = map(json.loads, call("--json").stdout.splitlines())
    assert told["committed_by"] == {"host": "web-1\x1b", "pid": 412, "since_ms": 1_700_000_000_000}


def test_drivers_that_stand_by(found: list[FlowStatus], call: Call) -> None:
    since = 1_700_000_000_000
    active = StandbyDriver("active", "web-1\x1b", 412, since, 0.2, warm=False)
    cold, warm = (StandbyDriver("standby", "web-2", n, since, 0.7, warm=n > 7) for n in (7, 8))
    found.append(replace(flow(), standbys=[active, cold, warm]))
    assert call("orders").stdout.splitlines()[5:8] == [
        "active: host web-1\N{REPLACEMENT CHARACTER}, process 412, since 2023-11-14T22:13:20+00:00; heard 0.2 s ago",
        "standby (warming up): host web-2, process 7, since 2023-11-14T22:13:20+00:00; heard 0.7 s ago",
        "standby: host web-2, process 8, since 2023-11-14T22:13:20+00:00; heard 0.7 s ago",
    ]
    (told,) = map(json.loads, call("--json").stdout.splitlines())
    assert told["standbys"][2] == {
        "role": "standby", "host": "web-2", "pid": 8, "since_ms": since, "age_s": 0.7, "warm": True
    }  # fmt: skip
    assert standby_warnings([active, cold]) == standby_warnings([]) == standby_warnings([warm]) == []
    assert ["no standby waits" in text for text in standby_warnings([active])] == [True]
    silent = replace(active, age_s=35.0)
    assert ["silent for 35 s" in text for text in standby_warnings([silent])] == [True]


def test_both_next_timers_of_tables_that_were_counted(found: list[FlowStatus], call: Call) -> None:
    """Windows end by event time, alarms of processors mostly by processing time."""
    due = {"event": 1_600_000_000_000, "processing": None}
    table = TableStatus("sums", {0: 5}, 9, None, TableCounts(3, 0, 2, 1, due, 9))
    found.append(replace(flow(), tables=[table, TableStatus("local", {}, None)]))
    lines = call("orders").stdout.splitlines()
    assert lines[-5:] == [
        "TABLE  RECORDS AT MOST  END OFFSETS  WATERMARK",
        "sums                 9            5          -",
        "local                ?            -          -",
        "IN KAFKA  VALUES  ENTRIES  TIMERS  DUE           NEXT EVENT TIMER  NEXT PROCESSING TIMER",
        "sums           3        0       2    1  2020-09-13T12:26:40+00:00                      -",
    ]


@pytest.mark.parametrize(
    "lag, waited_s, age_s, says",
    [
        (3, 300.0, 400.0, "records wait, and nothing was committed for 300 s: it does not run"),
        (3, None, 400.0, "records wait, and nothing was committed for 400 s: it does not run"),
        (3, 300.0, 59.0, ""),  # a batch may last so long
        (3, 1.0, 4000.0, ""),  # there was nothing to read before
        (0, 0.0, 4000.0, "it has read everything, so Kafka does not show whether it runs"),
    ],
)
def test_no_more_is_said_of_a_driver_than_kafka_shows(
    lag: int, waited_s: float | None, age_s: float, says: str
) -> None:
    part = PartitionStatus(0, 7, 0, 7 + lag, 7 + lag, lag, waited_s, 0)
    status = FlowStatus("f", 4, age_s=age_s, sources=[SourceStatus("in", {0: 7}, [part])])
    assert signs_of_life(status).startswith(says)
    assert bool(signs_of_life(status)) is bool(says)
    status.transaction = TransactionStatus("onceflow.f", "Ongoing", 17, 3, 9.0)
    assert signs_of_life(status).startswith("its transaction has been open for 9 s")


def test_what_is_held_back_is_no_sign_of_life() -> None:
    held = SourceStatus("in", {0: 7}, [PartitionStatus(0, 7, 0, 7, 9, 0, 0.0, 2)])
    assert signs_of_life(FlowStatus("f", 4, age_s=1.0, sources=[held])).startswith("what is left to read is held back")
    unknown = FlowStatus("f", 4, age_s=1.0, sources=[SourceStatus("in", {0: 7}, None)])
    assert signs_of_life(unknown) == ""


def test_json_has_everything(found: list[FlowStatus], call: Call) -> None:
    found += [flow(), flow("b", lag=0)]
    first, second = map(json.loads, call("--json").stdout.splitlines())
    assert (first["flow"], first["lag"], first["lag_seconds"], first["batch"]) == ("orders", 3, 4.25, 4)
    assert first["sources"][0]["partitions"][0]["held_back"] == 5
    assert first["transaction"]["age_s"] == 1.5
    assert (second["lag"], second["lag_seconds"], second["committed_by"]) == (0, 0.0, None)


def test_no_flow(found: list[FlowStatus], call: Call) -> None:
    answer = call("--max-lag", "0")
    assert answer.stdout == ""
    assert "No flow has committed anything" in answer.stderr


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--max-lag", "3"], 0, ""),
        (["--max-lag", "2"], 1, "onceflow: orders: a lag of 3 exceeds --max-lag 2\n"),
        (["--max-age", "10 seconds"], 0, ""),
        (["--max-age", "9"], 1, "onceflow: orders: a lag of 3 and no commit for 10 s exceed --max-age 9 s\n"),
    ],
)
def test_exit_codes(found: list[FlowStatus], call: Call, arguments: list[str], code: int, said: str) -> None:
    found.append(flow())
    assert call(*arguments, code=code).stderr == said


def test_what_could_not_be_asked_is_named(found: list[FlowStatus], call: Call) -> None:
    """The rest is shown; the lag is not known, so it exceeds each limit."""
    found.append(flow())
    (source,) = found[0].sources
    found[0].sources = [replace(source, offsets={0: 7, 2: 9}, unseen={2: "it has no leader"})]
    found[0].unseen += ["in-2: it has no leader", "transactional id onceflow.orders: no answer"]
    lines = call("orders").stdout.splitlines()
    assert lines[0] == "orders: batch 4, a lag of at least 3 records"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("in-")}
    assert rows["in-0"] == ["7", "0", "10", "15", "3", "4.2", "s", "5"]
    assert rows["in-2"] == ["9", *"??????"]
    assert lines[-2:] == [
        "not asked: in-2: it has no leader",
        "not asked: transactional id onceflow.orders: no answer",
    ]
    (told,) = map(json.loads, call("--json", "orders").stdout.splitlines())
    assert (told["lag"], told["sources"][0]["unseen"], len(told["unseen"])) == (None, {"2": "it has no leader"}, 2)
    assert call("--max-lag", "1000", code=1).stderr == "onceflow: orders: its lag is not known\n"


def test_flows_may_be_missing_when_progress_could_not_be_asked(
    found: list[FlowStatus], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(reader: StatusReader, *_: Any) -> list[FlowStatus]:
        reader.unseen = {3: "it has no leader", 4: "its leader, broker 2, does not answer"}
        return found

    monkeypatch.setattr(StatusReader, "read", read)
    said = (
        "onceflow: 2 partitions of __onceflow_progress could not be asked, so flows may be missing here "
        "(it has no leader, its leader, broker 2, does not answer)\n"
    )
    assert call(code=1).stderr == said
    found.append(flow())
    assert call(code=1).stderr == said
    assert call("orders").stderr == "", "it is known where this one is"
    found[0] = FlowStatus("orders", unseen=["__onceflow_progress-3, with its progress: it has no leader"])
    answer = call("orders", code=1)
    assert answer.stdout.splitlines()[-1].startswith("not asked: __onceflow_progress-3")


def test_without_lag_no_age_is_too_long() -> None:
    assert exceeded(flow(lag=0, age_s=1e9), 0, 1.0) == []


def test_a_lag_that_is_not_known_exceeds_every_limit() -> None:
    blind = FlowStatus("blind", batch=1, age_s=1.0, sources=[SourceStatus("in", {0: 1}, None)])
    assert exceeded(blind, 10, None) == exceeded(blind, None, 10.0) == ["blind: its lag is not known"]
    assert exceeded(blind, None, None) == []


@pytest.mark.parametrize("arguments", [["--watch", "0"], ["--watch", "--max-lag", "1"], ["--max-age", "soon"]])
def test_wrong_usage(found: list[FlowStatus], call: Call, arguments: list[str]) -> None:
    call(*arguments, code=1)


def test_no_broker_is_not_waited_for_as_a_start_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_connection, "LOOK_REFUSED_S", 0.1)
    answer = CliRunner().invoke(cli, ["status", "--bootstrap-servers", "127.0.0.1:1"])
    assert isinstance(answer.exception, BrokerUnreachableError)
    assert "within 0.1 s" in answer.exception.what


def test_watching_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """The word after --watch may be a flow."""
    asked: list[Any] = []

    def read(_: Any, flows: tuple[str, ...], __: Any) -> list[FlowStatus]:
        asked.append(flows)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [flow()]

    monkeypatch.setattr(StatusReader, "read", read)
    monkeypatch.setattr("onceflow.cli.status._EVERY_S", 0.01)
    answer = call("--json", "--watch", "orders", code=130)
    assert asked == [("orders",)] * 3
    assert [json.loads(line)["flow"] for line in answer.stdout.splitlines()] == ["orders"] * 2


def test_watching_goes_on_when_a_later_look_fails(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    looks: list[Any] = [DeadlineExceededError("no broker"), [flow()], DeadlineExceededError("no broker"), [flow()]]

    def read(*_: Any) -> list[FlowStatus]:
        if not looks:
            raise KeyboardInterrupt
        if isinstance(look := looks.pop(0), Exception):
            raise look
        return look

    monkeypatch.setattr(StatusReader, "read", read)
    assert isinstance(call("--json", "--watch", code=1).exception, DeadlineExceededError), "the first look"
    answer = call("--json", "--watch=0.1", code=130)
    assert len(answer.stdout.splitlines()) == 2
    assert answer.stderr.rstrip().endswith(": no broker")


def test_similar_names() -> None:
    error = unknown_flow("order", ["orders", "else"])
    assert error.detail == "flows of a similar name: orders"
    assert error.next_step.startswith("did you mean orders?")
    assert unknown_flow("x", []).detail == ""


def test_expired_records_are_a_loss() -> None:
    (text,) = expired("in", [PartitionStatus(0, 3, 8, 9, 9, 6, 0.0, 0), PartitionStatus(1, 3, 3, 9, 9, 6, 0.0, 0)])
    assert text.startswith("in-0 starts at offset 8, the flow is at 3: 5 offsets expired unread")
