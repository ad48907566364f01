"""The two brokers behind the methods the contract is stated in."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from streams.broker import kafka
from streams.event import Headers, Record
from streams.settings import Settings
from streams.testing import MemoryBroker
from tests.processes import eventually

PARTITIONS = 7


class Memory:
    def __init__(self) -> None:
        self._broker = MemoryBroker()
        self._broker.create_topic("contract", PARTITIONS)

    def produce(self, *records: tuple[bytes | None, bytes | None, Headers]) -> None:
        for key, value, headers in records:
            self._broker.produce("contract", value, key, headers)

    def read(self, partition: int, offset: int = 0) -> list[Record]:
        return self._broker.read("contract", partition, offset)

    def end(self, partition: int) -> int:
        return self._broker.end_offset("contract", partition)


class Kafka:
    """A topic of its own on a real broker, filled by the relay's own producer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._topic = f"contract.{uuid.uuid4().hex[:8]}"
        admin = kafka.admin(settings)
        new = NewTopic(self._topic, PARTITIONS, 1, config={"max.message.bytes": str(4 * 1024 * 1024)})
        admin.create_topics([new])[self._topic].result(10)
        self._producer = kafka.producer(settings)
        eventually(self._has_leaders, f"every partition of {self._topic} has a leader")

    def produce(self, *records: tuple[bytes | None, bytes | None, Headers]) -> None:
        for key, value, headers in records:
            self._producer.produce(self._topic, value, key, headers=list(headers))
        assert self._producer.flush(20) == 0

    def read(self, partition: int, offset: int = 0) -> list[Record]:
        reader = kafka.reader(self._settings)
        try:
            count = self.end(partition) - offset
            reader.assign([TopicPartition(self._topic, partition, offset)])
            return [kafka.record_of(message) for message in _messages(reader.consume, count)]
        finally:
            reader.close()

    def end(self, partition: int) -> int:
        reader = kafka.reader(self._settings)
        try:
            _, high = reader.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=10)
        finally:
            reader.close()
        return int(high)

    def _has_leaders(self) -> bool:
        # A topic is announced before its partitions are led.
        try:
            return [self.end(partition) for partition in range(PARTITIONS)] == [0] * PARTITIONS
        except KafkaException:
            return False


def _messages(consume: Callable[[int, float], Sequence[object]], count: int) -> Sequence[object]:
    messages = consume(count, 20) if count else []
    assert len(messages) == count
    return messages
