"""The service `files`: links that pass once, and what becomes of them; then the whole demo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from downloads import Downloads, Failure, Places, RefusedError
from fetch import Fetch, LinkError, link_of
from files import Once, files_flow
from test_downloads import LIMITS, content_at, reply, serve
from test_rows import GOOD, HEAD

import onceflow
from onceflow import Record
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


@pytest.fixture
def driver(tmp_path: Path) -> ProcessorDriver:
    places = Places(frozenset({"example.com", "127.0.0.1:8080"}), str(tmp_path))
    return ProcessorDriver(Once(places, "skipped"), on_error="dead-letter", dead_letter_topic="failed")


def _record(link: object, **more: object) -> bytes:
    return json.dumps({"link": link, **more}).encode()


LINK = "https://example.com/a.csv"


def test_a_link_passes_once(driver: ProcessorDriver) -> None:
    first, copy = _record(LINK), _record(LINK, note="once more")
    assert [record.value for record in driver.send(LINK.encode(), first)] == [first]
    assert driver.send(LINK.encode(), copy) == [Record(LINK.encode(), copy, topic="skipped")]
    assert driver.state(LINK.encode()) == 2


def test_two_copies_in_one_batch_pass_once(driver: ProcessorDriver) -> None:
    outputs = driver.send_many([(LINK.encode(), _record(LINK)), (LINK.encode(), _record(LINK))])
    assert [record.topic == "skipped" for record in outputs] == [False, True]


def test_again_passes_again(driver: ProcessorDriver) -> None:
    driver.send(LINK.encode(), _record(LINK))
    assert [record.topic for record in driver.send(LINK.encode(), _record(LINK, again=True))] != ["skipped"]
    assert [record.topic for record in driver.send(LINK.encode(), _record(LINK, again="yes"))] == ["skipped"]


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "no value"),
        (b"http://example.com/a.csv", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"[]", "not like"),
        (b"{}", "not like"),
        (_record(17), "not like"),
        (_record(None), "not like"),
        (_record("https://example.com/\n"), "printable"),
        (_record("https://example.com/\ud800"), "printable"),
        (_record(LINK, note="x" * 300_000), "more than 10000 bytes"),
        (b'{"link": "https://example.com/a", "link": "https://example.com/b"}', "more than one link"),
    ],
)
def test_a_bad_record_is_a_dead_letter(driver: ProcessorDriver, value: bytes | None, message: str) -> None:
    assert driver.send(b"https://example.com/a", value) == []
    [dead_letter] = driver.dead_letters
    assert dead_letter.value == value
    headers = dict(dead_letter.headers)
    assert headers["onceflow.error.class"] == b"LinkError"
    assert message in (headers["onceflow.error.message"] or b"").decode()
    assert driver.states == {}


def test_a_bad_record_does_no_harm_to_others(driver: ProcessorDriver) -> None:
    good = (LINK.encode(), _record(LINK))
    assert len(driver.send_many([(LINK.encode(), b"no JSON"), good, (b"", None)])) == 1
    assert len(driver.dead_letters) == 2


@pytest.mark.parametrize(
    "link",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost/a.csv",
        "http://127.0.0.1/a.csv",
        "http://127.0.0.1:8081/a.csv",
        "http://[::1]:8080/a.csv",
        "https://example.com.evil.org/a.csv",
        "https://example.com@evil.org/a.csv",
        "https://user:secret@example.com/a.csv",
        "https://example.com:8443/a.csv",
        "https://example.com:99999/a.csv",
        "https://example.com/ä.csv",
        "https:///a.csv",
        "file:///etc/passwd",
        "ftp://example.com/a.csv",
        "data:text/csv,id",
        "//example.com/a.csv",
        "/etc/passwd",
        "../outside.csv",
        "sub/../../outside.csv",
        "",
    ],
)
def test_a_link_to_elsewhere_is_refused(driver: ProcessorDriver, link: str) -> None:
    assert driver.send(link.encode(), _record(link)) == []
    assert dict(driver.dead_letters[0].headers)["onceflow.error.class"] == b"RefusedError"


def test_nothing_is_allowed_unless_it_is_named() -> None:
    for link in (LINK, "a.csv"):
        with pytest.raises(RefusedError):
            Places().check(link)


def test_a_symbolic_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.csv").write_text("secret")
    (inside / "a.csv").symlink_to(tmp_path / "secret.csv")
    with pytest.raises(RefusedError, match="out of the folder"):
        Places(root=str(inside)).check("a.csv")


def test_a_symbolic_link_in_circles_leads_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to("b.csv")
    (tmp_path / "b.csv").symlink_to("a.csv")
    assert isinstance(content_at(tmp_path, "a.csv"), Failure)


@pytest.mark.parametrize("link", ["a.csv", "sub/../a.csv", "https://example.com", "HTTPS://EXAMPLE.COM/a?b=c"])
def test_what_is_named_is_allowed(tmp_path: Path, link: str) -> None:
    Places(frozenset({"example.com"}), str(tmp_path)).check(link)


def test_what_a_link_says() -> None:
    assert link_of(_record("a.csv")) == ("a.csv", False)
    assert link_of(_record("a.csv", again=True)) == ("a.csv", True)
    with pytest.raises(LinkError):
        link_of(None)


# ---- from links to rows ------------------------------------------------------------------------------


def _fetched(root: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    batch = pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)
    return [row for out in Fetch(Downloads(Places(root=str(root)), LIMITS), "-x")([batch]) for row in out.to_pylist()]


def test_a_file_becomes_records(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{HEAD}1,a,12.50,2024-02-29,rent\nbad\n")
    good, bad, loaded = _fetched(tmp_path, {"key": b"a.csv", "value": _record("a.csv")})
    assert (good["topic"], good["key"], json.loads(good["value"])) == (
        "transactions-x",
        b"a",
        {**GOOD, "link": "a.csv"},
    )
    assert (bad["topic"], bad["key"], bad["value"]) == ("bad-rows-x", b"a.csv", b"bad")
    assert {each["key"]: each["value"] for each in bad["headers"]} == {
        "link": b"a.csv",
        "line": b"3",
        "cause": b"1 columns in place of 5",
    }
    assert (loaded["topic"], json.loads(loaded["value"])) == ("loaded-x", {"link": "a.csv", "rows": 1, "bad_rows": 1})


def test_a_link_that_leads_to_nothing_is_not_lost(tmp_path: Path) -> None:
    value = _record("a.csv", id=17)
    [failed] = _fetched(tmp_path, {"key": b"a.csv", "value": value, "headers": [{"key": "from", "value": b"me"}]})
    assert (failed["topic"], failed["key"], failed["value"]) == ("failed-x", b"a.csv", value)
    assert {each["key"]: each["value"] for each in failed["headers"]} == {
        "from": b"me",
        "onceflow.error.class": b"FinalError",
        "onceflow.error.message": b"there is no such file",
        "link": b"a.csv",
        "attempts": b"1",
    }


@pytest.mark.long
def test_a_file_of_a_gigabyte_is_never_in_memory() -> None:
    """Download, parse and Arrow batches in a process of their own, which says how much memory it ever had.

    Linux hands ``ru_maxrss`` on: that of a new program begins at what the process had that started it. ``VmHWM`` is of
    the program's own memory.
    """
    from onceflow_workshop.demos.files_big import big_bytes, big_parts
    from onceflow_workshop.demos.files_rows import HEAD as BIG_HEAD

    rows = 10**9 // (big_bytes(1) - big_bytes(0))

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        reply(to, b"", Content_Length=str(big_bytes(rows)))
        to.wfile.write(BIG_HEAD)
        for part in big_parts(rows):
            to.wfile.write(part)

    code = """
import json, resource, sys
from pathlib import Path
import pyarrow as pa
from downloads import Downloads, Limits, Places
from fetch import Fetch
from test_files import SCHEMA

link = f"http://{sys.argv[1]}/big.csv"
def max_kib():
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

batch = pa.RecordBatch.from_pylist([{"value": json.dumps({"link": link}).encode()}], schema=SCHEMA)
source = Downloads(Places(frozenset({sys.argv[1]})), Limits(deadline_s=170))
before = max_kib()
counts = {}
for out in Fetch(source)([batch]):
    for topic in out["topic"].to_pylist():
        counts[topic] = counts.get(topic, 0) + 1
print(json.dumps([counts, before, max_kib()]))
"""
    with serve(answer) as place:
        child = subprocess.run(
            [sys.executable, "-c", code, place], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    counts, before_kib, max_kib = json.loads(child.stdout)
    assert counts == {"transactions": rows, "loaded": 1}
    assert max_kib < 300 * 1024
    assert max_kib - before_kib < 150 * 1024


# ---- the flow, on topics in memory -------------------------------------------------------------------


@pytest.mark.integration
def test_links_become_rows(tmp_path: Path, onceflow_spark: Any) -> None:
    (tmp_path / "a.csv").write_text(f"{HEAD}1,a,12.50,2024-02-29,rent\nbad\n")

    def files_here(flow: onceflow.Flow) -> onceflow.FlowWriter:
        return files_flow(flow, Places(root=str(tmp_path)), LIMITS)

    flow = FlowDriver(files_here)
    flow.send_many("links", [(None, _record("a.csv")), (None, _record("b.csv")), (None, b"no JSON")])
    flow.send("links", None, _record("a.csv"))
    assert [each.value for each in flow.read("transactions")] == [{**GOOD, "link": "a.csv"}]
    assert [each.value for each in flow.read("bad-rows")] == [b"bad"]
    assert [each.value for each in flow.read("loaded")] == [{"link": "a.csv", "rows": 1, "bad_rows": 1}]
    assert [each.key for each in flow.read("skipped")] == ["a.csv"]
    assert sorted(dict(each.headers)["onceflow.error.class"] for each in flow.read("failed")) == [
        b"FinalError",
        b"LinkError",
    ]


# ---- the whole ---------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_files_survive_kills(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("files", "--seed", "3", records=45, kills=1)
    assert result["in"] == 45
    assert result["files"] > 20
    assert result["out"] > 2000
    assert result["dead_letters"] > 20


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_many_files_survive_many_kills(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("files", records=300, kills=3)
    assert result["state_deleted"] >= 1
