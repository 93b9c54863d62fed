"""Names of stored objects are found in whatever form a reference comes: what is overlooked is deleted."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow import ClaimCheck, ClaimCheckError
from onceflow.claim_check.reference import PREFIX, REFERS, Reference
from onceflow.claim_check.scan import may_refer, names_in, names_in_stream


def reference(number: int, *, refers: bool = False) -> Reference:
    digits = f"{number:064x}"
    return Reference.of(f"2026-11-{number % 28 + 1:02d}/{digits}{REFERS if refers else ''}", number, digits)


def _escaped(text: str) -> bytes:
    """As JSON of programs that escape slashes."""
    return json.dumps(text).replace("/", "\\/").encode()


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
    "text in JSON": lambda raw: json.dumps(raw.decode("latin-1")).encode(),
    "text in JSON that escapes slashes": lambda raw: _escaped(raw.decode("latin-1")),
    "text that was not UTF-8": lambda raw: raw.decode(errors="replace").encode(),
    "literal of Python": lambda raw: repr(raw).encode(),
}


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(1, 2**200),
    refers=st.booleans(),
    forms=st.lists(st.sampled_from(list(FORMS)), max_size=3),
    around=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), min_size=4, max_size=4),
    cut=st.integers(300, 1000),
)
def test_a_reference_is_found_in_any_form(
    number: int, refers: bool, forms: list[str], around: list[tuple[bytes, bytes]], cut: int
) -> None:
    """Each form may contain another one, with anything around it."""
    found = reference(number, refers=refers)
    raw: bytes = bytes(found)
    for (before, after), form in zip(around, [*forms, "itself"], strict=False):
        raw = FORMS[form](before.replace(PREFIX, b"") + raw + (b"." + after).replace(PREFIX, b""))
    assert found.name in names_in(raw)
    assert found.name in set(names_in_stream(raw[at : at + cut] for at in range(0, len(raw), cut)))


@settings(max_examples=200, deadline=None)
@given(
    number=st.integers(1, 2**200),
    forms=st.lists(
        st.sampled_from([form for form in FORMS if "digits" not in form and "lines" not in form]), max_size=2
    ),
    before=st.binary(max_size=5),
)
def test_a_value_with_references_is_known_when_it_is_stored(number: int, forms: list[str], before: bytes) -> None:
    raw = bytes(reference(number))
    for form in forms:
        raw = FORMS[form](before + raw)
    assert may_refer(raw)


def test_a_name_alone_is_found() -> None:
    """What ``StoredValue.name`` gives, in a document, a URL, and a path."""
    name = reference(7).name
    for text in (f'{{"picture":"{name}"}}', name, f"s3://bucket/{name}", name.replace("/", "%2F")):
        assert names_in(text.encode()) == [name]


def test_several_references_with_and_without_a_form() -> None:
    """None hides another one."""
    first, second, third = reference(1), reference(2), reference(3, refers=True)
    raw = first + b"," + base64.b64encode(b"ab" + second) + b"," + third
    assert sorted(names_in(raw)) == sorted(each.name for each in (first, second, third))


def test_a_reference_that_cannot_be_read_is_an_error_in_any_form() -> None:
    newer = PREFIX + b'2 {"object":"' + b"0" * 64 + b'"}'
    for form, encoded in FORMS.items():
        if "text" in form or "literal" in form:  # it is no reference any more
            continue
        with pytest.raises(ClaimCheckError, match="cannot be read"):
            names_in(encoded(reference(1) + newer))
        with pytest.raises(ClaimCheckError, match="cannot be read"):
            list(names_in_stream([encoded(reference(1) + newer), os.urandom(1000)]))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000) | st.text("0123456789abcdef/-+=\\rn", max_size=3000).map(str.encode))
def test_bytes_without_references_have_none(raw: bytes) -> None:
    known = re.findall(rb"\d{4}-\d\d-\d\d", raw)
    assert known or names_in(raw) == []


def test_a_value_that_refers_is_stored_under_a_name_that_says_so(tmp_path: Path) -> None:
    claim = ClaimCheck(tmp_path / "store", above=100)
    inner = claim.encode(b"x" * 1000)
    for raw in (inner, json.dumps({"inner": base64.b64encode(inner).decode()}).encode()):
        outer = Reference.parse(claim.encode(raw))  # it looks like a reference, or is large
        assert outer.name.endswith(REFERS)
        assert claim.decode(outer) == raw
        (tmp_path / "file").write_bytes(b"." * (8 << 20) + raw)
        assert Reference.parse(claim.put_file(tmp_path / "file")).name.endswith(REFERS)
        (tmp_path / "cut").write_bytes(b"." * ((8 << 20) - len(raw) // 3) + raw)
        assert Reference.parse(claim.put_file(tmp_path / "cut")).name.endswith(REFERS)
    assert not Reference.parse(inner).name.endswith(REFERS)
