"""The loop of one processor in one process: fetch, decide, settle, commit."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from streams.app import Processor
from streams.broker import kafka, registry
from streams.broker.registry import RegistryUnavailable
from streams.broker.types import KafkaError, KafkaException, TopicPartition
from streams.consume.assignment import Assignment, Rejoin
from streams.consume.database import Database
from streams.consume.dispatch import Dispatcher, Item
from streams.consume.plan import Halted
from streams.consume.runner import Runner
from streams.consume.settle import Settled, Settler
from streams.dispositions import Disposition, Partition
from streams.errors import ConfigurationError, Fenced, ServerUnavailable
from streams.observe import metrics
from streams.points import reach
from streams.settings import Settings
from streams.stores.postgres import DATABASE_ERRORS, Fault, fault_of

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_MISCONFIGURED_SECONDS = 5.0
_SERVER_SECONDS = 0.2
_REGISTRY_SECONDS = 2.0
_DECIDE_SECONDS = 5.0


class Worker:
    """Runs one processor until told to stop.

    One thread owns the consumer and the connection. What the database says is the truth: after any doubt the
    worker reads its fences again and seeks to them.
    """

    def __init__(self, settings: Settings, processor: Processor, name: str, stop: threading.Event) -> None:
        self._settings, self._processor, self._name, self._stop = settings, processor, name, stop
        self._topics = {topic.name(settings): topic.resource_type for topic in processor.topics}
        decode = registry.decoder(settings, processor.catalog)
        self._dispatcher = Dispatcher(processor, self._topics, decode)
        self._in_place_attempts: Counter[tuple[str, int, int]] = Counter()
        self.settled: Counter[Disposition] = Counter()

    def run(self) -> None:
        """Runs until stopped; comes back by itself after the loss of the database or the broker.

        Raises:
            ServerUnavailable: a topic does not exist, or a server is not there at the start.
        """
        self._topic_ids()
        self._database = Database(self._settings, self._processor.group, self._stop)
        try:
            while not self._stop.is_set():
                self._membership()
        finally:
            self._database.close()

    def _membership(self) -> None:
        """One membership in the group, until stopped or until it cannot go on."""
        self._use_connection()
        self._consumer = kafka.consumer(self._settings, self._processor.group)
        self._assignment = Assignment(
            self._settings,
            self._processor.group,
            self._name,
            self._topic_ids,
            lambda: self._database.connection,
        )
        self._assignment.subscribe(self._consumer, list(self._topics))
        try:
            while not self._stop.is_set():
                self._turn()
        except (Rejoin, Fenced) as error:
            logger.warning("%s; joining anew", error)
            metrics.FENCED.labels(self._processor.group).inc(isinstance(error, Fenced))
            self._recover(lambda: None)
        finally:
            self._consumer.close()

    def _turn(self) -> None:
        """One batch. Nothing moves unless the database committed it."""
        messages = self._fetch()
        self._assignment.resume_due(self._consumer)
        if not messages:
            return
        started = time.monotonic()
        reach("consume.fetched")
        items = self._decide(messages)
        reach("consume.decided")
        if items:
            settled = self._settle(items)
            if settled is None:
                return
            metrics.BATCH_SECONDS.labels(self._processor.group).observe(time.monotonic() - started)
            self._after(settled)
        if len(items) < len(messages):
            self._recover(self._resync)  # what there was no time for comes again

    def _decide(self, messages: Sequence[Any]) -> list[Item]:
        """Decided records, as many as a slow handler allows: a group evicts a member that does not poll in time.

        Of a partition whose next record's schema cannot be asked for, those before it.
        """
        items: list[Item] = []
        waiting: set[Partition] = set()
        until = time.monotonic() + _DECIDE_SECONDS
        for message in messages:
            if waiting and kafka.partition_of(message) in waiting:
                continue
            try:
                item = self._dispatcher.decide(kafka.record_of(message))
            except RegistryUnavailable as error:
                waiting.add(kafka.partition_of(message))
                self._wait_for_registry(message, error)
            else:
                if self._in_place_attempts:
                    item.attempts_left -= self._in_place_attempts[_place(item)]
                items.append(item)
            if time.monotonic() > until:
                break
        return items

    def _wait_for_registry(self, message: Any, error: RegistryUnavailable) -> None:
        """Lets the record's partition stand at it for a while: no attempt is spent, since the fault is not its own."""
        place = kafka.partition_of(message)
        logger.warning("%s: %s/%s waits: %s", self._processor.group, *place, error)
        self._assignment.pause(self._consumer, place, message.offset(), _REGISTRY_SECONDS)

    def _fetch(self) -> list[Any]:
        # consume() waits for its whole timeout when there are fewer records than asked for; poll() returns at the first.
        first = self._consumer.poll(_POLL_SECONDS)
        changes, rest = self._assignment.changes, []
        if first is not None and self._settings.batch_size > 1:
            rest = self._consumer.consume(self._settings.batch_size - 1, self._settings.linger_ms / 1000)
        self._assignment.raise_failure()
        if first is None:
            return []
        if self._assignment.changes != changes:
            self._recover(self._resync)
            return []
        held = self._assignment.is_held
        return [m for m in (first, *rest) if self._is_record(m) and held(kafka.partition_of(m))]

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - its public name
            place = f"{message.topic()}/{message.partition()}"
            logger.error(
                "%s stands still at %s: its fence lies outside the topic (%s); records were deleted before they were "
                "read, and nothing is skipped unasked",
                self._processor.group,
                place,
                error.str(),
            )
            self._assignment.pause(self._consumer, kafka.partition_of(message), None, float("inf"))
            return False
        if error.fatal():
            raise Rejoin(f"the Kafka client cannot go on: {error.str()}")
        logger.warning("%s: %s", self._processor.group, error.str())
        return False

    def _settle(self, items: list[Item]) -> Settled | None:
        """The committed batch, or None where its records will come again."""
        try:
            return self._settler.settle(items, self._assignment.claims)
        except ConfigurationError as error:
            self._stand_still(error)
        except DATABASE_ERRORS as error:
            self._database_failed(error)
        return None

    def _database_failed(self, error: BaseException) -> None:
        match fault_of(error):
            case Fault.REPEAT:
                logger.info("%s: repeating: %s", self._processor.group, type(error).__name__)
                self._recover(self._resync)
            case Fault.SERVER:
                logger.warning("%s: the database is away: %s", self._processor.group, str(error).strip())
                # A server that answers, and cannot go on (out of disk, say), is not asked again at once.
                self._stop.wait(_SERVER_SECONDS)
                self._recover(self._resync)
            case Fault.SCHEMA | Fault.RECORD:
                self._stand_still(error)

    def _stand_still(self, error: BaseException) -> None:
        """Nothing can be done about it here, and nothing is skipped: says so, and tries again in a while."""
        logger.error("%s stands still: %s", self._processor.group, str(error).strip())
        self._recover(lambda: self._assignment.resync(self._consumer, pause_seconds=_MISCONFIGURED_SECONDS))

    def _resync(self) -> None:
        self._assignment.resync(self._consumer)

    def _recover(self, then: Callable[[], None]) -> None:
        """Waits for the database as long as it takes; the group keeps its partitions, and no attempt is spent."""
        paused = False
        while not self._stop.is_set():
            try:
                self._database.ensure()
                self._use_connection()
                then()
                break
            except (*DATABASE_ERRORS, ServerUnavailable) as error:
                logger.warning("%s waits for the database: %s", self._processor.group, str(error).strip())
                if not paused:
                    self._consumer.pause(self._consumer.assignment())
                    paused = True
                self._database.wait(lambda: self._consumer.poll(0.05))
        if paused:
            held = [
                p for p in self._consumer.assignment() if self._assignment.is_held((p.topic, p.partition))
            ]
            self._consumer.resume(held)

    def _use_connection(self) -> None:
        connection = self._database.connection
        self._settler = Settler(connection, self._processor, self._name)
        self._runner = Runner(connection, self._processor, self._dispatcher, self._name)

    def _after(self, settled: Settled) -> None:
        reach("consume.database_committed")
        self.settled.update(settled.counts)
        for disposition, count in settled.counts.items():
            metrics.RECORDS.labels(self._processor.group, disposition.value).inc(count)
        self._commit(settled.positions)
        reach("consume.offsets_committed")
        for place in [place for place in self._in_place_attempts if _is_past(place, settled.positions)]:
            del self._in_place_attempts[place]
        for partition, halted in settled.halted.items():
            self._halt(partition, halted)
        self._open_lanes(settled)

    def _commit(self, offsets: dict[Partition, int]) -> None:
        """Tells Kafka, for monitors and as a fallback; a commit that is lost costs nothing."""
        try:
            self._consumer.commit(
                offsets=[
                    TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()
                ],
                asynchronous=True,
            )
        except KafkaException as error:
            logger.info("%s: offsets not committed: %s", self._processor.group, error.args[0].str())

    def _open_lanes(self, settled: Settled) -> None:
        until = time.monotonic() + _DECIDE_SECONDS
        try:
            for lane in settled.open_lanes:
                while self._runner.drain(lane):
                    pass
                if time.monotonic() > until:
                    return  # the jobs are in the table, and the sweeper finds lanes that could run
        except (ConfigurationError, Fenced, RegistryUnavailable) as error:
            logger.info("%s: lanes are left to the sweeper: %s", self._processor.group, error)
        except DATABASE_ERRORS as error:
            logger.info("%s: lanes are left to the sweeper: %s", self._processor.group, type(error).__name__)
            self._recover(self._resync)

    def _halt(self, partition: Partition, halted: Halted) -> None:
        record, place = halted.item.record, _place(halted.item)
        if not halted.retry:
            logger.error(
                "%s stands still at %s/%s offset %s: %s", self._processor.group, *place, halted.reason
            )
            self._assignment.pause(self._consumer, partition, record.offset, float("inf"))
            return
        self._in_place_attempts[place] += 1
        delay = self._processor.retry.delay(self._in_place_attempts[place])
        logger.warning(
            "%s: %s/%s offset %s again in %.1f s: %s", self._processor.group, *place, delay, halted.reason
        )
        self._assignment.pause(self._consumer, partition, record.offset, delay)

    def _topic_ids(self) -> dict[str, str]:
        found = kafka.topic_ids(self._settings, list(self._topics))
        missing = [topic for topic in self._topics if topic not in found]
        if missing:
            raise ServerUnavailable(f"topic {', '.join(missing)} is not there; run: streams topics apply")
        return found


def _place(item: Item) -> tuple[str, int, int]:
    return item.record.topic, item.record.partition, item.record.offset


def _is_past(place: tuple[str, int, int], positions: dict[Partition, int]) -> bool:
    topic, partition, offset = place
    return offset < positions.get((topic, partition), 0)
