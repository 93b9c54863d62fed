"""``MemoryBroker``: answers the requests of onceflow's Kafka client from memory, as one broker of a cluster would.

It has what a flow needs: topics, transactions of version 2, consumer groups. It is for tests: nothing is kept on disk,
nothing expires, and records are never compacted. Requests and responses are encoded and decoded by kafka-python.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kafka.protocol import admin, consumer, metadata, producer

from onceflow.client import in_process
from onceflow.clock import clock_ms
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.codes import Code
from onceflow.testing.memory_log import DEFAULTS, LEADER_EPOCH, Aborted, MemoryTopic, PartitionLog
from onceflow.testing.memory_transactions import Transactions

_NODE, _PORT = 1, 9092
_LATEST, _EARLIEST, _NEWEST, _EARLIEST_LOCAL = -1, -2, -3, -4
_ON_TOPIC, _DEFAULT = 1, 5  # where a setting comes from
_TRANSACTION_VERSION = 2
_numbers = itertools.count(1)

Answer = Callable[["MemoryBroker", Any], Any]


class MemoryBroker:
    """One broker, reached by the clients of this process at `address`. It ends with `close`.

    Attributes:
        topics: by name.
        make: called with the name of a topic that somebody asks for and that does not exist; it may create it.
        address: ``bootstrap_servers`` for clients.
    """

    def __init__(self) -> None:
        self.topics: dict[str, MemoryTopic] = {}
        self.transactions = Transactions(self.topics)
        self.make: Callable[[str], None] = lambda _: None
        self._host = f"memory-{next(_numbers)}.invalid"  # RFC 2606: no such host can exist
        self._lock = threading.RLock()
        self.address = f"{self._host}:{_PORT}"
        in_process.serve(self._host, self)

    def close(self) -> None:
        """Clients cannot reach it any more."""
        in_process.withdraw(self._host)

    def create(self, name: str, partitions: int, configs: Mapping[str, str] | None = None) -> MemoryTopic:
        """Create a topic, unless it exists."""
        with self._lock:
            logs = [PartitionLog() for _ in range(partitions)]
            return self.topics.setdefault(name, MemoryTopic(name, logs, dict(configs or {})))

    def answer(self, request: bytes) -> bytes:
        """See `in_process.Broker`."""
        key, version = int.from_bytes(request[:2], "big"), int.from_bytes(request[2:4], "big")
        asked, handler, *_ = _HANDLERS[key]
        decoded = asked.decode(request, version=version, header=True)
        with self._lock:
            response = handler(self, decoded)
        response.API_VERSION = version
        response.with_header(correlation_id=decoded.header.correlation_id)
        return bytes(response.encode(header=True))

    def _topic(self, name: str) -> MemoryTopic | None:
        if name not in self.topics:
            self.make(name)
        return self.topics.get(name)

    def _log(self, topic: str, partition: int) -> PartitionLog | None:
        found = self.topics.get(topic)
        return found.partitions[partition] if found is not None and partition < len(found.partitions) else None

    # ---- the cluster ---------------------------------------------------------------------------------

    def api_versions(self, request: Any) -> Any:
        response = metadata.ApiVersionsResponse
        versions = [
            response.ApiVersion(api_key=key, min_version=least, max_version=most)
            for key, (*_, least, most) in sorted(_HANDLERS.items())
        ]
        name, level = "transaction.version", _TRANSACTION_VERSION
        return response(
            api_keys=versions,
            supported_features=[response.SupportedFeatureKey(name=name, min_version=0, max_version=level)],
            finalized_features_epoch=0,
            finalized_features=[
                response.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            ],
        )

    def metadata(self, request: Any) -> Any:
        response = metadata.MetadataResponse
        names = sorted(self.topics) if request.topics is None else [str(each.name) for each in request.topics]
        return response(
            brokers=[response.MetadataResponseBroker(node_id=_NODE, host=self._host, port=_PORT)],
            cluster_id=self._host,
            controller_id=_NODE,
            topics=[self._described(name) for name in names],
        )

    def _described(self, name: str) -> Any:
        topic_type = metadata.MetadataResponse.MetadataResponseTopic
        topic = self._topic(name)
        if topic is None:
            return topic_type(name=name, error_code=Code.UNKNOWN_TOPIC_OR_PARTITION)
        partitions = [
            topic_type.MetadataResponsePartition(
                partition_index=number,
                leader_id=_NODE,
                leader_epoch=LEADER_EPOCH,
                replica_nodes=[_NODE],
                isr_nodes=[_NODE],
            )
            for number in range(len(topic.partitions))
        ]
        return topic_type(name=name, topic_id=topic.topic_id, partitions=partitions)

    def coordinators(self, request: Any) -> Any:
        response = metadata.FindCoordinatorResponse
        found = [
            response.Coordinator(key=key, node_id=_NODE, host=self._host, port=_PORT)
            for key in request.coordinator_keys or [request.key]
        ]
        return response(node_id=_NODE, host=self._host, port=_PORT, coordinators=found)

    # ---- topics --------------------------------------------------------------------------------------

    def create_topics(self, request: Any) -> Any:
        response = admin.CreateTopicsResponse
        found = []
        for each in request.topics:
            is_there = each.name in self.topics
            if not is_there:
                self.create(each.name, max(1, each.num_partitions), {c.name: c.value for c in each.configs})
            code = Code.TOPIC_ALREADY_EXISTS if is_there else 0
            found.append(response.CreatableTopicResult(name=each.name, error_code=code))
        return response(topics=found)

    def describe_configs(self, request: Any) -> Any:
        result = admin.DescribeConfigsResponse.DescribeConfigsResult
        found = []
        for each in request.resources:
            place = {"resource_type": each.resource_type, "resource_name": each.resource_name}
            topic = self.topics.get(each.resource_name)
            if topic is None:
                found.append(result(error_code=Code.UNKNOWN_TOPIC_OR_PARTITION, configs=[], **place))
                continue
            names = each.configuration_keys or sorted({*DEFAULTS, *topic.configs})
            configs = [
                result.DescribeConfigsResourceResult(
                    name=name, value=value, config_source=_ON_TOPIC if name in topic.configs else _DEFAULT
                )
                for name in names
                if (value := topic.setting(name)) is not None
            ]
            found.append(result(configs=configs, **place))
        return admin.DescribeConfigsResponse(results=found)

    # ---- records -------------------------------------------------------------------------------------

    def list_offsets(self, request: Any) -> Any:
        topic_type = consumer.ListOffsetsResponse.ListOffsetsTopicResponse
        found = []
        for topic in request.topics:
            answers = []
            for each in topic.partitions:
                log = self._log(topic.name, each.partition_index)
                answer = topic_type.ListOffsetsPartitionResponse(partition_index=each.partition_index)
                if log is None:
                    answer.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
                else:
                    answer.offset, answer.timestamp = _offset_at(log, each.timestamp, bool(request.isolation_level))
                    answer.leader_epoch = LEADER_EPOCH
                answers.append(answer)
            found.append(topic_type(name=topic.name, partitions=answers))
        return consumer.ListOffsetsResponse(topics=found)

    def fetch(self, request: Any) -> Any:
        """All that is there, at once: nobody has to wait for what a test is going to send."""
        topic_type = consumer.FetchResponse.FetchableTopicResponse
        names = {topic.topic_id: name for name, topic in self.topics.items()}
        left = request.max_bytes
        found = []
        for topic in request.topics:
            name = topic.topic or names.get(topic.topic_id, "")
            answers = []
            for each in topic.partitions:
                most = min(left, each.partition_max_bytes)
                answer = self._fetched(name, each, bool(request.isolation_level), most, is_first=left > 0)
                left -= len(answer.records or b"")
                answers.append(answer)
            found.append(topic_type(topic=topic.topic, topic_id=topic.topic_id, partitions=answers))
        return consumer.FetchResponse(responses=found)

    def _fetched(self, topic: str, each: Any, committed: bool, most_bytes: int, *, is_first: bool) -> Any:
        data_type = consumer.FetchResponse.FetchableTopicResponse.PartitionData
        log = self._log(topic, each.partition)
        if log is None or not 0 <= each.fetch_offset <= log.end:
            code = Code.UNKNOWN_TOPIC_OR_PARTITION if log is None else Code.OFFSET_OUT_OF_RANGE
            return data_type(partition_index=each.partition, error_code=code, records=b"")
        records, aborted = b"", list[Aborted]()
        if is_first:
            records, aborted = log.fetch(each.fetch_offset, committed=committed, most_bytes=most_bytes)
        return data_type(
            partition_index=each.partition,
            high_watermark=log.end,
            last_stable_offset=log.stable_end,
            log_start_offset=0,
            aborted_transactions=[
                data_type.AbortedTransaction(producer_id=one.producer_id, first_offset=one.first) for one in aborted
            ],
            records=records,
        )

    def produce(self, request: Any) -> Any:
        topic_type = producer.ProduceResponse.TopicProduceResponse
        found = []
        for topic in request.topic_data:
            answers = [
                self._produced(request.transactional_id, topic.name, each.index, bytes(each.records))
                for each in topic.partition_data
            ]
            found.append(topic_type(name=topic.name, partition_responses=answers))
        return producer.ProduceResponse(responses=found)

    def _produced(self, transactional_id: str | None, topic: str, partition: int, records: bytes) -> Any:
        answer_type = producer.ProduceResponse.TopicProduceResponse.PartitionProduceResponse
        log = self._log(topic, partition)
        code = 0 if log is not None else int(Code.UNKNOWN_TOPIC_OR_PARTITION)
        if log is not None and transactional_id is not None:
            enrolled = self.transactions.enrol(transactional_id, _producer_of(records), clock_ms())
            if isinstance(enrolled, int):
                code = enrolled
            else:
                enrolled.partitions.add((topic, partition))
        offset = log.append(records) if log is not None and not code else -1
        return answer_type(index=partition, error_code=code, base_offset=offset, log_append_time_ms=-1)

    def epoch_ends(self, request: Any) -> Any:
        topic_type = consumer.OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        found = []
        for topic in request.topics:
            answers = []
            for each in topic.partitions:
                log = self._log(topic.topic, each.partition)
                code = Code.UNKNOWN_TOPIC_OR_PARTITION if log is None else 0
                end = -1 if log is None else log.end
                answers.append(
                    topic_type.EpochEndOffset(
                        partition=each.partition, error_code=code, leader_epoch=LEADER_EPOCH, end_offset=end
                    )
                )
            found.append(topic_type(topic=topic.topic, partitions=answers))
        return consumer.OffsetForLeaderEpochResponse(topics=found)

    # ---- transactions --------------------------------------------------------------------------------

    def init_producer_id(self, request: Any) -> Any:
        owner = None if request.producer_id < 0 else ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
        name, timeout_ms = request.transactional_id, request.transaction_timeout_ms
        code, given = self.transactions.init(name, owner, timeout_ms, clock_ms())
        return producer.InitProducerIdResponse(
            error_code=code, producer_id=given.producer_id, producer_epoch=given.producer_epoch
        )

    def txn_offset_commit(self, request: Any) -> Any:
        identity = ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
        enrolled = self.transactions.enrol(request.transactional_id, identity, clock_ms())
        code = enrolled if isinstance(enrolled, int) else 0
        if not isinstance(enrolled, int):
            enrolled.offsets.setdefault(request.group_id, {}).update(_offsets_of(request))
        return _offsets_answer(producer.TxnOffsetCommitResponse, "TxnOffsetCommitResponse", request, code)

    def end_txn(self, request: Any) -> Any:
        identity = ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
        code, following = self.transactions.end(
            request.transactional_id, identity, committed=bool(request.committed), now_ms=clock_ms()
        )
        return producer.EndTxnResponse(
            error_code=code, producer_id=following.producer_id, producer_epoch=following.producer_epoch
        )

    def describe_producers(self, request: Any) -> Any:
        topic_type = admin.DescribeProducersResponse.TopicResponse
        found = []
        for topic in request.topics:
            answers = []
            for number in topic.partition_indexes:
                log = self._log(topic.name, number)
                code = Code.UNKNOWN_TOPIC_OR_PARTITION if log is None else 0
                producers = [] if log is None else [*_open_producers(log)]
                answers.append(
                    topic_type.PartitionResponse(partition_index=number, error_code=code, active_producers=producers)
                )
            found.append(topic_type(name=topic.name, partitions=answers))
        return admin.DescribeProducersResponse(topics=found)

    def describe_transactions(self, request: Any) -> Any:
        state_type = admin.DescribeTransactionsResponse.TransactionState
        found = []
        for name in request.transactional_ids:
            known = self.transactions.ids.get(name)
            if known is None:
                found.append(state_type(transactional_id=name, error_code=Code.TRANSACTIONAL_ID_NOT_FOUND))
                continue
            by_topic: dict[str, list[int]] = {}
            for topic, partition in sorted(known.partitions):
                by_topic.setdefault(topic, []).append(partition)
            found.append(
                state_type(
                    transactional_id=name,
                    transaction_state=known.state,
                    transaction_timeout_ms=known.timeout_ms,
                    transaction_start_time_ms=known.started_ms if known.is_open else -1,
                    producer_id=known.producer.producer_id,
                    producer_epoch=known.producer.producer_epoch,
                    topics=[state_type.TopicData(topic=t, partitions=numbers) for t, numbers in by_topic.items()],
                )
            )
        return admin.DescribeTransactionsResponse(transaction_states=found)

    # ---- consumer groups -----------------------------------------------------------------------------

    def offset_commit(self, request: Any) -> Any:
        self.transactions.commit_offsets(request.group_id, _offsets_of(request))
        return _offsets_answer(consumer.OffsetCommitResponse, "OffsetCommitResponse", request, 0)

    def offset_fetch(self, request: Any) -> Any:
        topic_type = consumer.OffsetFetchResponse.OffsetFetchResponseTopic
        known = self.transactions.groups.get(request.group_id, {})
        if request.topics is None:
            wanted: dict[str, list[int]] = {}
            for topic, partition in sorted(known):
                wanted.setdefault(topic, []).append(partition)
        else:
            wanted = {each.name: list(each.partition_indexes) for each in request.topics}
        found = []
        for topic, numbers in wanted.items():
            answers = []
            for number in numbers:
                offset, text = known.get((topic, number), (-1, ""))
                answers.append(
                    topic_type.OffsetFetchResponsePartition(
                        partition_index=number, committed_offset=offset, metadata=text
                    )
                )
            found.append(topic_type(name=topic, partitions=answers))
        return consumer.OffsetFetchResponse(topics=found)


def _offset_at(log: PartitionLog, timestamp: int, committed: bool) -> tuple[int, int]:
    if timestamp == _LATEST:
        return (log.stable_end if committed else log.end), -1
    if timestamp in (_EARLIEST, _EARLIEST_LOCAL):
        return 0, -1
    if timestamp == _NEWEST:
        newest = max((batch.max_timestamp_ms for batch in log.batches), default=-1)
        return log.at_time(newest) if newest >= 0 else (-1, -1)
    return log.at_time(timestamp)


def _open_producers(log: PartitionLog) -> Iterator[Any]:
    state_type = admin.DescribeProducersResponse.TopicResponse.PartitionResponse.ProducerState
    for producer_id, (first, epoch) in log.open.items():
        yield state_type(
            producer_id=producer_id,
            producer_epoch=epoch,
            last_sequence=-1,
            last_timestamp=clock_ms(),
            coordinator_epoch=-1,
            current_txn_start_offset=first,
        )


def _producer_of(records: bytes) -> ProducerIdAndEpoch:
    """The producer of a record batch, by its head."""
    return ProducerIdAndEpoch(int.from_bytes(records[43:51], "big", signed=True), int.from_bytes(records[51:53], "big"))


def _offsets_of(request: Any) -> dict[tuple[str, int], tuple[int, str]]:
    return {
        (topic.name, each.partition_index): (int(each.committed_offset), each.committed_metadata or "")
        for topic in request.topics
        for each in topic.partitions
    }


def _offsets_answer(response: Any, name: str, request: Any, code: int) -> Any:
    """The response to an OffsetCommit or a TxnOffsetCommit. It is the same in both; only type names differ."""
    topic_type = getattr(response, f"{name}Topic")
    partition_type = getattr(topic_type, f"{name}Partition")
    topics = [
        topic_type(
            name=topic.name,
            partitions=[
                partition_type(partition_index=each.partition_index, error_code=code) for each in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return response(topics=topics)


# Class of the request, what answers it, and its lowest and highest version.
_REQUESTS: tuple[tuple[Any, Answer, int, int], ...] = (
    (metadata.ApiVersionsRequest, MemoryBroker.api_versions, 0, 4),
    (metadata.MetadataRequest, MemoryBroker.metadata, 1, 12),
    (metadata.FindCoordinatorRequest, MemoryBroker.coordinators, 1, 4),
    (admin.CreateTopicsRequest, MemoryBroker.create_topics, 4, 5),
    (admin.DescribeConfigsRequest, MemoryBroker.describe_configs, 1, 4),
    (consumer.ListOffsetsRequest, MemoryBroker.list_offsets, 2, 8),
    (consumer.FetchRequest, MemoryBroker.fetch, 11, 13),
    (producer.ProduceRequest, MemoryBroker.produce, 9, 12),
    (consumer.OffsetForLeaderEpochRequest, MemoryBroker.epoch_ends, 3, 4),
    (producer.InitProducerIdRequest, MemoryBroker.init_producer_id, 3, 5),
    (producer.TxnOffsetCommitRequest, MemoryBroker.txn_offset_commit, 3, 5),
    (producer.EndTxnRequest, MemoryBroker.end_txn, 5, 5),
    (admin.DescribeProducersRequest, MemoryBroker.describe_producers, 0, 0),
    (admin.DescribeTransactionsRequest, MemoryBroker.describe_transactions, 0, 0),
    (consumer.OffsetCommitRequest, MemoryBroker.offset_commit, 6, 7),
    (consumer.OffsetFetchRequest, MemoryBroker.offset_fetch, 7, 7),
)
_HANDLERS: dict[int, tuple[Any, Answer, int, int]] = {each[0].API_KEY: each for each in _REQUESTS}
