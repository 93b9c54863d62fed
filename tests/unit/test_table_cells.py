"""`onceflow table` without Kafka: keys of the command line, and how keys and values are printed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from onceflow import Change, EnvironmentUnusableError, OnceflowError
from onceflow.cli.main import cli
from onceflow.cli.table_cells import Cells
from onceflow.cli.table_lookup import naming_state_dir
from onceflow.state.stores.base import unusable

SERVERS = ["--bootstrap-servers", "localhost:1"]


@pytest.mark.parametrize(
    "form, text, raw",
    [
        ("text", "ä", "ä".encode()),
        ("text", "\udcff", b"\xff"),  # an argument that is not UTF-8
        ("hex", "00ff", b"\0\xff"),
        ("base64", "AP8=", b"\0\xff"),
        ("json", ' {"id" : 7} ', b'{"id":7}'),
        ("json", '"ada"', b'"ada"'),
        ("json", str(2**65), b"%d" % 2**65),
        ("long", "-2", struct.pack(">q", -2)),
    ],
)
def test_keys_of_the_command_line(form: str, text: str, raw: bytes) -> None:
    assert Cells(form, "text", as_json=False).key(text) == raw


@pytest.mark.parametrize(
    "form, text",
    [
        ("hex", "0"),
        ("base64", "A"),
        ("json", "ada"),
        ("json", "NaN"),
        ("json", "1e400"),
        ("long", "1.5"),
        ("long", str(2**63)),
    ],
)
def test_what_is_no_key(form: str, text: str) -> None:
    with pytest.raises(click.UsageError, match=f"is not a key of --key {form}: "):
        Cells(form, "text", as_json=False).key(text)


def test_half_a_byte() -> None:
    with pytest.raises(click.UsageError, match="'633' is not a key of --key hex: it has 3 digits"):
        Cells("hex", "text", as_json=False).key("633")


def test_prefixes() -> None:
    assert Cells("hex", "text", as_json=False).prefix("00") == b"\0"
    assert Cells("json", "text", as_json=False).prefix('{"id":') == b'{"id":'
    with pytest.raises(click.UsageError, match="no prefixes"):
        Cells("long", "text", as_json=False).prefix("1")


@pytest.mark.parametrize(
    "form, raw, line, cell",
    [
        ("text", "ä".encode(), "ä", "ä"),
        ("json", b'{ "a": [1.5, null] }', '{"a":[1.5,null]}', {"a": [1.5, None]}),
        ("json", b'"a\xe2\x80\xaeb"', '"a\\u202eb"', "a\u202eb"),  # text that turns what follows around
        ("hex", b"\0\xff", "00ff", "00ff"),
        ("base64", b"\0\xff", "AP8=", "AP8="),
        ("long", struct.pack(">q", -2), "-2", -2),
        ("double", struct.pack(">d", 0.1), "0.1", 0.1),
    ],
)
def test_values(form: str, raw: bytes, line: str, cell: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert Cells("text", form, as_json=False).row(b"k", raw) == f"k\t{line}"
    assert json.loads(Cells("text", form, as_json=True).row(b"k", raw)) == {"key": "k", "value": cell}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "form, raw, noun",
    [
        ("text", b"\xff", "printable text in UTF-8"),
        ("json", b"{", "JSON"),
        ("long", b"7", "a 64-bit integer"),
        ("double", b"7", "a double"),
    ],
)
def test_values_of_another_kind(form: str, raw: bytes, noun: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are printed in another way, with one warning for all of them."""
    for as_json, how in ((False, "like b'\\xff'"), (True, "as value_base64")):
        cells = Cells("text", form, as_json=as_json)
        lines = {cells.row(b"k", raw) for _ in range(2)}
        assert capsys.readouterr().err == f"warning: some values are not {noun}; they are printed {how} (see --value)\n"
        assert len(lines) == 1
        if not as_json:
            assert lines == {f"k\t{raw!r}"}
        else:
            assert json.loads(lines.pop()).keys() == {"key", "value_base64"}


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert Cells("text", "text", as_json=False).row(b"a\tb", b"\x1b[2J\n") == "b'a\\tb'\tb'\\x1b[2J\\n'"
    line = Cells("text", "text", as_json=True).row(b"k", b"\x1b\x7f")
    assert line.isprintable()
    assert json.loads(line)["value"] == "\x1b\x7f"


def test_a_number_that_json_does_not_know() -> None:
    infinite = struct.pack(">d", float("inf"))
    assert Cells("text", "double", as_json=False).row(b"k", infinite) == "k\tinf"
    assert json.loads(Cells("text", "double", as_json=True).row(b"k", infinite)).keys() == {"key", "value_base64"}


def test_changes() -> None:
    change = Change(b"k", None, b"1", 2, 34, 56)
    assert Cells("text", "text", as_json=False).change(change) == "k\tnull"
    assert json.loads(Cells("text", "json", as_json=True).change(change)) == {
        "key": "k",
        "value": None,
        "before": 1,
        "deleted": True,
        "partition": 2,
        "offset": 34,
        "timestamp_ms": 56,
    }


def test_a_null_of_json_is_no_deletion() -> None:
    change = Change(b"k", b"null", None, 0, 1, 2)
    found = json.loads(Cells("text", "json", as_json=True).change(change))
    assert found["value"] is None
    assert "deleted" not in found


@pytest.mark.parametrize(
    "text, why",
    [
        ("xx", "it is no integer in decimal digits"),
        ("1.5", "it is no integer in decimal digits"),
        ("1_000", "it is no integer in decimal digits"),
        (str(2**63), "it is beyond the 64-bit integers"),
        ("9" * 5000, "it is beyond the 64-bit integers"),
    ],
)
def test_what_is_no_number(text: str, why: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        Cells("long", "text", as_json=False).key(text)
    assert raised.value.message == f"{text!r} is not a key of --key long: {why}"


@pytest.mark.parametrize("form, start, end", [("long", "-5", "5"), ("long", "7", "5"), ("json", "9", "10")])
def test_a_range_that_ends_before_it_starts(form: str, start: str, end: str) -> None:
    answer = CliRunner().invoke(cli, ["table", "range", "t", "--key", form, "--start", start, "--end", end, *SERVERS])
    assert answer.exit_code == 2
    said = " ".join(answer.stderr.split())
    assert f"--start {start} comes after --end {end} in the order of the keys' bytes" in said
    assert ("negative numbers come after positive ones" in said) == (form == "long")


def test_ranges() -> None:
    assert Cells("text", "text", as_json=False).bounds("b", "a") == (b"b", b"a")
    assert Cells("long", "text", as_json=False).bounds("5", "-5") == (struct.pack(">q", 5), struct.pack(">q", -5))
    assert Cells("long", "text", as_json=False).bounds(None, "5") == (None, struct.pack(">q", 5))


def test_negative_keys() -> None:
    answer = CliRunner().invoke(cli, ["table", "get", "t", "42", "-5", "--key", "long"])
    assert answer.exit_code == 2
    assert "goes behind --" in answer.stderr
    assert "-- 42 -5" in answer.stderr
    answer = CliRunner().invoke(cli, ["table", "get", "t", "42", "--kye", "long"])
    assert "No such option" in answer.stderr
    assert "goes behind" not in answer.stderr


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """The option is named if it was given."""

    def said(error: OnceflowError, state_dir: Path | None) -> OnceflowError:
        with pytest.raises(type(error)) as raised, naming_state_dir(state_dir):
            raise error
        return raised.value

    full = unusable(tmp_path / "@tables", "It cannot be opened", OSError("no space"))
    named = said(full, tmp_path)
    assert (named.what, named.detail) == (full.what, full.detail)
    assert named.next_step.startswith(f"make --state-dir {tmp_path} writable")
    assert said(full, None) is full
    other = EnvironmentUnusableError("Another thing")
    assert said(other, tmp_path) is other


@pytest.mark.parametrize("timeout, why", [("soon", "--timeout: 'soon' is not a duration"), ("0.5", "shorter than")])
def test_a_wrong_timeout(timeout: str, why: str) -> None:
    answer = CliRunner().invoke(cli, ["table", "count", "t", "--timeout", timeout, *SERVERS])
    assert answer.exit_code == 2
    assert why in answer.stderr
