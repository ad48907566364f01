"""What a relay does beside its work: hear wishes, watch the log's budget, keep house in the outbox."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Self

from streams.errors import ServerUnavailable, StreamsError
from streams.observe import metrics
from streams.settings import Settings
from streams.stores import blocked
from streams.stores import relay as store
from streams.stores.postgres import CONNECTION_ERRORS, DATABASE_ERRORS, LOCK_ERRORS, Connection, connect, sql

logger = logging.getLogger(__name__)

HAND_OVER, DECIDED = "hand over", "decided"

_LOOK_SECONDS = 2.0
_HOUSEKEEPING_SECONDS = 300.0
_LISTEN_SECONDS = 0.2
_AGAIN_SECONDS = 2.0
_SAY_AGAIN_SECONDS = 60.0
# A transaction open for so long is worth a word; shorter ones are work.
_OLD_SECONDS = 60.0
_WARN_AT = 0.5
_DAYS_AHEAD = 3


class Watch:
    """A thread with a connection of its own. Losing it disturbs nobody: it comes back by itself.

    Args:
        on_wish: called with ``HAND_OVER`` or ``DECIDED`` when somebody asked for it.
        on_over_budget: called when the slot retains more than it may, and polling is to go on instead.
    """

    def __init__(
        self, settings: Settings, on_wish: Callable[[str], None], on_over_budget: Callable[[], None]
    ) -> None:
        self._settings, self._on_wish, self._on_over_budget = settings, on_wish, on_over_budget
        self._stop = threading.Event()
        self._free = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay watch", daemon=True)
        self._said: dict[str, float] = {}
        self._own: int | None = None
        self.holder: int | None = None
        """The pid of another relay's connection that holds the lock."""
        self.active = False
        """Whether that is this relay: only one keeps house."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def wait_until_free(self, seconds: float) -> None:
        """Returns when nobody holds the lock, or after so long."""
        self._free.clear()
        self._free.wait(seconds)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with connect(
                    self._settings.database_url,
                    name=store.watcher_name(self._settings.slot),
                    autocommit=True,
                    seconds=self._settings.connect_seconds,
                ) as connection:
                    self._watch(connection)
            except (*DATABASE_ERRORS, StreamsError) as error:
                # The relay itself says that the database is away; what else may be wrong, nobody else says.
                away = isinstance(error, (*CONNECTION_ERRORS, ServerUnavailable))
                logger.log(
                    logging.INFO if away else logging.WARNING,
                    "the relay's watch begins anew (%s)",
                    str(error).strip(),
                )
                self._free.set()
                self._stop.wait(_AGAIN_SECONDS)

    def _watch(self, connection: Connection) -> None:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(store.CHANNEL)))
        looked = kept = -_HOUSEKEEPING_SECONDS
        while not self._stop.is_set():
            holder = store.holder(connection, self._settings.slot)
            if self.active:
                self._own = holder
            self.holder = None if holder == self._own else holder
            if holder is None:
                self._free.set()
            clock = time.monotonic()
            if clock - looked > _LOOK_SECONDS:
                looked = clock
                self._look(connection)
            if self.active and clock - kept > _HOUSEKEEPING_SECONDS:
                kept = clock
                keep_house(connection, self._settings)
            for notice in connection.notifies(timeout=_LISTEN_SECONDS, stop_after=1):
                wish, _, slot = notice.payload.partition(": ")
                # Every relay hears it, but only the one at work can hand over: another would do so once it is at work.
                if slot == self._settings.slot and (self.active or wish != HAND_OVER):
                    self._on_wish(wish)

    def _look(self, connection: Connection) -> None:
        """Brings the gauges up to date, and says what is wrong."""
        name = self._settings.slot
        log = store.log(connection, name)
        metrics.RELAY_POLLS.set(store.why_polling(connection, name) is not None)
        refused, behind = blocked.counts(connection, name)
        metrics.RELAY_REFUSED.set(refused)
        metrics.RELAY_BEHIND_REFUSED.set(behind)
        oldest = store.oldest_transaction(connection)
        metrics.OLDEST_TRANSACTION_SECONDS.set(oldest.seconds if oldest else 0)
        if self.active and oldest is not None and oldest.seconds > _OLD_SECONDS:
            self._say(
                "oldest",
                f"an open transaction holds {'the log of slot ' + name if log else 'the rounds of the polling'} back: {oldest}",
            )
        if log is None:
            return
        budget = budget_bytes(self._settings, log)
        metrics.LOG_RETAINED_BYTES.set(log.retained_bytes)
        metrics.LOG_UNCONFIRMED_BYTES.set(log.unconfirmed_bytes)
        metrics.LOG_BUDGET_BYTES.set(budget or 0)
        if budget is None or log.retained_bytes < budget * _WARN_AT:
            return
        self._say(
            "budget",
            f"slot {name} retains {log.retained_bytes / 1e6:,.0f} MB of log, {100 * log.retained_bytes / budget:.0f} % of "
            f"its budget of {budget / 1e6:,.0f} MB; {_why(log, oldest)}",
        )
        if self.active and log.retained_bytes > budget and self._settings.log_over_budget == "poll":
            self._on_over_budget()

    def _say(self, what: str, message: str) -> None:
        if time.monotonic() >= self._said.get(what, 0.0):
            self._said[what] = time.monotonic() + _SAY_AGAIN_SECONDS
            logger.warning("%s", message)


def budget_bytes(settings: Settings, log: store.Log) -> int | None:
    """How much the slot may retain: one's own budget, and nine tenths of what the server would cut off."""
    limits = [
        settings.log_budget_mb * 1024 * 1024 if settings.log_budget_mb is not None else None,
        log.limit_bytes * 9 // 10 if log.limit_bytes is not None else None,
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _why(log: store.Log, oldest: store.OpenTransaction | None) -> str:
    if log.unconfirmed_bytes * 2 > log.retained_bytes:
        return "most of it is not confirmed: is a relay running, and the broker there?"
    return f"most of it is confirmed, and held by the oldest transaction: {oldest or 'none that is open now'}"


def keep_house(connection: Connection, settings: Settings) -> None:
    """Makes the next days of the outbox, and drops those that are confirmed and older than the retention."""
    today = datetime.now(UTC).date()
    oldest_kept = today - timedelta(days=settings.outbox_retention_days)
    # Never in the way of a service for longer than this; what is not to be had now is tried again next time.
    connection.execute("SET lock_timeout = '100ms'")
    days = [today + timedelta(days=ahead) for ahead in range(_DAYS_AHEAD + 1)]
    steps: list[tuple[str, Callable[[], object]]] = [
        (f"make {day}", partial(store.make_day, connection, day)) for day in days
    ]
    for past in store.past_days(connection, settings.slot):
        if not past.sealed:
            steps.append((f"seal {past.day}", partial(store.seal_day, connection, past.day)))
        elif past.confirmed and past.day < oldest_kept:
            steps.append((f"drop {past.day}", partial(store.drop_day, connection, past.day)))
    steps.append(
        (
            "clear the rest",
            partial(store.clear_rest, connection, settings.slot, settings.outbox_retention_days),
        )
    )
    for what, step in steps:
        try:
            step()
        except LOCK_ERRORS:
            logger.info("outbox: %s: somebody holds it; next time", what)
        except CONNECTION_ERRORS:
            raise
        except DATABASE_ERRORS as error:
            logger.warning("outbox: %s: %s", what, str(error).strip())
    connection.execute("RESET lock_timeout")
