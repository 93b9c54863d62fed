"""JSON in which every number keeps its value: integers up to 1e308, and decimals with more digits than a float has.

`orjson` is fast, but it reads an integer beyond 64 bits as a float, shortens long decimals, and writes NaN and infinity
as null. So what it reads is checked for long numbers, and what it writes is checked for nulls. Both checks take little
time, and few documents need more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any

import orjson

__all__ = ["canonical", "dumps", "is_written", "loader", "loads", "number", "written"]

# Digits and points become 0, so that a long number is found as a row of them. What a negative exponent begins with is
# kept, what may follow a number becomes a space, and everything else an x.
_KEPT = {**dict.fromkeys(b"0123456789.", b"0"), **dict.fromkeys(b"eE", b"e"), **dict.fromkeys(b",]} \t\r\n", b" ")}
_OUTLINE = bytes({**_KEPT, ord("-"): b"-"}.get(code, b"x")[0] for code in range(256))
# A number of at most 15 digits is a float without loss, unless its exponent is below that of the smallest normal float.
_LONG, _SMALL = b"0" * 16, b"0e-000"
_SMALL_NUMBER = re.compile(rb"0e-000+(?![0xe-])")  # not a part of a text, for example of a UUID
_LONG_NUMBER = re.compile(rb"[0-9.]{16,}(?:[eE][+-]?[0-9]+)?")  # those in texts do no harm
_BLANKS = b" \t\r\n"
_TOO_DEEP = "Recursion limit reached"  # what `orjson` says, in a TypeError, of more than 254 levels
_dumps, _loads = orjson.dumps, orjson.loads  # a global variable is found sooner than an attribute
_NO_INTEGER = re.compile(rb"[0-9][.eE]")  # as every number has that is none
_SMALLEST = 2.2250738585072014e-308
_FLOAT_DIGITS = 15  # a float holds every decimal number of so many digits
_MOST_FLOAT_DIGITS = 17  # so many digits tell every float from all others
_CHECKED_AT_ONCE = 32  # few, so that they stay in the CPU cache
_LARGEST_INT = 10**308  # what is larger is no double, and `orjson` does not read it
_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1


def loads(raw: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON document.

    Integers become ``int``, whatever their size. Other numbers become ``float`` if that is the number of the document:
    written again with the fewest digits, or with 17 digits, it is the same number. Otherwise they become ``Decimal``.

    Raises:
        ValueError: it is not JSON, it has a number that is too large for a float and no integer, or it is nested too
            deeply.
    """
    value = _loads(raw)
    if type(raw) is bytes:
        outline = raw.translate(_OUTLINE)  # as `has_only_short_numbers`, without another call
        if outline.rfind(_LONG) < 0 and outline.rfind(_SMALL) < 0:
            return value
    try:
        return _exactly(raw, value)
    except RecursionError:  # Python's reader takes fewer levels than `orjson`
        raise ValueError("it is nested too deeply") from None


def has_only_short_numbers(raw: bytes) -> bool:
    """Whether `orjson` reads every number of a document, or of many documents one after the other, as it is.

    False means that it has to be looked at more closely.
    """
    outline = raw.translate(_OUTLINE)
    if outline.rfind(_LONG) >= 0:  # in CPython, rfind() takes half the time of find() and `in`
        return False
    return outline.rfind(_SMALL) < 0 or _SMALL_NUMBER.search(outline) is None


def loader(raws: Sequence[bytes | None]) -> Callable[[bytes], Any]:
    """What reads these documents as `loads` does. To check some of them at once takes less time."""
    present = [raw for raw in raws if raw is not None] if None in raws else raws
    for at in range(0, len(present), _CHECKED_AT_ONCE):
        if not has_only_short_numbers(b",".join(present[at : at + _CHECKED_AT_ONCE])):  # type: ignore[arg-type]
            return loads
    return orjson.loads


def dumps(value: Any) -> bytes:
    """A JSON document of a value that `loads` returns, and of whatever else `orjson` can write.

    Raises:
        ValueError: it has a number that JSON does not have: NaN, infinity, or an integer beyond 1e308; or it is nested
            too deeply.
        TypeError: it has an object that is no JSON.
    """
    try:
        raw = _dumps(value)
    except TypeError:
        try:
            return orjson.dumps(_writable(value), default=_decimal)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except TypeError as error:
            if _TOO_DEEP in str(error):
                raise ValueError("it is nested too deeply") from None
            raise
    if raw.rfind(b"null") >= 0 and not _has_nulls(value, raw.count(b"null")):
        _check(value)
    return raw


def written(value: Any, comma: str = ",", colon: str = ":", **options: bool) -> str:
    """As `json.dumps` with these options, with each Decimal in its own digits: unlike `dumps`, it also writes halves of
    surrogate pairs, which some programs have in texts.

    Raises:
        ValueError: it has a number that JSON does not have, or is nested too deeply.
        TypeError: it has an object that is no JSON.
    """
    try:
        try:
            return json.dumps(value, separators=(comma, colon), **options)  # type: ignore[arg-type]
        except TypeError:
            return _WithDecimals(comma, colon, options).text(value)
        except ValueError:
            raise ValueError("it has a number that is too large for a double") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True)
class _WithDecimals:
    """Writes JSON piece by piece."""

    comma: str
    colon: str
    options: Mapping[str, bool]

    def text(self, value: Any) -> str:
        if isinstance(value, Decimal):
            return _in_digits(value)
        if isinstance(value, dict):
            pairs = (f"{self.name(name)}{self.colon}{self.text(each)}" for name, each in value.items())
            return f"{{{self.comma.join(pairs)}}}"
        if isinstance(value, (list, tuple)):
            return f"[{self.comma.join(map(self.text, value))}]"
        return json.dumps(value, **self.options)  # type: ignore[arg-type]

    def name(self, name: Any) -> str:
        """The name of a field, as `json.dumps` writes it: a text also for a number, a boolean or None."""
        if not isinstance(name, str | int | float | None):
            raise TypeError(f"names of fields must be texts, got {type(name).__name__}")
        return self.text(name if isinstance(name, str) else json.dumps(name))


def is_written(value: int | float | Decimal) -> bool:
    """Whether JSON has the number."""
    if type(value) is int:
        return -_LARGEST_INT <= value <= _LARGEST_INT
    return not (isinstance(value, Decimal) and value.is_snan()) and math.isfinite(value)


def canonical(raw: bytes) -> bytes:
    """A document in the form in which documents of the same value are the same bytes: the fields of objects in order,
    no spaces, texts and numbers in one form. The value of a float is that of its fewest digits.

    Raises:
        ValueError: as `loads`; or it is nested more deeply than `orjson` writes it (254 levels; it reads 1024).
    """
    value = loads(raw)
    try:
        return _canonical(value)
    except (TypeError, RecursionError):
        raise ValueError("it is nested too deeply") from None


def _canonical(value: Any) -> bytes:
    with suppress(TypeError):  # a Decimal, or an integer beyond 64 bits
        found = _dumps(value, option=orjson.OPT_SORT_KEYS)
        if not _NO_INTEGER.search(found):
            return found
    return orjson.dumps(_writable(value, _in_one_form), option=orjson.OPT_SORT_KEYS)


def number(text: str) -> float | Decimal:
    """The value of a number with a point or an exponent: a float if that is the same number.

    Raises:
        ValueError: it is too large for a float.
    """
    value = float(text)
    if len(text) <= _FLOAT_DIGITS and "e" not in text and "E" not in text:
        return value
    if math.isinf(value):
        raise ValueError(f"{text:.50} is too large for a double")
    try:
        exact = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text:.50} is too small for a double") from None
    if exact == Decimal(repr(value)):
        return value
    # More digits than 17 say that it is no float that a program has written with 17 digits, see `_in_digits`.
    return value if len(exact.as_tuple().digits) <= _MOST_FLOAT_DIGITS and exact == _of_17_digits(value) else exact


def _exactly(raw: bytes | bytearray | memoryview | str, value: Any) -> Any:
    """The value of a document that may have numbers which ``value``, read by `orjson`, does not have."""
    text = raw.encode() if isinstance(raw, str) else bytes(raw)
    with suppress(TypeError):  # nested more deeply than it writes
        # As most programs write it, and this one: each number is the same. Blanks are left out of texts on both sides.
        if _dumps(value).translate(None, _BLANKS) == text.translate(None, _BLANKS):
            return value
    outline = text.translate(_OUTLINE)
    if _SMALL not in outline or not _has_tiny(value):
        at = outline.find(_LONG)
        while at >= 0:
            found = _LONG_NUMBER.match(text, at)
            assert found is not None
            if not _is_held(found[0].decode(), text[at - 1 : at] == b"-"):
                break
            at = outline.find(_LONG, found.end())
        else:
            return value
    return json.loads(text.decode(), parse_float=number)


def _is_held(text: str, negative: bool) -> bool:
    """Whether `orjson` reads a long number as it is. False for a part of a text that is no number."""
    try:
        if text.isdigit():
            return int(text) <= (-_INT64_MIN if negative else _UINT64_MAX)
        return repr(float(text)) == text or type(number(text)) is float
    except ValueError:
        return False


def _has_tiny(value: Any) -> bool:
    """Whether there is a float in the value that may be a rounded one because it is so small."""
    if type(value) is float:
        return -_SMALLEST < value < _SMALLEST
    if type(value) is dict:
        return any(map(_has_tiny, value.values()))
    return type(value) is list and any(map(_has_tiny, value))


def _writable(value: Any, write: Callable[[Any], Any] | None = None) -> Any:
    """The value with numbers as `orjson.Fragment` that `orjson` does not write, or all of them with ``write``."""
    if isinstance(value, dict):
        return {name: _writable(each, write) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(each, write) for each in value]
    kind = type(value)
    if kind is int or kind is float or kind is Decimal:
        if write is not None:
            return write(value)
        if kind is int:
            if not is_written(value):
                raise ValueError("an integer is beyond 1e308: it could not be read again")
            return value if _INT64_MIN <= value <= _UINT64_MAX else orjson.Fragment(str(value))
        return _decimal(value) if kind is Decimal else _finite(value)
    if kind not in (str, bool, type(None)):
        _check(value)
    return value


def _decimal(value: Any) -> orjson.Fragment:
    """A Decimal in its own digits. `orjson` calls it for objects that it cannot write."""
    if not isinstance(value, Decimal):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return orjson.Fragment(_in_digits(value))


def _in_digits(value: Decimal) -> str:
    """The digits of a Decimal. If they are the 17 digits of a float that has fewer, it gets zeros at its end, so that
    it is not taken for that float when it is read again."""
    _finite(value)
    sign, digits, exponent = value.as_tuple()
    if _FLOAT_DIGITS < len(digits) <= _MOST_FLOAT_DIGITS and type(number(str(value))) is float:
        stands_for = Decimal(repr(float(value)))
        if stands_for != value:
            more = _MOST_FLOAT_DIGITS + 1 - len(digits)
            assert isinstance(exponent, int)  # it is finite
            return str(Decimal((sign, (*digits, *[0] * more), exponent - more)))
    return str(value)


def _of_17_digits(value: float) -> Decimal:
    return Decimal(f"{value:.{_MOST_FLOAT_DIGITS}g}")


def _finite(value: Any) -> Any:
    if not math.isfinite(value):
        raise ValueError(f"{value} does not exist in JSON: give None, a text, or leave it out")
    return value


def _has_nulls(value: Any, count: int) -> bool:
    """Whether a dict has so many values that are None: then no other value was written as null."""
    return type(value) is dict and list(value.values()).count(None) == count


def _check(value: Any) -> None:
    """Refuse NaN and infinity, wherever in the value they are."""
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is float:
        if value - value != 0:
            _finite(value)
        return
    elif kind is not list and kind is not tuple:
        if kind is str or kind is int or kind is bool or value is None:
            return
        if isinstance(value, dict):
            value = value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            value = [getattr(value, field.name, None) for field in fields(value)]
        elif isinstance(value, Enum):
            value = [value.value]
        elif not isinstance(value, (list, tuple)):
            return
    for each in value:
        kind = type(each)
        if kind is float:
            if each - each != 0:
                _finite(each)
        elif kind is not str and kind is not int and kind is not bool and each is not None:
            _check(each)


def _in_one_form(value: int | float | Decimal) -> orjson.Fragment:
    """The digits of a whole number; of another one, its digits without zeros at the end, and the exponent of ten."""
    if type(value) is not int:
        sign, digits, exponent = Decimal(repr(value) if type(value) is float else value).as_tuple()
        assert isinstance(exponent, int)  # NaN and infinity are not read
        whole = "".join(map(str, digits))
        short = whole.rstrip("0")
        exponent += len(whole) - len(short)
        if not short.strip("0"):
            return orjson.Fragment("0")
        if exponent < 0:
            return orjson.Fragment(f"{'-' if sign else ''}{short.lstrip('0')}e{exponent}")
        value = int(short) * 10**exponent * (-1 if sign else 1)
    return orjson.Fragment(str(value))
