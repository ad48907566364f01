"""The logical replication slot: what the database keeps for the relay."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streams.errors import ConfigurationError, RelayBlocked
from streams.relay.pgoutput import position_from_text, position_text
from streams.relay.rows import EVENT, OUTBOX
from streams.relay.source import Server
from streams.stores.postgres import (
    DATABASE_ERRORS,
    PRIVILEGE_ERRORS,
    Connection,
    connect,
    require_logical,
    sql,
)

# How a relay's connections call themselves in pg_stat_activity.
ACTIVE = "fencepost relay"
LACKS_REPLICATION = (
    "the role of STREAMS_DATABASE_URL may not read the log; run as a superuser: ALTER ROLE <role> REPLICATION "
    "(or set STREAMS_RELAY_SOURCE=poll, which needs no such right)"
)

_NAME = re.compile("[a-z0-9_]{1,63}")

_SLOT = """
SELECT confirmed_flush_lsn::text, wal_status, plugin, slot_type, database = current_database()
FROM pg_replication_slots WHERE slot_name = %s"""

BEGIN_ANEW = (
    "Begin from now, start the relay, and let the audit send what did not reach its topic: streams relay begin; "
    "streams relay run; streams relay audit --repair"
)

_PUBLICATION = """
SELECT pubinsert, pubviaroot, ARRAY(
    SELECT schemaname || '.' || tablename FROM pg_publication_tables t WHERE t.pubname = p.pubname), puballtables
FROM pg_publication p WHERE pubname = %s"""

ROWS_EXIST = "SELECT EXISTS (SELECT FROM fencepost.event) OR EXISTS (SELECT FROM fencepost.outbox)"
FAILOVER_SLOTS = 17_00_00


@dataclass(frozen=True)
class Slot:
    """``confirmed``: the position from which on the server keeps the log for it."""

    name: str
    confirmed: int


def find(connection: Connection, name: str) -> Slot | None:
    """The slot, or None where there is none.

    Raises:
        ConfigurationError: a slot of that name is not one the relay can read.
        RelayBlocked: the slot has lost its log.
    """
    row = connection.execute(_SLOT, (name,)).fetchone()
    if row is None:
        return None
    _require_own(name, row)
    confirmed, wal_status, *_ = row
    if wal_status == "lost":
        raise RelayBlocked(
            f"replication slot {name} has lost its log (max_slot_wal_keep_size): events since {confirmed} may be missing "
            f"from their topics. {BEGIN_ANEW}"
        )
    return Slot(name, position_from_text(confirmed))


def _require_own(name: str, row: tuple[Any, ...]) -> None:
    *_, plugin, kind, ours = row
    if kind != "logical":
        problem = f"is a {kind} one"
    elif plugin != "pgoutput":
        problem = f"is one of the plugin {plugin}"
    elif not ours:
        problem = "is one of another database"
    else:
        return
    raise ConfigurationError(
        f"replication slot {name} {problem}; set STREAMS_SLOT to a name of the relay's own"
    )


def require_able(connection: Connection, name: str, publication: str) -> None:
    """Raises ConfigurationError where a slot of that name could not be made or read; changes nothing."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"STREAMS_SLOT is {name!r}; a slot's name consists of up to 63 lower-case letters, digits and underscores"
        )
    exists(connection, name)
    require_rights(connection)
    require_publication(connection, publication)


def require_rights(connection: Connection) -> None:
    """Raises ConfigurationError where the server has no log to read, or the role may not read it."""
    require_logical(connection)
    try:
        # There can be no slot of no name: what is answered is whether the role might move it.
        connection.execute("SELECT pg_replication_slot_advance('', '0/1')")
    except PRIVILEGE_ERRORS as error:
        raise ConfigurationError(LACKS_REPLICATION) from error
    except DATABASE_ERRORS:
        pass


def ensure(database_url: str, name: str, publication: str = "fencepost") -> Slot:
    """The slot, made if the tables are still empty.

    A slot sees only what commits after it was made. Where there are rows already and no slot, some of them
    would never be sent, so that is refused rather than begun silently from now.

    Raises:
        ConfigurationError: the server, the role or the publication is not as a relay needs it. Nothing was made.
        RelayBlocked: rows are there and the slot is not.
        ServerUnavailable: the database does not answer.
    """
    with connect(database_url, name="fencepost relay", autocommit=True) as connection:
        require_able(connection, name, publication)
        found = find(connection, name)
        if found is not None:
            return found
        make(connection, name)
        # After the slot: a row that committed in between is in the slot's log and in the table, and refused too.
        row = connection.execute(ROWS_EXIST).fetchone()
        if row is not None and row[0]:
            drop(connection, name)
            raise RelayBlocked(missing(name))
        made = find(connection, name)
        assert made is not None, "made above, on this connection"  # noqa: S101
        return made


def make(connection: Connection, name: str) -> None:
    """Makes the slot; one that standbys of the server keep too, where the server can."""
    failover = ", failover => true" if connection.info.server_version >= FAILOVER_SLOTS else ""
    statement = f"SELECT pg_create_logical_replication_slot(%s, 'pgoutput'{failover})"
    try:
        connection.execute(statement.encode(), (name,))
    except PRIVILEGE_ERRORS as error:
        raise ConfigurationError(LACKS_REPLICATION) from error


def exists(connection: Connection, name: str) -> bool:
    """Whether there is a slot of that name, in whatever state.

    Raises:
        ConfigurationError: there is one that is not the relay's.
    """
    row = connection.execute(_SLOT, (name,)).fetchone()
    if row is not None:
        _require_own(name, row)
    return row is not None


def drop(connection: Connection, name: str) -> None:
    connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))


def require_publication(connection: Connection, publication: str) -> None:
    """Raises ConfigurationError where the publication is not there, or would leave rows out."""
    row = connection.execute(_PUBLICATION, (publication,)).fetchone()
    if row is None:
        raise ConfigurationError(
            f"there is no publication {publication}; run: streams migrate, or set STREAMS_PUBLICATION"
        )
    inserts, via_root, tables, all_tables = row
    if all_tables:
        raise ConfigurationError(
            f"publication {publication} is FOR ALL TABLES; the relay needs one of the tables it sends: "
            f"CREATE PUBLICATION fencepost FOR TABLE {EVENT}, {OUTBOX} WITH (publish = 'insert', publish_via_partition_root)"
        )
    # Without that, what it is said to hold are the days of the outbox.
    by_days = not via_root and any(f"{table}_".startswith(f"{OUTBOX}_") for table in tables)
    if not inserts or by_days:
        raise ConfigurationError(
            f"publication {publication} does not publish inserts as rows of the tables it names; run: "
            f"ALTER PUBLICATION {publication} SET (publish = 'insert', publish_via_partition_root = true)"
        )
    lacking = [table for table in (EVENT, OUTBOX) if table not in tables]
    if not tables or (lacking and publication == "fencepost"):
        raise ConfigurationError(
            f"publication {publication} lacks {' and '.join(lacking)}: rows of it would never be sent; "
            f"run: ALTER PUBLICATION {publication} ADD TABLE {', '.join(lacking)}"
        )


def published(connection: Connection, publication: str) -> list[str]:
    """The tables of a publication."""
    row = connection.execute(_PUBLICATION, (publication,)).fetchone()
    return [] if row is None else list(row[2])


def missing(name: str) -> str:
    return (
        f"there is no replication slot {name}, and the database holds events that a new one would not see. "
        f"It was dropped, or this is a restored or promoted server. {BEGIN_ANEW}"
    )


def gone(name: str) -> str:
    return (
        f"replication slot {name} is gone: it was dropped, or this server was restored or promoted without it. "
        f"{BEGIN_ANEW}"
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


def start_statement(name: str, position: int, publication: str) -> sql.Composed:
    return sql.SQL(
        "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}, binary 'true')"
    ).format(sql.Identifier(name), sql.SQL(position_text(position)), sql.Literal(publication))
