"""Topics that tests create for themselves, when Kafka's answer to the first request is lost."""

from __future__ import annotations

from typing import Any

import pytest

from onceflow.client import topics
from onceflow.errors import BrokerUnreachableError, UnknownTopicError
from onceflow.testing import broker


class KnownTopics:
    """A cluster in which the topic exists after the first question, or has always existed."""

    def __init__(self, *, existed: bool) -> None:
        self.exists = existed

    def topics(self, names: list[str], deadline: Any, **options: Any) -> dict[str, Any]:
        if not self.exists:
            self.exists = True
            raise UnknownTopicError("This topic does not exist")
        return dict.fromkeys(names, "what is known of it")


@pytest.mark.parametrize("existed", [False, True])
def test_a_lost_response_is_no_topic_that_existed(monkeypatch: pytest.MonkeyPatch, existed: bool) -> None:
    monkeypatch.setattr(broker, "_cluster", lambda servers, pid: KnownTopics(existed=existed))
    monkeypatch.setattr(topics, "create_topic", lambda *given, **options: False)  # TOPIC_ALREADY_EXISTS
    if existed:
        with pytest.raises(BrokerUnreachableError, match="could not be created") as found:
            broker.create_topic("localhost:9092", "t")
        assert found.value.detail == "it exists already"
    else:
        broker.create_topic("localhost:9092", "t")
