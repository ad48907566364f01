"""Connections to PostgreSQL, and what fencepost requires of the server."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import psycopg
from psycopg import sql as sql  # noqa: PLC0414 - for those who compose statements and import no driver

from streams.errors import ConfigurationError, NotLetIn, ServerUnavailable

Connection = psycopg.Connection[tuple[Any, ...]]

DATABASE_ERRORS = (psycopg.Error,)

# Of these the connection may be gone; what they mean inside a transaction is for fault_of to say.
CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)
PRIVILEGE_ERRORS = (psycopg.errors.InsufficientPrivilege,)
# Somebody else holds what was asked for, and did not let go in time.
LOCK_ERRORS = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.ObjectInUse)

# What a server answers who does not know us. Before a session there is no SQLSTATE, only these words.
_STRANGERS = re.compile(
    r"authentication failed|role \S+ does not exist|database \S+ does not exist|no pg_hba\.conf entry"
    r"|no password supplied|resolve host|translate host name|is not permitted to log in|SSL"
)

_HOW_TO_WRITE = (
    "it is a URL, postgresql://user:password@host:port/database, in which special characters of a password are written "
    "as %XX (@ as %40, / as %2F, % as %25), or a DSN, host=... user=..., in which a value with spaces stands in '...'"
)


def _names_password(database_url: str) -> bool:
    """Whether a piece of it, such as errors quote, may be one of a password."""
    return "@" in database_url or "pass" in database_url.lower()


def _is_cut_short(database_url: str) -> bool:
    """Whether a password in a URL ends at a character of its own, and the rest of it passes for a host or a database."""
    _, _, rest = database_url.partition("://")
    before, _, query = rest.partition("?")
    user, at, _ = (before if "@" in before or "@" not in query else rest).rpartition("@")
    return bool(at) and ("@" in user or "/" in user)


class Fault(Enum):
    """Whose an error is."""

    RECORD = "record"  # one record's effects: it fails, its neighbours do not
    REPEAT = "repeat"  # the transaction met another one; repeated, it succeeds
    SCHEMA = "schema"  # a table, column or right that is not there: every record would meet it
    SERVER = "server"  # the server is away, full, or shutting down; it passes


# By the class, or the whole of SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html
_FAULTS = {
    "08": Fault.SERVER,  # connection
    "53": Fault.SERVER,  # out of disk, memory, connections
    "57": Fault.SERVER,  # shutdown, cancelled
    "58": Fault.SERVER,  # the system below
    "XX": Fault.SERVER,  # data corrupted
    "40": Fault.REPEAT,  # serialization, deadlock
    "55": Fault.REPEAT,  # lock not available
    "25P03": Fault.REPEAT,  # idle in transaction for too long
    "3F": Fault.SCHEMA,
    "42501": Fault.SCHEMA,
    "42P01": Fault.SCHEMA,
    "42703": Fault.SCHEMA,
    "42883": Fault.SCHEMA,
    "42P10": Fault.SCHEMA,  # ON CONFLICT without a fitting constraint
}


def fault_of(error: BaseException) -> Fault:
    """Whose fault an error of psycopg is; what is not known to be wider is the record's."""
    code = getattr(error, "sqlstate", None)
    if code is None:
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return Fault.SERVER if lost else Fault.RECORD
    return _FAULTS.get(code) or _FAULTS.get(code[:2]) or Fault.RECORD


def may_pass(error: BaseException) -> bool:
    """Whether a record's effects that were refused may be taken another time.

    A foreign key may be satisfied once another event has arrived, and what a trigger raises is unknown; a value
    that does not fit its column or its check never will.
    """
    code = getattr(error, "sqlstate", None) or "22000"
    return code == "23503" or code[:2] not in ("22", "23", "54")


def connect(
    database_url: str, *, name: str = "fencepost", autocommit: bool = False, seconds: float = 10
) -> Connection:
    """Connects; ``name`` shows in pg_stat_activity.

    A frozen process must not hold its locks for ever, nor a broken network go unnoticed: the server ends a
    transaction in which nothing happens for half a minute, and either side notices a silent peer in about as long.

    Raises:
        ConfigurationError: the URL cannot be read; as NotLetIn where the server does not know whom it names.
        ServerUnavailable: with the server's own words and what to check.
    """
    try:
        connection = psycopg.connect(
            database_url,
            autocommit=True,
            application_name=name,
            connect_timeout=max(2, int(seconds)),
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=30_000,
        )
        connection.execute("SET idle_in_transaction_session_timeout = '30s'")
        connection.autocommit = autocommit
    except psycopg.ProgrammingError as error:
        detail = "" if _names_password(database_url) else f" ({_first_line(error)})"
        raise ConfigurationError(f"STREAMS_DATABASE_URL cannot be read{detail}; {_HOW_TO_WRITE}") from None
    except psycopg.OperationalError as error:
        if _is_cut_short(database_url):
            raise ConfigurationError(f"STREAMS_DATABASE_URL cannot be read; {_HOW_TO_WRITE}") from None
        if _STRANGERS.search(str(error)):
            raise NotLetIn(
                f"PostgreSQL does not let us in ({_first_line(error)}); check STREAMS_DATABASE_URL "
                "(special characters of a password in a URL are written as %XX)"
            ) from error
        raise ServerUnavailable(
            f"PostgreSQL does not answer ({_first_line(error)}); "
            "check STREAMS_DATABASE_URL, or start local servers with: streams dev up"
        ) from error
    return connection


def require_migrated(connection: Connection, newest: str) -> None:
    """Raises ServerUnavailable where the database lacks migrations, or has ones that this version does not know."""
    row = connection.execute("SELECT to_regclass('fencepost.migration')").fetchone()
    if row is None or row[0] is None:
        raise ServerUnavailable("the database has no fencepost tables; run: streams migrate")
    found = connection.execute("SELECT version_num FROM fencepost.migration").fetchone()
    if found is None or found[0] < newest:
        raise ServerUnavailable(
            f"the database is at migration {found[0] if found else 'none'}, this version needs {newest}; "
            "run: streams migrate"
        )
    if found[0] > newest:
        raise ServerUnavailable(
            f"the database is at migration {found[0]}, newer than this version of fencepost knows"
        )


def require_logical(connection: Connection) -> None:
    """Raises ConfigurationError where the server writes too little into its log to be read by a relay."""
    row = connection.execute("SELECT current_setting('wal_level')").fetchone()
    if row is None or row[0] != "logical":
        raise ConfigurationError(
            f"PostgreSQL runs with wal_level={row[0] if row else '?'}, the relay reads the log and needs 'logical'; "
            "run: ALTER SYSTEM SET wal_level = logical; and restart the server, or set STREAMS_RELAY_SOURCE=poll"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def clock_milliseconds(connection: Connection) -> float:
    """The database's clock, milliseconds since the epoch."""
    row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float * 1000").fetchone()
    assert row is not None, "a SELECT without FROM answers a row"  # noqa: S101
    return float(row[0])
