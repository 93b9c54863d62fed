"""The demo ``deposits``: two flows in a chain, their drivers killed again and again, and every record accounted for.

generator -> deposits -> [validate] -> validated -> [settle] -> settled
                                   \\-> rejected (with cause)
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from onceflow.broker.local import LocalBroker
from onceflow.broker.process import admin_client
from onceflow.client.deadline import Deadline
from onceflow.demos import deposits_data as data
from onceflow.demos.audit import Expected, Findings, compare
from onceflow.demos.display import Display, print_result, services_table, topics_table
from onceflow.demos.harness import Service, Supervisor, plan_kills
from onceflow.demos.reading import GroupLag, read_topic
from onceflow.errors import BrokerUnreachableError, OptionError
from onceflow.testing.broker import create_topic

SERVICE = Path(__file__).parent / "services" / "deposits.py"
# Different counts on purpose: a record must be placed anew in every topic.
PARTITIONS = {"deposits": 4, "validated": 3, "rejected": 2, "settled": 4}
# So many batches leave room for kills between them; so few keep the fixed cost of a batch small.
BATCHES_PER_LIFE = 5
RECORDS_PER_BATCH_MIN = 100
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Choices:
    """Options of the command."""

    records: int = 200_000
    seed: int = 0
    kills: int = 3
    bootstrap_servers: str | None = None
    timeout_s: float = 600.0


class Generator(threading.Thread):
    """Produces the deposits with an idempotent producer: each is in the topic once, in order per account.

    Afterwards ``origins`` tells where each invalid one is, and ``problem`` is None.
    """

    def __init__(self, bootstrap_servers: str, topic: str, choices: Choices) -> None:
        super().__init__(name="generator", daemon=True)
        self.delivered = 0
        self.problem: BaseException | None = None
        self.origins: dict[str, data.Origin] = {}
        self.leave = threading.Event()
        self._topic = topic
        self._choices = choices
        self._producer: Any = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 20,
                "log_level": 0,
            }
        )

    def run(self) -> None:
        try:
            for deposit in data.generate(self._choices.seed, self._choices.records):
                if self.leave.is_set():
                    self._producer.purge()
                    return
                self._produce(deposit)
            while self.delivered < self._choices.records and self.problem is None and not self.leave.is_set():
                self._producer.poll(0.1)
        except Exception as error:
            self.problem = error

    def check(self) -> bool:
        """Whether all are delivered.

        Raises:
            BrokerUnreachableError: one could not be delivered.
        """
        if self.problem is not None:
            raise BrokerUnreachableError(
                "The generator could not deliver a deposit",
                topic=self._topic,
                detail=str(self.problem),
                next_step="see whether the broker still runs and has disk space",
            )
        return self.delivered == self._choices.records

    def _produce(self, deposit: data.Deposit) -> None:
        report = self._delivered if deposit.cause is None else functools.partial(self._delivered, identity=deposit.id)
        while True:
            try:
                self._producer.produce(self._topic, deposit.value, deposit.key, on_delivery=report)
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.1)
                if self.leave.is_set():
                    return

    def _delivered(self, error: Any, message: Any, identity: str | None = None) -> None:
        if error is not None:
            self.problem = RuntimeError(str(error))
            return
        self.delivered += 1
        if identity is not None:
            self.origins[identity] = data.Origin(message.topic(), message.partition(), message.offset())


class Deposits:
    """One run of the demo.

    Args:
        folder: for the broker, the logs and whatever killed processes leave behind.
        deadline: of the whole run.
    """

    def __init__(self, choices: Choices, bootstrap_servers: str, folder: Path, deadline: Deadline) -> None:
        self._choices = choices
        self._servers = bootstrap_servers
        self._deadline = deadline
        # Names are new in every run: on a shared cluster, an earlier run has left its progress there.
        suffix = f"-{uuid.uuid4().hex[:6]}"
        self.topics = {name: name + suffix for name in PARTITIONS}
        rng = random.Random(f"kills-{choices.seed}")
        batches = BATCHES_PER_LIFE * (choices.kills + 1)
        command = [sys.executable, str(SERVICE)]
        options = ["--bootstrap-servers", bootstrap_servers, f"--suffix={suffix}"]
        options += ["--batch", str(choices.records // batches)]
        self._services = [
            # A flow reads a bit less than the bound and settle some control records more: never fewer batches.
            Service(
                flow + suffix, [*command, flow, *options], plan_kills(choices.kills, batches=batches, rng=rng), folder
            )
            for flow in ("validate", "settle")
        ]

    def run(self) -> dict[str, Any]:
        """Produce, process, kill, audit, report. The verdict, as it is printed."""
        expected = sum(deposit.cause is None for deposit in data.generate(self._choices.seed, self._choices.records))
        totals = {
            "produced": self._choices.records,
            "validated": self._choices.records,
            "settled": expected,
            "kills": 2 * self._choices.kills,
        }
        with Display(totals) as display:
            display.say(f"seed {self._choices.seed}, brokers {self._servers}")
            for name, topic in self.topics.items():
                create_topic(self._servers, topic, PARTITIONS[name])
            generator = Generator(self._servers, self.topics["deposits"], self._choices)
            generator.start()
            try:
                self._process(generator, display)
            finally:
                generator.leave.set()
                generator.join(10.0)
            display.say("every record is through; reading all topics")
            findings, hidden = self._audit(generator, display)
        return self._report(findings, hidden)

    def _process(self, generator: Generator, display: Display) -> None:
        """Both services run, and die, until nothing is left to read."""
        with contextlib.ExitStack() as stack:
            lags = []
            for service, name in zip(self._services, ("deposits", "validated"), strict=True):
                lag = GroupLag(self._servers, service.flow, self.topics[name], PARTITIONS[name])
                stack.callback(lag.close)
                lags.append(lag)
            supervisor = stack.enter_context(Supervisor(self._services))
            looked_at, kills = 0.0, 0

            def done() -> bool:
                nonlocal looked_at, kills
                for service in self._services:
                    for death in service.deaths[sum(d.told for d in service.deaths) :]:
                        death.told = True
                        display.say(f"{service.flow}: SIGKILL after step {death.step} (batch {death.batch} committed)")
                if time.monotonic() - looked_at < _LOOK_EVERY_S:
                    return False
                looked_at = time.monotonic()
                complete = generator.check()
                # In this order: once `validate` is through, the end of `validated` does not move any more.
                (first, first_end), (second, second_end) = (lag.read() for lag in lags)
                display.count(produced=generator.delivered, validated=first, settled=second, kills=supervisor.kills)
                return complete and first == first_end and second == second_end

            supervisor.run(done, self._deadline)
            display.count(kills=supervisor.kills)
            display.say("stopping the services")
            supervisor.stop()

    def _audit(self, generator: Generator, display: Display) -> tuple[list[Findings], dict[str, int]]:
        def deposits() -> Iterator[data.Deposit]:
            return data.generate(self._choices.seed, self._choices.records)

        expected: dict[str, Iterator[Expected]] = {
            "deposits": (Expected(deposit.id, deposit.key, deposit.value) for deposit in deposits()),
            "validated": data.expected_validated(deposits()),
            "rejected": data.expected_rejected(deposits(), generator.origins),
            "settled": data.expected_settled(deposits()),
        }
        findings, hidden = [], {}
        for name, records in expected.items():
            topic = self.topics[name]
            found = read_topic(self._servers, topic, self._deadline)
            finding = compare(topic, records, found, partitions=PARTITIONS[name], identify=data.identify)
            findings.append(finding)
            display.say(f"{topic}: {finding.found:,} records read, {finding.expected:,} expected")
            if name != "deposits":
                everything = read_topic(self._servers, topic, self._deadline, isolation="read_uncommitted")
                hidden[topic] = sum(1 for _ in everything) - finding.found
        return findings, hidden

    def _report(self, findings: list[Findings], hidden: dict[str, int]) -> dict[str, Any]:
        kills = sum(len(service.deaths) for service in self._services)
        wrong = [example for finding in findings for example in finding.examples]
        missed = 2 * self._choices.kills - kills
        if missed:
            wrong.append(f"{missed} of the planned kills did not happen")
        print_result([topics_table(findings, hidden), services_table(self._services)], wrong)
        counts = [sum(column) for column in zip(*(finding.counts.values() for finding in findings), strict=True)]
        lost, duplicated, *others = counts
        found = {name: finding.found for name, finding in zip(self.topics, findings, strict=True)}
        return {
            "demo": "deposits",
            "in": found["deposits"],
            "validated": found["validated"],
            "rejected": found["rejected"],
            "settled": found["settled"],
            "lost": lost,
            "duplicated": duplicated,
            "wrong": sum(others),
            "kills": kills,
            "seconds": round(self._deadline.seconds - self._deadline.remaining, 1),
            "seed": self._choices.seed,
            "verdict": "failed" if wrong or any(counts) else "passed",
        }


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; the result is what its last line says. Leaves nothing behind unless it fails.

    Raises:
        OptionError: too few records for so many kills.
        OnceflowError: it could not be brought to its end; the logs are kept.
    """
    least = RECORDS_PER_BATCH_MIN * BATCHES_PER_LIFE * (choices.kills + 1)
    if choices.records < least:
        raise OptionError(
            f"{choices.records} records are too few for {choices.kills} kills per flow",
            next_step=f"use at least --records {least}, or fewer --kills",
        )
    deadline = Deadline(choices.timeout_s, "the demo deposits")
    folder = Path(tempfile.mkdtemp(prefix="onceflow-demo-"))
    keep = False
    try:
        with contextlib.ExitStack() as stack:
            servers = choices.bootstrap_servers
            if servers is None:
                sys.stderr.write("starting a broker\n")
                servers = stack.enter_context(LocalBroker(folder / "broker", heap="512m")).bootstrap_servers
            demo = Deposits(choices, servers, folder, deadline)
            result = demo.run()
            keep = result["verdict"] != "passed"
            if choices.bootstrap_servers is not None and not keep:
                _delete(servers, list(demo.topics.values()))
            return result
    except Exception:
        keep = True
        raise
    finally:
        if keep:
            sys.stderr.write(f"logs and data are kept in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _delete(bootstrap_servers: str, topics: list[str]) -> None:
    with admin_client(bootstrap_servers, {}) as admin:
        for future in admin.delete_topics(topics, operation_timeout=30).values():
            with contextlib.suppress(Exception):  # the audit is done; a topic that stays does no harm
                future.result(30)
