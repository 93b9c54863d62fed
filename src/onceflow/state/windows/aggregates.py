"""Ready aggregates for windows: ``Count``, ``Sum``, ``Min``, ``Max``, ``Mean``. As in SQL, nulls are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from onceflow.state.api.record import Record

Source = str | Callable[[Record], Any]


class Aggregate:
    """What is computed of the records of a window, in parts that can be merged. Subclass it for one of your own.

    A part is what the ``state`` serde of the processor can encode.

    Args:
        of: the name of a field of the records' values, or a function of the record.
    """

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

    def __init__(self, of: Source | None = None) -> None:
        super().__init__(_one if of is None else of)

    def initial(self) -> int:
        return 0

    def part(self, value: Any) -> int:
        return 1

    def merge(self, left: int, right: int) -> int:
        return left + right


class Sum(Aggregate):
    """The sum of the numbers; null if there is none. Whole numbers are summed exactly."""

    def add(self, part: Any, record: Record) -> Any:
        found = super().add(part, record)
        _check_total(found, self._of)
        return found

    def part(self, value: Any) -> Any:
        return _number(value, self._of)

    def merge(self, left: Any, right: Any) -> Any:
        return right if left is None else left if right is None else left + right


class Min(Aggregate):
    """The smallest value; null if there is none."""

    def part(self, value: Any) -> Any:
        return _number(value, self._of) if isinstance(value, float) else value

    def merge(self, left: Any, right: Any) -> Any:
        return right if left is None else left if right is None else min(left, right)


class Max(Aggregate):
    """The largest value; null if there is none."""

    def part(self, value: Any) -> Any:
        return _number(value, self._of) if isinstance(value, float) else value

    def merge(self, left: Any, right: Any) -> Any:
        return right if left is None else left if right is None else max(left, right)


class Mean(Aggregate):
    """The mean of the numbers; null if there is none."""

    def initial(self) -> Any:
        return [0, 0]

    def add(self, part: Any, record: Record) -> Any:
        found = super().add(part, record)
        _check_total(found[0], self._of)
        return found

    def part(self, value: Any) -> Any:
        return [_number(value, self._of), 1]

    def merge(self, left: Any, right: Any) -> Any:
        return [left[0] + right[0], left[1] + right[1]]

    def result(self, part: Any) -> float | None:
        total, count = part
        return total / count if count else None


def _one(record: Record) -> int:
    return 1


def _number(value: Any, of: Source) -> Any:
    # JSON has no infinity: it would come back from the state as null.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{of if isinstance(of, str) else 'the value'} is {value!r:.100}, not a finite number")
    return value


def _check_total(total: Any, of: Source) -> None:
    # As in `_number`: the sum of the window would begin again, without the records that it had.
    if isinstance(total, float) and not math.isfinite(total):
        raise ValueError(f"with this record, the sum of {of if isinstance(of, str) else 'the values'} is too large")
