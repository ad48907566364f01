"""Reading a large result by pages, without a transaction that stays open meanwhile."""

from __future__ import annotations

import time

from streams.relay.pgoutput import Columns, position_from_text
from streams.relay.source import LOCK, SILENCE_SECONDS, Server, StandBy
from streams.settings import Settings
from streams.stores.postgres import Connection, connect, sql

_PAGE_BYTES = 2 * 1024 * 1024
# Few, since the next page may hold the largest rows there are, whatever the last one held.
_PAGE_ROWS = 32
_ALIVE_SECONDS = 2.0

_SERVER = """
SELECT system_identifier::text, timeline_id, pg_current_wal_flush_lsn()::text
FROM pg_control_system(), pg_control_checkpoint()"""


def lock(connection: Connection, slot: str) -> None:
    """Takes the relay's lock for as long as the connection lives.

    Raises:
        StandBy: another relay has it.
    """
    row = connection.execute(sql.SQL(LOCK).format(slot)).fetchone()
    if row is None or not row[0]:
        raise StandBy(f"another relay is at work for slot {slot}")


def server(connection: Connection) -> Server:
    row = connection.execute(_SERVER).fetchone()
    assert row is not None, "the functions answer one row each"  # noqa: S101
    return Server(row[0], row[1], position_from_text(row[2]))


class SqlConnection:
    """What the two sources share that ask by SQL: one connection, with the lock, that must not fall silent."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.connection = connect(
            settings.database_url, name=name, autocommit=True, seconds=settings.connect_seconds
        )
        # A frozen process holds the lock only for so long; the log stream has its sender's timeout instead.
        self.connection.execute(f"SET idle_session_timeout = '{SILENCE_SECONDS}s'".encode())
        self._spoke_at = time.monotonic()

    def keep(self) -> None:
        """Says something, if nothing was said for a while."""
        if time.monotonic() - self._spoke_at > _ALIVE_SECONDS:
            self.connection.execute("SELECT 1")
            self.spoke()

    def spoke(self) -> None:
        self._spoke_at = time.monotonic()


class Portal:
    """A query's rows in binary form, fetched in pages of bounded size.

    The cursor is held: the server keeps the result, on disk where it is large, and no transaction stays open while the
    broker takes its time.
    """

    def __init__(self, at: SqlConnection, name: str, query: sql.Composed) -> None:
        self._at, self._name = at, sql.Identifier(name)
        self._rows = 1
        at.connection.execute(
            sql.SQL("DECLARE {} NO SCROLL CURSOR WITH HOLD FOR ").format(self._name) + query
        )
        at.spoke()

    def page(self) -> list[Columns]:
        """The next rows; none at the end."""
        query = sql.SQL("FETCH FORWARD {} FROM {}").format(sql.Literal(self._rows), self._name)
        with self._at.connection.cursor(binary=True) as cursor:
            result = cursor.execute(query).pgresult
            assert result is not None, "a FETCH has a result"  # noqa: S101
            value, width = result.get_value, result.nfields
            rows = [[value(row, column) for column in range(width)] for row in range(result.ntuples)]
        self._at.spoke()
        if rows:
            size = sum(len(value) for row in rows for value in row if value is not None) // len(rows)
            self._rows = max(1, min(_PAGE_ROWS, self._rows * 8, _PAGE_BYTES // max(1, size)))
        return rows

    def close(self) -> None:
        self._at.connection.execute(sql.SQL("CLOSE {}").format(self._name))
