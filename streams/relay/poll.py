"""Polling: the tables read by SQL, where there is no logical replication.

A snapshot of PostgreSQL says of every transaction whether it was over when it was taken. So a round sends what the newest
snapshot shows and the last one did not, whatever the order of ids, and misses no transaction that was long on its way.
One that stays open delays nobody else; it only makes the rounds look at more rows.

Source of the idea: https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-PG-SNAPSHOT
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter

from streams.errors import RelayBlocked
from streams.points import reach
from streams.relay import slot
from streams.relay.pgoutput import Columns, Relation, position_from_text
from streams.relay.portal import Portal, SqlConnection, lock, server
from streams.relay.rows import EVENT, OUTBOX
from streams.relay.source import RequireSame, Sink, StandBy
from streams.settings import Settings
from streams.stores.postgres import Connection, sql

_PORTION_ROWS = 100_000
_KEEP_SECONDS = 0.2
# While nothing is sent the place need not be kept; now and then it is, so that a restart has little to look through.
_KEEP_IDLE_SECONDS = 2.0
_PAUSE_SECONDS = 0.05
# A round with no more rows than these has caught up, however busy the system is.
_CAUGHT_UP_ROWS = 1_000

_TABLES = (
    Relation(
        1,
        EVENT,
        (
            "sequence",
            "resource_type",
            "resource_id",
            "version",
            "id",
            "type",
            "payload",
            "traceparent",
            "recorded_at",
        ),
    ),
    Relation(2, OUTBOX, ("sequence", "topic", "key", "payload", "header_names", "header_values")),
)

_TAKE = """
UPDATE fencepost.relay_cursor SET token = token + 1 WHERE slot = %s
RETURNING system, sent::text, unsent::text[], since::text, target::text, target_at::text, upto, token, closing,
    pg_snapshot_xmax(sent) > pg_snapshot_xmax(pg_current_snapshot())"""
_KEEP = """
UPDATE fencepost.relay_cursor SET sent = %s, unsent = CASE WHEN %s THEN unsent ELSE '{}' END, since = %s, target = %s,
    target_at = %s, upto = %s
WHERE slot = %s AND token = %s RETURNING true"""
_NOW = "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text"

_CLOSE = "DELETE FROM fencepost.relay_cursor WHERE slot = %s AND token = %s"

_REOPEN = "UPDATE fencepost.relay_cursor SET closing = false WHERE slot = %s AND token = %s"

Row = tuple[int, int, Columns]


@dataclass(frozen=True)
class Place:
    """How far the rounds have come; a row of ``fencepost.relay_cursor``.

    Attributes:
        sent: the snapshot all of which was sent, but for the transactions in ``unsent``; those come first.
        since: no record of what was not yet sent stands in a topic before this position.
        target: what the round on its way goes to; None where the next one is not begun.
        target_at: the position that this round's records carry.
        upto: rows of this round up to this number are safe.
    """

    sent: str
    unsent: tuple[str, ...]
    since: str
    target: str | None
    target_at: str
    upto: int = 0


class Polling:
    """Rounds over the tables. Implements ``streams.relay.source.Source``; its ends are counted, not positions.

    Args:
        leave_at: from this moment of the monotonic clock on, end when a round finds nothing more, so that a slot can
            take over.
    """

    def __init__(self, settings: Settings, *, leave_at: float | None = None) -> None:
        self._slot, self._leave_at = settings.slot, leave_at
        self._sql = SqlConnection(settings, slot.ACTIVE)
        published = slot.published(self._sql.connection, settings.publication)
        self._tables = [table for table in _TABLES if table.name in published]
        self._token = 0
        self._closing = False
        self._round: Iterator[Row] | None = None
        self._may_repeat = True
        self._own_target = False
        self._rows = 0
        self._handed_over = False
        self._ends: deque[tuple[int, Place]] = deque()
        self._end = 0
        self._moved = False
        self._kept_at = 0.0
        self.confirmed = 0
        self.ended = False

    def begin(self, require_same: RequireSame) -> int:
        connection = self._sql.connection
        lock(connection, self._slot)
        row = connection.execute(_TAKE, (self._slot,)).fetchone()
        if row is None:
            raise RelayBlocked(slot.missing(self._slot))
        system, sent, unsent, since, target, target_at, upto, self._token, self._closing, ahead = row
        now = server(connection)
        if system != now.system or ahead:
            raise RelayBlocked(
                f"this is not the server that was polled so far (system identifier {now.system}, it was {system}), or "
                "it is behind what was sent: events may be in their topics and not here, or here and not there. "
                f"{slot.BEGIN_ANEW}"
            )
        require_same(now, lambda _: "")
        if not self._closing and slot.find(connection, self._slot):
            slot.drop(
                connection, self._slot
            )  # left by a relay that died while it switched; it would pin the log
        self._place = self._safe = Place(sent, tuple(unsent), since, target, target_at, upto)
        self.confirmed = self._end = position_from_text(since)
        return self.confirmed

    def take(self, sink: Sink, limit: int) -> bool:
        if self._round is None:
            if self._closing and self._place.target is None:
                return False  # the round to the slot's own snapshot is over
            self._round = self._begin_round(sink)
        page = list(islice(self._round, limit))
        if not page:
            self._end_round()
            return False
        at = position_from_text(self._place.target_at)
        # What an earlier relay sent, and had no time to write down, may stand in its topic under another position.
        sink.begin(0 if self._may_repeat else at, at)
        for _, oid, row in page:
            sink.insert(oid, row)
        self._end += 1
        sink.commit(self._end)
        self._place = replace(self._place, upto=page[-1][0])
        self._ends.append((self._end, self._place))
        self._moved = True
        self._rows += len(page)
        reach("relay.produced")
        return True

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, _PAUSE_SECONDS))

    def report(self, position: int, *, now: bool = False) -> None:
        while self._ends and self._ends[0][0] <= position:
            self._safe = self._ends.popleft()[1]
        if self._closing and not self._ends and self._safe.target is None:
            self._hand_to_slot()
        due = time.monotonic() - self._kept_at > (_KEEP_SECONDS if self._moved else _KEEP_IDLE_SECONDS)
        if (due or now) and not self._handed_over:
            self._keep()
        self._sql.keep()

    def close(self) -> None:
        self._sql.connection.close()

    def _begin_round(self, sink: Sink) -> Iterator[Row]:
        place = self._place
        if not place.unsent and place.target is None:
            row = self._sql.connection.execute(_NOW).fetchone()
            assert row is not None, "a SELECT without FROM answers a row"  # noqa: S101
            self._sql.spoke()
            place = self._place = replace(place, target=row[0], target_at=row[1])
            self._own_target = True
        self._rows = 0
        for table in self._tables:
            sink.table(table)
        condition = _condition(place)
        return heapq.merge(
            *(self._rows_of(table, condition, place.upto) for table in self._tables), key=itemgetter(0)
        )

    def _end_round(self) -> None:
        place, self._round = self._place, None
        if place.unsent:
            self._place = replace(place, unsent=(), upto=0)
        else:
            assert place.target is not None, "a round goes somewhere"  # noqa: S101
            self._place = Place(place.target, (), place.target_at, None, place.target_at)
            # A target of our own shows all that relays before us have sent; an inherited one does not.
            self._may_repeat = self._may_repeat and not self._own_target
            leaves = self._leave_at is not None and time.monotonic() >= self._leave_at
            self.ended = leaves and not self._closing and self._rows <= _CAUGHT_UP_ROWS
        self._ends.append((self._end, self._place))

    def _rows_of(self, table: Relation, condition: sql.Composable, after: int) -> Iterator[Row]:
        """A table's rows by their numbers, in portions that the server can hold."""
        query = sql.SQL("SELECT {} FROM {} WHERE {} AND sequence > {} ORDER BY sequence LIMIT {}")
        columns = sql.SQL(", ").join(map(sql.Identifier, table.columns))
        name = sql.Identifier(*table.name.split("."))
        found = _PORTION_ROWS
        while found == _PORTION_ROWS:
            portal = Portal(
                self._sql,
                f"fencepost_poll_{table.oid}",
                query.format(columns, name, condition, after, _PORTION_ROWS),
            )
            found = 0
            while page := portal.page():
                found += len(page)
                for row in page:
                    after = int.from_bytes(row[0] or b"", "big")
                    yield after, table.oid, row
            portal.close()

    def _keep(self) -> None:
        """Writes the place down that is safe.

        Raises:
            StandBy: another relay has taken the cursor over.
        """
        place = self._safe
        kept = self._sql.connection.execute(
            _KEEP,
            (
                place.sent,
                bool(place.unsent),  # a long list is not written again for every page
                place.since,
                place.target,
                place.target_at,
                place.upto,
                self._slot,
                self._token,
            ),
        ).fetchone()
        if kept is None:
            raise StandBy(f"another relay has taken over the polling of slot {self._slot}")
        self._sql.spoke()
        self._moved, self._kept_at = False, time.monotonic()
        self.confirmed = position_from_text(place.since)

    def _hand_to_slot(self) -> None:
        """What the slot's snapshot showed is safe: the slot takes over, if it is still there."""
        self._keep()
        if _is_whole(self._sql.connection, self._slot):
            self._sql.connection.execute(_CLOSE, (self._slot, self._token))
            self.ended = self._handed_over = True
        else:
            self._sql.connection.execute(_REOPEN, (self._slot, self._token))
            self._closing = False


def _is_whole(connection: Connection, name: str) -> bool:
    try:
        return slot.find(connection, name) is not None
    except RelayBlocked:  # it has lost its log meanwhile
        slot.drop(connection, name)
        return False


def _condition(place: Place) -> sql.Composed:
    if place.unsent:
        return sql.SQL("xid = ANY({}::text[]::xid8[])").format(sql.Literal(list(place.unsent)))
    return sql.SQL(
        "xid >= pg_snapshot_xmin({sent}) AND xid < pg_snapshot_xmax({target})"
        " AND NOT pg_visible_in_snapshot(xid, {sent}) AND pg_visible_in_snapshot(xid, {target})"
    ).format(
        sent=sql.SQL("{}::pg_snapshot").format(place.sent),
        target=sql.SQL("{}::pg_snapshot").format(place.target),
    )
