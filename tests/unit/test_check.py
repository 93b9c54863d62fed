"""Exit codes of commands that check something: a finding is not an error."""

from __future__ import annotations

import click
import pytest

from onceflow.admin.verify.audit import Audit
from onceflow.admin.verify.report import LOST, Report
from onceflow.cli import main as entry
from onceflow.cli.check import Check
from onceflow.errors import OptionError

VERIFY = ["verify", "flow", "--bootstrap-servers", "127.0.0.1:1"]


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        entry.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def found(*kinds: str) -> Report:
    report = Report(5)
    for kind in kinds:
        report.add(kind, "as a test has it")
    return report


@pytest.mark.parametrize("kinds, code", [((), 0), ((LOST,), 1), ((LOST, LOST), 1)])
def test_findings(kinds: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Audit, "run", lambda self, tally: found(*kinds))
    assert code_of(*VERIFY) == code


@pytest.mark.parametrize("kinds, code, last", [((), 2, "in what was checked and judged"), ((LOST,), 1, "flow: 1 lost")])
def test_a_part_that_could_not_be_checked(
    kinds: tuple[str, ...], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no success, and it hides no finding."""
    report = found(*kinds)
    report.not_checked.append("records: no ids")
    monkeypatch.setattr(Audit, "run", lambda self, tally: report)
    assert code_of(*VERIFY) == code
    said = capsys.readouterr().out
    assert "not checked: records: no ids\n" in said
    assert last in said.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--replay", "no_such_module:Processor"], "there is no module no_such_module"),
        (["--id", "$."], "onceflow: "),
        (["--id", "key", "--replay", "a:b"], "give --id or --replay, not both"),
        (["--option", "security.protocol=typo"], "security.protocol"),
        (["--typo"], "No such option"),
    ],
)
def test_what_could_not_be_checked(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(*VERIFY, *arguments) == 2
    assert text in capsys.readouterr().err


def test_a_mistake_of_ours_is_no_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(self: Audit, tally: object) -> Report:
        raise ZeroDivisionError("as a test has it")

    monkeypatch.setattr(Audit, "run", run)
    assert code_of(*VERIFY) == 2
    assert "ZeroDivisionError: as a test has it" in capsys.readouterr().err


def test_ctrl_c_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Audit, tally: object) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(Audit, "run", run)
    assert code_of(*VERIFY) == 130


def test_errors_of_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 1; a check says otherwise."""

    def fail() -> None:
        raise OptionError("as a test has it")

    monkeypatch.setitem(entry.COMMANDS, "trial", ("of the test", ""))
    for kind, code in ((click.Command, 1), (Check, 2)):
        command = kind("trial", callback=fail)
        monkeypatch.setattr(entry.LazyGroup, "get_command", lambda self, ctx, name, command=command: command)
        assert code_of("trial") == code


def test_a_position_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("2026-11-25T03:00:00Z", "timestamp=yesterday", "offsets=in:0"):
        assert code_of("reset", "flow", "--to", place, "--bootstrap-servers", "127.0.0.1:1", "--yes") == 2
        assert "give earliest, latest, beginning, timestamp=2025-01-31T08:00:00Z" in capsys.readouterr().err
