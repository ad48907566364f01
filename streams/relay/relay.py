"""The relay: carries committed rows to their topics, and confirms what the broker has.

One relay at a time works for a slot; further ones stand by and take over. Which way the rows are read is decided anew at
each session: by what the settings wish, and by whether there is a place to go on polling from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from streams.broker import kafka
from streams.broker.registry import Framing
from streams.errors import NotLetIn, RelayBlocked, ServerUnavailable
from streams.observe import metrics
from streams.relay import pgoutput, slot, switch
from streams.relay.blocked import Lane, Refusal
from streams.relay.peek import SlotPeek
from streams.relay.poll import Polling
from streams.relay.session import Session, Topics, Wishes
from streams.relay.source import Server, Source, StandBy
from streams.relay.stream import LogStream
from streams.relay.watch import DECIDED, HAND_OVER, Watch
from streams.settings import Settings
from streams.stores.postgres import CONNECTION_ERRORS, connect

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.5
# As many as can be on their way at once.
_CAREFUL_RECORDS = 100_000
_LONGEST_SECONDS = 5.0
# How long a relay that was asked to hand over leaves the lock to others.
_COURTESY_SECONDS = 3.0
# After a slot could not be made, since transactions stayed open.
_SWITCH_AGAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """What a relay has done since it was started, for display."""

    sent: int
    confirmed: str


class Relay:
    """Publishes committed rows until it is told to stop.

    Args:
        settings: database, Kafka, slot, topic prefix, and how the rows are read.
        stop: set to end ``run``; what was sent is then flushed and confirmed, within ten seconds.
        framing: see ``streams.broker.registry.framing``; without one values go out as they are stored.
    """

    def __init__(self, settings: Settings, stop: threading.Event, framing: Framing | None = None) -> None:
        self.settings = settings
        self._framing = framing
        self._stop = stop
        self._topics = Topics(settings)
        self._wishes = Wishes(stop)
        self._handing_over = False
        self._server: Server | None = None
        self.confirmed = 0
        """The highest position confirmed by this process: a server that has not written that far is another."""
        self._sent = self._sent_before = 0
        self._suspects: Counter[Lane] = Counter()
        self._careful = 0
        self._over_budget = self._stays_on_log = False
        self._caught_up = False
        self._switch_at = 0.0

    @property
    def progress(self) -> Progress:
        return Progress(self._sent, pgoutput.position_text(self.confirmed))

    def run(self, on_active: Callable[[], None] = lambda: None) -> None:
        """Runs until stopped; comes back by itself after the loss of the database or the broker.

        Args:
            on_active: called each time this relay becomes the one at work.

        Raises:
            ConfigurationError: the database, the role or the slot is not as a relay needs it.
            RelayBlocked: going on would lose or reorder something.
            ServerUnavailable: PostgreSQL or Kafka is not there at the start.
        """
        kafka.require_broker(self.settings)  # first, so that nothing is begun which cannot go on
        prepare(self.settings)
        delay = _AGAIN_SECONDS
        with Watch(self.settings, self._wish, self._degrade) as watch:
            while not self._stop.is_set():
                try:
                    self._session(watch, on_active)
                    delay = _AGAIN_SECONDS
                except StandBy as error:
                    self._suspects.clear()  # another relay works meanwhile
                    logger.info("%s; standing by", error)
                    watch.wait_until_free(_AGAIN_SECONDS)
                except Refusal as refusal:
                    self._isolate(refusal)
                except (*CONNECTION_ERRORS, ServerUnavailable, NotLetIn) as error:
                    self._suspects.clear()
                    logger.warning("a server is away (%s); trying again", str(error).strip().splitlines()[0])
                    self._stop.wait(delay)
                    delay = min(delay * 2, _LONGEST_SECONDS)

    def _session(self, watch: Watch, on_active: Callable[[], None]) -> None:
        with contextlib.closing(self._source()) as source:
            self._topics.ask()
            since = source.begin(self._require_same)
            session = Session(
                self.settings,
                source,
                since,
                self._topics,
                self._wishes,
                self._suspects,
                self._careful,
                self._framing,
            )
            self._careful = 0
            watch.active = True
            metrics.RELAY_ACTIVE.set(1)
            self._sent_before = self._sent
            try:
                on_active()
                session.run(lambda sent: self._count(sent, source.confirmed))
            finally:
                watch.active = False
                metrics.RELAY_ACTIVE.set(0)
                session.end()
                self._count(session.pump.sent, source.confirmed)
            self._caught_up = source.ended
        self._wishes.begin()
        if self._handing_over:
            self._handing_over = False
            logger.warning("handing over to a relay that stands by")
            until = time.monotonic() + _COURTESY_SECONDS
            while watch.holder is None and time.monotonic() < until and not self._stop.is_set():
                self._stop.wait(0.05)

    def _source(self) -> Source:
        """How the rows are read from here on.

        Raises:
            StandBy: another relay is at work.
        """
        wish = self.settings.relay_source
        with connect(self.settings.database_url, name=slot.ACTIVE, autocommit=True) as connection:
            polling = switch.polls(connection, self.settings.slot)
        if not polling and (wish == "poll" or self._over_budget):
            polling = self._to_polling()
        if not polling:
            return SlotPeek(self.settings) if wish == "peek" else LogStream(self.settings)
        if wish != "poll" and self._caught_up:
            self._caught_up = False
            if not switch.to_log(self.settings):
                logger.warning(
                    "the relay goes on polling: a slot cannot be made while transactions stay open; trying again in %.0f s",
                    _SWITCH_AGAIN_SECONDS,
                )
                self._switch_at = time.monotonic() + _SWITCH_AGAIN_SECONDS
        return Polling(self.settings, leave_at=None if wish == "poll" else self._switch_at)

    def _to_polling(self) -> bool:
        """Goes from the log to the tables; answers False where the log's budget asks for it, and it cannot be done."""
        over_budget, self._over_budget, self._caught_up = self._over_budget, False, False
        try:
            switch.to_polling(self.settings, "over the log's budget" if over_budget else "as configured")
        except RelayBlocked as error:
            if not over_budget:
                raise
            self._stays_on_log = True
            logger.error("over the log's budget, and it cannot be polled instead: %s", error)  # noqa: TRY400 - no bug
            return False
        return True

    def _require_same(self, server: Server, history: Callable[[int], str]) -> None:
        slot.require_same(self.settings.slot, self._server, server, self.confirmed, history)
        self._server = server

    def _isolate(self, refusal: Refusal) -> None:
        """The next session asks every record, and sends the suspects one at a time."""
        self._careful = _CAREFUL_RECORDS
        for lane, records in refusal.suspects.items():
            self._suspects[lane] = max(records, self._suspects[lane])

    def _wish(self, wish: str) -> None:
        if wish == HAND_OVER:
            self._handing_over = True
            self._wishes.leave()
        elif wish == DECIDED:
            self._wishes.decided.set()

    def _degrade(self) -> None:
        if not self._stays_on_log:
            self._over_budget = True
            self._wishes.leave()

    def _count(self, sent: int, confirmed: int) -> None:
        total = self._sent_before + sent
        metrics.RELAYED.inc(total - self._sent)
        self._sent, self.confirmed = total, max(self.confirmed, confirmed)


def prepare(settings: Settings) -> None:
    """Makes the place from which a first relay goes on, slot or cursor, if there are no rows yet.

    Raises:
        ConfigurationError: the server, the role or the publication is not as a relay needs it. Nothing was made.
        RelayBlocked: rows are there and the place is not.
    """
    with connect(settings.database_url, name=slot.ACTIVE, autocommit=True) as connection:
        if switch.polls(connection, settings.slot):
            return
    if settings.relay_source == "poll":
        switch.begin(settings)
    else:
        slot.ensure(settings.database_url, settings.slot, settings.publication)
