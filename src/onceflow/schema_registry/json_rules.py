"""Rules of JSON Schema that jsonschema applies to floats: here numbers are compared by their digits.

A schema has them as JSON does, too: 0.1 is less than 0.10000000000000000001, and equal to 0.10.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_Rule = Callable[["Validator", Any, Any, Any], "Iterator[ValidationError]"]
#: A fraction of a number with an exponent below this one would not fit into memory.
_SMALLEST = -10_000


def exact_validator(found: Any) -> Any:
    """A class of validators with these rules in place of its own."""
    from jsonschema import validators

    def is_integer(_: Any, value: Any) -> bool:
        if isinstance(value, Decimal):
            return value.is_finite() and (value.as_tuple().exponent >= 0 or value == value.to_integral_value())  # type: ignore[operator]
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )

    names = {
        "minimum": (operator.lt, "less than the minimum of"),
        "maximum": (operator.gt, "greater than the maximum of"),
        "exclusiveMinimum": (operator.le, "less than or equal to the minimum of"),
        "exclusiveMaximum": (operator.ge, "greater than or equal to the maximum of"),
    }
    rules = {
        "multipleOf": _multiple_of,
        "const": _const,
        "enum": _enum,
        **{name: _bound(*rule) for name, rule in names.items()},
    }
    known = {
        name: rule for name, rule in rules.items() if name in found.VALIDATORS and found.VALIDATORS[name] is not None
    }
    if "exclusiveMinimum" not in found.VALIDATORS:  # of draft 4, where it is no number
        known = {name: rule for name, rule in known.items() if name not in names}
    checker = found.TYPE_CHECKER
    if checker.is_type(1.0, "integer"):  # since draft 6
        checker = checker.redefine("integer", is_integer)
    return validators.extend(found, known, type_checker=checker)


def _bound(is_beyond: Callable[[Any, Any], bool], said: str) -> _Rule:
    def bound(validator: Validator, limit: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        from jsonschema.exceptions import ValidationError

        if validator.is_type(value, "number") and is_beyond(_number(value), _number(limit)):
            yield ValidationError(f"{value} is {said} {limit}")

    return bound


def _multiple_of(validator: Validator, unit: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """In fractions: jsonschema divides floats, so that 0.3 is no multiple of 0.1. A Decimal it cannot divide at all."""
    from jsonschema.exceptions import ValidationError

    if not validator.is_type(value, "number"):
        return
    number, of = _number(value), _number(unit)
    if not number:
        return
    if min(number.adjusted(), of.adjusted()) < _SMALLEST or (Fraction(number) / Fraction(of)).denominator != 1:
        yield ValidationError(f"{value} is not a multiple of {unit}")


def _const(validator: Validator, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if not same_document(wanted, value):
        yield ValidationError(f"{wanted!r} was expected")


def _enum(validator: Validator, options: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if not any(same_document(each, value) for each in options):
        yield ValidationError(f"{value!r} is not one of {options!r}")


def _number(value: Any) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def same_document(one: Any, other: Any) -> bool:
    """Whether two documents are equal: true is not 1, and 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float, Decimal)) and isinstance(other, (int, float, Decimal)):
        return _number(one) == _number(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_document(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_document, one, other))
    return bool(one == other)
