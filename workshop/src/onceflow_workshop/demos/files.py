"""The demo ``files``: links become files, files become records; the server is unreliable, the driver is killed.

generator -> links -> [files] -> transactions, bad-rows, loaded   (a file that is complete)
                             \\-> failed, skipped                 (a link that leads to none, or that was seen before)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from onceflow_workshop.demos.audit import Expected, Findings, Message
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.files_big import BIG_IDENTITY, BigFile
from onceflow_workshop.demos.files_data import ATTEMPTS, DEADLINE_S, Links, identify
from onceflow_workshop.demos.files_server import FilesServer, write_files
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("files/files.py")
BIG_BYTES = 10**9
# It takes longer to come than the others.
_BIG_DEADLINE_S = 40


@dataclass(frozen=True)
class FilesChoices(Choices):
    """Options of the command."""

    big: bool = False


class Files(Chain):
    """Download what links name."""

    name = "files"
    partitions: ClassVar[Mapping[str, int]] = {
        "links": 4,
        "transactions": 6,
        "bad-rows": 2,
        "loaded": 3,
        "failed": 3,
        "skipped": 2,
    }
    links: ClassVar[Sequence[Link]] = (Link("files", ("links",), "loaded", SERVICE, keeps_state=True),)
    inputs_of = ("links",)
    outputs = ("transactions",)
    dead_letters = ("failed", "bad-rows")
    min_records_per_batch = 3

    @cached_property
    def server(self) -> FilesServer:
        """Made when its port is first asked for, which is before it serves."""
        return FilesServer()

    @cached_property
    def wanted(self) -> Links:
        """All links, and what is behind them."""
        big = BIG_BYTES if isinstance(self.choices, FilesChoices) and self.choices.big else 0
        return Links(self.choices.seed, self.choices.records, f"http://{self.server.place}", big)

    @property
    def root(self) -> Path:
        """The folder of the files that are named by their path."""
        return self.folder / "root"

    def command(self, link: Link) -> list[str]:
        deadline_s = _BIG_DEADLINE_S if self.wanted.big_rows else DEADLINE_S
        places = ["--host", self.server.place, "--root", str(self.root), "--folder", str(self.folder)]
        limits = [
            "--attempts",
            str(ATTEMPTS),
            "--backoff-s",
            "0.2",
            "--timeout-s",
            "3",
            "--deadline-s",
            str(deadline_s),
        ]
        return [*super().command(link), *places, *limits]

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        self.root.mkdir()
        write_files(self.wanted, self.root)
        with self.server.serving(self.wanted):
            yield

    def inputs(self) -> Iterator[Input]:
        wanted = self.wanted
        for case in wanted.cases:
            yield Input("links", wanted.key(case), wanted.value(case), case.identity)
            if wanted.big_rows and case.number == len(wanted.cases) // 2:
                value = f'{{"id": "{BIG_IDENTITY}", "link": "{wanted.big_link}"}}'
                yield Input("links", wanted.big_link.encode(), value.encode(), BIG_IDENTITY)

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        return {
            "transactions": self.wanted.expected_transactions(),
            "bad-rows": self.wanted.expected_bad_rows(),
            "loaded": self.wanted.expected_loaded(),
            "failed": self.wanted.expected_failed(),
            "skipped": self.wanted.expected_skipped(),
        }

    def identify(self, topic: str, message: Message) -> str | None:
        return identify(topic, message, self.origins)

    def compare(self, name: str, records: Iterable[Expected], found: Iterable[Message] | None = None) -> Findings:
        if name != "transactions" or not self.wanted.big_rows:
            return super().compare(name, records, found)
        big = BigFile(self.wanted.big_link, self.wanted.big_rows)
        everything = read_topic(self.servers, self.topics[name], self.deadline)
        others = (message for message in everything if not big.takes(message))
        finding = super().compare(name, records, others)
        finding.expected += self.wanted.big_rows
        finding.found += big.found
        for kind, count in big.counts.items():
            finding.counts[kind] += count
        return finding

    def look_further(self, audit: Audit, display: Display) -> None:
        failed = read_topic(self.servers, self.topics["failed"], self.deadline)
        audit.problems += self.wanted.wrong_causes(
            failed, self.origins, lambda message: self.identify("failed", message)
        )
        table: dict[bytes, int] = {}
        for message in read_topic(self.servers, self._table, self.deadline):
            table[message.key or b""] = int.from_bytes(message.value or b"", "big")
        wrong = [link for link, count in self.wanted.expected_table().items() if table.pop(link, None) != count]
        audit.problems += [f"{self._table}: {link!r} is wrong" for link in [*wrong, *table]]
        audit.facts |= {
            "files": next(finding.found for finding in audit.topics if finding.topic == self.topics["loaded"]),
            "requests": self.server.requests.total(),
            "state_deleted": sum(death.lost_state for service in self.services for death in service.deaths),
        }

    def more_topics(self) -> list[str]:
        return [self._table, f"{self._table}-internal"]

    @property
    def _table(self) -> str:
        return f"link-table{self.suffix}"


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Files, choices)
