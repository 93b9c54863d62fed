"""Keys and values of tables as text: how the commands of ``onceflow table`` read keys, and print keys and values."""

from __future__ import annotations

import base64
import functools
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from onceflow.admin.records import record_lines
from onceflow.cli.registry import registry_options
from onceflow.state.api import serdes

if TYPE_CHECKING:
    from onceflow.schema_registry.json_view import JsonView
    from onceflow.tables.table import Change


_DIGITS_MAX = 20  # of a 64-bit integer, with its sign


@dataclass(frozen=True)
class Form:
    """A way to write bytes as text.

    Args:
        parse: the bytes of a text of the command line. Raises ValueError.
        read: what bytes mean: text, a number, or a JSON document. Raises ValueError.
        write: that as text, for people.
        noun: what bytes of this form are, for warnings.
    """

    parse: Callable[[str], bytes]
    read: Callable[[bytes], Any]
    write: Callable[[Any], str]
    noun: str


def _text_bytes(text: str) -> bytes:
    # An argument that is not UTF-8 becomes the same bytes again.
    return text.encode("utf-8", "surrogateescape")


def _hex_bytes(text: str) -> bytes:
    digits = "".join(text.split())
    if len(digits) % 2 and set(digits) <= set(string.hexdigits):
        raise ValueError(f"it has {len(digits)} digits, and each byte takes two")
    return bytes.fromhex(text)


def _json_bytes(text: str) -> bytes:
    try:
        return serdes.JSON.encode(record_lines.load_json(text))
    except TypeError as refused:  # for example an integer of more than 64 bits
        raise ValueError(str(refused)) from None


def _long_bytes(text: str) -> bytes:
    if not re.fullmatch("-?[0-9]+", text):
        raise ValueError("it is no integer in decimal digits")
    if len(text) > _DIGITS_MAX or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError("it is beyond the 64-bit integers")
    return serdes.LONG.encode(int(text))


def _json_text(content: Any) -> str:
    text = record_lines.compact_json(content)
    return text if text.isprintable() else record_lines.as_line(content)


FORMS = {
    "text": Form(_text_bytes, bytes.decode, str, "printable text in UTF-8"),
    "hex": Form(_hex_bytes, bytes.hex, str, "bytes"),
    "base64": Form(
        lambda text: base64.b64decode(text, validate=True), lambda raw: base64.b64encode(raw).decode(), str, "bytes"
    ),
    "json": Form(_json_bytes, record_lines.load_json, _json_text, "JSON"),
    "long": Form(_long_bytes, serdes.LONG.decode, str, "a 64-bit integer"),
    "double": Form(lambda text: serdes.DOUBLE.encode(float(text)), serdes.DOUBLE.decode, repr, "a double"),
}
KEY_FORMS = ("text", "hex", "json", "base64", "long")
VALUE_FORMS = ("text", "json", "hex", "base64", "long", "double")


def _of_schemas(view: JsonView) -> Form:
    return Form(_json_bytes, lambda raw: view.read(raw)[0], _json_text, "of a schema in the registry")


class Cells:
    """Reads the keys of a command line, and prints rows and changes.

    Args:
        key, value: names of `FORMS`.
        as_json: whether a line is a JSON object. Otherwise it is key, tab, value.
        view: reads values that begin with the id of a schema, in place of ``value``.
    """

    def __init__(self, key: str, value: str, *, as_json: bool, view: JsonView | None = None) -> None:
        values = FORMS[value] if view is None else _of_schemas(view)
        self._forms = {"key": FORMS[key], "value": values, "before": values}
        self._key, self._as_json = key, as_json
        self._warned: set[str] = set()

    def key(self, text: str) -> bytes:
        """The bytes of a key.

        Raises:
            click.UsageError: the text is not of the form of the keys.
        """
        try:
            return self._forms["key"].parse(text)
        except ValueError as error:
            raise click.UsageError(f"{text!r} is not a key of --key {self._key}: {error}") from None

    @property
    def keys_are_json(self) -> bool:
        return self._key == "json"

    def prefix(self, text: str) -> bytes:
        """The bytes that keys begin with. Of JSON, this is the beginning of the text."""
        if self._key == "long":
            raise click.UsageError("keys of --key long have no prefixes; use `range`")
        return _text_bytes(text) if self._key == "json" else self.key(text)

    def bounds(self, start: str | None, end: str | None) -> tuple[bytes | None, bytes | None]:
        """The bytes of the keys between which a range is.

        Raises:
            click.UsageError: as `key`; or they are numbers, and the range ends before it starts.
        """
        low, high = (None if key is None else self.key(key) for key in (start, end))
        if self._key in ("json", "long") and low is not None and high is not None and low > high:
            order = ", in which negative numbers come after positive ones" if self._key == "long" else ""
            raise click.UsageError(f"--start {start} comes after --end {end} in the order of the keys' bytes{order}")
        return low, high

    def row(self, key: bytes, value: bytes) -> str:
        """A line with a key and its value."""
        if self._as_json:
            return record_lines.as_line({**self._field("key", key), **self._field("value", value)})
        return f"{self._word('key', key)}\t{self._word('value', value)}"

    def change(self, change: Change) -> str:
        """A line with a change. As JSON it also has the value before, and where the record is."""
        if self._as_json:
            cells = (("key", change.key), ("value", change.value), ("before", change.before))
            found = {name: cell for field in cells for name, cell in self._field(*field).items()}
            if change.value is None:
                found["deleted"] = True  # the value may also be a null of JSON
            place = {"partition": change.partition, "offset": change.offset, "timestamp_ms": change.timestamp_ms}
            return record_lines.as_line({**found, **place})
        return f"{self._word('key', change.key)}\t{self._word('value', change.value)}"

    def _word(self, name: str, raw: bytes | None) -> str:
        if raw is None:
            return "null"
        form = self._forms[name]
        try:
            text = form.write(form.read(raw))
        except ValueError:
            text = "\n"
        return text if text.isprintable() else self._escaped(name, f"{raw!r}", "like b'\\xff'")

    def _field(self, name: str, raw: bytes | None) -> dict[str, Any]:
        if raw is None:
            return {name: None}
        try:
            found = self._forms[name].read(raw)
            record_lines.compact_json(found)  # a double may be infinite, which JSON does not know
            return {name: found}
        except ValueError:
            encoded = base64.b64encode(raw).decode()
            return {self._escaped(name, f"{name}_base64", f"as {name}_base64"): encoded}

    def _escaped(self, name: str, text: str, how: str) -> str:
        """The text. The first time, a warning says why it is used."""
        if name not in self._warned:
            self._warned.add(name)
            which = {"key": "keys are", "value": "values are", "before": "values are"}[name]
            noun = self._forms[name].noun
            click.echo(f"warning: some {which} not {noun}; they are printed {how} (see --{name})", err=True)
        return text


def cells(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--key``, ``--value`` and ``--json``; it is called with ``cells``."""

    @click.option(
        "--key",
        type=click.Choice(KEY_FORMS),
        default="text",
        show_default=True,
        help="What keys are, here and in the output.",
    )
    @click.option(
        "--value", type=click.Choice(VALUE_FORMS), default="text", show_default=True, help="How values are printed."
    )
    @click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each line.")
    @registry_options
    @functools.wraps(command)
    def with_cells(*arguments: Any, key: str, value: str, as_json: bool, view: JsonView | None, **named: Any) -> Any:
        return command(*arguments, cells=Cells(key, value, as_json=as_json, view=view), **named)

    return with_cells
