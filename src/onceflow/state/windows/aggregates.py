"""Ready aggregates for windows: ``Count``, ``Sum``, ``Min``, ``Max``, ``Mean``. As in SQL, nulls are left out.

In a part, a Decimal is text: JSON, in which parts are kept, reads a Decimal with few digits as a float. Parts of
earlier versions have numbers in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Context, Decimal, Inexact
from numbers import Integral, Real
from typing import Any

from onceflow.options.arguments import checked_arguments
from onceflow.state.api.record import Record

Source = str | Callable[[Record], Any]

# Panes are added when a window closes, and then no record can be blamed any more. So what is summed is bounded when it
# is read: not even 100 million of the largest numbers have a sum beyond the range of a float.
_LARGEST = 1e300
_DIGITS = 400
_WHOLE = 1 << 53  # floats hold all whole numbers up to here
_EXACT = Context(prec=2 * _DIGITS, traps=[Inexact])


class Aggregate:
    """What is computed of the records of a window, in parts that can be merged. Subclass it for one of your own.

    A part is what the ``state`` serde of the processor can encode.

    Args:
        of: the name of a field of the records' values, or a function of the record.
    """

    @checked_arguments
    def __init__(self, of: Source) -> None:
        if not (isinstance(of, str) or callable(of)):
            raise ValueError(f"{type(self).__name__}({of!r}): give the name of a field, or a function of the record")
        self._of = of

    def initial(self) -> Any:
        """The part of no records."""
        return None

    def add(self, part: Any, record: Record) -> Any:
        """The part with one more record."""
        value = self._value(record)
        return part if value is None else self.merge(part, self.part(value))

    def part(self, value: Any) -> Any:
        """The part of one value that is not null."""
        return value

    def merge(self, left: Any, right: Any) -> Any:
        """The part of two parts. Either may be `initial`."""
        raise NotImplementedError(f"{type(self).__name__} does not define merge()")

    def result(self, part: Any) -> Any:
        """The aggregate, from the part of all records of the window."""
        return part

    def _value(self, record: Record) -> Any:
        if callable(self._of):
            return self._of(record)
        if record.value is None:
            return None
        if not isinstance(record.value, Mapping):
            raise ValueError(
                f"the value has no field {self._of!r}, it is {type(record.value).__name__}: declare a serde, "
                "for example value = JSON"
            )
        return record.value.get(self._of)


class Count(Aggregate):
    """The number of records; with an argument, of those where it is not null."""

    @checked_arguments
    def __init__(self, of: Source | None = None) -> None:
        super().__init__(_one if of is None else of)

    def initial(self) -> int:
        return 0

    def part(self, value: Any) -> int:
        return 1

    def merge(self, left: int, right: int) -> int:
        return left + right


class Sum(Aggregate):
    """The sum of the numbers; null if there is none. Whole numbers are summed exactly, however large the sum is."""

    def add(self, part: Any, record: Record) -> Any:
        value = self._value(record)
        return part if value is None else _plus(part, self.part(value), self._of)

    def part(self, value: Any) -> Any:
        return _summand(value, self._of)

    def merge(self, left: Any, right: Any) -> Any:
        return right if left is None else left if right is None else _plus(left, right, self._of)

    def result(self, part: Any) -> Any:
        return _number_of(part)


class _Extreme(Aggregate):
    """The smallest or the largest value; null if there is none.

    All values are numbers, or all are text: otherwise they could not be compared when a window closes, and no record
    would be to blame any more.

    Args:
        text: whether the values are text, which is compared character by character (by code points).
    """

    @checked_arguments
    def __init__(self, of: Source, *, text: bool = False) -> None:
        super().__init__(of)
        self._text = text

    def part(self, value: Any) -> Any:
        return _text(value, self._of) if self._text else _kept(_number(value, self._of))

    def result(self, part: Any) -> Any:
        return part if self._text else _number_of(part)

    def _is_less(self, left: Any, right: Any) -> bool:
        return bool(left < right) if self._text else _is_less(left, right)


class Min(_Extreme):
    """The smallest number, or with ``text=True`` the first text; null if there is none."""

    def merge(self, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return right if left is None else left
        return right if self._is_less(right, left) else left


class Max(_Extreme):
    """The largest number, or with ``text=True`` the last text; null if there is none."""

    def merge(self, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return right if left is None else left
        return right if self._is_less(left, right) else left


class Mean(Aggregate):
    """The mean of the numbers; null if there is none."""

    def initial(self) -> Any:
        return [0, 0]

    def part(self, value: Any) -> Any:
        return [_summand(value, self._of), 1]

    def merge(self, left: Any, right: Any) -> Any:
        return [_plus(left[0], right[0], self._of), left[1] + right[1]]

    def result(self, part: Any) -> float | None:
        total, count = part
        return float(_number_of(total) / count) if count else None


def described(aggregates: Mapping[str, Aggregate]) -> str:
    """Aggregates in their order, by name, class and field, as text. The parts of a window are kept in this order.

    Of a function it says only that it is one: it has no name that stays the same.
    """
    texts = []
    for name, aggregate in aggregates.items():
        of = getattr(aggregate, "_of", None)  # a subclass may know nothing of fields
        given = [repr(of)] if isinstance(of, str) else [] if of is None or of is _one else ["function"]
        given += ["text"] if getattr(aggregate, "_text", False) is True else []
        texts.append(f"{name}={type(aggregate).__name__}({', '.join(given)})")
    return f"aggregates({', '.join(texts)})"


def _one(record: Record) -> int:
    return 1


def _number(value: Any, of: Source) -> Any:
    """The value as an int, a float or a Decimal.

    Raises:
        ValueError: it is none of them, or not finite.
    """
    kind = type(value)
    if kind is not int and kind is not float and kind is not Decimal:
        if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
            raise ValueError(f"{_name(of)} is {value!r:.100}, not a finite number")
        value = int(value) if isinstance(value, Integral) else float(value)  # of NumPy, for example
    # JSON has no infinity: it would come back from the state as null.
    if not (value.is_finite() if kind is Decimal else kind is int or math.isfinite(value)):
        raise ValueError(f"{_name(of)} is {value!r:.100}, not a finite number")
    return value


def _summand(value: Any, of: Source) -> Any:
    """As `_number`, as a part that is summed with others.

    Raises:
        ValueError: it is too large for that, or has too many digits.
    """
    value = _number(value, of)
    if type(value) is Decimal and int(value.as_tuple().exponent) < -_DIGITS:  # a number, because it is finite
        raise ValueError(f"{_name(of)} has more than {_DIGITS} digits behind the point")
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{_name(of)} is beyond {_LARGEST:.0e}: a sum of such numbers may be no number any more")
    return _kept(value)


def _text(value: Any, of: Source) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_name(of)} is {value!r:.100}, not text")
    return value


def _plus(left: Any, right: Any, of: Source) -> Any:
    """The sum of two parts. Ints and Decimals are added exactly. A float counts as it is written where it meets a
    Decimal, or an int that floats do not hold.

    Raises:
        ValueError: it is too large.
    """
    if left is None:
        return right
    if type(left) is int and type(right) is int:
        return left + right
    if type(left) is float and type(right) is float and math.isfinite(left + right):
        return left + right
    left, right = _number_of(left), _number_of(right)
    total: Any
    try:
        if isinstance(left, Decimal) or isinstance(right, Decimal) or _is_beyond_floats(left, right):
            total = _EXACT.add(_decimal(left), _decimal(right))
        else:
            total = left + right
    except ArithmeticError as error:
        raise _too_large(of) from error
    # As in `_number`: the sum of the window would begin again, without the records that it had.
    if isinstance(total, float) and not math.isfinite(total):
        raise _too_large(of)
    return _kept(total)


def _is_less(left: Any, right: Any) -> bool:
    """Whether one number is less than another, in parts. A float counts as it is written, as in `_plus`."""
    kind = type(left)
    if kind is type(right) and (kind is int or kind is float):
        return bool(left < right)
    left, right = _number_of(left), _number_of(right)
    if isinstance(left, Decimal) or isinstance(right, Decimal) or _is_beyond_floats(left, right):
        left, right = _decimal(left), _decimal(right)
    return bool(left < right)


def _kept(number: Any) -> Any:
    """A number as it is in a part."""
    return str(number) if isinstance(number, Decimal) else number


def _number_of(part: Any) -> Any:
    """The number that is in a part; null, if there is none."""
    return Decimal(part) if isinstance(part, str) else part


def _is_beyond_floats(left: Any, right: Any) -> bool:
    """Whether one is a float, and the other an int that floats do not hold."""
    if isinstance(left, float) is isinstance(right, float):
        return False
    whole = right if isinstance(left, float) else left
    return not -_WHOLE <= whole <= _WHOLE


def _decimal(value: Any) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _too_large(of: Source) -> ValueError:
    return ValueError(f"the sum of {of if isinstance(of, str) else 'the values'} is too large")


def _name(of: Source) -> str:
    return of if isinstance(of, str) else "the value"
