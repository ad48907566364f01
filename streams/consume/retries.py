"""The second loop of a processor: wakes its jobs when they are due.

The retry topics are the clock, the table is the truth. A record says "run this job, if it still waits after that
attempt"; one that comes twice or too late finds nothing to do, and what no record wakes the sweeper finds.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from streams.app import Processor
from streams.broker import kafka, registry
from streams.broker.registry import RegistryUnavailable
from streams.broker.types import KafkaException, TopicPartition
from streams.consume.database import Database
from streams.consume.dispatch import Dispatcher
from streams.consume.runner import Runner
from streams.dispositions import Partition
from streams.errors import ConfigurationError, Fenced, ServerUnavailable
from streams.jobs.letters import WakeUp, wake_up
from streams.observe import metrics
from streams.settings import Settings
from streams.stores.jobs import Job
from streams.stores.postgres import DATABASE_ERRORS, Fault, clock_milliseconds, fault_of

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_FETCH = 500
# How many wake-ups are held in memory; further ones stay in the topic, and the sweeper keeps their time.
_HELD = 20_000
_GRACE_SECONDS = 2.0
_TURN_SECONDS = 5.0
_PUT_OFF_MS = 5_000


class Outstanding:
    """The offsets of each partition that are not done, so that only what is done is committed."""

    def __init__(self) -> None:
        self._open: dict[Partition, set[int]] = {}
        self._next: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}

    def take(self, partition: Partition, offset: int) -> None:
        self._open.setdefault(partition, set()).add(offset)
        self._next[partition] = max(self._next.get(partition, 0), offset + 1)

    def done(self, partition: Partition, offset: int) -> None:
        self._open.get(partition, set()).discard(offset)

    def forget(self, partition: Partition) -> None:
        for table in (self._open, self._next, self._committed):
            table.pop(partition, None)

    def holds(self, partition: Partition, offset: int) -> bool:
        return offset in self._open.get(partition, ())

    def to_commit(self) -> dict[Partition, int]:
        """The offsets that have moved since they were last asked for."""
        moved = {}
        for partition, after in self._next.items():
            offset = min(self._open[partition], default=after)
            if self._committed.get(partition) != offset:
                moved[partition] = self._committed[partition] = offset
        return moved


class RetryWorker:
    """Wakes the jobs of one processor until told to stop."""

    def __init__(self, settings: Settings, processor: Processor, name: str, stop: threading.Event) -> None:
        self._settings, self._processor, self._name, self._stop = settings, processor, name, stop
        topics = {topic.name(settings): topic.resource_type for topic in processor.topics}
        decode = registry.decoder(settings, processor.catalog)
        self._dispatcher = Dispatcher(processor, topics, decode)
        self._heap: list[tuple[int, Partition, int, WakeUp]] = []
        self._outstanding = Outstanding()
        self._clock_ahead = 0.0
        self._sweep_at = 0.0
        self._paused = False

    def run(self) -> None:
        """Runs until stopped; comes back by itself after the loss of the database or the broker.

        Raises:
            ServerUnavailable: a retry topic does not exist, or a server is not there at the start.
        """
        self._require_topics()
        self._database = Database(self._settings, f"{self._processor.group} retry", self._stop)
        self._use_connection()
        # No fence here: whatever is read twice wakes nothing the second time.
        self._consumer = kafka.consumer(
            self._settings,
            f"{self._processor.group}.retry",
            {"auto.offset.reset": "earliest", "queued.min.messages": 1000},
        )
        self._consumer.subscribe(list(self._processor.retry_topics), on_revoke=self._gone, on_lost=self._gone)
        try:
            while not self._stop.is_set():
                self._turn()
        finally:
            self._commit()
            self._consumer.close()
            self._database.close()

    def _turn(self) -> None:
        self._fetch(min(_POLL_SECONDS, self._seconds_to_next()))
        try:
            self._wake_due()
            self._sweep()
        except (ConfigurationError, Fenced, RegistryUnavailable) as error:
            self._stand_still(error)
        except DATABASE_ERRORS as error:
            if fault_of(error) in (Fault.SCHEMA, Fault.RECORD):
                self._stand_still(error)
            else:
                logger.info("%s: retries wait: %s", self._processor.group, str(error).strip())
                self._recover()
        self._limit()
        self._commit()

    def _stand_still(self, error: BaseException) -> None:
        logger.error("%s: a retry cannot be run: %s", self._processor.group, str(error).strip())
        self._put_off_first()
        self._recover()

    def _put_off_first(self) -> None:
        """Lets the others go first: the wake-up that failed comes again in a while."""
        if self._heap:
            due, partition, offset, wanted = heapq.heappop(self._heap)
            heapq.heappush(self._heap, (due + _PUT_OFF_MS, partition, offset, wanted))

    def _fetch(self, seconds: float) -> None:
        first = self._consumer.poll(seconds)
        if first is None:
            return
        for message in (first, *self._consumer.consume(_FETCH, 0)):
            error = message.error()
            if error is not None:
                logger.warning("%s: %s", self._processor.group, error.str())
                continue
            self._hold(message)

    def _hold(self, message: Any) -> None:
        record = kafka.record_of(message)
        wanted = wake_up(record)
        if wanted is None:
            logger.warning(
                "%s: a record in %s is no retry of ours; it is passed over",
                self._processor.group,
                record.topic,
            )
            return
        partition = (record.topic, record.partition)
        self._outstanding.take(partition, record.offset)
        heapq.heappush(self._heap, (wanted.due, partition, record.offset, wanted))

    def _limit(self) -> None:
        """Stops reading while too many wake-ups are held; asked every turn, since partitions come and go."""
        full = len(self._heap) >= _HELD
        if full:
            self._consumer.pause(self._consumer.assignment())
        elif self._paused:
            self._consumer.resume(self._consumer.assignment())
        self._paused = full

    def _wake_due(self) -> None:
        until = time.monotonic() + _TURN_SECONDS  # then the consumer is polled again, or the group evicts it
        while (
            self._heap
            and self._heap[0][0] <= self._now()
            and time.monotonic() < until
            and not self._stop.is_set()
        ):
            _, partition, offset, wanted = self._heap[0]
            # A partition that was given up has its wake-ups elsewhere now.
            if self._outstanding.holds(partition, offset):
                self._wake(wanted.job_id, wanted.attempt)
                self._outstanding.done(partition, offset)
            heapq.heappop(self._heap)

    def _wake(self, job_id: int, attempt: int) -> None:
        outcome = self._runner.wake(job_id, attempt, self._observe)
        if outcome is not None:
            metrics.RETRIES.labels(self._processor.group, outcome.value).inc()

    def _observe(self, job: Job) -> None:
        metrics.RETRY_LATENESS_SECONDS.labels(self._processor.group).observe(max(0.0, job.late_seconds))

    def _sweep(self) -> None:
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + self._settings.sweep_seconds
        self._read_clock()
        until = time.monotonic() + _TURN_SECONDS
        for job_id, attempt in self._runner.overdue(_GRACE_SECONDS):
            self._wake(job_id, attempt)
            if time.monotonic() > until:
                return
        for lane in self._runner.ready_lanes():
            while self._runner.drain(lane) and time.monotonic() < until and not self._stop.is_set():
                pass

    def _recover(self) -> None:
        while not self._stop.is_set():
            try:
                self._database.ensure()
                self._use_connection()
            except (*DATABASE_ERRORS, ServerUnavailable) as error:
                logger.warning(
                    "%s: retries wait for the database: %s", self._processor.group, str(error).strip()
                )
                self._database.wait(lambda: self._fetch(_POLL_SECONDS))
                continue
            return

    def _use_connection(self) -> None:
        self._runner = Runner(self._database.connection, self._processor, self._dispatcher, self._name)

    def _commit(self) -> None:
        moved = self._outstanding.to_commit()
        if not moved:
            return
        try:
            offsets = [TopicPartition(*partition, offset) for partition, offset in moved.items()]
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            logger.info("%s: retry offsets not committed: %s", self._processor.group, error.args[0].str())

    def _gone(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self._outstanding.forget((partition.topic, partition.partition))
        consumer.incremental_unassign(partitions)

    def _now(self) -> float:
        """Milliseconds since the epoch by the database's clock, whatever this host's clock says."""
        return time.time() * 1000 + self._clock_ahead

    def _read_clock(self) -> None:
        self._clock_ahead = clock_milliseconds(self._database.connection) - time.time() * 1000

    def _seconds_to_next(self) -> float:
        return max(0.0, (self._heap[0][0] - self._now()) / 1000) if self._heap else _POLL_SECONDS

    def _require_topics(self) -> None:
        found = kafka.topic_ids(self._settings, list(self._processor.retry_topics))
        missing = [topic for topic in self._processor.retry_topics if topic not in found]
        if missing:
            raise ServerUnavailable(f"topic {', '.join(missing)} is not there; run: streams topics apply")
