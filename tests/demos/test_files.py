"""The demo `files`: what it generates and expects; that the service does so; that the audit sees what is wrong."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bank_rows import read_rows
from downloads import Downloads, Limits, Places
from fetch import Fetch
from files import Once

from onceflow.client.deadline import Deadline
from onceflow.errors import OptionError
from onceflow.protocol.partitioners import key_partitions
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.demos import files_big, files_rows
from onceflow_workshop.demos import files_data as data
from onceflow_workshop.demos.audit import KINDS, Expected, Findings, Message, Origin, compare
from onceflow_workshop.demos.files import Files, FilesChoices, run
from onceflow_workshop.demos.files_data import Links
from onceflow_workshop.demos.files_server import FilesServer, write_files

SEED = 42
COUNT = 70
PARTITIONS = 3
TOPICS = ("transactions", "bad-rows", "loaded", "failed", "skipped")
LIMITS = Limits(attempts=data.ATTEMPTS, backoff_s=0.01, timeout_s=0.5, deadline_s=2)
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


# ---- what is generated -------------------------------------------------------------------------------


def test_a_seed_gives_the_same_links_and_files_again() -> None:
    one, same, other = Links(SEED, COUNT), Links(SEED, COUNT), Links(SEED + 1, COUNT)
    assert one.cases == same.cases
    assert [one.content(case) for case in one.cases] == [same.content(case) for case in same.cases]
    assert one.cases != other.cases


def test_every_kind_of_link_is_there() -> None:
    kinds = Counter(case.kind for case in Links(SEED, 300).cases)
    assert set(kinds) == set(data.KINDS)
    assert kinds["csv"] > 20
    assert kinds["slow"] == kinds["stalls"] == 1  # they take their time


def test_a_copy_repeats_a_link_that_came_before() -> None:
    links = Links(SEED, 300)
    copies = [case for case in links.cases if case.of is not None]
    assert len(copies) > 10
    for case in copies:
        assert case.of is not None
        assert case.of < case.number
        assert links.link(case) == links.link(links.cases[case.of])
        assert links.value(case) != links.value(links.cases[case.of])


@pytest.mark.long
def test_one_percent_of_the_rows_is_bad_in_every_way() -> None:
    links = Links(SEED, 1500)
    rows = [row for case in links.loaded() for row in links.rows(case)]
    causes = Counter(row.cause for row in rows if row.transaction is None)
    assert 0.007 < causes.total() / len(rows) < 0.013
    assert {cause for _, cause in (*files_rows.BAD_CSV, *files_rows.BAD_JSONL)} <= set(causes)


def test_ids_are_unique_in_a_file_and_accounts_belong_to_one() -> None:
    links = Links(SEED, COUNT)
    assert len({record.identity for record in links.expected_transactions()}) == len([*links.expected_transactions()])
    owner: dict[bytes | None, str] = {}
    for record in links.expected_transactions():
        assert owner.setdefault(record.key, record.identity.split()[0]) == record.identity.split()[0]


def test_the_old_content_of_a_file_that_changes_shares_no_row_with_the_new_one() -> None:
    links = Links(SEED, COUNT)
    case = next(case for case in links.cases if case.kind == "changes")
    old = {row.transaction["id"] for row in links.rows(case, "old") if row.transaction}
    assert old
    assert not old & {row.transaction["id"] for row in links.rows(case) if row.transaction}


def test_the_rows_of_the_big_file_all_have_one_length() -> None:
    content = b"".join([files_rows.HEAD, *files_big.big_parts(9_000)])
    assert len(content) == files_big.big_bytes(9_000)
    assert len(set(map(len, content.split(b"\n")[1:-1]))) == 1


def test_the_big_file_becomes_what_is_expected_of_it(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    path.write_bytes(b"".join([files_rows.HEAD, *files_big.big_parts(2_000)]))
    with path.open("rb") as file:
        rows = [row.transaction for row in read_rows(file, "csv")]
    assert all(row is not None for row in rows)
    for number, row in enumerate(rows):
        expected = json.loads(files_big.big_transaction(number, "l")[1])
        assert row == {name: value for name, value in expected.items() if name != "link"}


# ---- the server --------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[FilesServer]:
    made = FilesServer()
    with made.serving(Links(SEED, COUNT, f"http://{made.place}")):
        yield made


def _ask(server: FilesServer, kind: str) -> tuple[Links, data.Case, Callable[[], bytes]]:
    links = Links(SEED, COUNT, f"http://{server.place}")
    case = next(case for case in links.cases if case.kind == kind)

    def get() -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(links.link(case), timeout=5) as answer:
            content: bytes = answer.read()
            return content

    return links, case, get


@pytest.mark.parametrize("kind", ["csv", "jsonl.gz", "chunked", "redirected", "typed", "empty"])
def test_the_server_gives_what_was_generated(server: FilesServer, kind: str) -> None:
    links, case, get = _ask(server, kind)
    assert get() == links.content(case)


def test_a_busy_server_recovers(server: FilesServer) -> None:
    links, case, get = _ask(server, "busy")
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get()
        refused.value.close()
    assert get() == links.content(case)
    assert server.requests[links.name(case)] == 3


def test_a_file_that_is_cut_has_half_its_bytes(server: FilesServer) -> None:
    import http.client

    links, case, get = _ask(server, "cut")
    with pytest.raises(http.client.IncompleteRead) as cut:
        get()
    whole = links.content(case)
    assert cut.value.partial == whole[: len(whole) // 2]


def test_what_nobody_made_is_not_there(server: FilesServer) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        opener.open(f"http://{server.place}/../../etc/passwd", timeout=5)
    refused.value.close()


# ---- the service's code against what is expected -----------------------------------------------------


class Run:
    """All links through the service's code, in this process."""

    def __init__(self, links: Links, server: FilesServer, folder: Path) -> None:
        self.links = links
        self._expected: dict[str, list[Expected]] = {}
        places = Places(frozenset([server.place]), str(folder))
        driver = ProcessorDriver(Once(places, "skipped"), on_error="dead-letter", dead_letter_topic="failed")
        self.origins: dict[str, Origin] = {}
        for offset, case in enumerate(links.cases):
            self.origins[case.identity] = Origin("links", 0, offset)
            driver.send(_spark_key(links.value(case)), links.value(case), topic="links", run=False)
        passed = driver.run()
        # What names a topic is a side output, and never comes to the fetch step.
        links_to_fetch = [record for record in passed if record.topic in (None, "links")]
        elsewhere = [*(record for record in passed if record.topic not in (None, "links")), *driver.dead_letters]
        batch = pa.RecordBatch.from_pylist(
            [
                {
                    "key": record.key,
                    "value": record.value,
                    "topic": None,
                    "headers": [{"key": name, "value": value} for name, value in record.headers],
                    "timestamp": None,
                }
                for record in links_to_fetch
            ],
            schema=SCHEMA,
        )
        self.found: dict[str, list[Message]] = {topic: [] for topic in TOPICS}
        for record in elsewhere:
            self._found(str(record.topic), record.key, record.value, tuple(record.headers))
        for out in Fetch(Downloads(places, LIMITS, str(folder)))([batch]):
            assert out.schema == SCHEMA
            for row in out.to_pylist():
                headers = tuple((each["key"], each["value"]) for each in row["headers"] or ())
                self._found(row["topic"], row["key"], row["value"], headers)
        self.table = {_link(case, links): driver.state(_link(case, links)) for case in links.cases}

    def _found(self, topic: str, key: bytes | None, value: bytes | None, headers: Any) -> None:
        place = int(key_partitions(pa.array([key], pa.binary()), PARTITIONS)[0])
        messages = self.found[topic]
        messages.append(Message(place, len(messages), key, value, headers))

    def expected(self, topic: str) -> list[Expected]:
        if topic not in self._expected:
            self._expected[topic] = list(getattr(self.links, f"expected_{topic.replace('-', '_')}")())
        return self._expected[topic]

    def audit(self, topic: str, found: list[Message] | None = None) -> Findings:
        return compare(
            topic,
            self.expected(topic),
            self.found[topic] if found is None else found,
            partitions=PARTITIONS,
            identify=lambda message: data.identify(topic, message, self.origins),
        )


def _spark_key(value: bytes | None) -> bytes:
    """What the plain PySpark in front of the step makes of a value."""
    try:
        link = json.loads(value or b"")["link"]
    except (ValueError, KeyError):
        return b""
    return str(link).encode()


def _link(case: data.Case, links: Links) -> bytes:
    return links.link(case).encode()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("root")
    server = FilesServer()
    links = Links(SEED, COUNT, f"http://{server.place}")
    write_files(links, folder)
    with server.serving(links):
        return Run(links, server, folder)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_service_writes_exactly_what_is_expected(finished: Run, topic: str) -> None:
    findings = finished.audit(topic)
    assert findings.holds, findings.examples
    assert findings.found == findings.expected > 0


def test_every_link_ends_in_one_place(finished: Run) -> None:
    ends = sum(len(finished.found[topic]) for topic in ("loaded", "failed", "skipped"))
    assert ends == len(finished.links.cases)


def test_every_cause_is_the_right_one(finished: Run) -> None:
    def identity(message: Message) -> str | None:
        return data.identify("failed", message, finished.origins)

    assert finished.links.wrong_causes(finished.found["failed"], finished.origins, identity) == []


def test_the_state_counts_the_links(finished: Run) -> None:
    counted = {link: count for link, count in finished.table.items() if count is not None}
    assert counted == finished.links.expected_table()


# ---- the audit sees what is wrong --------------------------------------------------------------------


def _lose(found: list[Message]) -> None:
    del found[3]


def _double(found: list[Message]) -> None:
    found.append(found[3]._replace(offset=10_000))


def _add_foreign(found: list[Message]) -> None:
    found.append(found[3]._replace(value=b'{"id": "9999", "link": "http://elsewhere/"}', headers=()))


def _change(found: list[Message]) -> None:
    value = found[3].value or b""
    found[3] = found[3]._replace(value=value[:-1] + b" " + value[-1:])


def _misplace(found: list[Message]) -> None:
    found[3] = found[3]._replace(partition=(found[3].partition + 1) % PARTITIONS)


@pytest.mark.parametrize("topic", ["transactions", "bad-rows", "loaded"])
@pytest.mark.parametrize(
    "mutate, kind",
    [
        (_lose, "lost"),
        (_double, "duplicated"),
        (_add_foreign, "unexpected"),
        (_change, "wrong"),
        (_misplace, "misplaced"),
    ],
)
def test_the_audit_sees_damage(finished: Run, topic: str, mutate: Callable[[list[Message]], None], kind: str) -> None:
    found = list(finished.found[topic])
    mutate(found)
    assert finished.audit(topic, found).counts == {**dict.fromkeys(KINDS, 0), kind: 1}


def test_the_audit_sees_half_a_file(finished: Run) -> None:
    """The first half of the content that the server had before: no row of it may be there."""
    links = finished.links
    case = next(case for case in links.cases if case.kind == "changes")
    rows = [row.transaction for row in links.rows(case, "old") if row.transaction]
    torn = [
        Message(0, 0, str(row["account"]).encode(), json.dumps({**row, "link": links.link(case)}).encode())
        for row in rows[: len(rows) // 2 + 1]
    ]
    counts = finished.audit("transactions", finished.found["transactions"] + torn).counts
    assert counts["unexpected"] == len(torn) > 0


@pytest.mark.parametrize("header", ["onceflow.error.class", "onceflow.error.message", "attempts", "link"])
def test_the_audit_sees_a_wrong_cause(finished: Run, header: str) -> None:
    failed = list(finished.found["failed"])
    at = next(n for n, message in enumerate(failed) if _has(message, "attempts"))
    headers = tuple((name, b"another" if name == header else value) for name, value in failed[at].headers)
    failed[at] = failed[at]._replace(headers=headers)

    def identity(message: Message) -> str | None:
        return data.identify("failed", message, finished.origins)

    problems = finished.links.wrong_causes(failed, finished.origins, identity)
    assert len(problems) == 1
    assert "another" in problems[0]


def _has(message: Message, header: str) -> bool:
    return any(name == header for name, _ in message.headers)


def test_the_audit_of_the_big_file_sees_what_is_wrong() -> None:
    link, count = "http://127.0.0.1:1/big.csv", 50
    messages = [Message(0, n, *files_big.big_transaction(n, link)) for n in range(count)]
    assert _big(link, count, messages) == {"lost": 0, "duplicated": 0, "wrong": 0}
    assert _big(link, count, messages[1:]) == {"lost": 1, "duplicated": 0, "wrong": 0}
    assert _big(link, count, [*messages, messages[7]]) == {"lost": 0, "duplicated": 1, "wrong": 0}
    changed = (messages[7].value or b"").replace(b"2024-01-31", b"2024-01-30")
    assert _big(link, count, [*messages[:7], messages[7]._replace(value=changed), *messages[8:]])["wrong"] == 1
    assert _big(link, count, [*messages[:7], messages[7]._replace(key=b"x"), *messages[8:]])["wrong"] == 1
    foreign = files_big.big_transaction(count, link)
    assert _big(link, count, [*messages, Message(0, 0, *foreign)])["wrong"] == 1


def _big(link: str, count: int, messages: list[Message]) -> Mapping[str, Any]:
    audit = files_big.BigFile(link, count)
    assert not audit.takes(Message(0, 0, b"acc", b'{"id":"000000001","link":"http://another"}'))
    assert all(audit.takes(message) for message in messages)
    assert audit.found == len(messages)
    return audit.counts


def test_a_null_record_is_identified_by_its_origin() -> None:
    origins = {"link-00007": Origin("links-x", 2, 11), "link-00008": Origin("links-x", 2, 12)}
    headers = tuple((f"onceflow.origin.{name}", value) for name, value in
                    (("topic", b"links-x"), ("partition", b"2"), ("offset", b"12")))  # fmt: skip
    assert data.identify("failed", Message(0, 0, b"", None, headers), origins) == "link-00008"
    assert data.identify("failed", Message(0, 0, b"", None), origins) is None


def test_the_patterns_of_causes_are_no_wildcards() -> None:
    for kind in data.KINDS.values():
        assert not re.fullmatch(kind.message, "something else went wrong")


# ---- the demo ----------------------------------------------------------------------------------------


def test_too_few_links_for_the_kills_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="too few"):
        run(FilesChoices(records=40, kills=2))


@pytest.fixture
def make_demo(tmp_path: Path) -> Iterator[Callable[[FilesChoices], Files]]:
    made: list[Files] = []

    def make(choices: FilesChoices) -> Files:
        made.append(Files(choices, "127.0.0.1:1", tmp_path, Deadline(10, "a test")))
        return made[-1]

    yield make
    for demo in made:
        demo.server.close()


def test_the_service_is_told_where_files_may_come_from(make_demo: Callable[[FilesChoices], Files]) -> None:
    demo = make_demo(FilesChoices(records=60, seed=SEED, kills=1))
    command = demo.command(demo.links[0])
    assert command[command.index("--host") + 1] == demo.server.place
    assert command[command.index("--root") + 1] == str(demo.root)
    assert int(command[command.index("--batch") + 1]) * demo.batches <= 60
    assert Path(command[1]).name == "files.py"


def test_the_demo_writes_every_link(make_demo: Callable[[FilesChoices], Files]) -> None:
    demo = make_demo(FilesChoices(records=60, seed=SEED, kills=1))
    inputs = list(demo.inputs())
    assert [record.value for record in inputs] == [demo.wanted.value(case) for case in demo.wanted.cases]
    assert len({record.identity for record in inputs}) == 60
    assert any(record.key is None for record in inputs)


def test_the_big_file_is_one_more(make_demo: Callable[[FilesChoices], Files]) -> None:
    demo = make_demo(FilesChoices(records=60, seed=SEED, kills=1, big=True))
    assert len(list(demo.inputs())) == 61
    assert 0.999e9 < files_big.big_bytes(demo.wanted.big_rows) <= 1e9
    assert [record.identity for record in demo.wanted.expected_loaded()].count(demo.wanted.big_link) == 1
