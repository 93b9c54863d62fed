"""Finds and deletes objects of a claim check that no record refers to.

Writers refer to an object only on the day it was stored, and for as long as their transaction takes after that. So an
object that is old enough gets no new writers. If no record of the topics refers to it either, it is an orphan: its
batch was aborted, or its records have expired.

A record counts if a reader may see it, now or later: everything that is committed, and everything from the first open
transaction on, however that ends.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.claim_check.objects import ObjectStore
from onceflow.claim_check.reference import names_in
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topic, find_topics
from onceflow.errors import ClaimCheckError, DataLossError, OptionError
from onceflow.protocol.names import INTERNAL_SUFFIX

_CALL_S = 60.0
_UNDECIDED_OFFSETS = 10_000
_DELETED_AT_ONCE = 1000
_FETCH_BYTES = 4_000_000

Show = Callable[[str, int, int | None], None]
Place = tuple[str, int]


@dataclass
class Collection:
    """What one run has found.

    Args:
        references: how many references were found, by topic.
        objects, object_bytes: of all that are old enough.
        orphans, orphan_bytes: of those that nothing refers to.
    """

    references: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    object_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0


class Collector:
    """One run: `find`, then `orphans` and `delete`. Names are kept in a temporary database on disk, not in memory.

    Args:
        store: of the claim check.
        topics: all topics with references to objects of the store. The companion topic of a table is added.
        without: topics that an earlier run has read, and that have no references any more.
        older_than_ms: the age from which on an object may be deleted.
        now_ms: the time, in epoch milliseconds.
        show: called with a text, how much is done, and of how much.
        check: called often; an exception that it raises ends the run.

    Raises:
        StorageUnavailableError: this is not a store, or it cannot be reached.
        OptionError: a topic of an earlier run is not given.
    """

    def __init__(
        self,
        settings: ClientSettings,
        store: ObjectStore,
        topics: Sequence[str],
        *,
        older_than_ms: int,
        now_ms: int,
        without: Sequence[str] = (),
        show: Show = lambda text, done, total: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._store, self._topics = settings, store, list(dict.fromkeys(topics))
        self._until_ms = now_ms - older_than_ms
        self._show, self._check = show, check
        self.found = Collection()
        self.earlier = store.check()
        """The topics that the last run which was no dry run has read; none if there was no such run."""
        self._check_topics(self.earlier, without)
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
            ClaimCheckError: a record has a reference that cannot be read.
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
        self._store.remember(self._topics)

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

    def _check_topics(self, earlier: Sequence[str], without: Sequence[str]) -> None:
        """A topic that is forgotten would lose its values."""
        if not self._topics:
            raise OptionError("No topic is given", next_step="name every topic that has references to this store")
        forgotten = [topic for topic in earlier if topic not in self._topics and topic not in without]
        if forgotten:
            raise OptionError(
                f"An earlier collection of {self._store.url} has also read {', '.join(forgotten)}",
                next_step=f"give --topic {forgotten[0]}, or --without-topic {forgotten[0]} if it has no references to "
                "this store any more",
            )

    def _partitions(self, cluster: Cluster) -> dict[str, list[int]]:
        deadline = Deadline(_CALL_S, "looking for the topics of a claim check")
        found = find_topics(cluster, dict.fromkeys(self._topics, ""), deadline)
        for name in self._topics:
            if name + INTERNAL_SUFFIX not in found:
                companion = find_topic(cluster, name + INTERNAL_SUFFIX, "READ", deadline)
                found |= {} if companion is None else {companion.name: companion}
        self.found.references = dict.fromkeys(found, 0)
        return {name: sorted(topic.leaders) for name, topic in found.items()}

    def _list(self) -> None:
        for day in self._store.days(self._until_ms):
            self._check()
            self._show(f"listing objects of {day}", self.found.objects, None)
            with self._transaction():
                for name, size in self._store.names(day):
                    self._names.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (name, size))
                    self.found.objects += 1
                    self.found.object_bytes += size

    def _scan(self, cluster: Cluster, partitions: Mapping[str, Sequence[int]]) -> None:
        """Take everything off the list that a record refers to."""
        deadline = Deadline(_CALL_S, "reading the offsets of topics")
        starts = _places(list_offsets(cluster, partitions, EARLIEST, deadline))
        # In this order: what is decided meanwhile is read as if it were not.
        stable = _places(list_offsets(cluster, partitions, LATEST, deadline))
        ends = _places(list_offsets(cluster, partitions, LATEST, deadline, committed=False))
        total, done = sum(max(0, ends[place] - starts[place]) for place in ends), 0
        reader = CommittedReader(cluster, fetch_bytes=_FETCH_BYTES)
        for (topic, number), start in starts.items():
            name = f"reading {topic}-{number}"
            for chunk in reader.read(topic, number, start, stable[topic, number]):
                self._check()
                self._refer(topic, number, zip(chunk.offsets.tolist(), chunk.values, strict=True))
                self._show(name, done + chunk.next_offset - start, total)
            self._read_all(cluster, topic, number, max(start, stable[topic, number]), ends[topic, number])
            done += max(0, ends[topic, number] - start)
        # A flow may have copied a reference to a topic that was read already, from one that was read later and had lost
        # the record by then.
        deadline = Deadline(_CALL_S, "reading the offsets of topics")
        later = _places(list_offsets(cluster, partitions, LATEST, deadline, committed=False))
        for (topic, number), end in later.items():
            self._read_all(cluster, topic, number, ends[topic, number], end)

    def _read_all(self, cluster: Cluster, topic: str, number: int, start: int, end: int) -> None:
        """Read records whatever becomes of their transactions."""
        while start < end:
            self._check()
            upto = min(end, start + _UNDECIDED_OFFSETS)
            deadline = Deadline(_CALL_S, f"reading {topic}-{number}")
            try:
                items = read_log(cluster, topic, number, start, upto, deadline)
                self._refer(topic, number, ((i.offset, i.value) for i in items if isinstance(i, LogRecord)))
            except DataLossError:  # records have expired meanwhile: their references, too
                first = list_offsets(cluster, {topic: [number]}, EARLIEST, deadline)[topic][number]
                if first <= start:
                    raise
                upto = max(start, min(first, end))
            start = upto

    def _refer(self, topic: str, number: int, values: Iterator[tuple[int, bytes | None]]) -> None:
        with self._transaction():
            for offset, value in values:
                try:
                    names = names_in(value) if value else []
                except ClaimCheckError as error:
                    error.detail += f"; the record is {topic}-{number} at offset {offset}"
                    raise error.locate(topic=f"{topic}-{number}") from None
                for name in names:
                    self._names.execute("DELETE FROM objects WHERE name = ?", (name,))
                    self.found.references[topic] += 1

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Many statements at once: one by one, each would be written to disk."""
        self._names.execute("BEGIN")
        try:
            yield
        finally:
            self._names.execute("COMMIT")


def _places(offsets: Mapping[str, Mapping[int, int]]) -> dict[Place, int]:
    return {(topic, number): offset for topic, numbers in offsets.items() for number, offset in numbers.items()}
