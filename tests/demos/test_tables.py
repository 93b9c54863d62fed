"""The demo `tables`: what it generates and expects; that its fold is one; that its check sees what is wrong."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing.processor_driver import ProcessorDriver
from onceflow.testing.waiting import wait_until
from onceflow_workshop.demos import tables_questions as questions
from onceflow_workshop.demos.audit import Origin
from onceflow_workshop.demos.tables import SERVICE, TablesChoices
from onceflow_workshop.demos.tables_asking import Asker, Figures, Stream, events_of
from onceflow_workshop.demos.tables_check import Answer, Change, Checked, Fold, StreamCheck, check
from onceflow_workshop.demos.tables_data import Movements, wrong_rows
from onceflow_workshop.demos.tables_questions import offsets_of, read_answer
from onceflow_workshop.demos.tables_report import Killed, answers_table, lines, silences

SEED, PARTITIONS = 7, 2

# ---- data --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> Any:
    spec = importlib.util.spec_from_file_location("balances_of_the_demo", SERVICE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_the_service_of_the_demo() -> None:
    assert SERVICE.samefile(Path(__file__).parents[2] / "examples" / "balances-api" / "balances_api.py")


@pytest.mark.long
def test_the_service_does_what_is_expected_of_it(service: Any) -> None:
    movements = Movements(SEED)
    driver = ProcessorDriver(service.Balances(), on_error="dead-letter")
    for each in islice(movements, 5_000):
        driver.send(each.account, each.value)
    found = {key: (row["balance"], row["count"]) for key, row in driver.states.items()}
    assert found == {key: (row.balance, row.count) for key, row in movements.rows.items()}
    assert len(driver.dead_letters) == movements.invalid > 10
    assert sum(balance for balance, _ in found.values()) == movements.sum
    closed = sum(record.value == {"closed": True} for record in driver.outputs)
    assert closed > 20


def test_a_seed_repeats_the_movements() -> None:
    assert list(islice(Movements(SEED), 500)) == list(islice(Movements(SEED), 500))
    assert list(islice(Movements(SEED), 500)) != list(islice(Movements(SEED + 1), 500))


def test_rows_that_are_wrong_at_the_end() -> None:
    movements = Movements(SEED)
    origins = {
        each.account: Origin("movements", 0, at) for at, each in enumerate(islice(movements, 300)) if each.amount
    }
    rows = {
        account: {"balance": row.balance, "count": row.count, "through": origins[account].offset}
        for account, row in movements.rows.items()
    }
    assert wrong_rows(movements, origins, rows) == []
    account = next(iter(rows))
    for name in ("balance", "count", "through"):
        changed = {**rows, account: {**rows[account], name: rows[account][name] + 1}}
        assert account in wrong_rows(movements, origins, changed)[0]
    assert account in wrong_rows(movements, origins, {key: row for key, row in rows.items() if key != account})[0]
    assert "nobody" in wrong_rows(movements, origins, {**rows, "nobody": {}})[0]


# ---- the fold ----------------------------------------------------------------------------------------


def some_changes(count: int = 400, keys: int = 12) -> list[Change]:
    """Values and tombstones, with gaps between offsets, as control records and aborted batches leave them."""
    rng = random.Random(SEED)
    offsets = [0] * PARTITIONS
    found = []
    for number in range(count):
        key = rng.randrange(keys)
        partition = key % PARTITIONS
        offsets[partition] += rng.choice((1, 1, 3))
        value = None if rng.random() < 0.2 else {"n": number}
        found.append(Change(partition, offsets[partition], f"key-{key:02d}", value))
    return found


CHANGES = some_changes()


@pytest.fixture(scope="module")
def fold() -> Fold:
    found = Fold(PARTITIONS)
    for change in CHANGES:
        found.apply(change)
    return found


def folded(offsets: dict[int, int]) -> dict[str, Any]:
    """The rows below these offsets, in the simplest way."""
    rows: dict[str, Any] = {}
    for change in CHANGES:
        if change.offset < offsets[change.partition]:
            rows[change.key] = change.value
    return {key: value for key, value in rows.items() if value is not None}


def test_the_fold_knows_the_table_at_every_offset(fold: Fold) -> None:
    assert fold.now() == folded(fold.ends)
    for low in range(max(fold.ends.values()) + 1):
        rows = folded({0: low, 1: low})
        counts = [fold.count(partition, low, low)[0] for partition in range(PARTITIONS)]
        assert sum(counts) == len(rows)
        for key in fold.keys("", None):
            assert fold.window(key, low, low) == [rows.get(key)]
    key = "key-03"
    values = [change.value for change in CHANGES if change.key == key]
    assert fold.window(key, 0, fold.ends[1]) == [None, *values]
    assert fold.keys("key-03", "key-05") == ["key-03", "key-04"]
    assert fold.partition_of("nobody") is None
    assert fold.reached(fold.ends)
    assert not fold.reached({**fold.ends, 1: fold.ends[1] + 1})


# ---- the check ---------------------------------------------------------------------------------------

BOUNDS = {0: 150, 1: 140}


def whole(position: dict[int, int], **changed: Any) -> Answer:
    """A right answer: all rows at a position."""
    right = Answer("all rows", "http://one", 0.0, position, {}, folded(position), ("", None), len(folded(position)))
    return replace(right, **changed)


def verdict(fold: Fold, *answers: Answer) -> Checked:
    checked = Checked()
    for answer in answers:
        check(fold, answer, BOUNDS, checked)
    return checked


def test_right_answers_are_right(fold: Fold) -> None:
    rng = random.Random(SEED)
    answers = [whole({p: rng.randint(0, BOUNDS[p]) for p in BOUNDS}) for _ in range(100)]
    checked = verdict(fold, *answers)
    assert (checked.answers, checked.wrong, checked.newer, checked.stale) == (100, 0, 0, 0), checked.examples
    assert checked.rows > 500


@pytest.mark.parametrize("seed", range(10))
def test_every_mutant_of_an_answer_is_seen(fold: Fold, seed: int) -> None:
    rng = random.Random(seed)
    position = {partition: rng.randint(60, 100) for partition in BOUNDS}
    right = whole(position)
    key = rng.choice(list(right.rows))
    earlier = {partition: offset - 40 for partition, offset in position.items()}
    mutants = {
        "a value is another one": replace(right, rows={**right.rows, key: {"n": -1}}),
        "a row is missing": replace(right, rows={each: row for each, row in right.rows.items() if each != key}),
        "a row of nobody": replace(right, rows={**right.rows, "nobody": {"n": 1}}),
        "a count is too high": replace(right, count=len(right.rows) + 13),
        "a position of later": replace(right, rows=folded(earlier)),
        "a position without a partition": replace(right, position={1: position[1]}),
        "beyond what is committed": whole({**position, 0: BOUNDS[0] + 1}),
        "rows of the future": replace(right, rows=folded(fold.ends)),
        "older than demanded": replace(right, least={0: position[0] + 1}),
    }
    for name, mutant in mutants.items():
        if name == "a row is missing" and None in fold.window(key, position[fold.partition_of(key) or 0], 10**9):
            continue  # it was deleted right after that: allowed
        checked = verdict(fold, mutant)
        assert checked.wrong == 1, name
        assert checked.examples, name
        assert checked.stale == (name == "older than demanded"), name


def test_rows_may_be_newer_than_the_position(fold: Fold) -> None:
    """But not older, and not newer than the bounds."""
    position = {0: 60, 1: 60}
    later = folded({0: 90, 1: 90})
    checked = verdict(fold, whole(position, rows=later, count=len(later)))
    assert checked.wrong == 0, checked.examples
    assert checked.newer > 3


def test_one_key(fold: Fold) -> None:
    at = {1: 100}
    value = folded({0: 0, 1: 100}).get("key-03")
    right = Answer("key", "http://one", 0.0, at, {}, {"key-03": value})
    assert verdict(fold, right, replace(right, rows={"nobody": None})).wrong == 0
    assert verdict(fold, replace(right, rows={"key-03": {"n": -1}})).wrong == 1
    assert verdict(fold, replace(right, rows={"key-02": None})).wrong == 1  # of a partition that is not named


def test_a_stream_has_every_change_once(fold: Fold) -> None:
    def left(changes: list[Change]) -> tuple[int, int]:
        stream, checked = StreamCheck(), Checked()
        stream.begin({0: 50, 1: 50})
        for change in changes:
            stream.see(fold, change, checked)
        return checked.wrong, stream.left(fold)

    right = [change for change in CHANGES if change.offset >= 50]
    assert left(right) == (0, 0)
    assert left(right[:-3]) == (0, 3)
    assert left([*right[:9], *right[10:]]) == (1, 0)  # lost
    assert left([*right[:9], right[8], *right[9:]])[0] == 1  # twice
    assert left([right[0]._replace(value={"n": -1}), *right[1:]]) == (1, 0)
    assert left([CHANGES[0], *right])[0] == 1
    of_one = [change for change in right if change.partition == 0]
    assert left([of_one[1], of_one[0], *of_one[2:]])[0] == 2


# ---- questions and answers ---------------------------------------------------------------------------


def test_positions_are_read() -> None:
    assert offsets_of("balances-1a:52.0.17") == {0: 52, 1: 0, 2: 17}
    assert offsets_of("balances:..17") == {2: 17}


def answered(question: questions.Question, **document: Any) -> Answer:
    return read_answer(question, json.dumps({"position": "t:5.7", **document}).encode(), "here", 1.0)


def test_answers_are_read() -> None:
    key = questions.key_of("a", "own writes", "t:4")
    assert answered(key, value={"n": 1}).rows == {"a": {"n": 1}}
    assert answered(key, detail="no such key").rows == {"a": None}
    assert (answered(key).position, answered(key).least) == ({0: 5, 1: 7}, {0: 4})
    many = questions.Question("multi-get", "/multi-get", ("a", "b"), b"{}")
    assert answered(many, rows=[{"key": "b", "value": 2}]).rows == {"a": None, "b": 2}
    assert answered(questions.a_count(random.Random(0)), count=3).count == 3
    text = b'{"key":"a","value":1}\n{"key":"b","value":2}\n{"cursor":null,"count":2,"position":"t:5"}\n'
    found = read_answer(questions.all_rows(), text, "here", 1.0)
    assert (found.rows, found.whole, found.count) == ({"a": 1, "b": 2}, ("", None), None)


@pytest.mark.parametrize(
    "reverse, keys, cursor, whole",
    [
        (False, "bcd", None, ("a", "z")),
        (False, "bcd", "x", ("a", "d\0")),
        (True, "dcb", "x", ("b", "z")),
        (True, "dcb", None, ("a", "z")),
        (True, "", None, ("a", "z")),
    ],
)
def test_how_far_a_page_is_complete(reverse: bool, keys: str, cursor: str | None, whole: tuple[str, str]) -> None:
    asked = questions.Question("range", "/range", span=("a", "z"), reverse=reverse)
    assert answered(asked, rows=[{"key": key, "value": 1} for key in keys], cursor=cursor).whole == whole


@pytest.mark.parametrize("keys", ["bdc", "bbc", "dcb"])
def test_ranges_out_of_order_are_no_answers(keys: str) -> None:
    asked = questions.Question("range", "/range", span=("a", "z"))
    with pytest.raises(ValueError, match="out of order"):
        answered(asked, rows=[{"key": key, "value": 1} for key in keys], cursor=None)


def test_events_that_were_cut_off_are_left_out() -> None:
    text = b"event: change\nid: t:5\ndata: {}\n\nevent: change\nid: t:6\nda"
    assert list(events_of(iter(text.splitlines(keepends=True)))) == [{"event": "change", "id": "t:5", "data": "{}"}]


# ---- who asks ----------------------------------------------------------------------------------------


class Instance(ThreadingHTTPServer):
    """Answers what it is told to, as an instance does that has problems."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.replies: deque[tuple[int, bytes]] = deque()
        self.asked: list[tuple[str, str | None]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Last-Event-ID")))
        status, body = self.server.replies.popleft() if self.server.replies else (503, b"{}")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance() as found:
        yield found
        found.shutdown()


def test_who_asks_goes_on_until_somebody_answers(instance: Instance) -> None:
    answers: deque[Answer] = deque()
    asker = Asker(["http://127.0.0.1:1", instance.url], "t", questions.a_count, answers, 0.0, random.Random(1))
    instance.replies += [(503, b"{}"), (200, b'{"count": 3, "position": "t:5"}'), (500, b"broken"), (200, b"{}")]
    for _ in range(3):
        asker.ask(questions.a_count(random.Random(0)))
    (answer,) = answers
    assert (answer.count, answer.place) == (3, instance.url)
    figures = asker.figures
    assert (figures.kind, len(figures.answered), figures.refused) == ("count", 1, 1)
    assert figures.disconnected >= 1
    assert len(figures.problems) == 2


def test_a_stream_goes_on_with_the_last_id(instance: Instance) -> None:
    first = b"event: position\nid: t:5\ndata: {}\n\nevent: change\nid: t:6\ndata: %s\n\nevent: ch" % _change(5)
    second = b"event: position\nid: t:6\ndata: {}\n\nevent: change\nid: t:8\ndata: %s\n\n" % _change(7)
    instance.replies += [(200, first), (503, b"{}"), (200, second)]
    told: list[Any] = []
    stream = Stream(["http://127.0.0.1:1", instance.url], "t", lambda what, _: told.append(what))
    stream.start()
    wait_until(lambda: len(told) == 3, 10, lambda: str(told))
    stream.stop()
    stream.join(10)
    assert told == [{0: 5}, Change(0, 5, "a", 1), Change(0, 7, "a", 1)]
    assert [last for _, last in instance.asked[:3]] == [None, "t:6", "t:6"]
    assert stream.figures.disconnected >= 3
    assert (stream.figures.problems, stream.problem) == ([], None)


def _change(offset: int) -> bytes:
    return json.dumps({"key": "a", "value": 1, "partition": 0, "offset": offset}).encode()


# ---- the report --------------------------------------------------------------------------------------


def test_silences_belong_to_the_kill_before_them() -> None:
    silences([], [Figures("key")])
    kills = [Killed("one", 10.0, False), Killed("two", 20.0, False)]
    silences(kills, [Figures("key", [(9.0, 5.0), (12.0, 3.0), (19.0, 0.1), (24.0, 1.5)]), Figures("count")])
    assert [each.silent_s for each in kills] == [3.0, 1.5]


def test_a_line_for_each_kind() -> None:
    figures = [
        Figures("key", [(1.0, 0.001), (2.0, 0.003)], 1, 2),
        Figures("key", [(1.0, 0.002)], 1),
        Figures("changes"),
    ]
    of_keys, of_changes = lines(figures, {"key": Checked(3, 3, 1)})
    assert (of_keys.kind, of_keys.refused, of_keys.disconnected, of_keys.checked.newer) == ("key", 2, 2, 1)
    assert of_keys.p50_ms == pytest.approx(2.0)
    assert (of_changes.kind, of_changes.p50_ms) == ("changes", None)
    assert answers_table([of_keys, of_changes]).row_count == 2


def test_the_defaults_of_the_command() -> None:
    from onceflow_workshop.cli.demo import demo

    defaults = {parameter.name: parameter.default for parameter in demo.commands["tables"].params}
    assert (defaults["seconds"], defaults["kills"]) == (TablesChoices.seconds, TablesChoices.kills)
    assert "records" not in defaults
