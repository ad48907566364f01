"""The relay: reads the log, sends records, confirms what the broker has.

One relay at a time reads a slot, since the slot itself is the lock; further ones stand by and take over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from streams.broker import kafka
from streams.broker.types import KafkaException
from streams.errors import ServerUnavailable
from streams.observe import metrics
from streams.points import reach
from streams.relay import pgoutput, slot
from streams.relay.guard import Guard
from streams.relay.pump import Pump
from streams.relay.rows import Mapper, Naming, mapper
from streams.relay.stream import LogStream, SlotInUse
from streams.relay.tail import Tail
from streams.settings import Settings
from streams.stores.postgres import CONNECTION_ERRORS

logger = logging.getLogger(__name__)

_STANDBY_SECONDS = 0.5
# With what the pump then waits for the rest, within the ten seconds that a stop may take.
_FLUSH_SECONDS = 7.0
_IDLE_SECONDS = 0.05
# How many messages of the log are taken before the producer is looked after.
_BURST = 500
_TOPIC_SECONDS = 2.0


@dataclass(frozen=True)
class Progress:
    """What a relay has done since it was started, for display."""

    sent: int
    confirmed: str


class Relay:
    """Publishes committed rows until it is told to stop.

    Args:
        settings: database, Kafka, slot and topic prefix.
        stop: set to end ``run``; what was sent is then flushed and confirmed, within ten seconds.
    """

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self.settings = settings
        self._stop = stop
        self._naming = Naming(settings.topic_prefix, settings.source)
        self._partitions: dict[str, int] = {}
        self._server: slot.Server | None = None
        self.confirmed = 0
        """The highest position confirmed by this process: a server that has not written that far is another."""
        self._sent = 0

    @property
    def progress(self) -> Progress:
        return Progress(self._sent, pgoutput.position_text(self.confirmed))

    def run(self, on_active: Callable[[], None] = lambda: None) -> None:
        """Runs until stopped; comes back by itself after the loss of the database or the broker.

        Args:
            on_active: called each time this relay becomes the one that reads the slot.

        Raises:
            RelayBlocked: going on would lose or reorder something.
            ServerUnavailable: PostgreSQL or Kafka is not there, or not as it must be, at the start.
        """
        slot.ensure(self.settings.database_url, self.settings.slot)
        kafka.require_broker(self.settings)
        self._partitions = self._existing_topics()
        delay = _STANDBY_SECONDS
        while not self._stop.is_set():
            try:
                self._session(on_active)
                delay = _STANDBY_SECONDS
            except SlotInUse:
                logger.info("slot %s is in use; standing by", self.settings.slot)
            except (*CONNECTION_ERRORS, ServerUnavailable) as error:
                logger.warning("the database is away (%s); trying again", str(error).strip().splitlines()[0])
                delay = min(delay * 2, 5.0)
            self._stop.wait(delay)

    def _session(self, on_active: Callable[[], None]) -> None:
        with contextlib.closing(LogStream(self.settings)) as stream:
            session = _Session(self, stream, self._begin(stream), self._stop)
            try:
                on_active()
                session.pump_until()
                session.pump.flush(_FLUSH_SECONDS)
            finally:
                session.pump.abandon()
                self.confirmed = max(self.confirmed, session.pump.confirmed)
                with contextlib.suppress(*CONNECTION_ERRORS):
                    stream.report(session.pump.confirmed, now=True)
                    reach("relay.confirmed")

    def _begin(self, stream: LogStream) -> int:
        """Starts the stream where the slot stands; answers that position.

        The slot's own position, not the one remembered here: a server that was restored, or took over, has a slot that
        is behind, and what lies between the two would never be sent.
        """
        server = stream.server()
        slot.require_same(self.settings.slot, self._server, server, self.confirmed, stream.history)
        confirmed = stream.slot_position()
        stream.start(confirmed)
        self._server = server
        return confirmed

    def count(self, sent: int, confirmed: int) -> None:
        metrics.RELAYED.inc(sent - self._sent if sent > self._sent else 0)
        self._sent, self.confirmed = sent, max(self.confirmed, confirmed)

    def map(self, table: pgoutput.Relation) -> Mapper:
        return mapper(table, self._naming)

    def require_topic(self, topic: str, while_waiting: Callable[[], None]) -> None:
        """Waits for a topic that is not there: the relay makes none, and skips nothing."""
        if topic in self._partitions:
            return
        while not self._stop.is_set():
            self._partitions = self._existing_topics()
            if topic in self._partitions:
                return
            logger.error(
                "topic %s is not there; the relay waits for it. Declare it, then run: streams topics apply",
                topic,
            )
            metrics.RELAY_WAITING_FOR_TOPIC.set(1)
            until = time.monotonic() + _TOPIC_SECONDS
            while time.monotonic() < until and not self._stop.is_set():
                while_waiting()
                self._stop.wait(0.1)
        raise _Stopped

    def partitions(self, topic: str) -> int:
        return self._partitions[topic]

    def _existing_topics(self) -> dict[str, int]:
        metrics.RELAY_WAITING_FOR_TOPIC.set(0)
        try:
            found = kafka.admin(self.settings).list_topics(timeout=self.settings.connect_seconds).topics
        except KafkaException:
            return self._partitions
        return {name: len(topic.partitions) for name, topic in found.items()}


class _Stopped(Exception):
    """Raised out of whatever waits, since the relay was told to stop."""


class _Session:
    """One uninterrupted reading of the slot."""

    def __init__(self, relay: Relay, stream: LogStream, confirmed: int, stop: threading.Event) -> None:
        self._relay, self._stream, self._stop = relay, stream, stop
        producer = kafka.producer(relay.settings)
        self.pump = Pump(producer, confirmed, self._while_waiting, Guard(relay.partitions))
        self._sent_before = relay.progress.sent
        self._mappers: dict[int, Mapper] = {}
        self._known: set[str] = set()
        self._tail = Tail(relay.settings, confirmed, self._while_elsewhere)
        self._commit = 0
        self._position = b""
        self._index = 0
        self._inside = False

    def pump_until(self) -> None:
        with contextlib.suppress(_Stopped):
            while not self._stop.is_set():
                more = self._burst()
                self.pump.poll()
                self._answer()
                self._relay.count(self._sent_before + self.pump.sent, self.pump.confirmed)
                if not more:
                    self._stream.wait(_IDLE_SECONDS)

    def _burst(self) -> bool:
        """Takes what has arrived, to a limit; answers whether there may be more."""
        read, handle = self._stream.read, self._handle
        for _ in range(_BURST):
            message = read()
            if message is None:
                return False
            handle(message)
        return True

    def _handle(self, message: bytes) -> None:
        if message[0] == pgoutput.KEEPALIVE:
            self._keepalive(message)
            return
        match message[pgoutput.XLOG_HEADER]:
            case pgoutput.INSERT:
                self._insert(message)
            case pgoutput.BEGIN:
                self._commit = pgoutput.begin_position(message)
                self._position = pgoutput.position_text(self._commit).encode() + b"/"
                self._index, self._inside = 0, True
                self.pump.begin()
            case pgoutput.COMMIT:
                self.pump.commit(pgoutput.commit_end(message))
                self._inside = False
                reach("relay.produced")
            case pgoutput.RELATION:
                table = pgoutput.relation(message)
                self._mappers[table.oid] = self._relay.map(table)
            case _:
                pass  # types, origins and truncations carry nothing to send

    def _insert(self, message: bytes) -> None:
        oid, row = pgoutput.inserted(message)
        self._index += 1
        record = self._mappers[oid](row, self._position + b"%d" % self._index)
        if record[0] not in self._known:
            self._relay.require_topic(record[0], self._while_elsewhere)
            self._tail.read(record[0])
            self._known.add(record[0])
        if self._commit <= self._tail.horizon and self._tail.need_not_send(record):
            metrics.RELAY_REPEATS_AVOIDED.inc()
            return
        self.pump.send(record)

    def _keepalive(self, message: bytes) -> None:
        end, reply = pgoutput.keepalive(message)
        # Between BEGIN and COMMIT the server's position says nothing about rows still to come.
        if not self._inside:
            self.pump.seen(end)
        if reply:
            self._stream.report(self.pump.confirmed, now=True)

    def _answer(self) -> None:
        self._stream.report(self.pump.confirmed)

    def _while_waiting(self) -> None:
        """For the pump, which polls by itself."""
        if self._stop.is_set():
            raise _Stopped
        self._answer()

    def _while_elsewhere(self) -> None:
        """For what keeps this thread from the pump: a topic that is not there, a long end of one."""
        self.pump.poll()
        self._while_waiting()
