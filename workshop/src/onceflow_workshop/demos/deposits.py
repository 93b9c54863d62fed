"""The demo ``deposits``: two flows keep books while they are killed, and every state that a reader may find is checked.

generator -> deposits -> [validate] -> validated -> [book] -> ledger
                         |         \\-> rejected     |          (two entries for each movement)
                         accounts                    balances
                         (tables: topics, local stores)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from rich.table import Table

import onceflow
from onceflow_workshop.demos import deposits_data as data
from onceflow_workshop.demos import ledger
from onceflow_workshop.demos.audit import EXAMPLES_MAX, Expected, Findings, Message, origin_headers
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.ledger import BalanceFindings, Books, Line, Looks
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("deposits/deposits.py")
# What the driver says of each partition when a batch that had to read its state from the topics is committed.
READ_BACK = r"table \S+-\d+: (?:restored|caught up), (\d+) records read"
# For records of 1970 and of 9999: brokers delete the former, and refuse the latter, where nothing else is said.
ANY_TIME = {"retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
_CHUNK = 2_000
_LOOK_S = 0.05
_QUIET_S = 1.5


class Deposits(Chain):
    """Validate deposits and transfers; keep balances and a ledger."""

    name = "deposits"
    partitions: ClassVar[Mapping[str, int]] = {"deposits": 4, "validated": 3, "rejected": 2, "ledger": 6}
    configs: ClassVar[Mapping[str, Mapping[str, str]]] = {"deposits": ANY_TIME, "rejected": ANY_TIME}
    links: ClassVar[Sequence[Link]] = (
        Link("validate", ("deposits",), "validated", SERVICE, ("validate",), keeps_state=True),
        Link("book", ("validated",), "booked", SERVICE, ("book",), keeps_state=True),
    )
    inputs_of = ("deposits",)
    outputs = ("validated", "ledger")
    dead_letters = ("rejected",)
    #: The ledger, and what is wrong with records of it, when it has been read.
    lines: list[Line]
    problems: list[str]

    def inputs(self) -> Iterator[Input]:
        for each in data.generate(self.choices.seed, self.choices.records):
            identity = None if each.cause is None else each.id
            yield Input("deposits", each.key, each.value, identity, None, each.headers, each.timestamp_ms)

    @cached_property
    def operations(self) -> list[data.Operation]:
        """The same again, for the audit."""
        return list(data.generate(self.choices.seed, self.choices.records))

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        valid = [each for each in self.operations if each.cause is None]
        rejected = [each for each in self.operations if each.cause is not None]
        return {
            "validated": (Expected(each.id, each.key, data.validated(each), each.headers) for each in valid),
            # Their headers are looked at one by one, in audit_dead_letters().
            "rejected": (Expected(each.id, each.key, each.value, None) for each in rejected),
            # In which order two senders' money comes to an account is not in the seed; nor are balances on the way.
            "ledger": (
                Expected(f"{entry.id} of {entry.account}", entry.account.encode(), _entry(entry), free=True)
                for entry in data.entries(self.operations)
            ),
        }

    def identify(self, topic: str, message: Message) -> str | None:
        identity = data.identify(message.value, message.headers)
        return f"{identity} of {(message.key or b'').decode(errors='replace')}" if topic == "ledger" else identity

    def compare(self, name: str, records: Iterable[Expected], found: Iterable[Message] | None = None) -> Findings:
        return super().compare(name, records, self._read_ledger() if name == "ledger" else found)

    def _read_ledger(self) -> Iterator[Message]:
        """Its records, without the balances; the whole ones are kept in ``lines``."""
        self.lines = []
        self.problems = []
        for message in read_topic(self.servers, self.topics["ledger"], self.deadline):
            line = ledger.line_of(message)
            if line is None:
                self.problems.append(f"ledger: no entry at {message.partition}@{message.offset}: {message.value!r}")
            else:
                self.lines.append(line)
            yield message._replace(value=(message.value or b"").partition(b',"balance"')[0])

    def surroundings(self) -> Watcher:
        self.watcher = Watcher(self.servers, self.topics["ledger"], self.partitions["ledger"])
        return self.watcher

    @property
    def table(self) -> str:
        """The table topic with the balances: made by the flow, with as many partitions as its source has."""
        return f"balances{self.suffix}"

    def more_topics(self) -> list[str]:
        tables = [self.table, f"accounts{self.suffix}"]
        return [*tables, *(f"{table}-internal" for table in tables)]

    # ---- audits --------------------------------------------------------------------------------------

    def look_further(self, audit: Audit, display: Display) -> None:
        audit.problems += [*self.audit_dead_letters(), *self.problems[:EXAMPLES_MAX]]
        books = self.audit_books()
        looks = self.watcher.finish()
        display.say(f"ledger: {books.prefixes:,} transactions checked, {looks.looks:,} looks while it was written")
        findings = self.audit_balances()
        for each in findings:
            display.say(f"{each.place}: {each.found:,} rows read, {each.expected:,} expected")
            audit.problems += each.examples
        audit.problems += [*books.examples, *looks.problems]
        if looks.ids != len({line.id for line in self.lines}):
            audit.problems.append(f"the reader that looked all the time has seen {looks.ids} ids whole")
        audit.tables += [_books_table(books, looks), _balances_table(findings)]
        audit.facts |= {
            "prefixes": books.prefixes,
            "looks": looks.looks,
            "torn": books.torn + looks.torn,
            "money": books.money,
            "accounts": findings[0].expected,
            "wrong_balances": sum(each.wrong for each in findings),
            **self.losses(audit),
        }

    def audit_dead_letters(self) -> list[str]:
        """What is wrong with the headers of dead letters."""
        bad = {each.id: each for each in self.operations if each.cause is not None}
        problems = []
        for message in read_topic(self.servers, self.topics["rejected"], self.deadline):
            each = bad.get(data.identify(message.value, message.headers) or "")
            if each is not None:
                difference = data.wrong_dead_letter(each, message, origin_headers(self.origins[each.id]))
                if difference:
                    problems.append(f"rejected: {each.id} ({each.cause}): {difference}")
        return problems[:EXAMPLES_MAX]

    def audit_books(self) -> Books:
        """The ledger at every committed prefix."""
        books = ledger.audit_books(self.lines, partitions=self.partitions["ledger"])
        owners = {each.id: (each.account, nth) for nth, each in enumerate(self.operations) if each.cause is None}
        for problem in ledger.own_order(self.lines, owners):
            books.note(problem)
        return books

    def audit_balances(self) -> list[BalanceFindings]:
        """The balances in the table topic and in the local store, and what the other flow knows of the accounts."""
        expected = data.final_balances(self.operations)
        records = read_topic(self.servers, self.table, self.deadline)
        in_topic = ledger.audit_table(
            self.table, expected, self.lines, records, partitions=self.partitions["validated"]
        )
        balances = onceflow.Table.of_flow(self.state_dir / f"book{self.suffix}" / self.table)
        accounts = onceflow.Table.of_flow(self.state_dir / f"validate{self.suffix}" / f"accounts{self.suffix}")
        in_accounts = ledger.audit_rows("store of accounts", data.final_accounts(self.operations), accounts.range())
        missing = set(data.ids(self.operations)) ^ {(key, entry) for key, entry, _ in accounts.map_entries("ids")}
        for key, entry in sorted(missing):
            in_accounts.note(f"{key!r}: id {entry!r} is missing, or should not be there")
        return [in_topic, ledger.audit_rows("store of balances", expected, balances.range()), in_accounts]

    def losses(self, audit: Audit) -> dict[str, int]:
        """How often local state was deleted and read back."""
        deleted = sum(death.lost_state for service in self.services for death in service.deaths)
        planned = sum(service.planned_losses for service in self.services)
        restores = self.restores()
        # The first planned loss always finds something. A later one may not: a driver that dies before it has opened
        # its state again has none to lose. That is no deletion, and is not counted as one.
        if planned and not deleted:
            audit.problems.append(f"local state was never deleted, {planned} times were planned")
        if planned and not restores:
            audit.problems.append("local state was deleted, and nothing was read back")
        return {"restores": restores, "state_deleted": deleted}

    def restores(self) -> int:
        """How many times a partition's state was read from the table topic."""
        lines = (line for service in self.services for line in service.log_lines(READ_BACK))
        return sum(int(line[1]) > 0 for line in lines)


class Watcher(threading.Thread):
    """A reader of the ledger that looks all the time, with a consumer of its own; a context manager.

    Args:
        topic: of the ledger. It need not be there yet.
    """

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int) -> None:
        super().__init__(name="watcher", daemon=True)
        self._servers = bootstrap_servers
        self._places = [TopicPartition(topic, at, OFFSET_BEGINNING) for at in range(partitions)]
        self._looks = Looks(time.monotonic)
        self._leave = threading.Event()

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        self.join(ledger.HEAL_S)

    def finish(self) -> Looks:
        """What it has seen. The flows have stopped; it reads on until nothing more comes."""
        self.__exit__(None, None, None)
        if self.is_alive():
            self._looks.problems.append("the reader that looked all the time has not come to the end")
        self._looks.end()
        return self._looks

    def run(self) -> None:
        options = {
            "bootstrap.servers": self._servers,
            "group.id": "onceflow-demo-watcher",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
        }
        consumer = Consumer(options)
        try:
            self._look(consumer)
        except Exception as error:
            self._looks.problems.append(f"the reader that looked all the time: {type(error).__name__}: {error}")
        finally:
            consumer.close()

    def _look(self, consumer: Any) -> None:
        topic = self._places[0].topic
        while len(consumer.list_topics(topic, timeout=5.0).topics[topic].partitions) < len(self._places):
            if self._leave.wait(_LOOK_S):
                return
        consumer.assign(self._places)
        found_at = time.monotonic()
        while not self._leave.is_set() or time.monotonic() - found_at < _QUIET_S:
            messages = []
            for each in consumer.consume(_CHUNK, timeout=_LOOK_S):
                error = each.error()
                if error is None:
                    messages.append(Message(each.partition(), each.offset(), each.key(), each.value()))
                elif not error.retriable() and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
            if messages:
                found_at = time.monotonic()
                self._looks.see(messages)


def _entry(entry: data.Entry) -> bytes:
    """The beginning of a line of the ledger."""
    return f'{{"id":"{entry.id}","account":"{entry.account}","amount":{entry.amount}'.encode()


def _books_table(books: Books, looks: Looks) -> Table:
    table = Table(title="Money: the sum of the ledger, wherever a reader may have stopped", caption="in cents")
    for name in ("transactions", "looks while it was written", "most halves at a look", "torn", "sum of all entries"):
        table.add_column(name, justify="right")
    numbers = (books.prefixes, looks.looks, looks.halves_seen, books.torn + looks.torn, books.money)
    table.add_row(*(f"{number:,}" for number in numbers))
    return table


def _balances_table(findings: Sequence[BalanceFindings]) -> Table:
    table = Table(title="Accounts: what the tables have of them", caption="sums in cents")
    table.add_column("place")
    for name in ("expected", "found", "wrong", "sum of all balances"):
        table.add_column(name, justify="right")
    for each in findings:
        table.add_row(each.place, *(f"{number:,}" for number in (each.expected, each.found, each.wrong, each.total)))
    return table


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Deposits, choices)
