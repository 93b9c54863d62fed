"""Compares the copies that a flow keeps of its tables on this machine with the tables' topics. Nothing is written.

The flow may run meanwhile. A copy is read as of one moment, and compared with what the topics contain up to the offsets
that its commit record names.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onceflow.admin.verify.progress_history import last_of, read_history
from onceflow.admin.verify.report import LOCAL, Report, Tell
from onceflow.admin.verify.table_contents import Position, WrittenLater, differences, restored, rows_of, what_of
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.clock import clock_ms
from onceflow.errors import OptionError
from onceflow.protocol import progress as records
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import Progress, TableProgress
from onceflow.state.api.user_errors import shown
from onceflow.state.changelog.compacted_topic import tombstones_kept_ms
from onceflow.state.format import rows, segments
from onceflow.state.local.format import COMMIT_RECORD, KINDS, CommitRecord, partition_folder
from onceflow.state.local.opening import VERIFYING
from onceflow.state.stores.base import Snapshot, Store, StoreCorruptError, StoreSummary, checksum, tally_of
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.rocksdb_store import RocksdbStore

_CALL_S = 60.0
_TRIES, _PAUSE_S = 10, 0.02
_ID = 5  # where the id begins in the key of a stamped row
_OPENERS: tuple[type[Store], ...] = (LmdbStore, RocksdbStore)


@dataclass(frozen=True)
class _Copy:
    """A copy on this machine."""

    folder: Path
    table: str
    partition: int
    opener: type[Store]

    @property
    def name(self) -> str:
        return f"{self.table}-{self.partition} in {self.folder}"


class LocalCopies:
    """One comparison of all copies of a flow below a state folder.

    Args:
        report: findings are added to it.
        scratch: folder for scratch files; None: the system's.
        tell: is told what is read, how much of it is done, and of how much.
        check: called while something is waited for. It may raise, to end it.
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        report: Report,
        *,
        scratch: Path | None,
        tell: Tell,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster, self._names, self._report = cluster, names, report
        self._scratch, self._tell = scratch, tell
        self._check = check
        self._reader = CommittedReader(cluster, _CALL_S, check=check)

    def run(self, state_dir: Path, progress: Progress) -> None:
        """Compare.

        Raises:
            OptionError: there is no copy of a table of the flow in the folder.
            OnceflowError: a topic cannot be read, or a copy cannot be opened.
        """
        found = list(self._copies(state_dir, progress))
        if not found:
            raise OptionError(
                f"There is no copy of a table of the flow in {state_dir}",
                flow=self._names.flow,
                next_step="give the state folder of the flow on this machine: state_dir= of Flow.process, or "
                "ONCEFLOW_STATE_DIR. Copies of the memory store are in the flow's own process only",
            )
        for copy in found:
            with tempfile.TemporaryDirectory(prefix="onceflow-verify-", dir=self._scratch) as folder:
                try:
                    self._check_copy(copy, Path(folder))
                except StoreCorruptError as damage:
                    self._report.add(LOCAL, f"{copy.name} is damaged: {damage.what}")
                except FileNotFoundError:
                    continue  # it is being removed or created
        self._report.checked["local copies"] = len(found)

    def _copies(self, state_dir: Path, progress: Progress) -> Iterator[_Copy]:
        for table in sorted({*progress.tables, *progress.changelogs}):
            if table.endswith(INTERNAL_SUFFIX) and table.removesuffix(INTERNAL_SUFFIX) in progress.tables:
                continue
            parent = partition_folder(state_dir, self._names.progress_key, table, 0).parent
            for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
                opener = next((each for each in _OPENERS if folder.name.isdecimal() and each.exists(folder)), None)
                if opener is not None:
                    yield _Copy(folder, table, int(folder.name), opener)

    def _check_copy(self, copy: _Copy, scratch: Path) -> None:
        if (copy.folder / VERIFYING).exists():
            self._report.notes.append(f"{copy.name}: a process is verifying it, or has died while it did")
        store = copy.opener.open(copy.folder, read_only=True)
        try:
            _check_pages(store)
            record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
            if record is None:
                self._report.add(LOCAL, f"{copy.name} has no commit record that can be read")
                return
            stamped = store.get(segments.LIST) is not None
            compared = self._expected(copy, record, self._newest_with(copy.table))
            if compared:  # before the snapshot, which should be short
                self._restored(scratch, copy, record, stamped).close()
            with store.snapshot() as found:
                self._compare(copy, found, scratch if compared else None, stamped)
        finally:
            store.close()

    def _newest_with(self, table: str) -> Progress | None:
        """The newest committed progress that has a table. It is read after the copy that is judged by it.

        A promotion may replace a table while copies are compared. Then its copies are judged by the last progress
        before the promotion. None: compaction has removed that.
        """
        history = read_history(self._cluster, self._names, self._check)
        last_of(history, self._names)  # raises an error if the flow was reset meanwhile
        values = (records.decode(each.key, each.value) for each in reversed(history) if each.value is not None)
        return next((each for each in values if table in each.tables or table in each.changelogs), None)

    def _expected(self, copy: _Copy, record: CommitRecord, progress: Progress | None) -> bool:
        """Whether the topics say what the copy has to contain. If not, only its checksum is compared.

        Args:
            progress: see `_newest_with`.
        """
        known = TableProgress() if progress is None else progress.tables.get(copy.table, TableProgress())
        why = ""
        if progress is None:
            why = "the flow has replaced the table meanwhile"
        elif known.local is not None:
            why = "the table has no changelog"
        elif known.open_ended:
            why = "the table was written without transactions"
        elif record.table_id != progress.topic_ids.get(copy.table, record.table_id):
            why = "it is of an earlier topic of this name"
        elif self._is_too_old(copy, record, progress):
            why = "it is so old that Kafka may have removed tombstones behind it"
        if (record.flow, record.table, record.partition) != (self._names.progress_key, copy.table, copy.partition):
            self._report.add(LOCAL, f"{copy.name} belongs to {record.table}-{record.partition} of flow {record.flow}")
            return False
        if why:
            self._report.notes.append(f"{copy.name}: only its checksum is compared, because {why}")
        return progress is not None and not why and not self._is_ahead(copy, record, progress)

    def _is_too_old(self, copy: _Copy, record: CommitRecord, progress: Progress) -> bool:
        """Whether rows of a copy may have been deleted later, and their tombstones removed. The flow does not use such
        a copy either."""
        names = (copy.table, copy.table + INTERNAL_SUFFIX)
        ends = [progress.changelogs.get(name, {}).get(copy.partition, 0) for name in names]
        if all(map(int.__ge__, (record.table_end, record.internal_end), ends)):
            return False  # nothing was written since then
        topics = [name for name in names if name in progress.changelogs]
        deadline = Deadline(_CALL_S, f"reading the settings of {copy.table}")
        kept_ms = tombstones_kept_ms(self._cluster, topics, deadline)
        return clock_ms() - record.time_ms > kept_ms // 2

    # ---- one copy ------------------------------------------------------------------------------------

    def _restored(self, scratch: Path, copy: _Copy, record: CommitRecord, stamped: bool) -> Store:
        """What the topics contain where a copy is. Called again, it reads on from there."""
        at = Position(copy.table, copy.partition, record.table_end, record.internal_end)
        return restored(scratch, at, self._reader, lambda n: self._tell(f"reading {at.name}", n, None), stamped=stamped)

    def _compare(self, copy: _Copy, found: Snapshot, scratch: Path | None, stamped: bool) -> None:
        """Compare rows and checksum with one snapshot of a copy."""
        summed = _Summed(found)
        record = CommitRecord.decode(found.blobs.get(COMMIT_RECORD, b""))
        if scratch is not None and record is not None:
            at = Position(copy.table, copy.partition, record.table_end, record.internal_end)
            later = WrittenLater(self._reader, at)
            store = self._restored(scratch, copy, record, stamped)
            try:
                (self._compare_ids if stamped else self._compare_rows)(copy, store, summed, later)
            finally:
                store.close()
        if summed.tally() != found.tally:
            self._report.add(LOCAL, f"{copy.name}: its checksum is not that of its rows")
        name = "rows of local copies"
        self._report.checked[name] = self._report.checked.get(name, 0) + summed.count

    def _is_ahead(self, copy: _Copy, record: CommitRecord, progress: Progress) -> bool:
        """Whether a copy has more than what is committed."""
        names = (copy.table, copy.table + INTERNAL_SUFFIX)
        ends = (progress.changelogs.get(name, {}).get(copy.partition, 0) for name in names)
        if all(map(int.__le__, (record.table_end, record.internal_end), ends)):
            return False
        self._report.add(LOCAL, f"{copy.name} is ahead of what is committed")
        return True

    def _compare_rows(self, copy: _Copy, store: Store, summed: _Summed, later: WrittenLater) -> None:
        here = ((key, row) for key, row in summed if key[:1] in KINDS)
        for each in differences(rows_of(store), here):
            if each.key in later:
                continue
            how = (
                "is not there" if each.found is None else "is not in the topic" if each.expected is None else "differs"
            )
            self._report.add(LOCAL, f"{copy.name}: {what_of(each.row_key)} of key {shown(each.key)} {how}")

    def _compare_ids(self, copy: _Copy, store: Store, summed: _Summed, later: WrittenLater) -> None:
        """Compare the sums of a de-duplication's ids: they are in other segments there, so their order differs."""
        sides = (store.scan(rows.SEGMENT, rows.after(rows.SEGMENT)), summed)
        there, here = (
            sum(checksum([key[_ID:]], [row]) for key, row in side if key[:1] == rows.SEGMENT and key[_ID:] not in later)
            for side in sides
        )
        if there != here:
            self._report.add(LOCAL, f"{copy.name} has other ids than the topic")


class _Summed:
    """The rows of a snapshot, whose checksum is computed as they are read."""

    def __init__(self, found: Snapshot) -> None:
        self._found = found
        self._items = self._read()
        self._result: StoreSummary | None = None
        self.count = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return self._items

    def rest(self) -> None:
        """Read what is left."""
        for _ in self._items:
            pass

    def tally(self) -> StoreSummary:
        """The tally of all rows."""
        self.rest()
        assert self._result is not None
        return self._result

    def _read(self) -> Iterator[tuple[bytes, bytes]]:
        total = StoreSummary()
        part: list[tuple[bytes, bytes]] = []

        def add(before: StoreSummary) -> StoreSummary:
            more = tally_of(iter(part), {})
            return StoreSummary(before.rows + more.rows, (before.total + more.total) & ((1 << 64) - 1))

        last = b""
        for item in self._found.items:
            if item[0] <= last:
                raise StoreCorruptError("keys of the local store are out of order")
            last = item[0]
            part.append(item)
            self.count += 1
            if len(part) >= 256:
                total, part = add(total), []
            yield item
        self._result = add(total).with_blobs(self._found.blobs)


def _check_pages(store: Store) -> None:
    """Check the pages of a file before anything else of it is read: a damaged one may crash the process.

    Another process may write meanwhile. Then what looks damaged may be a commit that is under way.

    Raises:
        StoreCorruptError: they are damaged.
    """
    if not isinstance(store, LmdbStore):
        return
    for attempt in range(_TRIES):
        try:
            with store.snapshot():
                store.check_pages()
            return
        except StoreCorruptError:
            if attempt + 1 == _TRIES:
                raise
            time.sleep(_PAUSE_S)
