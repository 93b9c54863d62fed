"""Commands that get something odd: wrong usage is said in one message, before anything is asked or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onceflow.cli import main as entry

NOBODY = ("--bootstrap-servers", "127.0.0.1:9")
RUN = "from onceflow.cli.main import main; main()"
DIGITS = "9" * 5_000
EXPORT = {"version": 1, "flow": "f", "exported_at": "2026-01-01T00:00:00.000Z"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """The exit code, and what stands on standard error."""
    with pytest.raises(SystemExit) as ended:
        entry.main([*arguments, *NOBODY])
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("consume", "t", "--from", DIGITS), "is neither earliest nor latest nor an offset"),
        (("reset", "f", "--to", f"offsets=t:0={DIGITS}"), "is not of the form TOPIC:PARTITION=OFFSET"),
        (("reset", "f", "--to", f"offsets=t:{DIGITS}=0"), "is not of the form TOPIC:PARTITION=OFFSET"),
        (("compare", "f", "g", "--output", "a=b", "--output", "a=c"), "--output names 'a' twice"),
        (("compare", "f", "g", "--table", "a=b", "--table", "a=b"), "--table names 'a' twice"),
        (("compare", "f", "g", "--wait", "nan"), "'nan' is no number"),
        (("fork", "f", "g", "--table", "a=b", "--table", "a=c"), "--table names 'a' twice"),
        (("status", "f", "--option", "client.id=a", "--option", "client.id=b"), "--option names 'client.id' twice"),
    ],
    ids=lambda given: " ".join(given)[:60] if isinstance(given, tuple) else "",
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str) -> None:
    code, said = run(capsys, *arguments)
    assert told in said
    assert "Traceback" not in said
    assert code in (1, 2)


@pytest.mark.parametrize(
    "content, told",
    [
        ("é".encode("latin-1"), "is not a text in UTF-8"),
        (json.dumps({**EXPORT, "progress": {"flow": "\ud800"}}).encode(), "its progress names no flow"),
        (json.dumps({**EXPORT, "progress": {"flow": 1}}).encode(), "its progress names no flow"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"", "not JSON"),
    ],
)
@pytest.mark.parametrize("command", ["progress import f FILE", "verify f --replay CODE:P --since FILE"])
def test_files_that_are_no_exports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, content: bytes, told: str
) -> None:
    file, code = tmp_path / "export.json", tmp_path / "service.py"
    file.write_bytes(content)
    code.write_text(
        "import onceflow\nclass P(onceflow.Processor):\n    def process(self, key, records, state):\n        pass\n"
    )
    given = command.replace("FILE", str(file)).replace("CODE", str(code)).split()
    exit_code, said = run(capsys, *given)
    assert told in said
    assert "Traceback" not in said
    assert exit_code in (1, 2)


@pytest.mark.parametrize(
    "line", ["raise SystemExit(0)", "raise SystemExit", "import sys; sys.exit('done')", "raise StopIteration", "1 / 0"]
)
@pytest.mark.parametrize("where", ["module", "init"])
def test_code_that_ends_the_program_is_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str, line: str
) -> None:
    """Exit code 0 would mean that nothing is wrong."""
    code = tmp_path / "service.py"
    init = f"    def __init__(self):\n        {line}\n" if where == "init" else ""
    body = "    def process(self, key, records, state):\n        pass\n"
    start = f"{line}\n" if where == "module" else ""
    code.write_text(f"import onceflow\n{start}class P(onceflow.Processor):\n{init}{body}")
    exit_code, said = run(capsys, "verify", "f", "--replay", f"{code}:P")
    assert exit_code == 2
    assert "--replay" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", ["produce t", "progress import f - --yes", "produce t --key-separator \udcff"])
@pytest.mark.slow
def test_without_standard_input(command: str) -> None:
    answer = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", RUN, *command.split(" "), *NOBODY],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        timeout=60,
        check=False,
    )
    assert answer.returncode in (1, 2)
    assert "there is no standard input" in answer.stderr
    assert "Traceback" not in answer.stderr
