"""Which partitions this worker may move, from where, and which of them stand still for now.

A group begins in a partition at its fence, whatever Kafka remembers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from streams.broker.types import OFFSET_INVALID, KafkaException, TopicPartition
from streams.dispositions import Partition
from streams.errors import StreamsError
from streams.settings import Settings
from streams.stores.ledger import Claim, Ledger
from streams.stores.postgres import Connection

logger = logging.getLogger(__name__)


class Rejoin(StreamsError):
    """The membership in the group cannot go on as it is; leave, and join anew."""


class Assignment:
    """The partitions of one consumer. Its callbacks run inside the consumer's ``poll``, in the worker's thread.

    Args:
        topic_ids: answers the ids of the topics as they are now.
        connection: answers the connection to claim on.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        worker: str,
        topic_ids: Callable[[], dict[str, str]],
        connection: Callable[[], Connection],
    ) -> None:
        self._settings, self._group, self._worker = settings, group, worker
        self._topic_ids, self._connection = topic_ids, connection
        self._paused_until: dict[Partition, float] = {}
        self._failure: BaseException | None = None
        self.claims: dict[Partition, Claim] = {}
        self.changes = 0
        """How often partitions came or went; records fetched across a change may stand before others' offsets."""

    def subscribe(self, consumer: Any, topics: list[str]) -> None:
        consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._gone, on_lost=self._gone)

    def raise_failure(self) -> None:
        """Raises what went wrong in a callback, which librdkafka would have passed over."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise Rejoin(f"{self._group}: partitions could not be taken: {failure}") from failure

    def is_held(self, partition: Partition) -> bool:
        """Whether records of the partition may be worked on now; others come again after the seek that is due."""
        return partition in self.claims and partition not in self._paused_until

    def pause(self, consumer: Any, partition: Partition, offset: int | None, seconds: float) -> None:
        """Lets a partition stand still, at an offset if one is given; for ever where ``seconds`` is infinite."""
        consumer.pause([TopicPartition(*partition)])
        until = time.monotonic() + seconds
        self._paused_until[partition] = max(until, self._paused_until.get(partition, until))
        if offset is not None:
            self._seek(consumer, partition, offset)

    def resume_due(self, consumer: Any) -> None:
        now = time.monotonic()
        for partition in [partition for partition, until in self._paused_until.items() if until <= now]:
            del self._paused_until[partition]
            consumer.resume([TopicPartition(*partition)])

    def resync(self, consumer: Any, *, pause_seconds: float = 0.0) -> None:
        """Takes the positions from the database again, and reads on from there.

        Raises:
            Fenced: one of the partitions has another owner.
            Rejoin: the consumer cannot be sought.
        """
        if not self.claims:
            return
        connection = self._connection()
        with connection.transaction():
            found = Ledger(connection, self._group).lock(list(self.claims.values()))
        for partition, offset in found.items():
            if pause_seconds:
                self.pause(consumer, partition, offset, pause_seconds)
            elif partition not in self._paused_until:
                self._seek(consumer, partition, offset)

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self.changes += 1
        # An exception here would surface once and the partitions be consumed from anywhere: keep it, and stop.
        try:
            positions = self._claim(consumer, partitions)
            consumer.incremental_assign(
                [TopicPartition(*partition, offset) for partition, offset in positions.items()]
            )
        except BaseException as error:  # noqa: BLE001
            self._failure = error

    def _claim(self, consumer: Any, partitions: list[TopicPartition]) -> dict[Partition, int]:
        topic_ids, connection = self._topic_ids(), self._connection()
        ledger = Ledger(connection, self._group)
        positions = {}
        with connection.transaction():
            for partition in sorted(partitions, key=lambda p: (p.topic, p.partition)):
                topic_id = topic_ids[partition.topic]
                position = ledger.find_position(partition.topic, topic_id, partition.partition)
                first = self._beginning(consumer, partition) if position is None else position
                claim, offset = ledger.claim(
                    partition.topic, topic_id, partition.partition, first, self._worker
                )
                positions[partition.topic, partition.partition] = (claim, offset)
        self.claims.update({partition: claim for partition, (claim, _) in positions.items()})
        logger.info("%s took %s", self._group, _names(partitions))
        return {partition: offset for partition, (_, offset) in positions.items()}

    def _beginning(self, consumer: Any, partition: TopicPartition) -> int:
        """Where a group begins that has no fence: at what it committed to Kafka, if it did, or the oldest record."""
        committed = consumer.committed([partition], timeout=self._settings.connect_seconds)[0].offset
        low, high = consumer.get_watermark_offsets(partition, timeout=self._settings.connect_seconds)
        return int(committed) if committed != OFFSET_INVALID and low <= committed <= high else int(low)

    def _gone(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        # The loop settles each batch before it polls, so nothing of these partitions is in hand. Where they are
        # lost and another worker has them already, there is nothing to commit either.
        self.changes += 1
        for partition in partitions:
            self.claims.pop((partition.topic, partition.partition), None)
            self._paused_until.pop((partition.topic, partition.partition), None)
        consumer.incremental_unassign(partitions)
        logger.info("%s gave up %s", self._group, _names(partitions))

    def _seek(self, consumer: Any, partition: Partition, offset: int) -> None:
        try:
            consumer.seek(TopicPartition(*partition, offset))
        except KafkaException as error:
            raise Rejoin(f"{self._group}: {partition} cannot be sought: {error.args[0].str()}") from error


def _names(partitions: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{p.topic}/{p.partition}" for p in partitions) or "nothing"
