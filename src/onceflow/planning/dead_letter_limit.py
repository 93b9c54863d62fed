"""Counts the dead letters of one run of a step. The first one of each cause is logged. Too many stop the flow."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onceflow.errors import DeadLetterLimitError, OptionError
from onceflow.state.spec import StateReport
from onceflow.user_code import IN_HOOK

log = logging.getLogger("onceflow.state")

#: A share is checked only after a run has read this many records: one bad record among the first three proves nothing.
MIN_RECORDS = 100
_NEARLY_ALL = 0.9


def check_limit(limit: object, flow: str) -> None:
    """Check the value of ``max_dead_letters``.

    Raises:
        OptionError: it is neither a count nor a share.
    """
    is_count = type(limit) is int and limit >= 0
    is_share = type(limit) is float and 0 < limit < 1
    if limit is not None and not is_count and not is_share:
        raise OptionError(
            f"max_dead_letters={limit!r} is neither a count nor a share",
            flow=flow,
            next_step="give a whole number (100: so many in one run), or a share of the records read (0.01)",
        )


@dataclass(frozen=True)
class Letters:
    """What a batch has made dead letters of.

    Args:
        records: how many records it has read. count: how many of them are dead letters.
        causes: by class of the cause: the number of dead letters, and a description of the first one.
    """

    records: int
    count: int
    causes: Mapping[str, tuple[int, str]]


NO_LETTERS = Letters(0, 0, {})
"""Of a batch without outputs: an earlier version of the flow has written its dead letters, and has counted them."""


class DeadLetters:
    """The dead letters of one step since its flow was started.

    Args:
        limit: a count, a share of the records that were read, or None.
        source: what they come from, in words.
    """

    def __init__(self, flow: str, topic: str | None, limit: int | float | None, source: str) -> None:
        self._flow = flow
        self._topic = topic
        self._limit = limit
        self._source = source
        self.records = 0
        self.count = 0
        self._logged: set[str] = set()  # causes that are logged already
        self._of_hooks = Counter[str]()  # those for which a hook has failed

    def check(self, letters: Letters) -> None:
        """Check whether a batch may be committed.

        Raises:
            DeadLetterLimitError: with the dead letters of this batch, the run has more than allowed; or no record of
                the run has got through, because a hook such as event_time() has failed.
        """
        limit = self._limit
        count = self.count + letters.count
        if limit is None:
            self._check_hooks(letters)
        if limit is None or not count:
            return
        records = self.records + letters.records
        if isinstance(limit, float):
            if records < MIN_RECORDS or count <= limit * records:
                return
        elif count <= limit:
            return
        raise DeadLetterLimitError(
            f"{count:,} of {records:,} records of this run are dead letters, max_dead_letters is {limit}",
            topic=self._topic,
            detail=f"in this batch: {_in_words(letters.causes) or 'none'}; {self._source}",
            next_step="nothing of this batch is visible. Correct the code or its sources. To continue anyway, "
            "raise max_dead_letters. A new run counts from 0.",
        )

    def _check_hooks(self, letters: Letters) -> None:
        records, count = self.records + letters.records, self.count + letters.count
        if records < MIN_RECORDS or count < records:
            return
        for hook, failed in (self._of_hooks + _of_hooks(letters)).most_common(1):
            # Others are bad for another reason, such as a value that cannot be decoded.
            if failed < _NEARLY_ALL * records:
                return
            each = f"each of the {records:,}" if failed == records else f"{failed:,} of {records:,}"
            more = "" if failed == records else " (the others are dead letters, too)"
            raise DeadLetterLimitError(
                f"{hook} has failed for {each} records of this run{more}, so the code is at fault, and no record",
                topic=self._topic,
                detail=f"in this batch: {_in_words(letters.causes)}; {self._source}",
                next_step="nothing of this batch is visible. Correct the code. If it is right, and these records are "
                "to be dead letters, give max_dead_letters the number of them that you expect",
            )

    def on_commit(self, letters: Letters) -> None:
        """Call this when the batch is committed. It logs the first dead letter of each class of cause in the run."""
        news = {name: cause for name, cause in letters.causes.items() if name not in self._logged}
        if news:
            log.warning(
                "flow %s: the first dead letters of %s went to %s: %s",
                self._flow,
                "another cause" if self._logged else "this run",
                self._topic,
                _in_words(news),
            )
            self._logged |= news.keys()
        self.records += letters.records
        self.count += letters.count
        self._of_hooks += _of_hooks(letters)


def _of_hooks(letters: Letters) -> Counter[str]:
    """How many letters are of each hook."""
    found = Counter[str]()
    for cause, (count, _) in letters.causes.items():
        if hook := cause.partition(IN_HOOK)[2]:
            found[hook] += count
    return found


def counted(reports: Sequence[StateReport], what: str) -> int:
    """The sum of one of the reports' counts."""
    return sum(report.counts.get(what, 0) for report in reports)


def letters_of(reports: Sequence[StateReport]) -> Letters:
    """What the tasks of a process step report."""
    causes = merged(report.causes for report in reports)
    return Letters(counted(reports, "records"), counted(reports, "dead_letters"), causes)


def merged(causes: Iterable[Mapping[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
    """The causes of several parts. The most frequent class comes first."""
    found: dict[str, tuple[int, str]] = {}
    for part in causes:
        for name, (count, first) in part.items():
            before, example = found.get(name, (0, first))
            found[name] = before + count, example
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _in_words(causes: Mapping[str, tuple[int, str]]) -> str:
    return "; ".join(f"{count:,} x {name}, first {first}" for name, (count, first) in causes.items())
