"""The identifiers a flow has in Kafka, built and parsed in this one file.

A flow called ``orders`` owns the transactional id ``onceflow.orders`` and the group id ``orders`` (which
people's lag tools read). Both take an optional prefix, so that one prefixed ACL covers them. Parsing needs
the same prefix: a flow name may itself contain ``onceflow.``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.errors import OptionError

FLOW_NAME_LENGTH_MAX = 200
PREFIX_LENGTH_MAX = 100
_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")
_MARK = "onceflow."

TopicPartition: TypeAlias = tuple[str, int]
"""A topic, and the number of one of its partitions."""


def validate_flow_name(flow: object) -> str:
    """The name itself, or `OptionError`. Legal are the characters of topic names, at most 200 of them."""
    if not isinstance(flow, str) or not _LEGAL.fullmatch(flow) or flow in (".", ".."):
        raise OptionError(
            f"{flow!r} cannot be the name of a flow",
            next_step="use letters, digits, '.', '_' and '-', for example 'validated-deposits'.",
        )
    if len(flow) > FLOW_NAME_LENGTH_MAX:
        raise OptionError(
            f"the flow name starting {flow[:40]!r} has {len(flow)} characters",
            next_step=f"use a name of at most {FLOW_NAME_LENGTH_MAX} characters.",
        )
    return flow


def validate_prefix(prefix: object) -> str:
    """The prefix itself (may be empty), or `OptionError`."""
    if not isinstance(prefix, str) or (prefix and not _LEGAL.fullmatch(prefix)) or len(prefix) > PREFIX_LENGTH_MAX:
        raise OptionError(
            f"{prefix!r} cannot be a prefix of transactional and group ids",
            next_step=f"use letters, digits, '.', '_' and '-', at most {PREFIX_LENGTH_MAX} characters.",
        )
    return prefix


@dataclass(frozen=True, slots=True)
class Names:
    """All identifiers of one flow.

    Args:
        flow: the flow's name.
        transactional_id_prefix: put before the transactional id, as it is (write the dot yourself).
        group_id_prefix: put before the group id.
    """

    flow: str
    transactional_id_prefix: str = ""
    group_id_prefix: str = ""

    def __post_init__(self) -> None:
        validate_flow_name(self.flow)
        validate_prefix(self.transactional_id_prefix)
        validate_prefix(self.group_id_prefix)

    @property
    def transactional_id(self) -> str:
        """What InitProducerId is called with; whoever initialises it last owns the flow."""
        return f"{self.transactional_id_prefix}{_MARK}{self.flow}"

    @property
    def progress_key(self) -> str:
        """Key of the progress record: flows that do not fence each other must not share one."""
        return f"{self.transactional_id_prefix}{self.flow}"

    @property
    def group_id(self) -> str:
        """The consumer group that source offsets are committed to, for people's tools only."""
        return f"{self.group_id_prefix}{self.flow}"


def flow_of_transactional_id(transactional_id: str, prefix: str = "") -> str | None:
    """The flow that owns a transactional id, or None when the id is not one of ours with this prefix."""
    return _after(transactional_id, prefix + _MARK)


def flow_of_group_id(group_id: str, prefix: str = "") -> str | None:
    """The flow that a group id would belong to, or None when no flow can have it; any group may look so."""
    return _after(group_id, prefix)


def _after(text: str, start: str) -> str | None:
    if not text.startswith(start):
        return None
    try:
        return validate_flow_name(text[len(start) :])
    except OptionError:
        return None


@dataclass(frozen=True)
class OwnTopics:
    """Topics of a flow that its outputs must not go to.

    Args:
        sources: what it reads: an output there would come back as an input.
        tables: topics of its tables: rows there would be state that no processor has written.
    """

    sources: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()

    def refusal(self, topic: str) -> str:
        """Why nothing may be written to a topic, to go behind "which" or the topic; empty: it may.

        Kafka's own topics begin with two underscores, and so does the topic of progress: a record there could pass for
        the progress of a flow.
        """
        if topic.startswith("__"):
            return "is an internal topic"
        if topic in self.sources:
            return "is a source of this flow"
        return "belongs to a table of this flow" if topic in self.tables else ""
