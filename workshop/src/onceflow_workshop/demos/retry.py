"""The demo ``retry``: orders that fail come back after a while, or are parked; each of them ends in one place.

orders ─▶ [charge] ─▶ charged
            ▲   │
      retry │   ▼ failed (dead letters)
           [retry] ─▶ parked
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from onceflow.testing import independent
from onceflow_workshop.demos import retry_data as data
from onceflow_workshop.demos.audit import Expected, Message
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("retry/retry.py")
# Of the broker, not of the flows: the audit measures with it how long records have waited.
_BROKER_TIME = {"message.timestamp.type": "LogAppendTime"}


class Retries(Chain):
    """Charge orders, retry what has failed."""

    name = "retry"
    partitions: ClassVar[Mapping[str, int]] = {"orders": 4, "retry": 2, "failed": 3, "charged": 4, "parked": 2}
    configs: ClassVar[Mapping[str, Mapping[str, str]]] = {
        # Some orders have timestamps of long ago, and would be deleted at once.
        "orders": {"retention.ms": "-1"},
        "charged": {"retention.ms": "-1"},
        "failed": _BROKER_TIME,
        "retry": _BROKER_TIME,
        "parked": {"cleanup.policy": "compact"},
    }
    links: ClassVar[Sequence[Link]] = (
        Link("charge", ("orders", "retry"), "charged", SERVICE, ("charge",), keeps_state=True),
        Link("retry", ("failed",), "retried", SERVICE, ("retry",), keeps_state=True, share=0.4),
    )
    inputs_of: ClassVar[tuple[str, ...]] = ("orders",)
    outputs: ClassVar[tuple[str, ...]] = ("charged", "parked")
    dead_letters: ClassVar[tuple[str, ...]] = ("failed",)

    def orders(self) -> Iterator[data.Order]:
        """The input, from the seed."""
        return data.generate(self.choices.seed, self.choices.records)

    def inputs(self) -> Iterator[Input]:
        return data.inputs(self.orders())

    def identify(self, topic: str, message: Message) -> str | None:
        return data.identify(topic, message)

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        return {
            "failed": data.expected_failed(self.orders(), self.origins),
            "retry": data.expected_retry(self.orders(), self.origins),
            "charged": data.expected_charged(self.orders()),
            "parked": data.expected_parked(self.orders(), self.origins),
        }

    def through(self, display: Display) -> bool:
        return self.counted(**data.ends(self.orders()))

    def more_topics(self) -> list[str]:
        tables = [f"{name}{self.suffix}" for name in ("charges", "waiting")]
        return [*tables, *(f"{table}-internal" for table in tables)]

    def look_further(self, audit: Audit, display: Display) -> None:
        charges, waiting, _, waiting_internal = self.more_topics()
        waits, seconds = data.check_waits(self._appended("failed"), self._appended("retry"))
        found = [
            waits,
            *(
                data.check_headers(
                    self.topics[name],
                    self.orders(),
                    self.origins,
                    self._read(self.topics[name]),
                    parked=name == "parked",
                    retry_topic=self.topics["retry"],
                )
                for name in ("failed", "parked")
            ),
            data.check_rows(charges, self.orders(), self._read(charges)),
            data.check_deleted(waiting, self._read(waiting)),
            data.check_deleted(waiting_internal, self._read(waiting_internal)),
        ]
        for problems in found:
            display.say(f"{problems.place}: {problems.wrong} wrong")
            audit.problems += problems.examples
        audit.facts |= {
            "parked": audit.found([self.topics["parked"]]),
            "retried": audit.found([self.topics["retry"]]),
            "too_early": waits.wrong,
            "median_wait_s": round(median(seconds), 2) if seconds else None,
        }

    def _read(self, topic: str) -> Iterator[Message]:
        return read_topic(self.servers, topic, self.deadline)

    def _appended(self, name: str) -> dict[str, int]:
        """When the broker has appended the records of a topic, by identity."""
        seen = independent.read_topic(self.servers, self.topics[name], decided=True)
        found = {}
        for record in seen:
            identity = data.identify(name, Message(record.partition, record.offset, None, None, record.headers))
            found[identity or ""] = record.timestamp_ms
        return found


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Retries, choices)
