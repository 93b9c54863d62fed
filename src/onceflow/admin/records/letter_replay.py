"""Replays dead letters: sends them back to the topics that their records were read from, each once.

An ordinary topic of dead letters is no table, so what was replayed cannot be removed from it. It is noted in a
compacted topic beside it, ``<topic>-replayed``: a note for each letter, in the same transaction as the record. The key
of a note has the id of the topic of letters, because offsets begin again when a topic is deleted and created again.

A replay is a series of transactions of limited size. When one is interrupted, the next one continues. All commands that
change what is in a topic of letters share a transactional id, see `onceflow.admin.records.parked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import orjson
import pyarrow as pa

from onceflow import hooks
from onceflow.admin.records.parked import connected, end_transaction, is_parked
from onceflow.admin.records.writer import Row, Writer, abort_anew
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import create_own_topic, find_topic, find_topics, topic_limits
from onceflow.client.transactions import Transactions
from onceflow.clock import clock_ms
from onceflow.errors import FencedError, OptionError, PermissionDeniedError, counted
from onceflow.protocol.headers import Header
from onceflow.protocol.names import transactional_id_of_parked
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.changelog.topics import check_readable
from onceflow.state.engine import dead_letters
from onceflow.state.engine.retry import RETRY_TOPIC

SUFFIX = "-replayed"
_PREPARE_S, _TIMEOUT_MS = 60.0, 60_000
_LETTERS, _BYTES = 5_000, 16_000_000  # of one transaction
_SORTED_LETTERS, _SORTED_BYTES = 50_000, 64_000_000  # in memory

Position = tuple[int, int]
"""Partition and offset of a letter."""


@dataclass(frozen=True)
class Wanted:
    """Which letters are replayed. What is not given does not matter.

    Args:
        origins: where records were first read, ``topic/partition/offset``.
        cause: the class of the error. message: a part of its text.
        source: the topic that the record was read from when it failed. flow: the flow in which it failed.
        to: where the records go; empty: to that topic.
    """

    origins: Collection[str] = ()
    cause: str = ""
    message: str = ""
    source: str = ""
    flow: str = ""
    to: str = ""

    def fits(self, letter: Letter) -> bool:
        return (
            (not self.origins or letter.origin in self.origins)
            and self.cause in ("", letter.header(dead_letters.ERROR_CLASS))
            and self.message in letter.header(dead_letters.ERROR_MESSAGE)
            and self.source in ("", letter.source)
            and self.flow in ("", letter.header(dead_letters.ERROR_FLOW))
        )


@dataclass(frozen=True)
class Letter:
    """One dead letter. Key, value and timestamp are those of its record."""

    position: Position
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    timestamp_ms: int

    def header(self, name: str) -> str:
        """The last header with this name, as text; empty if there is none."""
        return dead_letters.header_text(self.headers, name)

    @cached_property
    def origin(self) -> str:
        """Where its record was first read, ``topic/partition/offset``; empty: not known."""
        return dead_letters.origin_of(self.headers)

    @cached_property
    def read_at(self) -> tuple[str, int, int]:
        """Topic, partition and offset where its record was read when it failed. The flow itself has noted that, whereas
        whoever wrote the record may have given it an origin. An empty topic: not known."""
        topic, _, place = dead_letters.read_at(self.headers).partition("/")
        partition, _, offset = place.partition("/")
        return topic, int(partition or 0), int(offset or 0)

    @property
    def source(self) -> str:
        """The topic where its record was read when it failed; empty: not known."""
        return self.read_at[0]

    @property
    def nbytes(self) -> int:
        return len(self.key or b"") + len(self.value or b"") + sum(len(each or b"") for _, each in self.headers)

    def again(self, topic: str) -> Row:
        """The record for a topic. Of the letter's own headers it keeps the origin, so that names which are made of it
        stay the same, and gets the one by which a flow knows that the record has come back."""
        gone = dead_letters.ABOUT - {
            dead_letters.ORIGIN_TOPIC,
            dead_letters.ORIGIN_PARTITION,
            dead_letters.ORIGIN_OFFSET,
        }
        headers = [each for each in self.headers if each[0] not in gone]
        return Row(self.value, self.timestamp_ms, [*headers, (RETRY_TOPIC, topic.encode())])


@dataclass(frozen=True)
class Replayed:
    """What was replayed, or would be.

    Args:
        records: their number, by target and cause.
        before: how many of the letters that fit were replayed by an earlier command.
        doubles: letters of records that were replayed already, by this command: several flows may have one topic of
            dead letters.
        kept: how many of them cannot be replayed, by the reason.
        read: how many letters were looked at. causes: how many of them have each cause.
    """

    records: Mapping[tuple[str, str], int] = field(default_factory=dict)
    before: int = 0
    doubles: int = 0
    kept: Mapping[str, int] = field(default_factory=dict)
    read: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)


def replayed(cluster: Cluster, topic: TopicInfo, deadline: Deadline) -> set[Position]:
    """Which letters of a topic were replayed; none if nothing was ever replayed."""
    name = topic.name + SUFFIX
    return set() if find_topic(cluster, name, "READ", deadline) is None else set(_noted(cluster, name, topic.topic_id))


def replayed_in(cluster: Cluster, topic: str, deadline: Deadline) -> set[Position]:
    """The same of a topic that is named."""
    return replayed(cluster, find_topics(cluster, {topic: ""}, deadline)[topic], deadline)


def replayed_positions(settings: ClientSettings, topic: str) -> set[Position] | None:
    """Which letters of a topic were replayed; None: this principal may not see it."""
    with connected(settings, topic) as cluster:
        deadline = Deadline(_PREPARE_S, f"looking for replayed letters of {topic}")
        cluster.connect(deadline)
        try:
            return replayed_in(cluster, topic, deadline)
        except PermissionDeniedError:
            return None


def replay(
    settings: ClientSettings,
    topic: str,
    wanted: Wanted,
    *,
    dry_run: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Replayed:
    """Send the wanted letters of a topic back, each once.

    Args:
        dry_run: write nothing, and fence nobody; say what would be done.
        tell: called with the offsets that were read, and their total.

    Raises:
        OptionError: one of the origins is not there or cannot be replayed, or the topic has parked records.
        FencedError: another command for this topic has started meanwhile.
        DeadlineExceededError: the outcome of the last transaction is not known.
        OnceflowError: Kafka refused a request. What earlier transactions have replayed stays so.
    """
    with connected(settings, topic) as cluster:
        return _Replay(cluster, topic, wanted, dry_run=dry_run, tell=tell).run()


class _Replay:
    """One call of `replay`."""

    def __init__(
        self, cluster: Cluster, topic: str, wanted: Wanted, *, dry_run: bool, tell: Callable[[int, int], None]
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._wanted = wanted
        self._dry_run = dry_run
        self._tell = tell
        self._transactions = Transactions(cluster, transactional_id_of_parked(topic), _TIMEOUT_MS)
        self._targets: dict[str, TopicInfo] = {}
        self._missing = set(wanted.origins)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._kept: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._sent: set[bytes] = set()
        self._before = self._read = self._doubles = 0

    def run(self) -> Replayed:
        deadline = Deadline(_PREPARE_S, f"preparing to replay the letters of {self._topic}")
        self._cluster.connect(deadline)
        info = find_topics(self._cluster, {self._topic: ""}, deadline)[self._topic]
        if self._wanted.to:
            self._targets |= find_topics(self._cluster, {self._wanted.to: "target"}, deadline)
        try:
            if not self._dry_run:
                self._transactions.check_supported(deadline)
                self._transactions.init(deadline)
                hooks.at("init", where="driver", flow=f"parked.{self._topic}")
                # Before anything is written: it may have to be created.
                create_own_topic(
                    self._cluster,
                    self._topic + SUFFIX,
                    "topic of replayed letters",
                    partitions=1,
                    configs={},
                    deadline=deadline,
                )
                check_readable(self._cluster, {self._topic + SUFFIX: {0: 0}}, deadline)
            # After init: the transaction of an earlier command is decided.
            noted = replayed(self._cluster, info, deadline)
            self._look_for_origins(info, noted)
            for letters in self._chosen(info, noted):
                first = [each for each in letters if self._is_first(each)]
                if not self._dry_run:
                    self._write(info, first, letters)
                self._doubles += len(letters) - len(first)
                self._counts.update((self._target(each), each.header(dead_letters.ERROR_CLASS)) for each in first)
            hooks.at("end", where="driver", flow=f"parked.{self._topic}")
        except FencedError as error:
            raise FencedError(
                f"Another command has started to change topic {self._topic}; what this one has replayed stays",
                topic=self._topic,
                detail=f"{counted(sum(self._counts.values()), 'letter')}; {error.what}",
                next_step=f"see with onceflow parked list {self._topic} which letters were replayed; run this command "
                "again if necessary: it replays the others",
            ) from error
        counts, kept, causes = dict(self._counts), dict(self._kept), dict(self._causes)
        return Replayed(counts, self._before, self._doubles, kept, self._read, causes)

    # ---- letters -------------------------------------------------------------------------------------

    def _look_for_origins(self, info: TopicInfo, noted: Collection[Position]) -> None:
        """Check that all named letters are there, and can be replayed, before anything is written."""
        if not self._wanted.origins:
            return
        for _ in self._chosen(info, noted, quiet=True):
            pass
        if self._missing:
            first = next(each for each in self._wanted.origins if each in self._missing)
            more = f" (and {len(self._missing) - 1} others)" if len(self._missing) > 1 else ""
            raise OptionError(
                f"There is no letter of {first}{more} in {self._topic}",
                topic=self._topic,
                next_step=f"see what is there with onceflow parked list {self._topic}; nothing was replayed",
            )
        if self._kept:
            raise OptionError(
                f"A letter cannot be replayed: {next(iter(self._kept))}",
                topic=self._topic,
                next_step="name the other ones; nothing was replayed",
            )
        self._before = self._read = 0
        self._causes.clear()

    def _is_first(self, letter: Letter) -> bool:
        """Whether no other letter of the same record is replayed by this command."""
        if not letter.source:
            return True
        what = repr((letter.read_at, letter.key, letter.value, self._target(letter))).encode()
        known = sha256(what).digest()
        is_first = known not in self._sent
        self._sent.add(known)
        return is_first

    def _chosen(self, info: TopicInfo, noted: Collection[Position], *, quiet: bool = False) -> Iterator[list[Letter]]:
        """The letters to replay, in lists of limited size.

        A batch writes letters of records that it cannot decode before others. So they are sorted by where they were
        read, with as many in memory as there is room for: letters of a key come back in their order.
        """
        found: list[Letter] = []
        size = 0
        for letter in self._letters(info, quiet=quiet):
            self._read += 1
            self._causes[letter.header(dead_letters.ERROR_CLASS)] += 1
            if not self._wanted.fits(letter):
                continue
            self._missing.discard(letter.origin)
            if letter.position in noted:
                self._before += 1
            elif why := self._why_kept(letter):
                self._kept[why] += 1
            else:
                found.append(letter)
                size += letter.nbytes
                if len(found) >= _SORTED_LETTERS or size >= _SORTED_BYTES:
                    found.sort(key=_order)
                    half = len(found) // 2 or 1
                    while half < len(found) and _is_same(found[half - 1], found[half]):
                        half += 1
                    yield from _parts(found[:half])
                    found = found[half:]
                    size = sum(each.nbytes for each in found)
        yield from _parts(sorted(found, key=_order))

    def _letters(self, info: TopicInfo, *, quiet: bool) -> Iterator[Letter]:
        deadline = Deadline(_PREPARE_S, f"looking for the ends of {self._topic}")
        span = {self._topic: sorted(info.leaders)}
        begins = list_offsets(self._cluster, span, EARLIEST, deadline)[self._topic]
        ends = list_offsets(self._cluster, span, LATEST, deadline)[self._topic]
        total = sum(ends[each] - begins[each] for each in ends)
        done = 0
        for partition, end in sorted(ends.items()):
            position = begins[partition]
            for chunk in CommittedReader(self._cluster).read(self._topic, partition, position, end):
                columns = chunk.offsets.tolist(), chunk.keys, chunk.values, chunk.timestamps_ms.tolist()
                for row, (offset, key, value, stamp) in enumerate(zip(*columns, strict=True)):
                    headers = tuple(chunk.headers.get(row, ()))
                    if key is not None and is_parked(key, headers):
                        raise _parked(self._topic)
                    yield Letter((partition, offset), key, value, headers, stamp)
                done += chunk.next_offset - position
                position = chunk.next_offset
                if not quiet:
                    self._tell(done, total)

    def _why_kept(self, letter: Letter) -> str:
        """Why a letter cannot be replayed, in words; empty: it can."""
        if not letter.header(dead_letters.ERROR_CLASS):
            return "it has no cause in its headers, so it is no dead letter"
        if why := dead_letters.why_not_retried(letter.headers):
            return why
        target = self._target(letter)
        if not target:
            return "its headers do not say where its record was read: name a topic with --to"
        return "it would go to the topic of letters itself" if target == self._topic else ""

    def _target(self, letter: Letter) -> str:
        return self._wanted.to or letter.source

    # ---- transactions --------------------------------------------------------------------------------

    def _write(self, info: TopicInfo, letters: Sequence[Letter], noted_letters: Sequence[Letter]) -> None:
        """Replay letters, and note that, in one transaction.

        Args:
            noted_letters: those that need not be replayed any more.
        """
        flow = f"parked.{self._topic}"
        deadline = Deadline(_TIMEOUT_MS / 1000, f"replaying letters of {self._topic}")
        notes = self._topic + SUFFIX
        placed = self._placed(letters, deadline)
        self._transactions.begin(deadline)
        try:
            limits = topic_limits(self._cluster, sorted({notes, *(topic for topic, _ in placed)}), deadline)
            writer = Writer(self._cluster, self._transactions, limits, deadline)
            for (topic, partition), found in placed.items():
                writer.write(topic, partition, [(each.key, each.again(topic)) for each in found])
            noted = [(_note_key(info.topic_id, each.position), self._note(each)) for each in noted_letters]
            writer.write(notes, 0, noted)
            writer.finish()
            hooks.at("write", where="driver", flow=flow)
        except BaseException as problem:
            if not isinstance(problem, FencedError):
                abort_anew(self._cluster, self._transactions)
            raise
        look = f"`onceflow parked replay {self._topic} --all --dry-run` shows what is left"
        end_transaction(self._transactions, self._topic, look)
        hooks.at("commit", where="driver", flow=flow)

    def _placed(self, letters: Sequence[Letter], deadline: Deadline) -> dict[tuple[str, int], list[Letter]]:
        """The letters by the partition that they go to: the one where their record was, so that the order of its key
        stays; in another topic, the one that Kafka's default partitioner chooses."""
        if new := {self._target(each) for each in letters} - self._targets.keys():
            self._targets |= find_topics(self._cluster, dict.fromkeys(sorted(new), "target"), deadline)
        placed: dict[tuple[str, int], list[Letter]] = {}
        for each in letters:
            topic = self._target(each)
            count = self._targets[topic].partitions
            partition = each.read_at[1] if topic == each.source else count
            if partition >= count:  # another topic, or it was created again with fewer
                key = repr(each.read_at).encode() if each.key is None else each.key
                partition = int(key_partitions(pa.array([key], pa.binary()), count)[0])
            placed.setdefault((topic, partition), []).append(each)
        return placed

    def _note(self, letter: Letter) -> Row:
        said = {"origin": letter.origin, "to": self._target(letter)}
        return Row(orjson.dumps(said), clock_ms())


def _order(letter: Letter) -> tuple[str, int, int]:
    return letter.read_at


def _is_same(one: Letter, other: Letter) -> bool:
    """Whether both are letters of the same record."""
    return bool(one.source) and one.read_at == other.read_at


def _parts(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """The letters of each transaction. Those of one record are in the same one: it is sent once, also if this process
    is killed between two of them."""
    part: list[Letter] = []
    size = 0
    for letter in letters:
        if (len(part) >= _LETTERS or size >= _BYTES) and not _is_same(part[-1], letter):
            yield part
            part, size = [], 0
        part.append(letter)
        size += letter.nbytes
    if part:
        yield part


def _note_key(topic_id: str, position: Position) -> bytes:
    return f"{topic_id}/{position[0]}/{position[1]}".encode()


def _noted(cluster: Cluster, name: str, topic_id: str) -> Iterator[Position]:
    reader = CommittedReader(cluster)
    for chunk in reader.read(name, 0, 0, reader.end(name, 0)):
        for key, value in zip(chunk.keys, chunk.values, strict=True):
            whose, *numbers = (key or b"").decode(errors="replace").rsplit("/", 2)
            is_noted = value is not None and whose == topic_id
            if is_noted and len(numbers) == 2 and all(each.isdigit() for each in numbers):
                yield int(numbers[0]), int(numbers[1])


def _parked(topic: str) -> OptionError:
    return OptionError(
        f"Topic {topic} has parked records, which onceflow.Retry has given up",
        topic=topic,
        next_step=f"`onceflow parked retry {topic} --all` sends them back; `--to` names another topic than "
        "that of their earlier retries",
    )
