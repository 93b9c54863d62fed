"""All commands: each has an example that can be typed, prints JSON if it prints data, and takes a file of options."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from onceflow.cli.completion import SHELLS
from onceflow.cli.main import cli
from onceflow.cli.main import commands as known_commands

# What these print is for people while they run; the last line of demos and of chaos is JSON without being asked, and
# benchmarks add JSON lines to a file.
BENCHMARKS = {f"bench {name}" for name in ("overhead", "postgres", "serve", "sink", "state")}
WITHOUT_JSON = {"chaos", "completion", "demo", "new", "table serve"} | BENCHMARKS

Path_ = tuple[str, ...]


def commands(group: click.Group, *path: str) -> Iterator[tuple[Path_, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


ALL = dict(commands(cli))


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def examples_of(command: click.Command) -> list[str]:
    """The lines of a shell below the last heading ``Example:`` or ``Examples:``."""
    shown = command.get_help(click.Context(command)).splitlines()
    heading = max((n for n, line in enumerate(shown) if line.strip() in ("Example:", "Examples:")), default=None)
    assert heading is not None, "there is no example"
    return [line.strip() for line in shown[heading + 1 :] if line.strip()]


def called(line: str) -> list[str]:
    """The arguments of ``onceflow`` in a line of a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&<>")
    lexer.whitespace_split = True
    words = list(lexer)
    words = words[words.index("onceflow") + 1 :]
    ends = [n for n, word in enumerate(words) if word and set(word) <= set("|&<>")]
    return words[: ends[0]] if ends else words


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_its_examples_can_be_typed(path: Path_) -> None:
    for line in examples_of(ALL[path]):
        arguments = called(line)
        assert tuple(arguments[: len(path)]) == path, line
        ALL[path].make_context(" ".join(path), arguments[len(path) :])  # a UsageError otherwise; nothing is run


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_what_prints_data_prints_json(path: Path_) -> None:
    exempt = bool({path[0], " ".join(path)} & WITHOUT_JSON)
    assert ("--json" in options_of(ALL[path])) != exempt


def test_each_command_with_a_connection_takes_a_file() -> None:
    """`topic create` has a --config of its own, as kafka-topics.sh has."""
    connecting = {path: command for path, command in ALL.items() if "--option" in options_of(command)}
    assert len(connecting) > 20
    for path, command in connecting.items():
        ours = next(parameter for parameter in command.params if "--command-config" in parameter.opts)
        assert ("--config" in ours.opts) == (path != ("topic", "create")), path


def test_the_summaries_are_those_of_the_commands() -> None:
    context = click.Context(cli)
    for name, (_, summary) in known_commands().items():
        command = cli.get_command(context, name)
        assert command is not None
        assert summary.endswith("."), "a line of its own, which is shorter than that of the command's help"
    assert {"bench", "chaos", "demo", "verify"} <= known_commands().keys()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_its_script(shell: str) -> None:
    answer = CliRunner().invoke(cli, ["completion", shell])
    assert answer.exit_code == 0
    assert "_ONCEFLOW_COMPLETE" in answer.stdout
    assert CliRunner().invoke(cli, ["completion", "tcsh"]).exit_code == 2


def test_a_shell_completes(tmp_path: Path) -> None:
    """What the script of bash asks for, of a real process."""
    words = {"COMP_WORDS": "onceflow transactions li", "COMP_CWORD": "2", "_ONCEFLOW_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-m", "onceflow.cli.main"],
        env={**os.environ, **words},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("plain,list\n", "")


def test_examples_are_not_wrapped() -> None:
    """A line of an example can be copied as a whole."""
    for path, command in ALL.items():
        for line in examples_of(command):
            assert "onceflow " in line, (path, line)
            assert len(line) <= 110, json.dumps(line)


@pytest.mark.parametrize(
    "line, says",
    [
        ("stat", "No such command 'stat'. Did you mean 'status'?"),
        ("brocker start", "No such command 'brocker'. Did you mean 'broker'?"),
        ("xyzzy", "No such command 'xyzzy'."),
        ("--statsu", "No such option '--statsu'."),
    ],
)
def test_a_mistyped_command(line: str, says: str) -> None:
    answer = CliRunner().invoke(cli, line.split())
    assert answer.exit_code == 2
    assert answer.stderr.splitlines()[-1] == f"Error: {says}"


_PRINTS = """
import sys
from onceflow.cli import main
import click

@click.command()
def command():
    from rich.console import Console
    click.echo("€ \N{CJK UNIFIED IDEOGRAPH-4E2D} \U0001f600")
    Console().print("→ \N{CJK UNIFIED IDEOGRAPH-4E2D}")
    click.echo("→", err=True)
    for n in range(int(sys.argv[2])):
        click.echo(f"{n} " + "x" * 100)

main.COMMANDS["status"] = ("__main__:command", "")
main.main(["status"])
"""


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C"}],
    ids=["ascii", "latin-1", "cp1252", "C"],
)
def test_a_terminal_that_cannot_print_a_value(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS, "status", "3"], env={**os.environ, **environment}, capture_output=True
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()
    assert done.stdout.count(b"x" * 100) == 3


def test_output_that_nobody_reads_to_its_end() -> None:
    """As with `| head -1`."""
    with subprocess.Popen(
        [sys.executable, "-c", _PRINTS, "status", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for _ in range(3):
            running.stdout.readline()
        running.stdout.close()
        said = running.stderr.read().decode()
        assert (running.wait(), said) == (141, "→\n")


@pytest.mark.parametrize("lines", [3, 100_000])
def test_output_that_cannot_be_written(lines: int) -> None:
    """The disk of a file is full: one line says so, when the command writes or at its end."""
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", _PRINTS, "status", str(lines)],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
    said = done.stderr.decode()
    assert (done.returncode, "Traceback" in said) == (1, False), said
    assert said.endswith("onceflow: standard output cannot be written: No space left on device\n")
