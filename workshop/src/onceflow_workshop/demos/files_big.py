"""The file of a gigabyte that the demo ``files`` can serve, and what must come out for it."""

from __future__ import annotations

from collections.abc import Iterator

from onceflow_workshop.demos.audit import Message
from onceflow_workshop.demos.files_rows import HEAD, compact_json

BIG, BIG_IDENTITY = "big.csv", "link-99999"
_BIG_TEXT = ("a payment with much to say for itself, " * 14)[:500]


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
        yield b"".join(map(big_row, range(at, min(at + 4_000, count))))


def big_bytes(count: int) -> int:
    """Of the whole file with so many rows, which all have the same length."""
    return len(HEAD) + count * len(big_row(0))


def big_transaction(number: int, link: str) -> tuple[bytes, bytes]:
    """Key and value that a row of the big file becomes."""
    account = f"acc-big-{number % 1000:04d}"
    amount = number % 1000 * 100 + 50
    fields = {"id": f"{number:09d}", "account": account, "amount": amount, "date": "2024-01-31", "text": _BIG_TEXT}
    return account.encode(), compact_json({**fields, "link": link})


def big_row(number: int) -> bytes:
    within = number % 1000
    text = f'{number:09d},acc-big-{within:04d},{within:03d}.50,2024-01-31,"{_BIG_TEXT}"\n'
    return text.encode()
