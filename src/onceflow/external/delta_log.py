"""Progress rows beside a table of Delta Lake.

    _onceflow/<hash of the flow>/<version>-<owner>.json     an entry: a driver has taken the flow over, or a batch

A commit of the table has a transaction identifier (the action ``txn`` of Delta's protocol): the application is the
identity of the flow, and the version names an entry. So an entry counts if and only if a commit of the table names it.
The version grows, and its last bits are random: two drivers that prepare the next commit at the same time do not write
the same entry, and a driver whose table was put back to an older state does not take another one's entry for its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote

from onceflow.errors import ProgressConflictError, ProtocolError
from onceflow.external.delta_storage import DeltaStorage
from onceflow.external.sink import ProgressRow

log = logging.getLogger("onceflow.sink")

_FOLDER = "_onceflow"
_FORMAT = 1
_RANDOM_BITS = 24
#: So many entries are kept, so that a table that is put back to an older state finds its own.
KEPT = 1000
#: Entries are looked through for old ones once in so many.
_PRUNE_EVERY = 100
_NAME = re.compile(r"(\d{20})-[0-9a-zA-Z]*\.json")
#: Metadata of commits.
FLOW, ENTRY, BATCH = "onceflow.flow", "onceflow.entry", "onceflow.batch"


def folder_of(flow: str) -> str:
    """The name of a flow's folders: its identity may be too long for one."""
    return hashlib.sha256(flow.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Entry:
    """An entry.

    Args:
        version: of the transaction identifier that commits it.
        base: the version of the entry before it, which was committed; 0: there was none.
        generation, owner, progress: the progress row from this entry on.
        batch: that it commits; 0: it is a takeover.
        files: data files that it commits.
        table_id: of the table. table_version: its version for which the commit was prepared. It has a higher one.
    """

    flow: str
    version: int
    base: int
    generation: int
    owner: str
    progress: str | None
    batch: int
    files: tuple[str, ...]
    table_id: str
    table_version: int
    time_ms: int

    @property
    def row(self) -> ProgressRow:
        return ProgressRow(self.generation, self.owner, self.progress)

    @property
    def name(self) -> str:
        return f"{self.version:020d}-{self.owner[:16]}.json"


def next_entry(
    flow: str,
    last: Entry | None,
    row: ProgressRow,
    table: Any,
    *,
    batch: int = 0,
    files: Sequence[str] = (),
) -> Entry:
    """The entry after the last one that was committed."""
    base = 0 if last is None else last.version
    version = ((base >> _RANDOM_BITS) + 1 << _RANDOM_BITS) + secrets.randbits(_RANDOM_BITS)
    now_ms = int(time.time() * 1000)
    return Entry(
        flow=flow,
        version=version,
        base=base,
        generation=row.generation,
        owner=row.owner,
        progress=row.progress,
        batch=batch,
        files=tuple(files),
        table_id=table.metadata().id,
        table_version=table.version(),
        time_ms=now_ms,
    )


class DeltaLog:
    """The entries of one flow."""

    def __init__(self, storage: DeltaStorage, flow: str) -> None:
        self._storage = storage
        self._flow = flow
        self._folder = f"{_FOLDER}/{folder_of(flow)}"

    def write(self, entry: Entry) -> None:
        """Write an entry. Nothing is committed by that."""
        content = json.dumps({"format": _FORMAT, **asdict(entry)}).encode()
        self._storage.create(f"{self._folder}/{entry.name}", content)

    def remove(self, entry: Entry) -> None:
        self._storage.remove(f"{self._folder}/{entry.name}")

    def prune(self, entry: Entry) -> None:
        """Remove entries that are much older than this one, now and then. A failure does no harm."""
        number = entry.version >> _RANDOM_BITS
        if number <= KEPT or number % _PRUNE_EVERY:
            return
        try:
            for version, name in self._entries():
                if version >> _RANDOM_BITS < number - KEPT:
                    self._storage.remove(f"{self._folder}/{name}")
        except Exception as error:
            log.warning("old entries in %s were not removed: %s", self._storage.root, self._storage.said(error))

    def committed(self, table: Any) -> Entry | None:
        """The last entry that the table has committed; None: there is none.

        Raises:
            ProtocolError: the entry is missing or cannot be read.
            ProgressConflictError: the table does not tell.
        """
        version = table.transaction_version(self._flow)
        if version is not None:
            return self._entry(version)
        found = self._entries()
        return self._without_identifier(table, found) if found else None

    # ---- inside --------------------------------------------------------------------------------------

    def _entries(self) -> list[tuple[int, str]]:
        """Versions and names of all entries, the newest last."""
        return [(int(match[1]), match[0]) for match in map(_NAME.fullmatch, self._storage.names(self._folder)) if match]

    def _entry(self, version: int) -> Entry:
        names = [name for number, name in self._entries() if number == version]
        path = f"{self._storage.root}/{self._folder}/{version:020d}"
        if len(names) != 1:
            found = "it is missing" if not names else f"there are several: {', '.join(names)}"
            raise ProtocolError(
                f"The entry {path} of flow {self._flow!r} cannot be used",
                detail=f"the table has committed it, but {found}",
                next_step="restore it from a backup of the folder _onceflow; only the last "
                f"{KEPT} are kept, so a table must not be put back further than that",
            )
        return self._read(names[0])

    def _read(self, name: str) -> Entry:
        path = f"{self._folder}/{name}"
        content = self._storage.read(path)
        try:
            fields = json.loads(content or b"")
            if fields.pop("format") == _FORMAT:
                return Entry(**{**fields, "files": tuple(fields["files"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"{self._storage.root}/{path} is no entry of onceflow",
                detail=str(error),
                next_step="restore it from a backup",
            ) from error
        raise ProtocolError(f"{path} was written by another version of onceflow", next_step="use a newer version")

    def _without_identifier(self, table: Any, found: Sequence[tuple[int, str]]) -> Entry | None:
        """The last committed entry, if the table has lost the transaction identifier: another writer has removed it.

        Its commits still name the entry, as long as Delta keeps them. What is older than these commits was committed if
        a later entry was based on it, or if its files are in the table.
        """
        history = table.history()
        mine = [commit for commit in history if commit.get(FLOW) == self._flow and ENTRY in commit]
        if mine:
            newest = max(mine, key=lambda commit: int(commit["version"]))
            entry = self._entry(int(newest[ENTRY]))
        else:
            oldest = min((int(commit["version"]) for commit in history), default=0)
            entries = [self._read(name) for _, name in found]
            entries = [each for each in entries if each.table_id == table.metadata().id]
            known = self._of_older_commits(table, entries, oldest)
            if known is None:
                return None
            entry = known
        log.warning(
            "flow %s: the table in %s has lost its transaction identifier; its last entry is %d",
            self._flow,
            self._storage.root,
            entry.version,
        )
        return entry

    def _of_older_commits(self, table: Any, entries: Sequence[Entry], oldest: int) -> Entry | None:
        """The last of these entries that was committed. The table has commits from the version ``oldest`` on; none of
        them is of this flow."""
        if not entries or oldest == 0:
            return None  # another table was here before
        known = max(entry.base for entry in entries)
        last = max((entry for entry in entries if entry.table_version + 1 < oldest), key=_version, default=None)
        if last is None or known >= last.version:
            return self._entry(known) if known else None
        if not last.batch or self._has_files(table, last):
            return last
        raise ProgressConflictError(
            f"The table in {self._storage.root} does not tell any more whether it has batch {last.batch} of this flow",
            detail=f"the transaction identifier {self._flow!r} was removed, and so was the log of that time; no file "
            f"of the batch is in the table, for example {', '.join(last.files[:1]) or 'it had none'}",
            next_step=f"look for rows of the batch: if they are not there, remove the file {self._folder}/{last.name}; "
            f"if they are, commit the identifier with version {last.version} again; docs/external.md shows how. "
            "`onceflow reset` would write all rows again",
        )

    def _has_files(self, table: Any, entry: Entry) -> bool:
        import pyarrow as pa

        # As the log writes them: paths are parts of URLs there.
        paths = {*map(unquote, pa.table(table.get_add_actions()).column("path").to_pylist())}
        return any(path in paths for path in entry.files)


def _version(entry: Entry) -> int:
    return entry.version
