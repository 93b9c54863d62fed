"""What columns of values with a schema have in common: a type, and what is wrong with values that cannot be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from onceflow.arrow_types import made_anew
from onceflow.errors import EnvironmentUnusableError


class Column(ABC):
    """Makes columns of values.

    Args:
        serde: its schema says which fields there are.
    """

    def __init__(self, serde: Any) -> None:
        self.serde = serde
        self._known: tuple[Any, Callable[[bytes], Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    @abstractmethod
    def _made(self) -> tuple[Any, Callable[[bytes], Any]]:
        """The type of the column while it is made, and what makes its values. That raises ValueError.

        Raises:
            EnvironmentUnusableError: the registry does not have the schema, or a column cannot have what it says.
        """

    def _schema(self) -> tuple[Any, Callable[[bytes], Any]]:
        if self._known is None:
            self._known = self._made()
        return self._known

    @property
    def type(self) -> Any:
        """Of the columns; times are in microseconds, as Spark has them.

        Raises:
            EnvironmentUnusableError: the registry does not have the schema, or a column cannot have what it says.
        """
        return made_anew(self._schema()[0], _in_us)

    def decode(self, values: Any) -> tuple[Any, dict[int, str]]:
        """The column, and what is wrong with values that are null in it because they cannot be read.

        Args:
            values: an array of binary values.

        Raises:
            RegistryUnavailableError: the registry does not answer.
        """
        kind, read = self._schema()
        found: list[Any] = []
        bad: dict[int, str] = {}
        for at, raw in enumerate(values.to_pylist()):
            value = None
            if raw is not None:
                try:
                    value = read(raw)
                except ValueError as error:
                    bad[at] = str(error)
            found.append(value)
        try:
            return pa.array(found, kind).cast(self.type), bad
        except (pa.ArrowException, OverflowError):
            return self._one_by_one(found, bad)

    def _one_by_one(self, found: list[Any], bad: dict[int, str]) -> tuple[Any, dict[int, str]]:
        """A value is beyond what a column has, such as a time in the year 300,000."""
        kind, _ = self._schema()
        for at, value in enumerate(found):
            try:
                pa.array([value], kind).cast(self.type)
            except (pa.ArrowException, OverflowError) as beyond:
                found[at], bad[at] = None, f"a column cannot have it: {beyond}"
        return pa.array(found, kind).cast(self.type), bad


def unusable(what: str) -> EnvironmentUnusableError:
    """The error for a schema with something that a column cannot have."""
    return EnvironmentUnusableError(
        f"The schema has {what}: a column cannot have that",
        next_step="read such values with a serde, in Flow.process or in the function of Flow.map",
    )


def _in_us(kind: Any) -> Any:
    return pa.timestamp("us", tz=kind.tz) if pa.types.is_timestamp(kind) else kind
