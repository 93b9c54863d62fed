"""Whether the records of a key stay in the order of their offsets."""

from __future__ import annotations

import logging

from onceflow.errors import OptionError
from onceflow.spark.query_facts import QueryFacts

log = logging.getLogger("onceflow")


def check_order(what: str, facts: QueryFacts, flow: str) -> None:
    """Refuse a query in which several tasks may read one partition. Warn if the query itself loses the order.

    Args:
        what: what needs the order, for the error.

    Raises:
        OptionError: several tasks may read one partition.
    """
    if facts.dealt_out:
        log.warning(
            'flow %s: repartition(n) without a column loses the order of a key\'s records; repartition(n, "key") '
            "keeps it",
            flow,
        )
    if facts.splitting is not None:
        option, topic = facts.splitting
        raise OptionError(
            f"{what} needs the records of a key in order, and {option} divides the partitions of {topic} among tasks",
            flow=flow,
            topic=topic,
            next_step=f'leave {option} out of Flow.read, or write with partitioner="round_robin"',
        )
