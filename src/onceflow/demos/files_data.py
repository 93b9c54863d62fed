"""Links and files from a seed, and what must come out of the service for them. Pure: no Kafka, no Spark, no network.

What is expected is computed here, from the values the files were made of, and never by reading a file or a topic.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from onceflow.demos.audit import Expected, Message, Origin, letter_cause, origin_headers

BAD_SHARE = 0.01
MAX_ROWS = 400
MAX_RAW_BYTES = 10_000
ATTEMPTS = 4
DEADLINE_S = 6
HEAD = b"id,account,amount,date,text\n"
TEXTS = ("Rent, March", 'Café "Zur Post"', "Überweisung", "Invoice 2024/17", "", "a\tb", "salary " * 10)
IDENTITY = re.compile(rb"link-\d{5}")
BIG, BIG_IDENTITY = "big.csv", "link-99999"
_BIG_TEXT = ("a payment with much to say for itself, " * 14)[:500]


class Kind(NamedTuple):
    """A kind of link.

    Args:
        weight: how often there is one, relative to others; every kind is there at least once if there is room.
        suffix: of the file's name.
        where: ``http``, ``path``, or ``record``: nothing is ever asked for, the record itself is bad.
        error, message: the cause, the message as a pattern; none: the file is loaded.
        attempts: that are made before it is given up.
    """

    weight: int = 1
    suffix: str = ".csv"
    where: str = "http"
    error: str = ""
    message: str = ""
    attempts: int = 1


KINDS: Mapping[str, Kind] = {
    "csv": Kind(20),
    "jsonl": Kind(16, ".jsonl"),
    "csv.gz": Kind(8, ".csv.gz"),
    "jsonl.gz": Kind(6, ".jsonl.gz"),
    "path": Kind(6, where="path"),
    "path.gz": Kind(3, ".jsonl.gz", where="path"),
    "typed": Kind(2, ""),
    "chunked": Kind(3),
    "encoded": Kind(2, ".jsonl"),
    "redirected": Kind(2),
    "empty": Kind(),
    "long line": Kind(0, ".jsonl"),
    "busy": Kind(4),
    "cut": Kind(4),
    "cut gzip": Kind(2, ".csv.gz"),
    "stalls": Kind(0),
    "changes": Kind(4),
    "missing": Kind(2, error="StatusError", message="HTTP status 404"),
    "down": Kind(error="StatusError", message="HTTP status 503", attempts=ATTEMPTS),
    "always cut": Kind(error="TruncatedError", message=r"\d+ bytes are missing", attempts=ATTEMPTS),
    "damaged": Kind(1, ".csv.gz", error="BadGzipFile", message="CRC check failed .*", attempts=ATTEMPTS),
    "half a gzip": Kind(1, ".csv.gz", error="EOFError", message="Compressed file ended .*", attempts=ATTEMPTS),
    "slow": Kind(0, error="TooSlowError", message=r"not complete after \d+ s"),
    "endless": Kind(error="TooLargeError", message=r"\d+ bytes, \d+ are the most"),
    "no length": Kind(error="NoLengthError", message="no Content-Length.*"),
    "led astray": Kind(error="RefusedError", message="this host is not allowed"),
    "in circles": Kind(error="FinalError", message="more than 5 redirects"),
    "no head": Kind(error="BadFileError", message="the first line does not name .*"),
    "picture": Kind(1, ".png", error="BadFileError", message="neither its name .*"),
    "no file": Kind(where="path", error="FinalError", message="there is no such file"),
    "outside": Kind(where="record", error="RefusedError", message="the path leads out of the folder"),
    "inner host": Kind(where="record", error="RefusedError", message="this host is not allowed"),
    "scheme": Kind(where="record", error="RefusedError", message="scheme 'ftp' is not http or https"),
    "not JSON": Kind(where="record", error="LinkError", message="not JSON"),
    "null": Kind(where="record", error="LinkError", message="no value"),
    "number": Kind(where="record", error="LinkError", message="not like .*"),
    "no link": Kind(where="record", error="LinkError", message="not like .*"),
    "huge": Kind(0, where="record", error="LinkError", message="more than 10000 bytes"),
    "too long": Kind(where="record", error="ValueError", message="the key has .* bytes, 470 are the most"),
    "copy": Kind(8, where="copy"),
    "again": Kind(1, where="copy", error="StatusError", message="HTTP status 404"),
}


class Case(NamedTuple):
    """A record of the topic ``links``. ``of``: the number of the earlier case that it repeats."""

    number: int
    kind: str
    of: int | None = None

    @property
    def identity(self) -> str:
        return f"link-{self.number:05d}"

    @property
    def about(self) -> Kind:
        return KINDS[self.kind]


class Row(NamedTuple):
    """A line of a file: a transaction, or a cause why it is none."""

    raw: bytes
    transaction: Mapping[str, str | int] | None
    cause: str = ""


class Links:
    """All links of a run.

    Args:
        base: URL of the server, which is not known before it runs.
        big: bytes that one more file has, about; 0: there is none.
    """

    def __init__(self, seed: int, count: int, base: str = "http://127.0.0.1:1", big: int = 0) -> None:
        self.seed = seed
        self.base = base
        self.big_link = f"{base}/{BIG}"
        self.big_rows = big // len(_big_row(0))
        self.cases = list(_cases(seed, count))
        self.by_name = {self.name(case): case for case in self.cases if case.of is None}

    # ---- records -------------------------------------------------------------------------------------

    def name(self, case: Case) -> str:
        """Of the file, on the server or in the folder."""
        return f"{case.identity}{case.about.suffix}"

    def link(self, case: Case) -> str:
        """What the record names."""
        if case.of is not None:
            return self.link(self.cases[case.of])
        name = self.name(case)
        special = {
            "redirected": f"{self.base}/moved/{name}",
            "outside": f"../../{name}",
            "inner host": f"http://169.254.169.254/{name}",
            "scheme": f"ftp://127.0.0.1/{name}",
            "too long": f"{self.base}/{name}?{'x' * 500}",
            "not JSON": "",
            "null": "",
            "no link": "",
            "number": str(case.number),
            "huge": f"{self.base}/{name}",
        }
        return special.get(case.kind, name if case.about.where == "path" else f"{self.base}/{name}")

    def value(self, case: Case) -> bytes | None:
        """Of the record."""
        whole = f'{{"id": "{case.identity}", "link": "{self.link(case)}"}}'
        special = {
            "null": None,
            "not JSON": f"please load {case.identity}".encode(),
            "number": f'{{"id": "{case.identity}", "link": {case.number}}}'.encode(),
            "no link": f'{{"id": "{case.identity}"}}'.encode(),
            "huge": f'{whole[:-1]}, "note": "{"x" * 300_000}"}}'.encode(),
            "again": f'{whole[:-1]}, "again": true}}'.encode(),
        }
        return special.get(case.kind, whole.encode())

    def key(self, case: Case) -> bytes | None:
        """Of the record: the link, so that the first of several copies is told by the order in their partition."""
        return self.link(case).encode() or None

    # ---- files ---------------------------------------------------------------------------------------

    def rows(self, case: Case, version: str = "") -> list[Row]:
        """The lines of a file, without a head."""
        return _rows(self.seed, case, version)

    def content(self, case: Case, version: str = "") -> bytes:
        """The file, packed if its name says so."""
        plain = b"".join(row.raw + b"\n" for row in self.rows(case, version))
        if ".jsonl" not in case.about.suffix and plain:
            plain = (b"\xef\xbb\xbf" if case.number % 3 == 0 else b"") + HEAD + plain
        if case.kind == "no head":
            plain = plain.split(b"\n", 1)[-1]
        return gzip.compress(plain, 1, mtime=0) if case.about.suffix.endswith(".gz") else plain

    # ---- what must come out --------------------------------------------------------------------------

    def loaded(self) -> Iterator[Case]:
        """Cases whose file is loaded."""
        return (case for case in self.cases if case.of is None and not case.about.error)

    def expected_transactions(self) -> Iterator[Expected]:
        for case in self.loaded():
            for row in self.rows(case):
                if row.transaction is not None:
                    value = {**row.transaction, "link": self.link(case)}
                    identity = f"{self.link(case)} {row.transaction['id']}"
                    yield Expected(identity, str(row.transaction["account"]).encode(), _json(value))

    def expected_bad_rows(self) -> Iterator[Expected]:
        for case in self.loaded():
            link = self.link(case).encode()
            first = 1 if ".jsonl" in case.about.suffix else 2
            for line, row in enumerate(self.rows(case), first):
                if row.transaction is None:
                    headers = (("link", link), ("line", b"%d" % line), ("cause", row.cause.encode()))
                    yield Expected(f"{link.decode()} {line}", link, row.raw[:MAX_RAW_BYTES], headers)

    def expected_loaded(self) -> Iterator[Expected]:
        for case in self.loaded():
            good = [row.transaction is not None for row in self.rows(case)]
            link = self.link(case)
            yield Expected(link, link.encode(), _summary(link, sum(good), len(good) - sum(good)))
        if self.big_rows:
            yield Expected(self.big_link, self.big_link.encode(), _summary(self.big_link, self.big_rows, 0))

    def expected_skipped(self) -> Iterator[Expected]:
        for case in self.cases:
            if case.kind == "copy":
                yield Expected(case.identity, self.key(case), self.value(case) or b"")

    def expected_failed(self) -> Iterator[Expected]:
        """Their headers hold the cause, see ``wrong_causes``. Those of one key may be in any order: they came from
        different partitions, and records without a link all have the same key."""
        failed = [case for case in self.cases if case.about.error]
        keys = Counter(self.link(case) for case in failed)
        for case in failed:
            link = self.link(case)
            free = keys[link] > 1 or case.kind in ("missing", "again")
            yield Expected(case.identity, link.encode(), self.value(case), None, free=free)

    def expected_table(self) -> dict[bytes, int]:
        """How often every link has come: the state of the service."""
        counts = Counter(
            self.link(case).encode() for case in self.cases if case.about.where in ("http", "path", "copy")
        )
        return dict(counts) | ({self.big_link.encode(): 1} if self.big_rows else {})

    def wrong_causes(
        self, failed: Iterable[Message], origins: Mapping[str, Origin], identify: Callable[[Message], str | None]
    ) -> list[str]:
        """What is wrong with the causes in a topic ``failed``, one line each."""
        by_identity = {case.identity: case for case in self.cases}
        wrong = []
        for message in failed:
            case = by_identity.get(identify(message) or "")
            if case is None or not case.about.error:
                continue  # told as unexpected already
            told = {name: (value or b"").decode(errors="replace") for name, value in message.headers}
            about = case.about
            want = {"onceflow.error.class": about.error}
            if about.where == "record":
                want |= {**origin_headers(origins[case.identity]), "onceflow.attempt": "1"}
                told = letter_cause(message)
            else:
                want |= {"link": self.link(case), "attempts": str(about.attempts)}
            differences = [f"{name} is {told.get(name)!r}, not {value!r}" for name, value in want.items()
                           if told.get(name) != value]  # fmt: skip
            said = told.get("onceflow.error.message", "")
            if not re.fullmatch(about.message, said):
                differences.append(f"the message is {said!r}, not {about.message!r}")
            wrong += [f"failed: {case.identity} ({case.kind}): {difference}" for difference in differences]
        return wrong


class BigFile:
    """The rows of the big file among the records of ``transactions``: too many to be compared one by one in memory."""

    def __init__(self, link: str, rows: int) -> None:
        self._end = f'"link":"{link}"}}'.encode()
        self._link = link
        self._seen = bytearray(rows)
        self.found = 0
        self.counts = {"lost": rows, "duplicated": 0, "wrong": 0}

    def takes(self, message: Message) -> bool:
        """Whether the record is a row of the file; then it is counted."""
        value = message.value or b""
        if not value.endswith(self._end):
            return False
        self.found += 1
        number = int(value[7:16]) if value[7:16].isdigit() else -1
        if not 0 <= number < len(self._seen) or (message.key, value) != big_transaction(number, self._link):
            self.counts["wrong"] += 1
        elif self._seen[number]:
            self.counts["duplicated"] += 1
        else:
            self._seen[number] = 1
            self.counts["lost"] -= 1
        return True


def big_parts(count: int) -> Iterator[bytes]:
    """The lines of the big file, without the head, some thousand at a time."""
    for at in range(0, count, 4_000):
        yield b"".join(map(_big_row, range(at, min(at + 4_000, count))))


def big_bytes(count: int) -> int:
    """Of the whole file with so many rows, which all have the same length."""
    return len(HEAD) + count * len(_big_row(0))


def big_transaction(number: int, link: str) -> tuple[bytes, bytes]:
    """Key and value that a row of the big file becomes."""
    account = f"acc-big-{number % 1000:04d}"
    amount = number % 1000 * 100 + 50
    fields = {"id": f"{number:09d}", "account": account, "amount": amount, "date": "2024-01-31", "text": _BIG_TEXT}
    return account.encode(), _json({**fields, "link": link})


def _big_row(number: int) -> bytes:
    within = number % 1000
    text = f'{number:09d},acc-big-{within:04d},{within:03d}.50,2024-01-31,"{_BIG_TEXT}"\n'
    return text.encode()


def identify(topic: str, message: Message, origins: Mapping[str, Origin]) -> str | None:
    """The identity of a record in a topic, as the expected ones have it."""
    headers = {name: (value or b"").decode(errors="replace") for name, value in message.headers}
    if topic == "bad-rows":
        return f"{headers.get('link')} {headers.get('line')}"
    if topic in ("transactions", "loaded"):
        try:
            value = json.loads(message.value or b"")
            return f"{value['link']} {value['id']}" if topic == "transactions" else str(value["link"])
        except (ValueError, KeyError, TypeError):
            return None
    found = IDENTITY.search(message.value or b"")
    if found is not None:
        return found[0].decode()
    place = tuple(headers.get(f"onceflow.origin.{name}") for name in Origin._fields)  # a null has no identity in it
    return next((name for name, origin in origins.items() if tuple(map(str, origin)) == place), None)


def _cases(seed: int, count: int) -> Iterator[Case]:
    """Every kind once, then by weight; copies of links that came before."""
    rng = random.Random(f"links-{seed}")
    kinds = list(KINDS)[:count]
    kinds += rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()], k=count - len(kinds))
    rng.shuffle(kinds)
    cases: list[Case] = []
    for number, kind in enumerate(kinds):
        of = None
        if KINDS[kind].where == "copy":
            wanted = [case.number for case in cases if case.about.where in ("http", "path")]
            if kind == "again":
                wanted = [case.number for case in cases if case.kind == "missing"]
            if wanted:
                of = rng.choice(wanted)
            else:  # there is nothing to repeat yet
                kind = "csv"
        cases.append(Case(number, kind, of))
    return iter(cases)


@lru_cache(maxsize=64)
def _rows(seed: int, case: Case, version: str) -> list[Row]:
    if case.kind == "empty":
        return []
    rng = random.Random(f"rows-{seed}-{case.number}-{version}")
    form = _jsonl if ".jsonl" in case.about.suffix else _csv
    bad = _BAD_JSONL if form is _jsonl else _BAD_CSV
    rows = []
    for n in range(rng.randint(1, MAX_ROWS)):
        cents = rng.randint(-(10**7), 10**7)
        if rng.random() < 0.1:
            cents = cents // 100 * 100
        fields = {
            "id": f"{version}{n:04d}",
            "account": f"acc-{case.number:05d}-{rng.randrange(10)}",
            "amount": _amount(cents),
            "date": f"{rng.randint(1970, 2099)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
            "text": rng.choice(TEXTS),
        }
        if rng.random() < BAD_SHARE:
            change, cause = rng.choice(bad)
            rows.append(Row(change(fields), None, cause))
        else:
            rows.append(Row(form(fields), {**fields, "amount": cents}))
    if case.kind == "long line":
        rows.insert(
            len(rows) // 2, Row(b'{"id": "' + b"x" * 3_000_000, None, f"more than {MAX_RAW_BYTES} bytes in a line")
        )
    return rows


def _amount(cents: int) -> str:
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}" + (f".{rest:02d}" if rest else "")


def _csv(fields: Mapping[str, str], **changed: str) -> bytes:
    return ",".join(_quoted(value) for value in {**fields, **changed}.values()).encode()


def _quoted(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if "," in value or '"' in value else value


def _jsonl(fields: Mapping[str, str], **changed: str) -> bytes:
    """``changed``: JSON in place of a value."""
    parts = {name: value if name == "amount" else json.dumps(value) for name, value in fields.items()} | changed
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}").encode()


def _without(fields: Mapping[str, str], name: str) -> bytes:
    return _jsonl({each: value for each, value in fields.items() if each != name})


def _summary(link: str, rows: int, bad_rows: int) -> bytes:
    return _json({"link": link, "rows": rows, "bad_rows": bad_rows})


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


_NO_AMOUNT = "amount is not a number with two decimals, or too large"
_NO_DATE, _FAR = "date is not a date", "date is not in 1970 to 2099"
_Bad = Sequence[tuple[Callable[[Mapping[str, str]], bytes], str]]
_BAD_CSV: _Bad = (
    (lambda row: _csv(row, text="").rsplit(b",", 1)[0], "4 columns in place of 5"),
    (lambda row: _csv(row, text="x") + b",more", "6 columns in place of 5"),
    (lambda row: _csv(row, amount="a lot"), _NO_AMOUNT),
    (lambda row: _csv(row, amount="1.234"), _NO_AMOUNT),
    (lambda row: _csv(row, amount="9" * 30), _NO_AMOUNT),
    (lambda row: _csv(row, amount=""), _NO_AMOUNT),
    (lambda row: _csv(row, date="2023-02-30"), _NO_DATE),
    (lambda row: _csv(row, date="tomorrow"), _NO_DATE),
    (lambda row: _csv(row, date="0000-00-00"), _NO_DATE),
    (lambda row: _csv(row, date="1066-10-14"), _FAR),
    (lambda row: _csv(row, date="9999-12-31"), _FAR),
    (lambda row: _csv(row, id=""), "id is missing"),
    (lambda row: _csv(row, account="x" * 65), "account is too long"),
    (lambda row: _csv(row, text="\0"), "a null character"),
    (lambda row: _csv(row, text="") + b"\xff\xfe", "not UTF-8"),
    (lambda row: _csv(row, text="") + b'"lost', "not CSV"),
)
_BAD_JSONL: _Bad = (
    (lambda row: _jsonl(row)[:-5], "not JSON"),
    (lambda row: b"[" * 5000, "not JSON"),
    (lambda row: b"[1, 2]", "not a JSON object"),
    (lambda row: b"null", "not a JSON object"),
    (lambda row: _without(row, "account"), "account is missing"),
    (lambda row: _jsonl(row, text="null"), "text is missing"),
    (lambda row: _jsonl(row, amount='"12"'), "amount has a wrong type"),
    (lambda row: _jsonl(row, amount="true"), "amount has a wrong type"),
    (lambda row: _jsonl(row, amount="NaN"), _NO_AMOUNT),
    (lambda row: _jsonl(row, amount="1e400"), _NO_AMOUNT),
    (lambda row: _jsonl(row, amount="9" * 30), _NO_AMOUNT),
    (lambda row: _jsonl(row, id="17"), "id has a wrong type"),
    (lambda row: _jsonl(row, date='"2023-02-30"'), _NO_DATE),
    (lambda row: _jsonl(row, date='"0001-01-01"'), _FAR),
    (lambda row: _jsonl(row, text='"\\ud800"'), "half a character"),
    (lambda row: _jsonl(row, text='""') + b"\xff", "not UTF-8"),
)
