"""A new version of a flow, tried beside it and then put in its place: ``onceflow fork``, and ``onceflow promote``.

A driver process of its own runs the copy, into topics and tables of its own, while faults hit everything around both.
After the promotion the driver of all flows runs the program of the copy: under the name of the flow, with its outputs,
and with the tables of the copy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from onceflow.testing.broker import create_topic
from onceflow_workshop.chaos.commands import Commands
from onceflow_workshop.chaos.driver_process import Driver
from onceflow_workshop.chaos.flows import LEDGER, Names

_COMMITS_S = 150.0
_WAIT_S = 40  # a driver that was killed starts in this time


class Replacement:
    """One copy of a flow, from the fork to the promotion.

    Args:
        names: those of the flow. kind: of the flow.
        bootstrap_servers: where the commands and the driver of the copy find the brokers.
        engines, rng: see `Driver`.
    """

    def __init__(
        self, names: Names, kind: str, bootstrap_servers: str, engines: Sequence[str], rng: random.Random
    ) -> None:
        self.kind = kind
        self.copy = names.of_copy(kind)
        self.driver = Driver(self.copy, [kind], bootstrap_servers, "local[2]", {}, engines=engines, rng=rng)
        self._names = names
        self.commands = Commands(names.folder, bootstrap_servers)

    @property
    def flow(self) -> str:
        return self._names.flow(self.kind)

    @property
    def new(self) -> str:
        return self.copy.flow(self.kind)

    def create_topics(self, bootstrap_servers: str, partitions: int) -> None:
        """Create the outputs of the copy."""
        for topic in self.copy.outputs([self.kind]):
            create_topic(bootstrap_servers, topic, partitions)

    def fork(self, rule: str | None, revive: Callable[[], object]) -> None:
        """Copy the flow, and start the driver of the copy. Arguments as of `promote`."""
        table, copied = self._names.own_table(self.kind), self.copy.own_table(self.kind)
        given = [] if table is None else ["--table", f"{table}={copied}"]
        self.commands.until_done(
            ["fork", self.flow, self.new, *given, "--yes"], flow=self.flow, rule=rule, between=lambda said: revive()
        )
        self.driver.start()

    def promote(self, rule: str | None, revive: Callable[[], object]) -> None:
        """Let the copy take the place of the flow. Drivers that are started from now on run its program.

        Args:
            rule: a fault for the command; it is run again afterwards.
            revive: starts what has to run before the command is tried again. The flow has to get as far as its copy,
                and its start aborts what a killed promotion has left open.
        """

        def between(said: str) -> None:
            revive()
            if "behind, which is more than" in said:
                self.await_commits()

        options = ["--wait", str(_WAIT_S), *(["--same-timers"] if self.kind == LEDGER else [])]
        arguments = ["promote", self.new, "--replaces", self.flow, *options, "--yes"]
        self.commands.until_done(arguments, flow=self.flow, rule=rule, between=between)
        self._names.versions[self.kind] = self.copy.versions[self.kind]

    def await_commits(self) -> None:
        """Wait until the copy has committed a batch. Its driver is started again if it has ended."""
        self.driver.await_commits(time.monotonic(), timeout_s=_COMMITS_S)

    def close(self) -> None:
        """End the driver of the copy."""
        self.driver.close()
