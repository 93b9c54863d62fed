"""Runs onceflow's commands as an operator would: again, when one was killed, or while brokers or drivers are down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from onceflow.errors import DeadlineExceededError
from onceflow.hooks import VARIABLE

_COMMAND_S = 150.0
_DONE_S = 300.0


class Commands:
    """Commands against one cluster.

    Args:
        folder: of the run; what commands say that fail is in its ``commands.log``.
        bootstrap_servers: where they find the brokers.

    Attributes:
        tries: how often the last one was started.
        program: what is run. A test puts a broken build here, to see that a run finds it out.
    """

    program = ("-m", "onceflow.cli.main")

    def __init__(self, folder: Path, bootstrap_servers: str) -> None:
        self._folder = folder
        self._bootstrap_servers = bootstrap_servers
        self.tries = 0

    def until_done(
        self,
        arguments: list[str],
        *,
        flow: str,
        rule: str | None = None,
        between: Callable[[str], object] = lambda said: None,
    ) -> None:
        """Run a command until it has done its work.

        Args:
            flow: which it is about.
            rule: a fault for it; without the fault, it is run again afterwards.
            between: is called before each further try, with what the command has said.

        Raises:
            DeadlineExceededError: it did not get there; the detail is what it said.
        """
        end = time.monotonic() + _DONE_S
        self.tries = 0
        while (said := self._run(arguments, rule)) is not None:
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"onceflow {arguments[0]} was not done within {_DONE_S:g} s, in {self.tries} tries",
                    flow=flow,
                    detail=said[-1500:],
                    next_step=f"see {self._folder / 'drivers.log'} (with --keep)",
                )
            with (self._folder / "commands.log").open("a") as log:
                log.write(f"{' '.join(arguments)}: {said}\n")
            rule = None
            between(said)
            time.sleep(0.5)

    def told(self, step: str | None) -> str:
        """How often the last one was tried, for the description of a fault.

        Args:
            step: where the first try was killed; None: it was not.
        """
        return f" in {self.tries} tries" + (f", the first killed at step {step}" if step else "")

    def _run(self, arguments: list[str], rule: str | None) -> str | None:
        """Run a command once. Returns what it said if it has failed."""
        self.tries += 1
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if rule is not None:
            environment[VARIABLE] = rule
        given = ["--json", "--bootstrap-servers", self._bootstrap_servers]
        try:
            done = subprocess.run(
                [sys.executable, *self.program, *arguments, *given],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
                env=environment,
                cwd=self._folder,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_COMMAND_S:g} s"
        return None if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr}"
