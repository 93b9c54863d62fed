"""Counts the dead letters of one run of a step. The first one of each cause is logged. Too many stop the flow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from onceflow.errors import DeadLetterLimitError, OptionError
from onceflow.state.spec import ProcessSpec, StateReport

log = logging.getLogger("onceflow.state")

#: A share is checked only after a run has read this many records: one bad record among the first three proves nothing.
MIN_RECORDS = 100


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


class DeadLetters:
    """The dead letters of one step since its flow was started.

    Args:
        spec: contains the limit: a count, a share of the records that were read, or None.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self.records = 0
        self.count = 0
        self._told: set[str] = set()  # causes that are logged already

    def check(self, reports: Sequence[StateReport]) -> None:
        """Check whether a batch may be committed.

        Raises:
            DeadLetterLimitError: with the dead letters of this batch, the run has more than allowed.
        """
        limit = self._spec.max_dead_letters
        count = self.count + counted(reports, "dead_letters")
        if limit is None or not count:
            return
        records = self.records + counted(reports, "records")
        if isinstance(limit, float):
            if records < MIN_RECORDS or count <= limit * records:
                return
        elif count <= limit:
            return
        raise DeadLetterLimitError(
            f"{count:,} of {records:,} records of this run are dead letters, max_dead_letters is {limit}",
            topic=self._spec.dead_letter_topic,
            detail=f"in this batch: {_in_words(_causes(reports)) or 'none'}; table {self._spec.table}",
            next_step="nothing of this batch is visible. Correct the processor or its sources. To continue anyway, "
            "raise max_dead_letters. A new run counts from 0.",
        )

    def on_commit(self, reports: Sequence[StateReport]) -> None:
        """Call this when the batch is committed. It logs the first dead letter of each class of cause in the run."""
        news = {name: cause for name, cause in _causes(reports).items() if name not in self._told}
        if news:
            log.warning(
                "flow %s: the first dead letters of %s went to %s: %s",
                self._spec.flow,
                "another cause" if self._told else "this run",
                self._spec.dead_letter_topic,
                _in_words(news),
            )
            self._told |= news.keys()
        self.records += counted(reports, "records")
        self.count += counted(reports, "dead_letters")


def counted(reports: Sequence[StateReport], what: str) -> int:
    """The sum of one of the reports' counts."""
    return sum(report.counts.get(what, 0) for report in reports)


def _causes(reports: Sequence[StateReport]) -> dict[str, tuple[int, str]]:
    """For each class of cause, the number of dead letters and the first one. The most frequent class comes first."""
    found: dict[str, tuple[int, str]] = {}
    for report in reports:
        for name, (count, first) in report.causes.items():
            before, told = found.get(name, (0, first))
            found[name] = before + count, told
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _in_words(causes: Mapping[str, tuple[int, str]]) -> str:
    return "; ".join(f"{count:,} x {name}, first {first}" for name, (count, first) in causes.items())
