"""Builds and parses the identifiers of a flow in Kafka. No other module does.

A flow called ``orders`` has the transactional id ``onceflow.orders`` and the group id ``orders``, which tools for
consumer lag read. Both can have a prefix, so that one prefixed ACL covers all flows. Parsing needs the same prefix,
because a flow name may itself contain ``onceflow.``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.errors import OptionError

FLOW_NAME_LENGTH_MAX = 200
PREFIX_LENGTH_MAX = 100
#: A table named T has the companion topic T-internal.
INTERNAL_SUFFIX = "-internal"
_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")
_MARK = "onceflow."
_OF_COMMANDS = f"{_MARK}admin."

TopicPartition: TypeAlias = tuple[str, int]
"""A topic, and the number of one of its partitions."""


def validate_flow_name(flow: object) -> str:
    """Return the name, or raise `OptionError`. The characters of topic names are legal, at most 200 of them."""
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
    """Return the prefix, which may be empty, or raise `OptionError`."""
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
        transactional_id_prefix: added in front of the transactional id, without a separator.
        group_id_prefix: added in front of the group id, likewise. None: the other prefix, so that flows of one name
            with different prefixes have different groups.
    """

    flow: str
    transactional_id_prefix: str = ""
    group_id_prefix: str | None = None

    def __post_init__(self) -> None:
        validate_flow_name(self.flow)
        validate_prefix(self.transactional_id_prefix)
        if self.group_id_prefix is not None:
            validate_prefix(self.group_id_prefix)
        if self.transactional_id.startswith(_OF_COMMANDS):
            raise OptionError(
                f"{self.flow!r} cannot be the name of a flow with this prefix: transactional ids that begin with "
                f"{_OF_COMMANDS!r} are those of commands, which would fence the flow",
                flow=self.flow,
                next_step="use another name, for example one that begins with the name of your team.",
            )

    @property
    def transactional_id(self) -> str:
        """The transactional id. The last driver that calls InitProducerId with it owns the flow."""
        return f"{self.transactional_id_prefix}{_MARK}{self.flow}"

    @property
    def progress_key(self) -> str:
        """Key of the progress record. It has the prefix, too: flows that do not fence each other must not share it."""
        return f"{self.transactional_id_prefix}{self.flow}"

    def identity(self, cluster_id: str) -> str:
        """What external systems call the flow: flows of all clusters and prefixes have different ones.

        The progress key would not do: prefix ``a.`` with flow ``b`` has the same one as no prefix with flow ``a.b``.
        """
        return f"{self.transactional_id}@{cluster_id}"

    @property
    def group_id(self) -> str:
        """The consumer group to which source offsets are committed. Only tools for consumer lag read them."""
        prefix = self.transactional_id_prefix if self.group_id_prefix is None else self.group_id_prefix
        return f"{prefix}{self.flow}"


def transactional_id_of_parked(topic: str) -> str:
    """The transactional id of the commands that change a topic of parked records. No flow can have it."""
    return f"{_OF_COMMANDS}parked.{topic}"


def flow_of_transactional_id(transactional_id: str, prefix: str = "") -> str | None:
    """The flow of a transactional id. None: the id is not one of onceflow with this prefix."""
    return _after(transactional_id, prefix + _MARK)


def progress_keys_of(transactional_id: str) -> set[str]:
    """The keys that the progress of the flow with a transactional id may have, if the prefix is not known: one for each
    ``onceflow.`` in the id. Empty: it is not the id of a flow."""
    parts = transactional_id.split(_MARK)
    return {_MARK.join(parts[:n]) + _MARK.join(parts[n:]) for n in range(1, len(parts))}


def flow_of_group_id(group_id: str, prefix: str = "") -> str | None:
    """The flow that would have a group id. None: no flow can have it. The group may still be one of another client."""
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
    """Topics of a flow to which its outputs must not be written.

    Args:
        sources: topics that it reads; it would read an output there as an input.
        tables: topics of its tables; an output there would become state that no processor has written.
    """

    sources: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()

    def refusal(self, topic: str) -> str:
        """Why outputs must not be written to a topic, as the end of a sentence; '' if they may be written.

        Names with two underscores at the beginning are those of Kafka's own topics and of the progress topic. An
        output there could be taken for the progress of a flow.
        """
        if topic.startswith("__"):
            return "is an internal topic"
        if topic in self.sources:
            return "is a source of this flow"
        return "belongs to a table of this flow" if topic in self.tables else ""
