"""A broker in memory: topics, partitions, offsets. Keys meet the partitions they meet with any Java client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from streams.errors import ConfigurationError
from streams.event import Record, as_headers

_SEED, _MULTIPLIER, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF

Header = tuple[str, bytes | str | None]


def murmur2(data: bytes) -> int:
    """Austin Appleby's MurmurHash2, 32 bits, with the seed of Kafka's ``Utils.murmur2``, unsigned."""
    value = _SEED ^ len(data)
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        block = int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER & _MASK
        block = (block ^ block >> 24) * _MULTIPLIER & _MASK
        value = (value * _MULTIPLIER & _MASK) ^ block
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, as Kafka's Java producer and librdkafka's ``murmur2_random`` choose it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class MemoryBroker:
    """Keeps every record; creates no topic by accident."""

    def __init__(self) -> None:
        self._topics: dict[str, list[list[Record]]] = {}
        self._keyless = itertools.count()

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        if topic in self._topics:
            raise ConfigurationError(f"topic {topic} exists already")
        self._topics[topic] = [[] for _ in range(partitions)]

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Iterable[Header] = (),
        partition: int | None = None,
    ) -> Record:
        """Appends a record: to the partition of its key, or in turns where it has none."""
        logs = self._logs(topic)
        if partition is None:
            partition = next(self._keyless) % len(logs) if key is None else partition_of(key, len(logs))
        log = self._log(topic, partition)
        now = int(time.time() * 1000)
        record = Record(topic, partition, len(log), key, value, as_headers(headers), now)
        log.append(record)
        return record

    def read(self, topic: str, partition: int, offset: int = 0, limit: int | None = None) -> list[Record]:
        """The records from an offset on, at most ``limit`` of them."""
        return self._log(topic, partition)[offset:][:limit]

    def end_offset(self, topic: str, partition: int) -> int:
        """The offset that the partition's next record will have."""
        return len(self._log(topic, partition))

    def partitions(self, topic: str) -> int:
        return len(self._logs(topic))

    def _logs(self, topic: str) -> list[list[Record]]:
        if topic not in self._topics:
            raise ConfigurationError(
                f"topic {topic} does not exist; known are {', '.join(self._topics) or 'none'}"
            )
        return self._topics[topic]

    def _log(self, topic: str, partition: int) -> list[Record]:
        logs = self._logs(topic)
        if not 0 <= partition < len(logs):
            raise ConfigurationError(f"topic {topic} has partitions 0 to {len(logs) - 1}, not {partition}")
        return logs[partition]
