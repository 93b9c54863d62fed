"""Rows that an external system does not take become dead letters, exactly once.

They cannot be written in the transaction of that system. So the progress row of the batch contains them: they are known
if and only if the batch is committed. The Kafka transaction that moves Kafka's progress to this batch writes them, too.
If the driver dies before that, the next start finds that Kafka's progress is behind, and writes them with it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from onceflow import hooks
from onceflow.client.deadline import Deadline
from onceflow.driver.record.session import DriverSession
from onceflow.external.sink import RefusedRow
from onceflow.messages import DRIVER, OutputTopic, Report, Routing, WriteOrder
from onceflow.planning.dead_letter_limit import DeadLetters, Letters
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.progress import Progress, decode, encode
from onceflow.protocol.timestamps import of_datetime
from onceflow.state.api.record import Record
from onceflow.state.engine.dead_letters import fitted, refused_record
from onceflow.task.row_writer import write_rows
from onceflow.task.step_outputs import OUTPUT_SCHEMA, packed, unpacked, written_rows

_LETTERS = "dead_letters"
_PLACE = {"topic": str, "partition": int, "offset": int}
_REST = {"key": bytes, "timestamp": datetime}  # as Spark's Kafka source has them


class RefusedRows:
    """The dead letters of one query with an external sink.

    Args:
        topic: where they go; None: there are none, such a row stops the flow.
        limit: ``max_dead_letters``.
        targets: the topic, as the driver sees it.
        target: where the rows go, in words.

    Attributes:
        text: the progress row of the batch. letters: its dead letters, rows of ``OUTPUT_SCHEMA``.
    """

    def __init__(
        self, topic: str | None, limit: float | None, targets: Mapping[str, OutputTopic], *, target: str, flow: str
    ) -> None:
        self.topic = topic
        self.text = ""
        self.letters: pa.Table = OUTPUT_SCHEMA.empty_table()
        self._targets = targets
        self._run = DeadLetters(flow, topic, limit, target)
        self._found = Letters(0, 0, {})

    def set(self, progress: Progress, refused: Sequence[RefusedRow], records: int) -> str:
        """The progress row of a batch.

        Args:
            records: how many rows the batch has.

        Raises:
            DeadLetterLimitError: the run has too many.
        """
        causes: dict[str, tuple[int, str]] = {}
        for row in refused:
            count, first = causes.get(row.kind, (0, f"{row.message:.200} ({dict(row.row)!s:.200})"))
            causes[row.kind] = (count + 1, first)
        self._found = Letters(records, len(refused), causes)
        self._run.check(self._found)
        limits = self._targets[self.topic or ""].limits(self.topic or "", "none") if refused else None
        letters = [fitted(_letter(row, self.topic or "", progress.offsets), limits) for row in refused]
        self.letters = _table(letters)
        self.text = progress_row(progress, self.letters)
        return self.text

    def committed(self) -> None:
        """The batch is committed."""
        self._run.on_commit(self._found)


class LettersToWrite:
    """Dead letters that the Kafka transaction of progress writes.

    Args:
        letters: rows of ``OUTPUT_SCHEMA``.
        targets: their topics.
    """

    def __init__(
        self, session: DriverSession, letters: pa.Table, targets: Mapping[str, OutputTopic], batch: int
    ) -> None:
        self._session = session
        self._letters = letters
        self._targets = targets
        self._batch = batch
        self.topics = {*letters["topic"].to_pylist()}

    def write(self, producer: ProducerIdAndEpoch, deadline: Deadline) -> Sequence[Report]:
        """Write them under this producer id and epoch.

        Raises:
            OnceflowError: they could not be written.
        """
        if not self._letters.num_rows:
            return []
        cluster, flow = self._session.cluster, self._session.names.flow
        order = WriteOrder(
            flow=flow,
            batch=self._batch,
            settings=cluster.settings,
            transactional_id=self._session.transactions.transactional_id,
            producer=producer,
            compression="none",
            topic=None,
            targets=self._targets,
            routing=Routing("key", 1, hash_key=True),
            transaction_version=cluster.transaction_version,
            deadline_s=deadline.remaining,
        )
        batches = (written_rows(batch) for batch in self._letters.to_batches())
        reports = write_rows(order, DRIVER, batches, cluster).written
        for report in reports:
            if report.error is not None:
                raise report.error.locate(flow=flow, batch=self._batch)
        return reports

    def sealed(self) -> None:
        """Progress is written, too: the transaction can be committed."""
        hooks.at("progress", where="driver", flow=self._session.names.flow, batch=self._batch)


def progress_row(progress: Progress, letters: pa.Table) -> str:
    """The text of the progress row: the value of the progress record, and the dead letters in a field of their own."""
    text = encode(progress)[1].decode()
    if not letters.num_rows:
        return text
    return json.dumps({**json.loads(text), _LETTERS: base64.b64encode(packed(letters)).decode()})


def parsed(flow_key: str, text: str) -> tuple[Progress, pa.Table]:
    """What `progress_row` has put together."""
    fields = json.loads(text)
    letters = fields.pop(_LETTERS, None)
    progress = decode(flow_key.encode(), json.dumps(fields).encode())
    return progress, OUTPUT_SCHEMA.empty_table() if letters is None else unpacked(base64.b64decode(letters))


def _with_types(row: Mapping[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """Those of these columns that have these types."""
    return {name: row[name] for name, kind in types.items() if isinstance(row.get(name), kind)}


def _letter(refused: RefusedRow, topic: str, sources: Collection[str]) -> Record:
    """The record that the row was made of, as far as the DataFrame has it; its value is the row itself otherwise.

    Args:
        sources: the topics that the flow reads.
    """
    # A table may have columns for the place of a record, too; or columns with these names that mean something else.
    place = _with_types(refused.row, _PLACE)
    if place.get("topic") not in (None, *sources):
        place = {}
    given = {**place, **refused.record}
    if "value" in given:  # the rest of the record may be in columns of the table
        given = {**_with_types(refused.row, _REST), **given}
    at = given.get("timestamp")
    record = Record(
        _raw(given.get("key")),
        _raw(given["value"]) if "value" in given else _as_json(dict(refused.row)),
        given.get("topic"),
        [(str(header["key"]), _raw(header["value"])) for header in given.get("headers") or ()],
        of_datetime(at) if isinstance(at, datetime) else None,
        given.get("partition"),
        given.get("offset"),
    )
    return refused_record(record, topic, refused.kind, refused.message)


def _table(letters: Sequence[Record]) -> pa.Table:
    rows = [
        {
            "key": letter.key,
            "value": letter.value,
            "topic": letter.topic,
            "headers": [{"key": name, "value": value} for name, value in letter.headers],
            "timestamp": None if letter.timestamp_ms is None else letter.timestamp_ms * 1000,
        }
        for letter in letters
    ]
    return pa.Table.from_pylist(rows, OUTPUT_SCHEMA)


def _raw(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else _as_json(value)


def _as_json(value: Any) -> bytes:
    try:
        return json.dumps(value, default=_plain, allow_nan=False).encode()
    except ValueError:  # JSON has no numbers for NaN and infinity
        return json.dumps(_finite(value), default=_plain).encode()


def _finite(value: Any) -> Any:
    """The value with text in place of NaN and infinity, as Spark's ``to_json`` writes them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> str:
    """What JSON has no type for."""
    if isinstance(value, datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
