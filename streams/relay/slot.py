"""The logical replication slot: what the database keeps for the relay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psycopg import sql

from streams.errors import RelayBlocked
from streams.relay.pgoutput import position_from_text, position_text
from streams.stores.postgres import Connection, connect, require_logical

_SLOT = """
SELECT active, active_pid, confirmed_flush_lsn::text, plugin, slot_type, wal_status, database = current_database(),
    pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint
FROM pg_replication_slots WHERE slot_name = %s"""

_ROWS = "SELECT EXISTS (SELECT FROM fencepost.event) OR EXISTS (SELECT FROM fencepost.outbox)"


@dataclass(frozen=True)
class Slot:
    """``behind_bytes``: how much log lies between what is confirmed and the newest."""

    name: str
    active_pid: int | None
    confirmed: int
    wal_status: str
    behind_bytes: int


@dataclass(frozen=True)
class Server:
    """Which server holds the log. A copy of it has the same system; from its promotion on, another timeline."""

    system: str
    timeline: int
    written: int


def find(connection: Connection, name: str) -> Slot | None:
    """The slot, or None where there is none.

    Raises:
        RelayBlocked: a slot of that name is not one the relay can read, or has lost its log.
    """
    row = connection.execute(_SLOT, (name,)).fetchone()
    if row is None:
        return None
    _, pid, confirmed, plugin, kind, wal_status, ours, behind = row
    if kind != "logical" or plugin != "pgoutput" or not ours:
        raise RelayBlocked(
            f"replication slot {name} is a {kind} slot of plugin {plugin}, or of another database; set STREAMS_SLOT"
        )
    if wal_status == "lost":
        raise RelayBlocked(
            f"replication slot {name} has lost its log (max_slot_wal_keep_size): events since {confirmed} may be missing "
            f"from their topics. Compare them (streams relay audit), then drop the slot with SELECT pg_drop_replication_slot('{name}')"
        )
    return Slot(name, pid, position_from_text(confirmed), wal_status, int(behind or 0))


def ensure(database_url: str, name: str) -> Slot:
    """The slot, made if the tables are still empty.

    A slot sees only what commits after it was made. Where there are rows already and no slot, some of them
    would never be sent, so that is refused rather than begun silently from now.

    Raises:
        RelayBlocked: rows are there and the slot is not.
        ServerUnavailable: the database does not answer or has not wal_level=logical.
    """
    with connect(database_url, name="fencepost relay", autocommit=True) as connection:
        require_logical(connection)
        found = find(connection, name)
        if found is not None:
            return found
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
        # After the slot: a row that committed in between is in the slot's log and in the table, and refused too.
        row = connection.execute(_ROWS).fetchone()
        if row is not None and row[0]:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
            raise RelayBlocked(
                f"there is no replication slot {name}, and the database holds events that a new one would not see. "
                "If it was dropped, or this is a restored or promoted server, find out which events reached their topics: streams relay audit. "
                f"To begin from now all the same: SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"
            )
        made = find(connection, name)
        assert made is not None, "made above, on this connection"  # noqa: S101
        return made


def gone(name: str) -> str:
    return (
        f"replication slot {name} is gone: it was dropped, or this server was restored or promoted without it. Find out "
        "which events did not reach their topics (the store has each, its topic's records say fp_version). "
        f"To begin from now all the same: SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"
    )


def require_same(
    name: str, before: Server | None, now: Server, confirmed: int, history: Callable[[int], str]
) -> None:
    """Refuses a server that does not hold what this process has confirmed.

    Args:
        before: the server of the last session, if there was one.
        confirmed: the highest position confirmed by this process.
        history: where a timeline and those before it branched off, asked only where it is another one.

    Raises:
        RelayBlocked: the server is another one, or a copy that lacks what was published.
    """
    reason = _difference(before, now, confirmed, history)
    if reason is not None:
        raise RelayBlocked(
            f"this is not the server whose log was read through slot {name} so far: {reason}. The topics may hold "
            "events that this database has lost, and new ones will take their versions. Compare the topics with "
            "fencepost.event, then start the relay's process anew: it goes on from where the slot stands"
        )


def _difference(
    before: Server | None, now: Server, confirmed: int, history: Callable[[int], str]
) -> str | None:
    if before is not None and before.system != now.system:
        return f"its system identifier is {now.system}, it was {before.system}"
    if confirmed > now.written:
        return f"it has written up to {position_text(now.written)}, confirmed was {position_text(confirmed)}"
    if before is not None and before.timeline != now.timeline:
        left = branched_off(history(now.timeline), before.timeline)
        if left is None or left < confirmed:
            where = "elsewhere" if left is None else f"at {position_text(left)}"
            return (
                f"its timeline {now.timeline} branched off {where}, confirmed was {position_text(confirmed)}"
            )
    return None


def branched_off(history: str, timeline: int) -> int | None:
    """Where a history left a timeline; None where it never was on it."""
    for line in history.splitlines():
        number, _, rest = line.strip().partition("\t")
        if number.isdecimal() and int(number) == timeline:
            return position_from_text(rest.partition("\t")[0])
    return None


def start_statement(name: str, position: int) -> sql.Composed:
    return sql.SQL(
        "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names 'fencepost', binary 'true')"
    ).format(sql.Identifier(name), sql.SQL(position_text(position)))
