"""Links and files from a seed, and what must come out of the service for them. Pure: no Kafka, no Spark, no network.

What is expected is computed here, from the values the files were made of, and never by reading a file or a topic.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from onceflow_workshop.demos.audit import Expected, Message, Origin, onceflow_headers, origin_headers
from onceflow_workshop.demos.files_big import BIG, big_row
from onceflow_workshop.demos.files_rows import HEAD, MAX_RAW_BYTES, Row, compact_json, rows_of_file

ATTEMPTS = 4
DEADLINE_S = 6
IDENTITY = re.compile(rb"link-\d{5}")


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
    "endless": Kind(error="TooLargeError", message=r"\d+ bytes, at most \d+ are allowed"),
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
        self.big_rows = big // len(big_row(0))
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
        """Of the record: the link, so that the order in their partition says which of several copies is the first."""
        return self.link(case).encode() or None

    # ---- files ---------------------------------------------------------------------------------------

    def rows(self, case: Case, version: str = "") -> list[Row]:
        """The lines of a file, without a head."""
        if case.kind == "empty":
            return []
        rows = list(rows_of_file(self.seed, case.number, version, jsonl=".jsonl" in case.about.suffix))
        if case.kind == "long line":
            cause = f"more than {MAX_RAW_BYTES} bytes in a line"
            rows.insert(len(rows) // 2, Row(b'{"id": "' + b"x" * 3_000_000, None, cause))
        return rows

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
                    yield Expected(identity, str(row.transaction["account"]).encode(), compact_json(value))

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
                continue  # the audit of the records reports it as unexpected
            headers = {name: (value or b"").decode(errors="replace") for name, value in message.headers}
            about = case.about
            want = {"onceflow.error.class": about.error}
            if about.where == "record":
                want |= {**origin_headers(origins[case.identity]), "onceflow.attempt": "1"}
                headers = onceflow_headers(message)
            else:
                want |= {"link": self.link(case), "attempts": str(about.attempts)}
            differences = [f"{name} is {headers.get(name)!r}, not {value!r}" for name, value in want.items()
                           if headers.get(name) != value]  # fmt: skip
            said = headers.get("onceflow.error.message", "")
            if not re.fullmatch(about.message, said):
                differences.append(f"the message is {said!r}, not {about.message!r}")
            wrong += [f"failed: {case.identity} ({case.kind}): {difference}" for difference in differences]
        return wrong


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


def _summary(link: str, rows: int, bad_rows: int) -> bytes:
    return compact_json({"link": link, "rows": rows, "bad_rows": bad_rows})
