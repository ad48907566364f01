"""What the database says of the relays of a slot: who works, who stands by, and what holds them back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from psycopg.rows import class_row

from streams.stores.postgres import Connection

CHANNEL = "fencepost_relay"

_HOLDER = """
SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND d.datname = current_database()
    AND l.classid = (hashtext('fencepost.relay')::bigint & 4294967295)::oid
    AND l.objid = (hashtext(%s)::bigint & 4294967295)::oid"""

_WATCHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
)

_LOG = """
SELECT coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint AS retained_bytes,
    coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn), 0)::bigint AS unconfirmed_bytes,
    coalesce(confirmed_flush_lsn::text, '0/0') AS confirmed, coalesce(wal_status, 'unknown') AS wal_status,
    (SELECT CASE WHEN setting::bigint < 0 THEN NULL ELSE setting::bigint * 1024 * 1024 END
        FROM pg_settings WHERE name = 'max_slot_wal_keep_size') AS limit_bytes
FROM pg_replication_slots WHERE slot_name = %s"""

# Both the log and the polling rounds are held back by transactions that have an id, in whichever database.
_OLDEST = """
SELECT pid, coalesce(usename, '?') AS user, coalesce(datname, '?') AS database, coalesce(application_name, '') AS application,
    coalesce(state, 'unknown') AS state, extract(epoch FROM clock_timestamp() - xact_start)::float AS seconds
FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND xact_start IS NOT NULL
UNION ALL
SELECT NULL, owner, database, 'prepared transaction ' || gid, 'prepared',
    extract(epoch FROM clock_timestamp() - prepared)::float FROM pg_prepared_xacts
ORDER BY seconds DESC LIMIT 1"""

_CURSOR = "SELECT reason FROM fencepost.relay_cursor WHERE slot = %s"

# Every transaction before this one is over, and all of it has reached its topics. Who polls has it from snapshots. For a
# slot it is what the server may forget: that id moves on only with a position behind all that is older, once confirmed.
_SETTLED = """(SELECT least(
    (SELECT CASE WHEN cardinality(unsent) = 0 THEN pg_snapshot_xmin(sent) ELSE '0' END
        FROM fencepost.relay_cursor ORDER BY 1 LIMIT 1),
    (SELECT (pg_snapshot_xmax(pg_current_snapshot())::text::bigint - age(catalog_xmin))::text::xid8
        FROM pg_replication_slots WHERE slot_name = %(slot)s)))"""

_DAYS = f"""
SELECT day, sealed_at IS NOT NULL AS sealed, (sealed_xid <= {_SETTLED}) IS TRUE AS confirmed
FROM fencepost.outbox_day WHERE day < (clock_timestamp() AT TIME ZONE 'UTC')::date ORDER BY day"""  # noqa: S608 - our own

_CLEAR_REST = f"""
DELETE FROM fencepost.outbox_rest WHERE created_at < clock_timestamp() - make_interval(days => %(days)s)
    AND xid < {_SETTLED}"""  # noqa: S608 - our own


@dataclass(frozen=True, slots=True)
class Log:
    """The slot's log; ``limit_bytes`` is the server's own, None where it keeps whatever is needed."""

    retained_bytes: int
    unconfirmed_bytes: int
    confirmed: str
    wal_status: str
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """The oldest transaction that is open; ``pid`` is None for a prepared one, which belongs to no process."""

    pid: int | None
    user: str
    database: str
    application: str
    state: str
    seconds: float

    def __str__(self) -> str:
        who = f"pid {self.pid}" if self.pid is not None else self.application
        named = f", {self.application}" if self.pid is not None and self.application else ""
        return f"{who} (user {self.user}, database {self.database}{named}), {self.state}, open for {self.seconds:,.0f} s"


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the outbox that is over; ``confirmed`` when every row of it has reached its topic."""

    day: date
    sealed: bool
    confirmed: bool


def watcher_name(slot: str) -> str:
    """How a running relay calls its second connection, which it holds whether it works or stands by."""
    return f"fencepost relay of slot {slot}"[:63]


def holder(connection: Connection, slot: str) -> int | None:
    """The pid of the connection that holds the relay's lock; None while nobody is at work."""
    row = connection.execute(_HOLDER, (slot,)).fetchone()
    return None if row is None else int(row[0])


def running(connection: Connection, slot: str) -> int:
    """How many relays run, with those that stand by."""
    row = connection.execute(_WATCHERS, (watcher_name(slot),)).fetchone()
    return 0 if row is None else int(row[0])


def log(connection: Connection, slot: str) -> Log | None:
    """The slot's log, or None where there is no slot."""
    with connection.cursor(row_factory=class_row(Log)) as cursor:
        return cursor.execute(_LOG, (slot,)).fetchone()


def oldest_transaction(connection: Connection) -> OpenTransaction | None:
    with connection.cursor(row_factory=class_row(OpenTransaction)) as cursor:
        return cursor.execute(_OLDEST).fetchone()


def why_polling(connection: Connection, slot: str) -> str | None:
    """Why the tables are polled; None where the log is read."""
    row = connection.execute(_CURSOR, (slot,)).fetchone()
    return None if row is None else str(row[0])


def past_days(connection: Connection, slot: str) -> list[Day]:
    with connection.cursor(row_factory=class_row(Day)) as cursor:
        return cursor.execute(_DAYS, {"slot": slot}).fetchall()


def make_day(connection: Connection, day: date) -> bool:
    """Makes the partition of a day, if it is not there; answers whether it was made."""
    row = connection.execute("SELECT fencepost.make_outbox_day(%s)", (day,)).fetchone()
    return row is not None and bool(row[0])


def seal_day(connection: Connection, day: date) -> None:
    connection.execute("SELECT fencepost.seal_outbox_day(%s)", (day,))


def drop_day(connection: Connection, day: date) -> bool:
    """Drops the partition of a sealed day; answers whether it did, or found rows younger than the seal."""
    row = connection.execute("SELECT fencepost.drop_outbox_day(%s)", (day,)).fetchone()
    return row is not None and bool(row[0])


def clear_rest(connection: Connection, slot: str, days: int) -> int:
    """Deletes what is old and confirmed from the partition for days that nobody made; answers how many rows."""
    return connection.execute(_CLEAR_REST, {"slot": slot, "days": days}).rowcount


def notify(connection: Connection, message: str) -> None:
    """Tells every relay of the database."""
    connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, message))
