"""A new version of a flow, tried beside it and then put in its place: ``onceflow fork``, and ``onceflow promote``.

A driver process of its own runs the copy, into topics and tables of its own, while faults hit everything around both.
After the promotion the driver of all flows runs the program of the copy: under the name of the flow, with its outputs,
and with the tables of the copy.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from onceflow.chaos.driver_process import Driver
from onceflow.chaos.flows import LEDGER, Names
from onceflow.errors import DeadlineExceededError
from onceflow.hooks import VARIABLE
from onceflow.testing.broker import create_topic

_COMMAND_S = 150.0
_DONE_S = 300.0
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
        self._bootstrap_servers = bootstrap_servers
        self.tries = 0

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
        self._until_done(["fork", self.flow, self.new, *given], rule, lambda said: revive())
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
        self._until_done(["promote", self.new, "--replaces", self.flow, *options], rule, between)
        self._names.versions[self.kind] = self.copy.versions[self.kind]

    def await_commits(self) -> None:
        """Wait until the copy has committed a batch. Its driver is started again if it has ended."""
        self.driver.await_commits(time.monotonic(), timeout_s=_COMMAND_S)

    def close(self) -> None:
        """End the driver of the copy."""
        self.driver.close()

    def _until_done(self, arguments: list[str], rule: str | None, between: Callable[[str], object]) -> None:
        """Run a command until it has done its work. It may fail while brokers or drivers are down.

        Raises:
            DeadlineExceededError: it did not get there; the detail is what it said.
        """
        end = time.monotonic() + _DONE_S
        self.tries = 0
        while (said := self._run(arguments, rule)) is not None:
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"onceflow {arguments[0]} was not done within {_DONE_S:g} s, in {self.tries} tries",
                    flow=self.flow,
                    detail=said[-1500:],
                    next_step=f"see {self._names.folder / 'drivers.log'} (with --keep)",
                )
            with (self._names.folder / "commands.log").open("a") as log:
                log.write(f"{' '.join(arguments)}: {said}\n")
            rule = None
            between(said)
            time.sleep(0.5)

    def _run(self, arguments: list[str], rule: str | None) -> str | None:
        """Run a command once. Returns what it said if it has failed."""
        self.tries += 1
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if rule is not None:
            environment[VARIABLE] = rule
        given = ["--yes", "--json", "--bootstrap-servers", self._bootstrap_servers]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "onceflow.cli.main", *arguments, *given],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
                env=environment,
                cwd=self._names.folder,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_COMMAND_S:g} s"
        return None if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr}"
