"""Metrics of running flows: what is counted, what is scraped, and what the probes answer."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import onceflow
from onceflow import hooks
from onceflow.admin.status.driver_status import LastBatch, ask_endpoint
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import (
    BatchAbortedError,
    BrokerUnreachableError,
    EnvironmentUnusableError,
    FencedError,
    OptionError,
)
from onceflow.metrics import endpoint as serving
from onceflow.metrics import latency
from onceflow.metrics import watch as watching
from onceflow.metrics.counts import BUCKETS_S, METRICS, Distribution
from onceflow.planning.options import BatchSummary
from onceflow.protocol.progress import Progress
from onceflow.spark.streaming_query import _lag_of
from onceflow.state.table_facts import CopyFacts, TableFacts
from onceflow.testing.waiting import wait_until

ORDER = ("flow", "topic", "partition", "step", "error", "table", "kind", "clock")
MONITOR = Path(__file__).parents[2] / "docs" / "monitor.md"


class Times:
    """Looks up timestamps, as `SourceTimes` does it."""

    def __init__(self) -> None:
        self.stamps: list[int] = []
        self.asked: list[Any] = []
        self.closed = threading.Event()

    def first(self, places: Any, limit: int) -> list[int]:
        self.asked.append((list(places), limit))
        if not self.stamps:
            raise BrokerUnreachableError("for the test")
        return self.stamps

    def close(self) -> None:
        self.closed.set()


class Query:
    """A query as far as an endpoint asks it."""

    def __init__(self, flow: str = "f", condition: str = "running") -> None:
        self.flow, self._condition = flow, condition
        self.batches: list[BatchSummary] = []
        self.lag: Mapping[str, Mapping[int, int]] = {}
        self.is_over = False
        self.since_ms, self.guarantee = 1_700_000_000_000, "exactly_once"
        self.failure: BaseException | None = None
        self.progress = Progress(f"prefix-{flow}", 3, {}, {}, 5, producer_id=17, producer_epoch=2)
        self.transaction_timeout_s: float | None = 60.0
        self.tables: list[TableFacts] = []
        self.standbys: int | None = None
        self.times = Times()
        self.hangs = threading.Event()
        self.hangs.set()

    @property
    def condition(self) -> str:
        self.hangs.wait(10)
        return self._condition

    def source_times(self) -> Times:
        return self.times

    def becomes(self, condition: str) -> None:
        self._condition = condition

    def start(self) -> Query:
        hooks.at(hooks.STARTED, where="driver", flow=self.flow, query=self)
        return self

    def commit(self, number: int, **more: Any) -> BatchSummary:
        """As `BatchSink` does it."""
        batch = BatchSummary(number, 10, **{"attempts": 1, **more})
        self.batches.append(batch)
        step = hooks.LOST if batch.lost else "end"
        hooks.at(step, where="driver", flow=self.flow, batch=number, summary=batch)
        return batch


@pytest.fixture
def endpoint() -> Iterator[onceflow.MetricsEndpoint]:
    with onceflow.serve_metrics(0) as endpoint:
        yield endpoint


def get(endpoint: onceflow.MetricsEndpoint, path: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Content-Type"]


def scrape(endpoint: onceflow.MetricsEndpoint) -> dict[tuple[str, ...], float]:
    """Values by name and labels, in the order of METRICS; then the bound of a bucket."""
    status, text, _ = get(endpoint, "/metrics")
    assert status == 200
    return {
        (sample.name, *(sample.labels[name] for name in (*ORDER, "le") if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_committed_batches_are_counted(endpoint: onceflow.MetricsEndpoint) -> None:
    query = Query().start()
    first = {"written": {"a": (5, 50), "b": (1, 9)}, "read": {"s": 7}, "seconds": {"write": 0.02, "end": 0.001}}
    query.commit(1, **first)
    query.commit(2, attempts=3, dead_letters=2, late=3, duplicates=4, dropped=5, timers_fired=6, expired=7)
    query.commit(3, written={"a": (2, 20)}, read={"s": 3}, state_lost=1, seconds={"write": 400.0})
    found = scrape(endpoint)
    assert found["onceflow_records_written_total", "f", "a"] == 7
    assert found["onceflow_bytes_written_total", "f", "a"] == 70
    assert found["onceflow_records_written_total", "f", "b"] == 1
    assert found["onceflow_offsets_read_total", "f", "s"] == 10
    expected = {"batches_committed": 3, "attempts": 5, "dead_letters": 2, "late_records": 3, "duplicates": 4}
    expected |= {"rows_dropped": 5, "timers_fired": 6, "rows_expired": 7, "state_lost": 1, "batches_lost": 0}
    assert {name: found[f"onceflow_{name}_total", "f"] for name in expected} == expected
    assert found["onceflow_last_batch", "f"] == 3
    assert found["onceflow_last_commit_timestamp_seconds", "f"] > 1.7e9
    assert found["onceflow_step_seconds_count", "f", "write"] == 2
    assert found["onceflow_step_seconds_sum", "f", "write"] == pytest.approx(400.02)
    assert found["onceflow_step_seconds_bucket", "f", "write", "0.01"] == 0
    assert found["onceflow_step_seconds_bucket", "f", "write", "0.025"] == 1
    assert found["onceflow_step_seconds_bucket", "f", "write", "120.0"] == 1
    assert found["onceflow_step_seconds_bucket", "f", "write", "+Inf"] == 2
    assert found["onceflow_batch_seconds_count", "f"] == 3


def test_what_is_not_committed_is_counted_apart(endpoint: onceflow.MetricsEndpoint) -> None:
    query = Query().start()
    at = {"where": "driver", "flow": "f", "batch": 1}
    for _ in range(2):
        hooks.at("begin", **at, producer=None, source=None)
        hooks.at(hooks.ABORTED, **at, error=BatchAbortedError("for the test"))
    hooks.at(hooks.ABORTED, **at)  # an observer of an older driver
    query.commit(1, lost=True, written={"a": (5, 50)})
    hooks.at(hooks.FAILED, **at, error=FencedError("for the test"))
    hooks.at(hooks.FAILED, **at, error=ValueError("for the test"))
    found = scrape(endpoint)
    assert found["onceflow_attempts_aborted_total", "f", "BatchAbortedError"] == 2
    assert found["onceflow_batches_lost_total", "f"] == 1
    assert found["onceflow_batches_committed_total", "f"] == 0
    assert (
        found["onceflow_failures_total", "f", "FencedError"] == found["onceflow_failures_total", "f", "ValueError"] == 1
    )
    assert found["onceflow_fences_total", "f"] == 1
    assert not [name for name in found if name[0] == "onceflow_records_written_total"]


def test_batches_before_the_endpoint_are_counted_once() -> None:
    query = Query()
    query.commit(1, written={"a": (1, 1)})
    with onceflow.serve_metrics(0) as endpoint:
        # Spark's thread has put the batch into the list, and announces it only after the query was added.
        late = BatchSummary(2, 10, written={"a": (10, 1)})
        query.batches.append(late)
        endpoint.add(query)
        hooks.at("end", where="driver", flow="f", batch=2, summary=late)
        query.commit(3, written={"a": (100, 1)})
        endpoint.add(query)
        assert scrape(endpoint)["onceflow_records_written_total", "f", "a"] == 111
        # Another run, after a reset: its numbers begin again.
        again = Query()
        again.start().commit(1, written={"a": (1000, 1)})
        endpoint.add(again)
        assert scrape(endpoint)["onceflow_records_written_total", "f", "a"] == 1111


def test_flows_of_a_process_share_an_endpoint(endpoint: onceflow.MetricsEndpoint) -> None:
    one, two = Query("one").start(), Query('two "2"\n\\').start()
    one.commit(1, written={"a": (1, 10)})
    two.commit(1, written={"a": (2, 20)})
    one.lag, two.lag = {"s": {0: 5, 1: 0}}, {"s": {0: 7}}
    found = scrape(endpoint)
    assert found["onceflow_records_written_total", "one", "a"] == 1
    assert found["onceflow_records_written_total", two.flow, "a"] == 2
    places = (("one", "s", "0"), ("one", "s", "1"), (two.flow, "s", "0"))
    assert [found[("onceflow_source_lag", *place)] for place in places] == [5, 0, 7]
    two.becomes("stopped")
    found = scrape(endpoint)
    assert (found["onceflow_up", "one"], found["onceflow_up", two.flow]) == (1, 0)
    assert ("onceflow_source_lag", two.flow, "s", "0") not in found, "it says nothing any more"


def test_tables_are_shown_while_their_query_runs(endpoint: onceflow.MetricsEndpoint) -> None:
    query = Query().start()
    rows = {"value": 7, "entry": 3, "timer": 5}
    assert scrape(endpoint)["onceflow_transaction_timeout_seconds", "f"] == 60
    query.tables = [
        TableFacts("waiting", 4, 2, rows, 8192, {"event": None, "processing": 1_500}, 10, 0.5, waiting_letters=True),
        TableFacts("unknown", 3, 0),
        TableFacts("spread", 3, 3, copies=CopyFacts(2, 1, 700, 3, 40, 5)),
    ]
    found = scrape(endpoint)
    copies = ["table_hosts", "table_partitions_waiting", "table_records_lacking", "standby_copies"]
    copies += ["standby_records_lacking", "table_partitions_moved"]
    assert [found[f"onceflow_{name}", "f", "spread"] for name in copies] == [2, 1, 700, 3, 40, 5]
    assert {kind: found["onceflow_table_rows", "f", "waiting", kind] for kind in rows} == rows
    assert found["onceflow_table_bytes", "f", "waiting"] == 8192
    assert found["onceflow_table_partitions", "f", "waiting"] == 4
    assert found["onceflow_table_partitions_open", "f", "waiting"] == 2
    assert found["onceflow_next_timer_timestamp_seconds", "f", "waiting", "processing"] == 1.5
    assert found["onceflow_letters_waiting", "f", "waiting"] == 10, "several letters of one origin are entries"
    assert found["onceflow_table_partitions_open", "f", "unknown"] == 0
    names = {name[0] for name in found if "unknown" in name}
    assert names == {"onceflow_table_partitions", "onceflow_table_partitions_open"}, "nothing is said of the rest"
    query.transaction_timeout_s = None
    assert ("onceflow_transaction_timeout_seconds", "f") not in scrape(endpoint)
    query.is_over = True
    assert not [name for name in scrape(endpoint) if "waiting" in name]


def test_standbys_are_shown_while_their_number_is_known(endpoint: onceflow.MetricsEndpoint) -> None:
    query, other = Query().start(), Query("other").start()
    query.standbys = 2
    found = scrape(endpoint)
    assert found["onceflow_standby_drivers", "f"] == 2
    assert ("onceflow_standby_drivers", "other") not in found
    query.standbys, other.standbys = None, 0
    found = scrape(endpoint)
    assert ("onceflow_standby_drivers", "f") not in found
    assert found["onceflow_standby_drivers", "other"] == 0
    other.is_over = True
    assert ("onceflow_standby_drivers", "other") not in scrape(endpoint)


def test_restores_are_counted(endpoint: onceflow.MetricsEndpoint) -> None:
    Query().start()
    for records, seconds in ((10, 0.2), (20, 400.0)):
        hooks.at(hooks.RESTORED, where="driver", flow="f", table="t", records=records, seconds=seconds)
    found = scrape(endpoint)
    assert found["onceflow_restored_records_total", "f", "t"] == 30
    assert found["onceflow_restore_seconds_count", "f", "t"] == 2
    assert found["onceflow_restore_seconds_sum", "f", "t"] == pytest.approx(400.2)
    assert found["onceflow_restore_seconds_bucket", "f", "t", "300.0"] == 1
    assert found["onceflow_restore_seconds_bucket", "f", "t", "900.0"] == 2


def test_latency_of_a_sample_of_the_batches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """From the first record of a partition to the commit. A look-up that fails is told once, and harms nothing."""
    monkeypatch.setattr(latency, "EVERY_S", 0.0)
    source = SourceRange({"s": {0: 5, 1: 9}}, {"s": {0: 7, 1: 9, 2: 3}})
    with onceflow.serve_metrics(0) as endpoint:
        query = Query().start()

        def commit(number: int, what: SourceRange | None = source) -> None:
            hooks.at("begin", where="driver", flow="f", batch=number, source=what, producer=None)
            query.commit(number)

        for number in (1, 2):
            commit(number)
        wait_until(lambda: len(query.times.asked) == 2, 10, "both were looked up")
        assert query.times.asked[0] == ([("s", 0, 5, 7), ("s", 2, 0, 3)], latency.PARTITIONS)
        query.times.stamps = [int(time.time() * 1000) - 4_000, int(time.time() * 1000) + 60_000]
        commit(3, None)
        commit(4, SourceRange({}, {}))
        commit(5)
        wait_until(lambda: scrape(endpoint).get(("onceflow_latency_seconds_count", "f")) == 2, 10, "it is counted")
        found = scrape(endpoint)
        assert 4 <= found["onceflow_latency_seconds_sum", "f"] < 20, "a clock that is ahead makes no negative age"
        assert found["onceflow_latency_seconds_bucket", "f", "0.005"] == 1
        monkeypatch.setattr(latency, "EVERY_S", 3600.0)
        commit(6)
        commit(7)
        wait_until(lambda: len(query.times.asked) == 4, 10, "the sixth batch is looked at")
        commit(8)
    assert query.times.closed.wait(10)
    assert len(query.times.asked) == 4, "one of them in a while"
    assert [record.levelname for record in caplog.records if "age of its records" in record.message] == ["WARNING"]


def test_connections_for_latency_are_those_of_the_query_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that was started again may have other settings, and one that has ended needs none."""
    monkeypatch.setattr(latency, "EVERY_S", 0.0)
    source = SourceRange({"s": {0: 5}}, {"s": {0: 7}})
    meter = latency.LatencyMeter(lambda flow, age_s: None)

    def commit(query: Query) -> None:
        query.times.stamps = [1]
        before = len(query.times.asked)
        meter.begun(query.flow, source)
        meter.committed(query.flow, query.source_times, time.time())
        wait_until(lambda: len(query.times.asked) > before, 10, "it was looked up")

    first, again, other = Query(), Query(), Query("other")
    commit(first)
    commit(first)
    assert not first.times.closed.is_set()
    commit(again)
    assert first.times.closed.wait(10)
    commit(other)
    assert not again.times.closed.is_set()
    later_s = time.monotonic() + 2 * latency._IDLE_S
    monkeypatch.setattr(latency, "time", SimpleNamespace(monotonic=lambda: later_s))
    commit(other)
    assert again.times.closed.wait(10), "its flow has ended, and another one goes on"
    meter.close()


def test_what_a_driver_says_of_itself(endpoint: onceflow.MetricsEndpoint) -> None:
    """What /status says is what `onceflow status` reads."""
    query, quiet = Query().start(), Query("quiet", "failed").start()
    query.lag = {"s": {0: 5, 1: 2}}
    query.tables = [TableFacts("t", 4, 2, {"value": 7, "entry": 3, "timer": 5}, 8192, {"processing": None}, 10, 0.5)]
    query.commit(
        3, records=5, read={"s": 8, "r": 1}, path="4 tasks", dead_letters=2, seconds={"write": 0.25, "end": 0.5}
    )
    quiet.failure = ValueError("with a secret of a record")
    hooks.at(hooks.ABORTED, where="driver", flow="f", batch=1, error=ValueError("no"))
    status, text, kind = get(endpoint, "/status")
    assert (status, kind) == (200, "application/json")
    assert "secret" not in text
    (first, second), problem = ask_endpoint(f"http://127.0.0.1:{endpoint.port}", 10)
    assert problem == ""
    assert (first.flow, first.condition, first.since_ms) == ("prefix-f", "running", 1_700_000_000_000)
    assert (first.host, first.pid, first.version) == (socket.gethostname(), os.getpid(), onceflow.__version__)
    assert (first.batch, first.producer_id, first.producer_epoch, first.lag) == (3, 17, 2, 7)
    assert first.last_batch == LastBatch(5, 1, 0.75, "4 tasks", 9)
    assert first.counts["dead_letters"] == 2
    assert first.counts["attempts_aborted"] == 1
    assert [asdict(table) for table in first.tables] == [asdict(table) for table in query.tables]
    assert (second.flow, second.condition, second.failure) == ("prefix-quiet", "failed", "ValueError")
    assert (second.lag, second.last_batch) == (None, None)


def probes(endpoint: onceflow.MetricsEndpoint) -> tuple[int, int]:
    return get(endpoint, "/healthz")[0], get(endpoint, "/readyz")[0]


def test_probes(endpoint: onceflow.MetricsEndpoint) -> None:
    assert probes(endpoint) == (200, 503), "nothing has been started yet"
    query = Query(condition="starting").start()
    assert probes(endpoint) == (200, 503)
    query.becomes("running")
    assert probes(endpoint) == (200, 200)
    other = Query("g", "starting").start()
    assert probes(endpoint) == (200, 503)
    other.becomes("failed")
    assert probes(endpoint) == (503, 503)
    assert json.loads(get(endpoint, "/healthz")[1]) == {"flows": {"f": "running", "g": "failed"}}
    other = Query("g").start()
    assert probes(endpoint) == (200, 200), "started again"
    other.becomes("stopped")
    assert probes(endpoint) == (200, 200), "a query that has read all of its source holds nothing up"
    query.becomes("stopped")
    assert probes(endpoint) == (200, 503)


def test_a_jvm_that_does_not_answer_holds_no_scrape_up(
    endpoint: onceflow.MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query().start()
    assert probes(endpoint) == (200, 200)
    monkeypatch.setattr(watching, "_ANSWER_S", 0.05)
    query.hangs.clear()
    query.becomes("failed")
    assert probes(endpoint) == (200, 200), "what was known last"
    assert scrape(endpoint)["onceflow_up", "f"] == 1
    query.hangs.set()
    monkeypatch.setattr(watching, "_ANSWER_S", 10)
    assert probes(endpoint) == (503, 503)


def test_an_error_of_the_metrics_is_none_of_the_batch(
    endpoint: onceflow.MetricsEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query().start()
    query.commit(1, seconds=None)
    assert "flow f: the metrics of batch 1 are incomplete" in caplog.text
    query.commit(2, written={"a": (1, 1)})
    assert scrape(endpoint)["onceflow_records_written_total", "f", "a"] == 1


def test_formats_and_paths(endpoint: onceflow.MetricsEndpoint) -> None:
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"
    assert get(endpoint, "/metrics")[2].startswith("text/plain")
    _, text, kind = get(endpoint, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert get(endpoint, "/metrics?name=x")[0] == 200
    assert get(endpoint, "/secret")[0] == 404


def is_closed(client: socket.socket, within_s: float) -> bool:
    """Whether the endpoint closes the connection in time."""
    client.settimeout(within_s)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def request_threads() -> set[threading.Thread]:
    """The threads that answer a client of any server of this process; others may come and go with other tests."""
    return {thread for thread in threading.enumerate() if "process_request_thread" in thread.name}


@pytest.mark.slow
def test_clients_that_stay_take_a_few_threads_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HANDLERS_MAX", 3)
    with onceflow.serve_metrics(0) as endpoint:
        before = request_threads()

        def handlers() -> int:
            return len(request_threads() - before)

        with ExitStack() as stack:
            address = "127.0.0.1", endpoint.port
            clients = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(10)]
            assert [is_closed(client, 5) for client in clients[3:]] == [True] * 7
            assert handlers() == 3
            assert not is_closed(clients[0], 0.01)
            clients[0].close()
            wait_until(lambda: handlers() == 2, 10, "the handler of a client that has gone ends")
            assert get(endpoint, "/metrics")[0] == 200
        for _ in range(7):  # each of them gives its place back
            wait_until(lambda: handlers() == 0, 10, "the other handlers end")
            assert get(endpoint, "/metrics")[0] == 200


def test_a_request_that_comes_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_CLIENT_S", 0.5)
    with (
        onceflow.serve_metrics(0) as endpoint,
        socket.create_connection(("127.0.0.1", endpoint.port), 5) as client,
    ):
        client.sendall(b"GET /metrics HTTP/1.0\r\n")
        began = time.monotonic()
        while not is_closed(client, 0.1):
            assert time.monotonic() - began < 5
            with suppress(ConnectionError):
                client.sendall(b"X")
        assert time.monotonic() - began > 0.4
        assert get(endpoint, "/metrics")[0] == 200


def test_nothing_is_observed_after_the_end() -> None:
    with onceflow.serve_metrics(0) as endpoint:
        assert len(hooks._observers) == 1
        url = endpoint.url
    endpoint.close()
    assert hooks._observers == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)
    with onceflow.serve_metrics(endpoint.port):
        pass  # the port is free again


def test_a_port_in_use_is_an_error(endpoint: onceflow.MetricsEndpoint) -> None:
    with pytest.raises(EnvironmentUnusableError, match=f"127.0.0.1:{endpoint.port}") as caught:
        onceflow.serve_metrics(endpoint.port)
    assert "in use" in str(caught.value)
    assert "choose another port" in str(caught.value)
    with pytest.raises(EnvironmentUnusableError, match=r"192\.0\.2\.1:0"):
        onceflow.serve_metrics(0, "192.0.2.1")  # an address of no machine


@pytest.mark.parametrize("port", [-1, 65536, "9404", True, None])
def test_a_port_that_is_none(port: Any) -> None:
    with pytest.raises(OptionError, match="port"):
        onceflow.serve_metrics(port)


def test_distribution() -> None:
    found = Distribution()
    for seconds in (0.0, 0.005, 0.0051, 120.0, 121.0):
        found.add(seconds)
    cumulative = dict(found.cumulative())
    assert [cumulative[bound] for bound in ("0.005", "0.01", "60.0", "120.0", "+Inf")] == [2, 3, 3, 4, 5]
    assert sorted(BUCKETS_S) == list(BUCKETS_S)


@pytest.mark.parametrize(
    "sources, expected",
    [
        ([], {}),
        ([{"endOffset": {"s": {"0": 5, "1": 7}}, "latestOffset": {"s": {"0": 9, "1": 7}}}], {"s": {0: 4, 1: 0}}),
        ([{"endOffset": {"s": {"0": 5}}, "latestOffset": None}], {}),
        ([{"endOffset": 3, "latestOffset": 4}], {}),
        # A partition that was added since; an end behind which the log was cut.
        ([{"endOffset": {"s": {"0": 5}}, "latestOffset": {"s": {"0": 4, "1": 8}}}], {"s": {0: 0, 1: 0}}),
    ],
)
def test_lag_from_the_report_of_spark(sources: Any, expected: Any) -> None:
    assert _lag_of({"sources": sources}) == expected


def test_the_page_names_all_metrics() -> None:
    section = MONITOR.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(onceflow_\w+)` \| (\w+) \| ([^|]*) \|", section, re.MULTILINE)
    told = [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows]
    assert told == [(name, metric.kind, metric.labels) for name, metric in METRICS.items()]


def test_a_scrape_shows_all_metrics(endpoint: onceflow.MetricsEndpoint) -> None:
    _, text, _ = get(endpoint, "/metrics")
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert kinds == {name: metric.kind for name, metric in METRICS.items()}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(EnvironmentUnusableError, match=r"onceflow\[metrics\]"):
        onceflow.serve_metrics(0)
    assert hooks._observers == []
