"""Connections to PostgreSQL, and what fencepost requires of the server."""

from __future__ import annotations

from typing import Any

import psycopg

from streams.errors import ConfigurationError, ServerUnavailable

Connection = psycopg.Connection[tuple[Any, ...]]

DATABASE_ERRORS = (psycopg.Error,)

# A server that is gone, restarting or unreachable; the same work may succeed on a new connection.
CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)

# What the database says of one record's effects: the record fails, its neighbours do not.
DATA_ERRORS = (psycopg.IntegrityError, psycopg.DataError, psycopg.errors.RaiseException)

# The transaction met another one; the same work succeeds when it is repeated.
REPEATABLE_ERRORS = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)

# A table, column or function that is not there: every record would meet it, so none is to blame.
UNDEFINED_ERRORS = (psycopg.ProgrammingError, psycopg.NotSupportedError)


def may_pass(error: BaseException) -> bool:
    """Whether effects that were refused may be taken another time.

    A foreign key may be satisfied once another event has arrived, and what a trigger raises is unknown; a value
    that does not fit its column or its check never will.
    """
    return not isinstance(error, DATA_ERRORS) or isinstance(
        error, psycopg.errors.ForeignKeyViolation | psycopg.errors.RaiseException
    )


def connect(
    database_url: str, *, name: str = "fencepost", autocommit: bool = False, seconds: float = 10
) -> Connection:
    """Connects; ``name`` shows in pg_stat_activity.

    Raises:
        ServerUnavailable: with the server's own words and what to check.
    """
    try:
        return psycopg.connect(
            database_url, autocommit=autocommit, application_name=name, connect_timeout=max(2, int(seconds))
        )
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(f"STREAMS_DATABASE_URL cannot be read: {error}") from error
    except psycopg.OperationalError as error:
        raise ServerUnavailable(
            f"PostgreSQL does not answer ({_first_line(error)}); "
            "check STREAMS_DATABASE_URL, or start local servers with: streams dev up"
        ) from error


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
    """Raises ServerUnavailable where the server writes too little into its log to be read by a relay."""
    row = connection.execute("SELECT current_setting('wal_level')").fetchone()
    if row is None or row[0] != "logical":
        raise ServerUnavailable(
            f"PostgreSQL runs with wal_level={row[0] if row else '?'}, the relay reads the log and needs 'logical'; "
            "run: ALTER SYSTEM SET wal_level = logical; and restart the server"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def clock_milliseconds(connection: Connection) -> float:
    """The database's clock, milliseconds since the epoch."""
    row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float * 1000").fetchone()
    assert row is not None, "a SELECT without FROM answers a row"  # noqa: S101
    return float(row[0])
