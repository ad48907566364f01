"""A broker in memory: topics, partitions, offsets. Keys meet the partitions they meet with any Java client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from streams.broker.partitioner import partition_of
from streams.errors import ConfigurationError
from streams.event import Record, as_headers

Header = tuple[str, bytes | str | None]


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
