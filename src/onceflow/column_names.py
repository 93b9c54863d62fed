"""Names of columns that mean something to onceflow: a name that is only almost one of them is refused.

Spark ignores case by default (``spark.sql.caseSensitive``), so ``df.select("KEY")`` works, and returns a column named
``KEY``. A sink that looks for ``key`` would ignore it, and write null keys without an error.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from onceflow.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_case_sensitive(spark: SparkSession) -> bool:
    """Whether names of columns that differ in case alone are different ones for Spark."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def plain(name: str) -> str:
    """A name without what people overlook: case, blanks, invisible characters, and forms of the same letter."""
    visible = "".join(each for each in name if unicodedata.category(each) not in ("Cf", "Cc"))
    return "".join(unicodedata.normalize("NFKC", visible).casefold().split())


def check_reserved(
    names: Sequence[str], reserved: Collection[str], *, caller: str, flow: str | None, case_sensitive: bool
) -> None:
    """Check that no column has a name that is almost a reserved one, and that no reserved name is there twice.

    Args:
        names: of all columns. reserved: those that ``caller`` looks for.
        caller: what the user has called.
        case_sensitive: whether names that differ in case alone are different ones. Even then, a name such as ``KEY`` is
            refused if there is no ``key``.

    Raises:
        SchemaError: with the right spelling.
    """
    wanted = {plain(name): name for name in reserved}
    for name in names:
        meant = wanted.get(plain(name))
        if meant is None:
            continue
        if name == meant:
            if names.count(name) > 1:
                raise SchemaError(
                    f"{caller}: the DataFrame has two columns {name!r}",
                    flow=flow,
                    next_step="drop or rename one of them, for example after a join",
                )
        elif meant not in names:
            raise SchemaError(
                f"{caller} would ignore the column {name!r}: it looks for {meant!r}, with exactly this spelling",
                flow=flow,
                next_step=f".withColumnRenamed({name!r}, {meant!r}); or, if it is something else, give it another name "
                "or leave it out with select",
            )
        elif name.lower() == meant and not case_sensitive:
            raise SchemaError(
                f"{caller}: column {name!r} and column {meant!r} are the same for Spark",
                flow=flow,
                next_step="drop or rename one of them",
            )


def twice(names: Sequence[str], *, case_sensitive: bool) -> str | None:
    """The first name that is there twice for Spark; None: they all differ."""
    seen: set[str] = set()
    for name in names:
        same = name if case_sensitive else name.lower()
        if same in seen:
            return name
        seen.add(same)
    return None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question about the name that somebody may have meant, followed by a blank; empty: there is none.

    A name that differs in case, blanks or underscores alone comes first, then one that is spelled almost so.
    """
    by_plain: dict[str, str] = {}
    for each in known:
        by_plain.setdefault(plain(each).replace("_", ""), each)
    text = plain(str(name)).replace("_", "")
    close = [text] if text in by_plain else difflib.get_close_matches(text, by_plain, 1, 0.75)
    return f"did you mean {by_plain[close[0]]!r}? " if close and by_plain[close[0]] != name else ""
