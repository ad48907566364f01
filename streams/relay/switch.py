"""From the log to the tables and back, while services go on writing. Nothing is lost, and nothing sent twice.

What is known at each moment is which transactions are sent. For the log that is a position, for the tables a snapshot;
what follows translates one into the other, and writes it down before anything is let go. Killed anywhere in between, the
next relay finds one truth: where there is a row in ``fencepost.relay_cursor``, the tables are polled.
"""

from __future__ import annotations

import logging

from streams.errors import RelayBlocked
from streams.points import reach
from streams.relay import slot
from streams.relay.pgoutput import BEGIN, position_text
from streams.relay.portal import lock, server
from streams.relay.rows import EVENT, OUTBOX
from streams.relay.stream import connect_to_log
from streams.settings import Settings
from streams.stores import relay as store
from streams.stores.postgres import LOCK_ERRORS, Connection, connect, sql

logger = logging.getLogger(__name__)

# For a new slot the server waits for all transactions that are open; nothing is sent meanwhile.
_SLOT_SECONDS = 5

_BEGIN = """
INSERT INTO fencepost.relay_cursor (slot, system, sent, unsent, since, target_at, reason)
VALUES (%s, %s, %s, %s::text[]::xid8[], %s, %s, %s)"""
_UNSENT = """
SELECT xid::text::bigint FROM pg_logical_slot_peek_binary_changes(
    %s, %s, NULL, 'proto_version', '1', 'publication_names', %s, 'binary', 'true') WHERE get_byte(data, 0) = %s"""
_VISIBLE = "SELECT x::text FROM unnest(%s::text[]::xid8[]) x WHERE pg_visible_in_snapshot(x, %s::pg_snapshot)"
_NEXT = "SELECT pg_snapshot_xmax(%s::pg_snapshot)::text::bigint"
_UNNUMBERED = """
SELECT EXISTS (SELECT FROM fencepost.relay_begin WHERE numbered_from > %s::pg_lsn AND numbered_from <= pg_current_wal_insert_lsn())"""
_FROM_ELSEWHERE = """
SELECT EXISTS (SELECT FROM fencepost.event WHERE xid >= pg_snapshot_xmax(pg_current_snapshot()))
    OR EXISTS (SELECT FROM fencepost.outbox WHERE xid >= pg_snapshot_xmax(pg_current_snapshot()))"""
_CLOSING = "SELECT closing FROM fencepost.relay_cursor WHERE slot = %s"
_CLOSE = """
UPDATE fencepost.relay_cursor SET target = %s, target_at = %s, upto = 0, closing = true
WHERE slot = %s AND target IS NULL AND cardinality(unsent) = 0 RETURNING true"""


def polls(connection: Connection, name: str) -> bool:
    """Whether the relay of this slot polls now."""
    return store.why_polling(connection, name) is not None


def begin(settings: Settings) -> None:
    """Makes a cursor from which a first relay polls, if there are no rows yet.

    Raises:
        RelayBlocked: there are rows, and what of them was sent is not known.
    """
    with connect(settings.database_url, name=slot.ACTIVE, autocommit=True) as connection:
        if polls(connection, settings.slot) or slot.find(connection, settings.slot):
            return
        _require_pollable(connection, settings)
        with connection.transaction():
            # Before the rows are looked for: one that commits in between is refused, rather than taken for sent.
            _begin(connection, settings.slot, _snapshot(connection), (), "nothing was sent before")
            row = connection.execute(slot.ROWS_EXIST).fetchone()
            if row is not None and row[0]:
                raise RelayBlocked(slot.missing(settings.slot))


def begin_now(settings: Settings) -> None:
    """Begins from now, whatever is there and whatever was sent of it; slot or cursor are made anew.

    Raises:
        StandBy: a relay is at work.
    """
    with connect(settings.database_url, name=slot.ACTIVE, autocommit=True) as connection:
        lock(connection, settings.slot)
        if settings.relay_source == "poll":
            _require_pollable(connection, settings)
        connection.execute("DELETE FROM fencepost.relay_cursor WHERE slot = %s", (settings.slot,))
        if slot.exists(connection, settings.slot):
            slot.drop(connection, settings.slot)
        if settings.relay_source == "poll":
            _begin(connection, settings.slot, _snapshot(connection), (), "begun from then")
        else:
            slot.make(connection, settings.slot)


def to_polling(settings: Settings, reason: str) -> None:
    """Writes down what the slot has not confirmed, and lets the slot go.

    Raises:
        StandBy: another relay is at work.
        RelayBlocked: the slot is gone, or has lost its log; or some rows can only be had from the log.
    """
    with connect(settings.database_url, name=slot.ACTIVE, autocommit=True) as connection:
        lock(connection, settings.slot)
        if not polls(connection, settings.slot):
            found = slot.find(connection, settings.slot)
            if found is None:
                raise RelayBlocked(slot.gone(settings.slot))
            _require_pollable(connection, settings)
            row = connection.execute(_UNNUMBERED, (position_text(found.confirmed),)).fetchone()
            if row is not None and row[0]:
                raise RelayBlocked(
                    f"slot {settings.slot} still holds rows from before migration 0002, which only the log can tell; let "
                    "the relay confirm them first (STREAMS_RELAY_SOURCE=log)"
                )
            # First the snapshot, then the position: what the snapshot shows is then before the position, and either
            # confirmed or among what the slot still holds. The other way round a commit between them would be lost.
            snapshot = _snapshot(connection)
            until = _flushed(connection)
            xids = [
                row[0]
                for row in connection.execute(_UNSENT, (settings.slot, until, settings.publication, BEGIN))
            ]
            unsent = _visible(connection, snapshot, xids)
            _begin(connection, settings.slot, snapshot, unsent, reason, position_text(found.confirmed), until)
            logger.warning(
                "the relay of slot %s polls from now on (%s); %s transactions of the log are to be sent first",
                settings.slot,
                reason,
                f"{len(unsent):,}",
            )
            reach("switch.cursor_written")
        if slot.find(connection, settings.slot):
            slot.drop(connection, settings.slot)


def to_log(settings: Settings) -> bool:
    """Makes a slot, and lets the polling end where the slot begins; answers whether that is so.

    It is not where transactions stay open for long, or the polling is in the middle of a round.

    Raises:
        StandBy: another relay is at work.
    """
    with connect(settings.database_url, name=slot.ACTIVE, autocommit=True) as connection:
        lock(connection, settings.slot)
        row = connection.execute(_CLOSING, (settings.slot,)).fetchone()
        if row is not None and row[0]:
            return True
        if slot.find(connection, settings.slot):  # of a relay that died here before it could write it down
            slot.drop(connection, settings.slot)
        oldest = store.oldest_transaction(connection)
        if oldest is not None and oldest.seconds > _SLOT_SECONDS:
            logger.warning("a slot would have to wait for %s", oldest)
            return False
        with connect_to_log(settings) as log:
            log.execute(f"SET lock_timeout = '{_SLOT_SECONDS}s'".encode())
            failover = ", FAILOVER true" if log.info.server_version >= slot.FAILOVER_SLOTS else ""
            try:
                made = log.execute(
                    sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput (SNAPSHOT 'export'{})").format(
                        sql.Identifier(settings.slot), sql.SQL(failover)
                    )
                ).fetchone()
            except LOCK_ERRORS:
                return False
            assert made is not None, "the command answers one row"  # noqa: S101
            _, consistent_point, exported, _ = made
            reach("switch.slot_made")
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(exported))
                snapshot = _snapshot(connection)
        closing = connection.execute(_CLOSE, (snapshot, consistent_point, settings.slot)).fetchone()
        reach("switch.closing")
        if closing is None:
            slot.drop(connection, settings.slot)
        return closing is not None


def _require_pollable(connection: Connection, settings: Settings) -> None:
    """Raises RelayBlocked where polling would leave rows out, or send old ones again."""
    others = set(slot.published(connection, settings.publication)) - {EVENT, OUTBOX}
    if others:
        raise RelayBlocked(
            f"polling reads fencepost's own tables only, and publication {settings.publication} holds {', '.join(sorted(others))}"
        )
    row = connection.execute(_FROM_ELSEWHERE).fetchone()
    if row is not None and row[0]:
        raise RelayBlocked(
            "some rows have transaction ids of another server, as after a restored dump, which this one will give out again; "
            f"set the column xid of {EVENT} and of {OUTBOX} to NULL first"
        )


def _begin(
    connection: Connection,
    name: str,
    snapshot: str,
    unsent: tuple[str, ...],
    reason: str,
    since: str = "0/0",
    at: str = "0/0",
) -> None:
    system = server(connection).system
    connection.execute(_BEGIN, (name, system, snapshot, list(unsent), since, at, reason))


def _snapshot(connection: Connection) -> str:
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None, "a SELECT without FROM answers a row"  # noqa: S101
    xmin, xmax, running = str(row[0]).split(":")
    # One that a slot exported may end before it begins, which means the same, but cannot be stored.
    return f"{xmin}:{max(int(xmin), int(xmax))}:{running}"


def _flushed(connection: Connection) -> str:
    """A position behind all that was visible before the call, and on disk, since a slot reads no further than that."""
    # A commit of our own, and not of the lazy kind, takes with it whatever stands before it in the log.
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = local")
        connection.execute("SELECT pg_logical_emit_message(true, 'fencepost', 'switch')")
    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None, "a SELECT without FROM answers a row"  # noqa: S101
    return str(row[0])


def _visible(connection: Connection, snapshot: str, xids: list[int]) -> tuple[str, ...]:
    """Those transactions that the snapshot shows; the others are found by the first round anyway."""
    row = connection.execute(_NEXT, (snapshot,)).fetchone()
    assert row is not None, "a SELECT without FROM answers a row"  # noqa: S101
    full = [str(_full(xid, row[0])) for xid in xids]
    return tuple(shown for (shown,) in connection.execute(_VISIBLE, (full, snapshot)))


def _full(xid: int, near: int) -> int:
    """The log's 32 bits of a transaction's id, completed by what is near."""
    distance = (xid - near) & 0xFFFFFFFF
    return near + distance - (1 << 32 if distance >= 1 << 31 else 0)
