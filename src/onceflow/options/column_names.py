"""Names of columns that mean something to onceflow: a name that is only almost one of them is refused.

Spark ignores case by default (``spark.sql.caseSensitive``), so ``df.select("KEY")`` works, and returns a column named
``KEY``. A sink that looks for ``key`` would ignore it, and write null keys without an error.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from onceflow.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_case_sensitive(spark: SparkSession) -> bool:
    """Whether names of columns that differ in case alone are different ones for Spark."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


# Characters that are not seen, besides those of the categories Cf and Cc (Unicode: Default_Ignorable_Code_Point), and
# the blank of Braille.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# Letters of other scripts that look like Latin ones (Unicode TS 39: confusables): Cyrillic, Greek, Armenian, Cherokee,
# and some special ones of Latin. A capital letter may look like another letter than its small one, so both are listed.
_LOOK_ALIKE = str.maketrans(
    {
        other: letter
        for letter, others in {
            "a": "\u0430\u0410\u03b1\u0391\u0251\u13aa",
            "c": "\u0441\u0421\u03f2\u03f9\u1d04\u13df",
            "d": "\u0501\u13a0",
            "e": "\u0435\u0415\u0395\u13ac",
            "f": "\u03dc\ua798\ua799",
            "g": "\u0261\u0581\u050c\u13c0",
            "h": "\u04bb\u0570\u041d\u0397\u13bb",
            "i": "\u0456\u0406\u03b9\u0399\u0131\u0269",
            "k": "\u043a\u041a\u03ba\u039a\u212a\u13e6",
            "l": "\u04cf\u04c0\u01c0\u13de",
            "m": "\u043c\u041c\u039c\u13b7",
            "n": "\u0578\u057c\u039d",
            "o": "\u043e\u041e\u03bf\u039f\u0585\u0555",
            "p": "\u0440\u0420\u03c1\u03a1\u13e2",
            "r": "\u0433\u1d26\u13a1\u13d2",
            "s": "\u0455\u0405\ua731\u13da\u054f",
            "t": "\u0442\u0422\u03c4\u03a4\u13a2",
            "u": "\u03c5\u057d\u1d1c\u054d",
            "v": "\u03bd\u0475\u0474\u1d20\u13d9",
            "y": "\u0443\u0423\u03b3\u03a5\u04af\u04ae\u028f",
        }.items()
        for other in others
    }
)


def plain(name: str) -> str:
    """A name without what people overlook: case, blanks, invisible characters, forms of the same letter, and letters of
    other scripts that look the same."""
    visible = "".join(each for each in name if unicodedata.category(each) not in ("Cf", "Cc"))
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", visible.translate(_LOOK_ALIKE)))
    text = _UNSEEN.sub("", text).translate(_LOOK_ALIKE).casefold()
    return "".join(text.split())


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
