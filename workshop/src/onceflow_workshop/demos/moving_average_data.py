"""Measurements of real series with bad records among them, and the averages that must come out. No Kafka, no Spark.

The series are those packaged in ``vega_datasets``: nothing is downloaded. What is expected is computed here from the
series themselves, with other means than the service's: whole lists, dates and fractions.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any, NamedTuple

from onceflow.errors import EnvironmentUnusableError
from onceflow_workshop.demos.audit import Expected, Message, Origin, onceflow_headers, origin_headers
from onceflow_workshop.demos.generator import Input

SOURCE = "measurements"
BAD_SHARE = 0.01
LAST_N = 20
LAST_T = timedelta(minutes=10_080)
ROUND = timedelta(days=365 * 17)
"""How much later the series begin again when more measurements are wanted than there are."""

NUMBER = "measurement"
"""Header with the number of a bad record: some have nothing else to tell them by."""
HUGE_BYTES = 300_000

# What is wrong with a record, and what its dead letters must say.
_VALUE = "ValueError: value is no whole number"
_TIME = "ValueError: time is no time like"
CAUSES: Mapping[str, str] = {
    "not JSON": "JSONDecodeError: ",
    "no object": "ValueError: missing field",
    "missing field": "ValueError: missing field",
    "no value": "ValueError: missing field",
    "no key": "ValueError: the record has no key",
    "other key": "ValueError: series is not the key",
    "type of value": _VALUE,
    "type of time": _TIME,
    "no time": _TIME,
    "no such day": "ValueError: day is out of range",
    "out of range": _VALUE,
    "beyond 64 bits": _VALUE,
    "huge": "JSONDecodeError: ",
    "time goes back": "ValueError: time goes back",
}
# Letters of 300 KB are rare, so that a run does not consist of them.
_WEIGHTS = [1 if kind == "huge" else 10 for kind in CAUSES]
_TIMES = re.compile(rb'"series": ?"([^"]+)", ?"time": ?"([^"]+)"')


class Measurement(NamedTuple):
    """One record; ``cause`` is a name of ``CAUSES``, None for a good one.

    Args:
        identity: series and time of a good one, else the number in its header.
        thousandths: what was measured. It and ``time`` are of no meaning for a bad one.
    """

    identity: str
    series: str
    time: datetime
    thousandths: int
    key: bytes | None
    value: bytes | None
    cause: str | None = None


# ---- input -------------------------------------------------------------------------------------------


def optional(module: str) -> Any:
    """A module that only this demo needs.

    Raises:
        EnvironmentUnusableError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentUnusableError(
            f"The demo moving-average needs {module.partition('.')[0]}, which cannot be imported",
            detail=str(error),
            next_step="pip install ./workshop in a checkout",
        ) from error


@functools.cache
def series() -> Sequence[tuple[datetime, str, int]]:
    """Time, series and value (in thousandths) of all measurements there are, in order of time.

    Raises:
        EnvironmentUnusableError: no ``vega_datasets``.
    """
    data = optional("vega_datasets").data
    found: list[tuple[datetime, str, int]] = []

    def take(times: Any, names: Iterable[str], values: Any) -> None:
        dates = (time.to_pydatetime() for time in times)
        found.extend(zip(dates, names, (values * 1000).round().astype("int64").tolist(), strict=True))

    stocks = data.stocks()
    take(stocks["date"], [f"stocks/{symbol}" for symbol in stocks["symbol"]], stocks["price"])
    for city, frame in (("seattle", data.seattle_temps()), ("san-francisco", data.sf_temps())):
        take(frame["date"], itertools.repeat(f"temperature/{city}", len(frame)), frame["temp"])
    weather = data.seattle_weather()
    for name in ("precipitation", "temp_max", "temp_min", "wind"):
        take(weather["date"], itertools.repeat(f"weather/{name}", len(weather)), weather[name])
    return sorted(found, key=lambda each: each[0])


def generate(seed: int, count: int) -> Iterator[Measurement]:
    """``count`` records, about 1 % of them bad; the same ones for the same seed.

    The good ones are those of ``series()``. When these come to their end they begin again, ``ROUND`` later each time.
    """
    rng = random.Random(f"moving-average-{seed}")
    # A bad record needs a series that has begun: it may say that time goes back.
    latest: dict[str, datetime] = {}
    good = _rounds()
    for number in range(count):
        if latest and rng.random() < BAD_SHARE:
            yield _bad(f"bad-{number:09d}", rng.choices(list(CAUSES), _WEIGHTS)[0], latest, rng)
            continue
        time, name, thousandths = next(good)
        latest[name] = time
        value = _json(series=name, time=_text(time), value=thousandths)
        yield Measurement(f"{name} {_text(time)}", name, time, thousandths, name.encode(), value)


def inputs(measurements: Iterable[Measurement]) -> Iterator[Input]:
    """The same for the generator of the run."""
    for each in measurements:
        if each.cause is None:
            yield Input(SOURCE, each.key, each.value)
        else:
            headers = ((NUMBER, each.identity.encode()),)
            yield Input(SOURCE, each.key, each.value, each.identity, headers=headers)


def identify(message: Message) -> str | None:
    """Of a measurement, its averages or its dead letter."""
    number = dict(message.headers).get(NUMBER)
    if number is not None:
        return number.decode()
    found = _TIMES.search(message.value or b"")
    return None if found is None else f"{found[1].decode()} {found[2].decode()}"


def _rounds() -> Iterator[tuple[datetime, str, int]]:
    for n in itertools.count():
        for time, name, thousandths in series():
            yield time + n * ROUND, name, thousandths


def _text(time: datetime) -> str:
    return f"{time.isoformat()}Z"


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _bad(identity: str, cause: str, latest: Mapping[str, datetime], rng: random.Random) -> Measurement:
    name = rng.choice(list(latest))
    fields = {"series": name, "time": _text(latest[name]), "value": rng.randrange(100_000)}
    key: bytes | None = name.encode()
    value: bytes | None = None
    if cause == "not JSON":
        whole = _json(**fields)
        value = rng.choice([whole[: rng.randrange(len(whole))], b"\xff\xfe" + whole, whole + whole, b"measured: 5"])
    elif cause == "no object":
        value = rng.choice([b"[]", b"7", b"null", b'"value"'])
    elif cause != "no value":
        if cause == "missing field":
            del fields[rng.choice(list(fields))]
        elif cause == "no key":
            key = None
        elif cause == "other key":
            key = b"stocks/unknown"
        elif cause == "time goes back":
            fields["time"] = _text(latest[name] - timedelta(seconds=rng.randint(1, 10_000_000)))
        else:
            fields |= rng.choice(_WRONG[cause])
        value = _json(**fields).replace(b'"DIGITS"', b"9" * HUGE_BYTES)
    return Measurement(identity, name, latest[name], 0, key, value, cause)


_WRONG: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "type of value": [{"value": each} for each in ("12", 1.5, True, [1], {"thousandths": 1})],
    "type of time": [{"time": each} for each in (1_262_304_000, True, ["2010-01-01T00:00:00Z"])],
    "no time": [
        {"time": each}
        for each in (
            "yesterday",
            "",
            "2010-01-01",
            "0001-01-01T00:00:00Z",
            "9999-12-31T23:59:59Z",
            "2010-01-01T24:00:00Z",
        )
    ],
    "no such day": [{"time": "2010-02-30T00:00:00Z"}],
    "out of range": [{"value": each} for each in (10**9 + 1, -(10**18))],
    "beyond 64 bits": [{"value": each} for each in (2**63, 10**30, -(10**300))],
    "huge": [{"value": "DIGITS"}],
}


# ---- what must come out ------------------------------------------------------------------------------


def expected_averages(measurements: Iterable[Measurement]) -> Iterator[Expected]:
    """One for each good measurement: of its series' values up to it."""
    before: dict[str, list[tuple[datetime, int]]] = {}
    totals: dict[str, int] = {}
    for each in measurements:
        if each.cause is not None:
            continue
        of_series = before.setdefault(each.series, [])
        of_series.append((each.time, each.thousandths))
        totals[each.series] = totals.get(each.series, 0) + each.thousandths
        oldest = bisect_right(of_series, each.time - LAST_T, key=lambda one: one[0])
        averages = {
            "last_n": average([value for _, value in of_series[-LAST_N:]]),
            "last_t": average([value for _, value in of_series[oldest:]]),
            "all": to_next(Fraction(totals[each.series], len(of_series))),
        }
        value = {"series": each.series, "time": _text(each.time), "value": each.thousandths, **averages}
        yield Expected(each.identity, each.series.encode(), json.dumps(value, separators=(",", ":")).encode())


def expected_dead_letters(measurements: Iterable[Measurement]) -> Iterator[Expected]:
    """Bad records, as they were. Their headers are looked at by ``letter_problems``."""
    for each in measurements:
        if each.cause is not None:
            yield Expected(each.identity, each.key, each.value, None, free=True)


def expected_source(measurements: Iterable[Measurement]) -> Iterator[Expected]:
    """All records, as they were produced."""
    for each in measurements:
        headers = ((NUMBER, each.identity.encode()),) if each.cause is not None else ()
        yield Expected(each.identity, each.key, each.value, headers, free=each.key is None)


def average(values: Sequence[int]) -> int:
    """To the next whole number."""
    return to_next(Fraction(sum(values), len(values)))


def to_next(number: Fraction) -> int:
    """The whole number that is next; of two the greater one."""
    return math.floor(number + Fraction(1, 2))


# ---- dead letters -----------------------------------------------------------------------------------------


def dead_letter_problems(
    messages: Iterable[Message],
    measurements: Iterable[Measurement],
    origins: Mapping[str, Origin],
) -> list[str]:
    """What is wrong with the headers of dead letters, one line each.

    Args:
        messages: of a topic of dead letters.
        origins: where the broker put the bad records.
    """
    causes = {each.identity: each.cause for each in measurements if each.cause is not None}
    problems = []
    for message in messages:
        identity = identify(message)
        if identity not in causes:
            continue  # the audit of the records says so
        headers = onceflow_headers(message)
        cause = f"{headers.get('onceflow.error.class')}: {headers.get('onceflow.error.message')}"
        where = f"{identity} ({causes[identity]})"
        if not cause.startswith(CAUSES[causes[identity]]):
            problems.append(f"{where}: the cause is {cause:.200}")
        must_be = {"onceflow.attempt": "1", **origin_headers(origins[identity])}
        wrong = {name: headers.get(name) for name, value in must_be.items() if headers.get(name) != value}
        if wrong or not headers.get("onceflow.error.stack"):
            problems.append(f"{where}: headers are {wrong}, must be {must_be}, and a stack")
    return problems
