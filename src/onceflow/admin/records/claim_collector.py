"""Finds and deletes objects of a claim check that nothing refers to.

Writers refer to an object only on the day it was stored, and for as long as their transaction takes after that. So an
object that is old enough gets no new writers. If nothing refers to it either, it is an orphan: its batch was aborted,
or its records have expired.

References are looked for in keys, values and headers of all records that a reader may see, now or later: everything
that is committed, and everything from the first open transaction on, however that ends. They are also looked for in
objects whose content may have references, and in rows of other systems, which a command of the user prints. What flows
keep where nobody can look is not guessed at: then nothing is deleted.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from onceflow.admin.records.tables import possible_progress
from onceflow.claim_check.objects import ObjectStore, Remembered
from onceflow.claim_check.reference import REFERS
from onceflow.claim_check.scan import Found, scan, scan_stream
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import by_topic
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topic, find_topics
from onceflow.errors import ClaimCheckError, DataLossError, EnvironmentUnusableError, OnceflowError, OptionError
from onceflow.object_storage import CHUNK_BYTES
from onceflow.protocol.decode import HeaderList
from onceflow.protocol.names import INTERNAL_SUFFIX, TopicPartition
from onceflow.protocol.progress import Progress

_CALL_S = 60.0
_UNDECIDED_OFFSETS = 10_000
_DELETED_AT_ONCE = 1000
_FETCH_BYTES = 4_000_000

Show = Callable[[str, int, int | None], None]
#: Offset, key, value and headers of a record.
Record = tuple[int, bytes | None, bytes | None, HeaderList]

_APART = b"\0\0"
_CONTENTS = "stored objects"
_ROWS_OF = "rows of {}"
_SAID_BYTES = 300
_ODD_SHOWN = 10
_SIGPIPE_EXIT = 141


@dataclass
class Collection:
    """What one run has found.

    Args:
        references: how many references were found, by topic; also in rows of other systems, and in stored objects.
        objects, object_bytes: of all that are old enough.
        orphans, orphan_bytes: of those that nothing refers to.
        odd: where there are values that begin like a reference and are none; the first ten.
    """

    references: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    object_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    odd: list[str] = field(default_factory=list)


class Collector:
    """One run: `find`, then `orphans` and `delete`. Names are kept in a temporary database on disk, not in memory.

    Args:
        store: of the claim check.
        topics: all topics with references to objects of the store; None: all topics of the cluster. What flows that
            read these topics write to Kafka is added, as far as their progress says: tables with their companion
            topics, outputs, dead letters. So are topics in which earlier runs have found references.
        without: topics that have no references, although an earlier run has read them, or a flow writes them.
        rows: for flows that write another system: a command of the shell that prints their rows in any form.
        without_rows: flows that keep no references outside of Kafka.
        no_newer_format: whether the user knows that no newer onceflow writes references to this store: what begins like
            one in a newer format is none.
        older_than_ms: the age from which on an object may be deleted.
        now_ms: the time, in epoch milliseconds.
        show: called with a text, how much is done, and of how much.
        check: called often; an exception that it raises ends the run.

    Raises:
        StorageUnavailableError: this is not a store, or it cannot be reached.
        OptionError: a topic or flow of an earlier run is not given.
    """

    def __init__(
        self,
        settings: ClientSettings,
        store: ObjectStore,
        topics: Sequence[str] | None,
        *,
        older_than_ms: int,
        now_ms: int,
        without: Sequence[str] = (),
        rows: Mapping[str, str] | None = None,
        without_rows: Sequence[str] = (),
        no_newer_format: bool = False,
        show: Show = lambda text, done, total: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._store, self._every = settings, store, topics is None
        self._topics = list(dict.fromkeys(topics or ()))
        self._without, self._rows, self._without_rows = without, dict(rows or {}), without_rows
        self._no_newer_format = no_newer_format
        self._until_ms = now_ms - older_than_ms
        self._show, self._check = show, check
        self.found = Collection()
        self._of_nobody: set[str] = set()  # topics that are read to be sure, and not shown or remembered
        self.earlier = store.check()
        """Where the last run which was no dry run has looked; nothing if there was no such run."""
        self._check_earlier()
        self._places = [_CONTENTS, *map(_ROWS_OF.format, self._rows)]
        self._folder = tempfile.TemporaryDirectory(prefix="onceflow-claim-check-")
        self._names = sqlite3.connect(Path(self._folder.name) / "names.db", isolation_level=None)
        self._names.execute("PRAGMA synchronous = OFF")
        self._names.execute("PRAGMA journal_mode = OFF")
        self._names.execute("CREATE TABLE objects (name TEXT PRIMARY KEY, bytes INTEGER) WITHOUT ROWID")

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._names.close()
        self._folder.cleanup()

    def find(self) -> Collection:
        """Find the orphans. Nothing is deleted.

        Raises:
            UnknownTopicError: one of the topics does not exist.
            OptionError: a flow keeps rows or state where this does not look, or the command for its rows prints no
                reference any more.
            EnvironmentUnusableError: the command for the rows of a flow has failed.
            ClaimCheckError: there is what can be a reference in a newer format.
            PermissionDeniedError: a topic, or the progress of flows, may not be read.
            OnceflowError: a topic or the store cannot be read as a whole.
        """
        with contextlib.closing(Cluster(self._settings)) as cluster:
            partitions = self._partitions(cluster)  # a typo is found before anything is listed
            self._list()
            self._scan(cluster, partitions)
        row = self._names.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM objects").fetchone()
        self.found.orphans, self.found.orphan_bytes = row
        return self.found

    def orphans(self) -> Iterator[tuple[str, int]]:
        """Names and bytes of what `find` has found, the oldest first."""
        yield from self._names.execute("SELECT name, bytes FROM objects ORDER BY name")

    def remember(self) -> None:
        """Let the store know the topics of this run, so that a later one that leaves out one of them is refused."""
        read = {name.removesuffix(INTERNAL_SUFFIX) for name, count in self.found.references.items() if count}
        # A topic of an earlier run may have no reference at the moment, and get one again.
        known = [name for name in (*self.earlier.topics, *self.earlier.found) if name not in self._without]
        topics = [name for name in self.earlier.topics if name in known] if self._every else self._topics
        wanted = [name for name in {**dict.fromkeys(known), **dict.fromkeys(read)} if name in self.found.references]
        found = [name for name in wanted if name not in (*topics, *self._places)]
        referring = [flow for flow in self._rows if self.found.references.get(_ROWS_OF.format(flow))]
        self._store.remember(Remembered(tuple(topics), tuple(self._rows), tuple(found), tuple(referring)))

    def delete(self) -> None:
        """Delete what `find` has found, after `remember`."""
        self.remember()
        done = 0
        rows = self._names.execute("SELECT name FROM objects ORDER BY name")
        while part := [name for (name,) in rows.fetchmany(_DELETED_AT_ONCE)]:
            self._check()
            self._store.delete(part)
            done += len(part)
            self._show("deleting objects", done, self.found.orphans)

    # ---- inside --------------------------------------------------------------------------------------

    def _check_earlier(self) -> None:
        """A topic or a flow that is forgotten would lose its values."""
        if not self._topics and not self._every:
            raise OptionError("No topic is given", next_step="name every topic that has references to this store")
        given = {*self._topics, *self._without}
        forgotten = [] if self._every else [topic for topic in self.earlier.topics if topic not in given]
        if forgotten:
            raise OptionError(
                f"An earlier collection of {self._store.url} has also read {', '.join(forgotten)}",
                next_step=f"give --topic {forgotten[0]}, or --without-topic {forgotten[0]} if it has no references to "
                "this store any more",
            )
        for flow in self.earlier.flows:
            if flow not in (*self._rows, *self._without_rows):
                raise _kept_elsewhere(flow, f"an earlier collection of {self._store.url} has read its rows")

    def _partitions(self, cluster: Cluster) -> dict[str, list[int]]:
        deadline = Deadline(_CALL_S, "looking for the topics of a claim check")
        there = cluster.topics(None, deadline)
        if self._topics:
            find_topics(cluster, dict.fromkeys(self._topics, ""), deadline)
        flows = possible_progress(cluster, deadline, unreadable=self._unreadable)
        if self._every:
            named = [name for name, info in there.items() if not info.internal and name not in self._without]
        else:
            named = self._with_written(flows, there)
        self._check_flows(flows, named)
        if not self._every:
            more = self._of_no_flow(flows, there, named)
            self._of_nobody = {*more, *(name + INTERNAL_SUFFIX for name in more)}
            named += more
        companions = [name + INTERNAL_SUFFIX for name in named if name + INTERNAL_SUFFIX not in named]
        for companion in list(companions):
            if find_topic(cluster, companion, "READ", deadline) is None:
                companions.remove(companion)
        found = find_topics(cluster, dict.fromkeys([*named, *companions], ""), deadline)
        for name in found:
            if name not in self._of_nobody:
                self.found.references.setdefault(name, 0)
        return {name: sorted(topic.leaders) for name, topic in found.items()}

    def _with_written(self, flows: Sequence[Progress], there: Mapping[str, object]) -> list[str]:
        """The topics that are given, those in which earlier runs have found references, and those to which flows have
        written what they have read in them."""
        for topic in self.earlier.found:
            if topic not in there and topic not in self._without:
                raise OptionError(
                    f"An earlier collection of {self._store.url} has found references in {topic}, which is not there",
                    next_step=f"give --without-topic {topic} if it was deleted, or get permission to read it",
                )
        found = dict.fromkeys([*self._topics, *(topic for topic in self.earlier.found if topic not in self._without)])
        size = 0
        while len(found) > size:
            size = len(found)
            for flow in flows:
                if _reads(flow) & found.keys():
                    written = (*flow.changelogs, *flow.outputs, *flow.side_topics)
                    found |= dict.fromkeys(t for t in written if t in there and t not in self._without)
        return list(found)

    def _of_no_flow(self, flows: Sequence[Progress], there: Mapping[str, object], named: Sequence[str]) -> list[str]:
        """Tables that no progress names: `onceflow fork` may be filling them at this moment, in one transaction."""
        known = {topic for flow in flows for topic in flow.changelogs} | {*named, *self._without}
        return [name for name in there if name + INTERNAL_SUFFIX in there and name not in known]

    def _unreadable(self, flow: str, error: OnceflowError) -> None:
        """Refuse, unless the user vouches for this flow: nobody knows what it reads, and where it keeps that."""
        if flow not in self._without_rows:
            raise OptionError(
                f"The progress of flow {flow} cannot be read, so that it is not known where it keeps references",
                next_step="collect with the version of onceflow that runs this flow; or give "
                f"--without-rows {flow}, if it reads neither these topics nor what is written from them",
            ) from error

    def _check_flows(self, flows: Sequence[Progress], topics: Sequence[str]) -> None:
        """Check that no flow keeps what it has read in these topics where nobody looks."""
        vouched = {*self._rows, *self._without_rows}
        for flow in flows:
            if flow.flow in vouched or not _reads(flow) & {*topics}:
                continue
            local = [name for name, table in flow.tables.items() if table.local is not None]
            if flow.external:
                raise _kept_elsewhere(flow.flow, f"it writes {flow.external}")
            if flow.checkpoint is not None:
                raise _kept_elsewhere(flow.flow, "its query keeps state in a checkpoint of Spark")
            if local:
                raise _kept_elsewhere(flow.flow, f"its table {local[0]} has no changelog")

    def _list(self) -> None:
        for day in self._store.days(self._until_ms):
            self._check()
            self._show(f"listing objects of {day}", self.found.objects, None)
            with self._transaction():
                for name, size in self._store.names(day):
                    self._names.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (name, size))
                    self.found.objects += 1
                    self.found.object_bytes += size

    def _scan_objects(self) -> None:
        """Read the objects whose content may have references, also young ones."""
        for day in self._store.days():
            for name, _ in self._store.names(day):
                if name.endswith(REFERS):
                    self._check()
                    self._show(f"reading objects of {day}", self.found.references.get(_CONTENTS, 0), None)
                    self._refer_all(_CONTENTS, self._store.content(name), f"object {name}")

    def _scan(self, cluster: Cluster, partitions: Mapping[str, Sequence[int]]) -> None:
        """Take everything off the list that a record, a row or an object refers to."""
        ends = self._scan_topics(cluster, partitions)
        # After the topics: what has gone from one of them to another system since, is found there.
        for flow, command in self._rows.items():
            self._scan_rows(flow, command)
        # A flow may have copied a reference to a topic that was read already, from one that was read later and had lost
        # the record by then. It may even be in a topic or a partition that is new: a fork and a repartition copy rows.
        while True:
            deadline = Deadline(_CALL_S, "reading the offsets of topics")
            later = _flattened(list_offsets(cluster, by_topic(ends), LATEST, deadline, committed=False))
            for (topic, number), end in later.items():
                self._read_all(cluster, topic, number, ends[topic, number], end)
            ends |= later
            # Last, so that no partition is left which was there when the offsets were asked for.
            there = {(topic, number) for topic, numbers in self._partitions(cluster).items() for number in numbers}
            if not (added := there - ends.keys()):
                break
            ends |= self._scan_topics(cluster, by_topic(added))
        # No object goes before this command is done, so what went from a record into one is found, and the other way.
        self._scan_objects()

    def _scan_topics(self, cluster: Cluster, partitions: Mapping[str, Sequence[int]]) -> dict[TopicPartition, int]:
        """Read these partitions. Returns the offsets up to which that was."""
        deadline = Deadline(_CALL_S, "reading the offsets of topics")
        starts = _flattened(list_offsets(cluster, partitions, EARLIEST, deadline))
        # In this order: what is decided meanwhile is read as if it were not.
        stable = _flattened(list_offsets(cluster, partitions, LATEST, deadline))
        ends = _flattened(list_offsets(cluster, partitions, LATEST, deadline, committed=False))
        total, done = sum(max(0, ends[each] - starts[each]) for each in ends), 0
        reader = CommittedReader(cluster, fetch_bytes=_FETCH_BYTES)
        for (topic, number), start in starts.items():
            name = f"reading {topic}-{number}"
            for chunk in reader.read(topic, number, start, stable[topic, number]):
                self._check()
                rows = zip(chunk.offsets.tolist(), chunk.keys, chunk.values, strict=True)
                self._refer(topic, number, [(*row, chunk.headers.get(at) or []) for at, row in enumerate(rows)])
                self._show(name, done + chunk.next_offset - start, total)
            self._read_all(cluster, topic, number, max(start, stable[topic, number]), ends[topic, number])
            done += max(0, ends[topic, number] - start)
        return ends

    def _read_all(self, cluster: Cluster, topic: str, number: int, start: int, end: int) -> None:
        """Read records whatever becomes of their transactions."""
        while start < end:
            self._check()
            upto = min(end, start + _UNDECIDED_OFFSETS)
            deadline = Deadline(_CALL_S, f"reading {topic}-{number}")
            try:
                items = read_log(cluster, topic, number, start, upto, deadline)
                records = [(i.offset, i.key, i.value, i.headers) for i in items if isinstance(i, LogRecord)]
                self._refer(topic, number, records)
            except DataLossError:  # records have expired meanwhile: their references, too
                first = list_offsets(cluster, {topic: [number]}, EARLIEST, deadline)[topic][number]
                if first <= start:
                    raise
                upto = max(start, min(first, end))
            start = upto

    def _scan_rows(self, flow: str, command: str) -> None:
        """Read what a command prints: the rows of a flow in another system."""
        place = _ROWS_OF.format(flow)
        self.found.references[place] = 0
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(_strict(command, flow), stdout=subprocess.PIPE, stderr=said) as process,
        ):
            assert process.stdout is not None
            try:
                self._refer_all(place, self._read_chunks(process.stdout, place), f"the {place}")
            except BaseException:
                process.kill()
                raise
            if code := process.wait():
                said.seek(0)
                cut = " (a later part of a pipe has not read everything)" if code == _SIGPIPE_EXIT else ""
                raise EnvironmentUnusableError(
                    f"The command for the rows of flow {flow} has failed, so nothing is deleted",
                    detail=f"exit code {code}{cut}: {said.read(_SAID_BYTES).decode(errors='replace')}",
                    next_step="correct the command of --rows; it prints all rows that may have references",
                )
        forgotten = flow in self.earlier.referring and flow not in self._without_rows
        if forgotten and not self.found.references[place]:
            raise OptionError(
                f"The command for the rows of flow {flow} has printed no reference, although an earlier collection of "
                f"{self._store.url} has found some, so nothing is deleted",
                next_step="check what the command prints: all rows that may have references. If they have none any "
                f"more, give --without-rows {flow}, too",
            )

    def _read_chunks(self, source: IO[bytes], place: str) -> Iterator[bytes]:
        done = 0
        while chunk := source.read(CHUNK_BYTES):
            self._check()
            done += len(chunk)
            self._show(f"reading {place}", done, None)
            yield chunk

    def _refer(self, topic: str, number: int, records: Sequence[Record]) -> None:
        """Take the objects off the list to which these records refer."""
        found = scan(_APART.join(map(_bytes_of, records)))
        is_newer = bool(found.newer) and not self._no_newer_format
        if is_newer or ((found.newer or found.odd) and len(self.found.odd) < _ODD_SHOWN):
            for record in records:  # which of them is it?
                place = f"record {topic}-{number} at offset {record[0]}"
                self._judge(scan(_bytes_of(record)), place, f"{topic}-{number}")
        self._take_off(topic, found.names)

    def _refer_all(self, place: str, chunks: Iterable[bytes], what: str) -> None:
        """As `_refer`, for bytes that come in pieces."""
        for found in scan_stream(chunks):
            self._judge(found, what)
            self._take_off(place, found.names)

    def _judge(self, found: Found, place: str, topic: str | None = None) -> None:
        """What is to become of that which begins like a reference, and cannot be read.

        Raises:
            ClaimCheckError: it can be one in a newer format, and the user does not say that there are none.
        """
        if found.newer and not self._no_newer_format:
            raise ClaimCheckError(
                f"There is what can be a reference in a newer format, in {place}. Nothing was deleted",
                topic=topic,
                detail=f"it begins with {found.newer[0]!r}",
                next_step="collect with the newest onceflow that writes to this store; or give --no-newer-format, if "
                "none is newer than this one: then it is no reference",
            )
        for odd in (*found.odd, *found.newer):
            said = f"{place}: {odd!r}"
            if len(self.found.odd) < _ODD_SHOWN and said not in self.found.odd:
                self.found.odd.append(said)

    def _take_off(self, place: str, names: Sequence[str]) -> None:
        if names:
            with self._transaction():
                self._names.executemany("DELETE FROM objects WHERE name = ?", ((name,) for name in names))
            if place not in self._of_nobody:
                self.found.references[place] = self.found.references.get(place, 0) + len(names)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Many statements at once: one by one, each would be written to disk."""
        self._names.execute("BEGIN")
        try:
            yield
        finally:
            self._names.execute("COMMIT")


def _flattened(offsets: Mapping[str, Mapping[int, int]]) -> dict[TopicPartition, int]:
    return {(topic, number): offset for topic, numbers in offsets.items() for number, offset in numbers.items()}


def _reads(flow: Progress) -> set[str]:
    """The topics from which a flow can have got references."""
    return {*flow.offsets, *flow.joined, *flow.changelogs}


def _bytes_of(record: Record) -> bytes:
    _, key, value, headers = record
    return _APART.join([key or b"", value or b"", *(content or b"" for _, content in headers)])


def _strict(command: str, flow: str) -> list[str]:
    """The program that runs a command of the shell, and fails if one of its steps does, or one part of a pipe.

    Raises:
        OptionError: the command has a pipe, and no shell here notices the failure of its first part.
    """
    shell = shutil.which("bash") or "/bin/sh"
    strict = [shell, "-e", "-o", "pipefail", "-c"]
    if subprocess.run([*strict, ":"], capture_output=True, check=False).returncode == 0:
        return [*strict, command]
    if "|" in command:
        raise OptionError(
            f"The command for the rows of flow {flow} has a pipe, and {shell} does not see when its first part fails",
            next_step="install bash, or give a command without a pipe, for example a script. Nothing was deleted",
        )
    return [shell, "-e", "-c", command]


def _kept_elsewhere(flow: str, why: str) -> OptionError:
    return OptionError(
        f"Flow {flow} may keep references where this command does not look: {why}",
        next_step=f"give --rows {flow} COMMAND, with a command that prints its rows; or --without-rows {flow} if it "
        "keeps no references outside of Kafka. Nothing was deleted",
    )
