"""One uninterrupted reading of a source: rows come in, records go out, positions go back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from streams.broker import kafka
from streams.broker.registry import Framing
from streams.broker.types import KafkaError
from streams.errors import SchemaError, StreamsError, UnknownSchema
from streams.observe import metrics
from streams.points import reach
from streams.relay import pgoutput
from streams.relay.blocked import Blocked, Lane, Refusal, as_produced
from streams.relay.pump import Pump
from streams.relay.routes import Routes
from streams.relay.rows import Mapper, Naming, Produced, identity, is_letter, mapper, repositioned
from streams.relay.source import SILENCE_SECONDS, Source, StandBy
from streams.relay.tail import Tail, sent_since
from streams.settings import Settings
from streams.stores.blocked import Head, Waiting
from streams.stores.postgres import CONNECTION_ERRORS

logger = logging.getLogger(__name__)

# With what the pump then waits for the rest, within the ten seconds that a stop may take.
_FLUSH_SECONDS, _FLUSH_SLICE_SECONDS = 7.0, 0.5
_IDLE_SECONDS = 0.05
# How many messages are taken before the producer is looked after.
_BURST = 500
_ABSENT_AGAIN_SECONDS = 2.0
# Partitions that are added to a topic are used from then on, as other clients' producers do by default.
_TOPICS_SECONDS = 300.0
_RELEASE_SECONDS = 1.0
# A lane that is sent shares the time with everything else.
_RELEASE_SLICE_SECONDS = 0.5
_STALL_SECONDS = SILENCE_SECONDS / 2


class Topics:
    """Which topics exist, and how many partitions each has. The relay makes none: it might get the wrong number."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._partitions: dict[str, int] = {}
        self._asked_at = 0.0
        self.known_since = time.monotonic()

    def ask(self) -> None:
        """Asks the broker; where it does not answer, what was known holds."""
        self._partitions = kafka.partitions(self._settings) or self._partitions
        self._asked_at = time.monotonic()

    def exists(self, topic: str) -> bool:
        """Whether there is such a topic; asks the broker again if there was none, once in a while."""
        if topic not in self._partitions and time.monotonic() - self._asked_at > _ABSENT_AGAIN_SECONDS:
            self.ask()
        return topic in self._partitions

    @property
    def stale(self) -> bool:
        """Whether partitions may have been added since the broker was asked."""
        return time.monotonic() - self._asked_at > _TOPICS_SECONDS

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has.

        Raises:
            Refusal: it is not there any more, which the next session looks after.
        """
        if topic not in self._partitions:
            raise Refusal(Counter())
        return self._partitions[topic]


class Stopped(Exception):
    """Raised out of whatever waits, since the session is to end."""


class Wishes:
    """What others want of a session; said from any thread.

    Args:
        stop: the process is to end.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._leave = threading.Event()
        self.decided = threading.Event()
        """Somebody has decided on blocked records."""

    @property
    def ending(self) -> bool:
        """Whether the session is to flush and to end."""
        return self._leave.is_set() or self._stop.is_set()

    def leave(self) -> None:
        self._leave.set()

    def begin(self) -> None:
        """What was wished of the session before is fulfilled."""
        self._leave.clear()

    def pause(self, seconds: float) -> None:
        self._stop.wait(seconds)


class Session:
    """Carries rows from a source to their topics, until told to end, or something breaks.

    Args:
        since: the position before which everything is confirmed.
        suspects: keys whose records are sent alone; those that passed are taken out.
        careful: how many records answer one by one.
        framing: exchanges the frames of values for those of a registry, where there is one.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        since: int,
        topics: Topics,
        wishes: Wishes,
        suspects: Counter[Lane],
        careful: int,
        framing: Framing | None,
    ) -> None:
        self._settings, self._source, self._topics, self._wishes = settings, source, topics, wishes
        self._framing = framing
        self._naming = Naming(settings.topic_prefix, settings.source)
        self._tried: dict[str, set[bytes]] = {}
        self._unframed: StreamsError = StreamsError()
        self.blocked = Blocked(settings, since)
        self.routes = Routes(topics.partitions)
        self.pump = Pump(
            kafka.producer(settings),
            lambda: kafka.producer(settings, {"enable.gapless.guarantee": False, "linger.ms": 0}),
            since,
            self.routes,
            self._while_waiting,
            suspects,
            careful,
        )
        self._tables: dict[int, pgoutput.Relation] = {}
        self._mappers: dict[int, Mapper] = {}
        self._ready: set[str] = set()
        self._tail = Tail(settings, since, self._while_elsewhere)
        self._commit = 0
        self._position = ""
        self._place = 0
        self._looked_at = time.monotonic()
        self._looked_sent = self._looked_outstanding = 0
        self._in_hand = 0
        self._released_at = 0.0

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Works until the wish to end, or the source's end; then flushes.

        Args:
            on_progress: called with the number of records sent so far.
        """
        with contextlib.suppress(Stopped):
            while not self._wishes.ending and not self._source.ended:
                self._notice_stall()
                more = self._source.take(self, _BURST)
                self.pump.close_group()
                self.blocked.flush()
                self.pump.poll()
                self._source.report(self.pump.confirmed)
                on_progress(self.pump.sent)
                if self.blocked.any:
                    self._release()
                if self._topics.stale:
                    self._look_for_partitions()
                if not more:
                    self._source.wait(_IDLE_SECONDS)
        with contextlib.suppress(Stopped):
            # Where the broker has no room, what is left is for the next session.
            self._flush()

    def _flush(self) -> None:
        """Waits until the broker has everything, or for so long."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        self.pump.flush(_FLUSH_SLICE_SECONDS)
        while self.pump.outstanding and time.monotonic() < deadline:
            self._notice_stall()
            self.pump.flush(_FLUSH_SLICE_SECONDS)

    def end(self) -> None:
        """Lets go of everything; what is safe by then is reported."""
        with contextlib.suppress(StandBy):
            self._notice_stall()
        self.pump.abandon()
        self._count_late()
        with contextlib.suppress(*CONNECTION_ERRORS):
            self._source.report(self.pump.confirmed, now=True)
            reach("relay.confirmed")
        self.blocked.close()

    def table(self, relation: pgoutput.Relation) -> None:
        # Partitions are announced too, whose rows come as those of their table: what cannot be sent is found at a row.
        self._tables[relation.oid] = relation
        self._mappers.pop(relation.oid, None)

    def begin(self, commit: int, position: int) -> None:
        self._commit = commit
        self._position = pgoutput.position_text(position) + "/"
        self._place = 0

    def insert(self, oid: int, row: pgoutput.Columns) -> None:
        self._place += 1
        as_record = self._mappers.get(oid)
        if as_record is None:
            as_record = self._mappers[oid] = mapper(self._tables[oid], self._naming)
        stored = as_record(row, self._position, self._place)
        # What is set aside stands there as it is stored; frames are exchanged when it is sent.
        record = stored if self._framing is None else self._framed(stored)
        topic, key = stored[0], stored[1]
        if topic not in self._ready and not self._prepare(topic):
            self._wait_behind(stored)
        elif self._commit <= self._tail.horizon and record is not None and self._tail.need_not_send(record):
            metrics.RELAY_REPEATS_AVOIDED.inc()
        elif self.blocked.given_up and identity(*stored) in self.blocked.given_up:
            logger.info("a record for topic %s is passed over: it was let go", topic)
        elif self.blocked.holds(topic, key):
            self.blocked.put_behind(stored, self.pump.group)
        elif record is None:
            self._refuse(stored, self._unframed)
        else:
            refusal = self.pump.send(record)
            if refusal is not None:
                self._refuse(stored, refusal)

    def commit(self, end: int) -> None:
        self.pump.commit(end)

    def nothing_before(self, end: int) -> None:
        self.pump.seen(end)

    def _framed(self, record: Produced) -> Produced | None:
        """A record in the registry's frame; None where it has none, for the reason in ``_unframed``."""
        topic, key, value, headers = record
        if self._framing is None or is_letter(headers):
            return record  # what a processor sends back stays byte for byte
        try:
            return topic, key, self._framing.to_confluent(topic, value), headers
        except (UnknownSchema, SchemaError) as error:
            self._unframed = error
            return None

    def _refuse(self, record: Produced, why: KafkaError | StreamsError) -> None:
        """Sets a record aside, once all before it of its key is in its topic, or is set aside too."""
        self.pump.settle()
        self.pump.trust((record[0], record[1]))
        if isinstance(why, StreamsError):
            self.blocked.refuse_unframed(record, why)
        else:
            self.blocked.refuse(record, why)

    def _prepare(self, topic: str) -> bool:
        """Gets a topic ready that is met for the first time; answers whether it is there."""
        waits = self.blocked.holds(topic, None)
        if not self._topics.exists(topic) and (waits or not self._wait_for(topic)):
            return False
        self._make_ready(topic)
        return True

    def _make_ready(self, topic: str) -> None:
        """Learns what of it is in a topic, before the first record is sent there."""
        self._tail.read(topic)
        self._ready.add(topic)

    def _wait_for(self, topic: str) -> bool:
        """Waits for a topic that is not there while the relay is young: at a first start it may come any moment."""
        until = self._topics.known_since + self._settings.topic_grace_seconds
        if time.monotonic() >= until:
            return False
        logger.error(
            "topic %s is not there; the relay waits for it, then sets its records aside. Declare it, and run: streams topics apply",
            topic,
        )
        metrics.RELAY_WAITING_FOR_TOPIC.set(1)
        try:
            while time.monotonic() < until:
                self._while_elsewhere()
                self._wishes.pause(0.1)
                if self._topics.exists(topic):
                    return True
        finally:
            metrics.RELAY_WAITING_FOR_TOPIC.set(0)
        return False

    def _wait_behind(self, record: Produced) -> None:
        topic, key, *_ = record
        if self.blocked.holds(topic, key):
            self.blocked.put_behind(record, self.pump.group)
        else:
            self.blocked.refuse_absent(record)

    def _look_for_partitions(self) -> None:
        """Follows topics that got more partitions, once all that went by the old number is safe."""
        self._topics.ask()
        if self.routes.outdated:
            self.pump.flush(_FLUSH_SECONDS)
            if self.pump.idle:
                self.routes.forget()

    def _release(self) -> None:
        """Sends the lanes on which somebody has decided, and those whose topic is there now."""
        clock = time.monotonic()
        if clock - self._released_at < _RELEASE_SECONDS and not self._wishes.decided.is_set():
            return
        self._released_at = clock
        self._wishes.decided.clear()
        for lane in self.blocked.released(self._topics.exists):
            while records := self.blocked.next_of(lane):
                if not self._send_lane(lane, records):
                    self.blocked.halt(lane)
                    break
                if time.monotonic() - clock > _RELEASE_SLICE_SECONDS:
                    return

    def _send_lane(self, lane: Head, records: list[Waiting]) -> bool:
        """Sends some records of a lane; answers False where one of them is refused again."""
        if lane.topic not in self._ready and self._topics.exists(lane.topic):
            self._make_ready(lane.topic)
        position = self._position or pgoutput.position_text(self.pump.confirmed) + "/"
        framed: list[Produced] = []
        for waiting in records:
            made = self._framed(repositioned(as_produced(waiting), position))
            if made is None:
                break
            framed.append(made)
        there = self._sent_before(lane.topic, records)
        gone = [n for n, record in enumerate(framed) if there and identity(*record) in there]
        self.blocked.forget([records[n] for n in gone])
        left = sorted(set(range(len(framed))).difference(gone))
        self.blocked.mark_tried([records[n] for n in left])
        sent: list[int] = []

        def delivered(numbers: list[int]) -> None:
            sent.extend(numbers)
            self.blocked.forget([records[left[number]] for number in numbers])

        refusal = self.pump.send_all([framed[n] for n in left], delivered)
        if len(sent) == len(left) == len(records) - len(gone):
            return True
        refused = len(framed) if refusal is None else left[len(sent)]
        self._refuse(as_produced(records[refused]), self._unframed if refusal is None else refusal)
        return False

    def _sent_before(self, topic: str, records: list[Waiting]) -> set[bytes]:
        """What a relay before us may have sent of a lane, and had no time to take out."""
        tried = [record.tried_at for record in records if record.tried_at is not None]
        if not tried:
            return set()
        if topic not in self._tried:
            self._tried[topic] = sent_since(self._settings, topic, min(tried), self._while_elsewhere)
        return self._tried[topic]

    def _while_waiting(self) -> None:
        """For the pump, which polls by itself."""
        self._notice_stall()
        if self._wishes.ending:
            raise Stopped
        self._source.report(self.pump.confirmed)

    def _while_elsewhere(self) -> None:
        """For what keeps this thread from the pump: a topic that is not there, a long end of one."""
        self.pump.poll()
        self._while_waiting()

    def _notice_stall(self) -> None:
        """Ends the session of a process that stood still for so long that another relay may have taken over.

        What it holds, and what the server had sent it until then, would reach the topics behind the other's records.

        Raises:
            StandBy: it did.
        """
        clock, stood_still = time.monotonic(), self._stood_still()
        if stood_still:
            # The client's threads woke first, so what was on its way before is what may be late.
            self._in_hand = self._looked_outstanding + self.pump.sent - self._looked_sent
        self._looked_at = clock
        self._looked_sent, self._looked_outstanding = self.pump.sent, self.pump.outstanding
        if stood_still:
            raise StandBy("this relay stood still, and another may have taken over")

    def _stood_still(self) -> bool:
        return time.monotonic() - self._looked_at > _STALL_SECONDS

    def _count_late(self) -> None:
        if self._in_hand:
            metrics.RELAY_LATE.inc(self._in_hand)
            logger.warning(
                "this relay stood still; up to %s records of it may have reached their topics behind those of a relay "
                "that took over. They are repetitions, which consumers know by version or id",
                f"{self._in_hand:,}",
            )
