"""Names of stored objects are found in whatever form a reference comes: what is overlooked is deleted."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onceflow import ClaimCheck
from onceflow.claim_check import scan as scan_module
from onceflow.claim_check.reference import PREFIX, REFERS, Reference
from onceflow.claim_check.scan import refers, scan, scan_stream
from onceflow.errors import ClaimCheckError


def reference(number: int, *, refers: bool = False) -> Reference:
    digits = f"{number:064x}"
    return Reference.of(f"2026-11-{number % 28 + 1:02d}/{digits}{REFERS if refers else ''}", number, digits)


def _escaped(text: str) -> bytes:
    """As JSON of programs that escape slashes."""
    return json.dumps(text).replace("/", "\\/").encode()


def _net(text: str) -> bytes:
    """As JSON of programs that write some characters as their numbers."""
    escaped = {"+": "\\u002B", "/": "\\u002f", "\n": "\\u000A"}
    return f'"{"".join(escaped.get(letter, letter) for letter in text)}"'.encode()


def _column(digits: str, line: str, goes_on: str = "+", width: int = 76) -> bytes:
    """As a column of `psql`; the text of a line is what it prints there."""
    parts = [digits[at : at + width] for at in range(0, len(digits), width)] or [""]
    width = max(map(len, parts))
    lines = [
        line.format(
            "金 é" if at == 0 else "    ", part + (goes_on if at < len(parts) - 1 else " ") + " " * (width - len(part))
        )
        for at, part in enumerate(parts)
    ]
    return "\n".join(["", *lines, ""]).encode()


#: Names of forms, and how each makes bytes of bytes.
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "itself": bytes,
    "base64": base64.b64encode,
    "base64url": lambda raw: base64.urlsafe_b64encode(raw).rstrip(b"="),
    "base64 in lines": base64.encodebytes,
    "base64 in lines of MIME": lambda raw: base64.encodebytes(raw).replace(b"\n", b"\r\n"),
    "base64 in JSON": lambda raw: json.dumps({"value": base64.b64encode(raw).decode()}).encode(),
    "base64 in lines in JSON": lambda raw: json.dumps(base64.encodebytes(raw).decode()).encode(),
    "base64 in JSON that escapes slashes": lambda raw: _escaped(base64.b64encode(raw).decode()),
    "digits": lambda raw: raw.hex().encode(),
    "upper digits": lambda raw: raw.hex().upper().encode(),
    "digits of PostgreSQL": lambda raw: b"\\\\x" + raw.hex().encode(),
    "base64 in JSON of .NET": lambda raw: _net(base64.b64encode(raw).decode()),
    "base64 in lines in JSON of .NET": lambda raw: _net(base64.encodebytes(raw).decode()),
    "base64 in an URL": lambda raw: urllib.parse.quote(base64.encodebytes(raw), safe="").encode(),
    "base64 in indented lines": lambda raw: base64.encodebytes(raw).replace(b"\n", b"\r\n    "),
    "digits in lines": lambda raw: b"\n".join(raw.hex().encode()[at : at + 60] for at in range(0, len(raw) * 2, 60)),
    "text in JSON": lambda raw: json.dumps(raw.decode("latin-1")).encode(),
    "text in JSON that escapes slashes": lambda raw: _escaped(raw.decode("latin-1")),
    "text that was not UTF-8": lambda raw: raw.decode(errors="replace").encode(),
    "literal of Python": lambda raw: repr(raw).encode(),
}

#: What programs print: the same, around all other forms.
PRINTED: dict[str, Callable[[bytes], bytes]] = {
    "itself": bytes,
    "HTML": lambda raw: base64.encodebytes(raw).replace(b"\n", b"<br />\n"),
    "a column": lambda raw: _column(base64.b64encode(raw).decode(), " {} | {}| end"),
    "the last column": lambda raw: _column(base64.b64encode(raw).decode(), " {} | {}"),
    "a column of a table": lambda raw: _column(base64.b64encode(raw).decode(), "| {} | {}|     |"),
    "a column in lines of Unicode": lambda raw: _column(base64.b64encode(raw).decode(), "│ {} │ {}│   │", "↵"),
    "a wrapped column": lambda raw: _column(base64.b64encode(raw).decode(), " {} | {}|", "."),
    "a column in the old form": lambda raw: _column(base64.b64encode(raw).decode(), " {} : {} ", " "),
    "digits in a column": lambda raw: _column(raw.hex(), " {} | {}| end"),
    "digits in a narrow column": lambda raw: _column(raw.hex(), " {} | {}| end", ".", 31),
    "a bytea in a narrow column": lambda raw: _column("\\x" + raw.hex(), " {} | {}|", ".", 42),
    "two columns": lambda raw: _column(
        base64.b64encode(raw).decode(), " {} | " + "ABC/" * 19 + "+| {}| " + "abcd" * 16 + "+"
    ),
}


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(1, 2**200),
    printed=st.sampled_from(list(PRINTED)),
    of_referring=st.booleans(),
    forms=st.lists(st.sampled_from(list(FORMS)), max_size=3),
    around=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), min_size=4, max_size=4),
    cut=st.integers(300, 1000),
)
@pytest.mark.slow
def test_a_reference_is_found_in_any_form(
    number: int, printed: str, of_referring: bool, forms: list[str], around: list[tuple[bytes, bytes]], cut: int
) -> None:
    """Each form may contain another one, with anything around it."""
    found = reference(number, refers=of_referring)
    raw: bytes = bytes(found)
    for (before, after), form in zip(around, [*forms, "itself"], strict=False):
        raw = FORMS[form](before.replace(PREFIX, b"") + raw + (b"." + after).replace(PREFIX, b""))
    raw = PRINTED[printed](raw)
    cuts = [raw[at : at + cut] for at in range(0, len(raw), cut)]
    assert found.name in scan(raw).names
    assert found.name in [name for each in scan_stream(cuts) for name in each.names]
    # What the collection finds, makes the name of the object that has it.
    assert refers([raw])
    assert refers(cuts)


@pytest.mark.slow
def test_a_value_with_references_in_any_two_forms_refers() -> None:
    for (outer, print_), inner in itertools.product([*FORMS.items(), *PRINTED.items()], FORMS):
        for around in (b"", b"a", b"ab"):
            raw = print_(around + FORMS[inner](around + reference(2**200)))
            assert refers([raw]), (outer, inner)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.binary(max_size=90)
        | st.text("0123456789abcdefABCDEF", max_size=90).map(str.encode)
        | st.text("ABcdQ29+/-_=%\\\r\n ", max_size=90).map(str.encode)
        | st.sampled_from([reference(1).name.encode(), PREFIX, PREFIX + b"1 ", PREFIX + b"2 ", b'{"name":"']),
        max_size=8,
    ),
    forms=st.lists(st.sampled_from(list(FORMS)), max_size=3),
    printed=st.sampled_from(list(PRINTED)),
    cut=st.integers(1, 500),
)
@example([b"\xff" + PREFIX, b"0000-00-00/" + b"0" * 63 + b"6"], ["base64"], "HTML", 1)  # cut in what ends a line
def test_whatever_a_scan_finds_refers(parts: list[bytes], forms: list[str], printed: str, cut: int) -> None:
    raw = b"".join(parts)
    for form in forms:
        raw = FORMS[form](raw)
    raw = PRINTED[printed](raw)
    found = scan(raw)
    cuts = [raw[at : at + cut] for at in range(0, len(raw), cut)]
    assert refers(cuts) == refers([raw]) == bool(found.names or found.newer)
    of_cuts = list(scan_stream(cuts))
    assert {name for each in of_cuts for name in each.names} >= set(found.names)
    assert bool(found.odd) == any(each.odd for each in of_cuts)


def test_a_name_alone_is_found() -> None:
    """What ``StoredValue.name`` gives, in a document, a URL, and a path."""
    name = reference(7).name
    for text in (f'{{"picture":"{name}"}}', name, f"s3://bucket/{name}", name.replace("/", "%2F")):
        assert scan(text.encode()).names == [name]


def test_several_references_with_and_without_a_form() -> None:
    """None hides another one."""
    first, second, third = reference(1), reference(2), reference(3, refers=True)
    raw = first + b"," + base64.b64encode(b"ab" + second) + b"," + third
    assert sorted(scan(raw).names) == sorted(each.name for each in (first, second, third))


def test_a_reference_in_a_newer_format_is_seen_in_any_form() -> None:
    newer = PREFIX + b'2 {"object":"' + b"0" * 64 + b'"}'
    for form, encoded in FORMS.items():
        if "text" in form or "literal" in form:  # it is no reference any more
            continue
        raw = encoded(reference(1) + newer)
        assert scan(raw).newer, form
        assert any(each.newer for each in scan_stream([raw, os.urandom(1000)])), form
        assert refers([encoded(newer)])


@pytest.mark.parametrize(
    "odd",
    [
        PREFIX, PREFIX + b"1 {}", PREFIX + b"1 ", PREFIX + b"2", PREFIX + b"x {}", PREFIX + b"0 {}", PREFIX + b"01 {}",
        PREFIX + b'1 {"name":7}', PREFIX + b"1 " + b"[" * 400, PREFIX + b'1 {"name":"2026-11-23/00"}',
    ],
)  # fmt: skip
def test_what_only_begins_like_a_reference_is_none(odd: bytes) -> None:
    """It is told, and hides nothing."""
    found = scan(odd + b"\0" + reference(1) + b"," + base64.b64encode(odd + bytes(100)))
    assert set(found.names) == {reference(1).name}
    assert len(found.odd) == 2
    assert not found.newer
    assert not refers([odd])


@pytest.mark.parametrize(
    "damage", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b" " * 600, b"[" * 400, b'{"name":' * 40]
)
def test_what_is_long_or_nested_deeply_is_a_damaged_reference(damage: bytes) -> None:
    with pytest.raises(ClaimCheckError, match="damaged"):
        Reference.parse(PREFIX + b"1 " + damage)


def test_a_reference_that_another_program_has_written() -> None:
    """JSON has many spellings, and all that `Reference.parse` reads are found."""
    name, digits = reference(7).name, reference(7).sha256
    document = {"size": 7, "sha256": digits, "name": name}
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name[:11]) + name[11:]
    for text in (
        json.dumps(document, indent=2),
        json.dumps(document).replace(name, escaped),
        f" {json.dumps(document)}",
    ):
        raw = PREFIX + b"1 " + text.encode()
        assert Reference.parse(raw).name == name
        assert name in scan(b"some" + raw + b"more").names
        assert not scan(raw).odd


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000) | st.text("0123456789abcdef/-+=\\rn", max_size=3000).map(str.encode))
def test_bytes_without_references_have_none(raw: bytes) -> None:
    known = re.findall(rb"\d{4}-\d\d-\d\d", raw)
    assert known or scan(raw).names == []


@pytest.mark.parametrize(
    "filling",
    [
        b"\\", b"\\n", b"\n ", b" ", b"%", b"7", b"V", PREFIX, PREFIX + b"1 {", b"\\u00", b"2026-", b"<br />",
        b" 7777777777777777\n", b"\n | 7777777777777777 | VVVVVVVVVVVVVVVV+", "\n │ 7777777777777777".encode(),
    ],
)  # fmt: skip
def test_no_value_takes_for_ever(filling: bytes) -> None:
    """Whoever writes to a topic could stop all collections otherwise."""
    raw = filling * (300_000 // len(filling)) + b"." + reference(1)
    started = time.process_time()
    assert reference(1).name in scan(raw).names
    assert time.process_time() - started < 10


def _decoded_bytes(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes a scan decodes."""
    count = 0
    for name in ("_from_hex", "_from_base64"):
        real = getattr(scan_module, name)

        def counted(digits: bytes, real: Callable[[bytes], bytes] = real) -> bytes:
            nonlocal count
            count += len(digits)
            return real(digits)

        monkeypatch.setattr(scan_module, name, counted)
    scan(raw)
    monkeypatch.undo()
    return count


@settings(max_examples=60, deadline=None)
@given(
    period=st.sampled_from([b"3", b"MzMz", b"33", b"4d", b"TVRN", b"TWpBeU5p"])
    | st.text("0123456789abcdef", min_size=1, max_size=6).map(str.encode)
    | st.text("MTzNQxYWVUd0123+/", min_size=1, max_size=8).map(str.encode),
    forms=st.lists(st.sampled_from(["base64", "digits", "base64 in lines"]), max_size=3),
    printed=st.sampled_from(list(PRINTED)),
    rest=st.binary(max_size=3),
)
@pytest.mark.slow
def test_periodic_values_are_not_decoded_again_and_again(
    period: bytes, forms: list[str], printed: str, rest: bytes
) -> None:
    """Writers scan a value within the transaction of its batch. Some values decode to themselves."""
    raw = period * (6_000 // len(period))
    for form in forms:
        raw = FORMS[form](raw)
    raw = PRINTED[printed](raw)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert _decoded_bytes(raw + rest, monkeypatch) < 40 * len(raw)


@pytest.mark.slow
def test_a_value_that_refers_is_stored_under_a_name_that_says_so(tmp_path: Path) -> None:
    claim = ClaimCheck(tmp_path / "store", above=100)
    inner = claim.encode(b"x" * 1000)
    mime = FORMS["base64 in lines of MIME"]
    for raw in (inner, json.dumps({"inner": base64.b64encode(inner).decode()}).encode(), mime(inner.hex().encode())):
        outer = Reference.parse(claim.encode(raw))  # it looks like a reference, or is large
        assert outer.name.endswith(REFERS)
        assert claim.decode(outer) == raw
        (tmp_path / "file").write_bytes(b"." * (8 << 20) + raw)
        assert Reference.parse(claim.put_file(tmp_path / "file")).name.endswith(REFERS)
        (tmp_path / "cut").write_bytes(b"." * ((8 << 20) - len(raw) // 3) + raw)
        assert Reference.parse(claim.put_file(tmp_path / "cut")).name.endswith(REFERS)
    assert not Reference.parse(inner).name.endswith(REFERS)
