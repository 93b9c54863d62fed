"""The command for rows of another system: how a shell runs it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from onceflow.admin.records import claim_collector
from onceflow.errors import OptionError

FAILING = (
    "false | cat", "cat /nowhere | sort | cat", "true | false | cat", "false; true", "(echo row; exit 3) | cat",
    "cat /nowhere /dev/null", "yes | head -1", "nowhere-to-be-found", "kill $$", "true && false | cat",
    "for file in /nowhere; do cat $file; done; echo row", "echo row\nfalse\necho row",
)  # fmt: skip
FINE = {"echo a | cat": b"a\n", "echo a; echo b": b"a\nb\n", "false || echo a": b"a\n", "if false; then :; fi": b""}


def ran(command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(claim_collector._strict(command, "flow"), capture_output=True, check=False)


@pytest.mark.parametrize("command", FAILING)
def test_a_failure_anywhere_is_seen(command: str) -> None:
    assert ran(command).returncode != 0


@pytest.mark.parametrize("command", FINE)
def test_commands_that_work(command: str) -> None:
    done = ran(command)
    assert (done.returncode, done.stdout) == (0, FINE[command])


def test_without_a_shell_that_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes are refused, and all other failures are seen."""
    run = subprocess.run

    def refusing(command: list[str], **options: object) -> object:
        return run(["false"] if "pipefail" in command else command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(subprocess, "run", refusing)
    with pytest.raises(OptionError, match="rows of flow ledger has a pipe"):
        claim_collector._strict("cat rows | sort", "ledger")
    assert ran("false; true").returncode != 0
    assert ran("echo a").stdout == b"a\n"
