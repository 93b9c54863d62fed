"""`onceflow verify --id` of a flow that does not pass the id on: nothing is checked, and nothing seems to be lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onceflow.admin.verify import audit
from onceflow.admin.verify.audit import Audit, Outputs
from onceflow.admin.verify.identity import identity_of, kind_of
from onceflow.admin.verify.report import Report
from onceflow.admin.verify.tally import RecordComparison
from onceflow.client.cluster import TopicInfo
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.log_reader import LogRecord
from onceflow.client.offsets import EARLIEST
from onceflow.protocol import progress as records
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress

SOURCES = ('{"id": 1}', '{"id": 2}', '{"id": 3}')


@pytest.mark.parametrize(
    "id_, outputs, letters, options, findings, told",
    [
        # Sums, which have no id.
        ("$.id", ['{"n": 1}', '{"n": 2}'], [], {}, {}, "not checked: no output has $.id, so this flow does not pass"),
        ("$.id", ['{"n": 1}'], ['{"id": 1}'], {}, {}, "not checked: no output has $.id"),
        ("$.id", ['{"n": 1}'], ['{"id": 1}', '{"id": 1}'], {}, {"doubled": 1}, "not checked: no output has $.id"),
        ("$.id", ['{"n": 1}'], [], {"filtered": True}, {}, "not checked: no output has $.id"),
        ("$.ids", ['{"n": 1}'], [], {}, {}, "not checked: neither the sources nor the outputs have $.ids"),
        # Only one side has ids, or they are of another kind.
        ("$.n", ['{"n": 1}'], [], {}, {}, "not checked: no record of the sources has $.n"),
        (
            "$.id",
            ['{"id": "1"}', '{"id": "2"}', '{"id": "3"}'],
            [],
            {},
            {},
            "not checked: the ids of the sources are numbers, those of the outputs texts",
        ),
        # Other notations of one number.
        ("$.id", ['{"id": 1.0}', '{"id": 2e0}', '{"id": 0.3E1}'], [], {}, {}, ""),
        # Null is no id: what has none is compared as a whole, and is not one record that comes again and again.
        ("$.x", ['{"x": null}'] * 3, [], {}, {}, "not checked: neither the sources nor the outputs have $.x"),
        # These may be lost.
        ("$.id", [], [], {}, {"lost": 3}, ""),
        ("$.id", ['{"id": 8}'], [], {}, {"lost": 3, "foreign": 1}, "no output has the $.id of a source record"),
        ("record", ['{"n": 1}'], [], {}, {"lost": 3, "foreign": 1}, "no output is the same as a source record"),
        ("$.id", ['{"id": 2}', '{"n": 1}'], [], {}, {"lost": 2, "foreign": 1}, ""),
        # Not one of them is.
        ("$.id", ['{"n": 1}'], ['{"id": 1}', '{"id": 2}', '{"id": 3}'], {}, {"foreign": 1}, ""),
    ],
)
def test_outputs_without_an_id_of_the_source(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    id_: str,
    outputs: Sequence[str],
    letters: Sequence[str],
    options: dict[str, Any],
    findings: dict[str, int],
    told: str,
) -> None:
    """That is no loss of all records. But a loss of all records is one."""
    topics = {"s": SOURCES, "out": outputs, "dead": letters}
    wanted = Outputs(letters=("dead",) if letters else (), ordered=False, **options)
    report = audited(tmp_path, monkeypatch, topics, id_, wanted)
    assert report.counts == findings
    assert {each.kind for each in report.examples} == set(findings)
    said = [*report.notes, *(f"not checked: {each.removeprefix('records: ')}" for each in report.not_checked)]
    assert [each[: len(told)] for each in said] == ([told] if told else [])
    assert all("--replay" in each for each in said)
    assert report.exact == (not findings and not told)


def test_letters_that_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are outputs then, and have the id that the other outputs do not have."""
    topics = {"s": SOURCES, "out": ['{"n": 1}', '{"n": 2}'], "dead": ['{"id": 2}']}
    report = audited(tmp_path, monkeypatch, topics, "$.id", Outputs(ordered=False), ("out", "dead"))
    assert report.counts == {}
    assert "no record of out has $.id, and other outputs have it" in report.not_checked[0]
    assert "--dead-letter" in report.not_checked[0]
    assert not report.exact


def audited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    topics: dict[str, Sequence[str]],
    id_: str,
    wanted: Outputs,
    outputs: tuple[str, ...] = ("out",),
) -> Report:
    """The report on a flow that has read all of the topic s.

    Args:
        topics: what is in each topic. outputs: the topics that progress names as outputs.
    """

    def chunks(self: Any, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        values: list[bytes | None] = [each.encode() for each in topics[topic][start:end]]
        if values:
            keys: list[bytes | None] = [b"k"] * len(values)
            yield Chunk(keys, values, next_offset=end, places=[np.arange(start, start + len(values))])

    monkeypatch.setattr(CommittedReader, "read", chunks)
    monkeypatch.setattr(audit, "find_topics", lambda _, given, *__: {t: TopicInfo(t, t, {0: 0}) for t in given})
    monkeypatch.setattr(
        audit,
        "list_offsets",
        lambda _, span, when, *__, **___: {t: {0: 0 if when == EARLIEST else len(topics[t])} for t in span},
    )
    begun = Progress("f", 0, {"s": {0: 0}}, {}, 5, outputs=outputs)
    life = [begun, replace(begun, batch_id=1, offsets={"s": {0: 3}})]
    history = [LogRecord(n, *records.encode(each), 5, 7, 0) for n, each in enumerate(life)]
    monkeypatch.setattr(audit, "read_history", lambda *_: history)
    monkeypatch.setattr(Audit, "_check_positions", lambda *_: None)
    monkeypatch.setattr(Audit, "_check_now", lambda *_: None)
    wanted = replace(wanted, identity=identity_of(id_), place=None if id_ == "record" else id_)
    with RecordComparison(tmp_path) as made:
        return Audit(SimpleNamespace(), Names("f"), wanted, limit=1, tell=lambda *_: None).run(made)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["[" * 400 + "]" * 400, "15" + "0" * 307, "[" * 999 + "1e-400" + "]" * 999])
def test_an_id_that_can_be_read_but_not_written_is_none(value: str) -> None:
    raw = f'{{"id": {value}}}'.encode()
    assert identity_of("$.id")(b"k", raw, ()) == identity_of("record")(b"k", raw, ())


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("1", "1.0", True),
        ("1", "1e0", True),
        ("1000", "1E3", True),
        ("0.5", "5e-1", True),
        ("-0", "0", True),
        ("12345678901234567890", "12345678901234567890.0", True),
        ("12345678901234567890", "12345678901234567891", False),
        ("9007199254740993", "9007199254740992.0", False),
        ("1", '"1"', False),
        ("1", "true", False),
        ("null", "0", False),
        ('{"a": 1, "b": 2}', '{"b": 2.0, "a": 1}', True),
        ("[1, 2]", "[2, 1]", False),
        ('"a"', '"\\u0061"', True),
    ],
)
def test_notations_of_an_id(one: str, other: str, same: bool) -> None:
    """Ids that are one number were lost records, and beyond 64 bits others were taken for the same."""
    identity = identity_of("$.id")
    found = [identity(b"k", f'{{"id": {each}}}'.encode(), ()) for each in (one, other)]
    assert (found[0] == found[1]) is same


@pytest.mark.parametrize("id_", ["key", "$.id", "header:id"])
@pytest.mark.parametrize("present", [False, True])
def test_ids_that_are_null(id_: str, *, present: bool) -> None:
    """Records without an id are not the same record."""
    identity = identity_of(id_)
    values = [b'{"id": null, "x": %d}' % n if present else b'{"x": %d}' % n for n in range(3)]
    found = {identity(None, value, [("id", None)] if present else ()) for value in values}
    assert len(found) == 3
    assert identity(None, values[0], ()) == identity(None, values[0], [("other", b"1")])
    assert kind_of(id_)(values[0]) is None


def test_null_ids_of_sources_and_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ['{"id": 1}', '{"id": null, "x": 1}', '{"id": null, "x": 1}']
    topics = {"s": ('{"id": 1}', '{"id": null, "x": 1}', '{"id": null, "x": 2}'), "out": lost}
    report = audited(tmp_path, monkeypatch, topics, "$.id", Outputs(ordered=False))
    assert report.counts == {"lost": 1, "doubled": 1}
