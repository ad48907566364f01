"""One connection to the database's log."""

from __future__ import annotations

import select
import time
from typing import Any

import psycopg
from psycopg import conninfo, errors, sql

from streams.errors import RelayBlocked, ServerUnavailable
from streams.relay import slot
from streams.relay.pgoutput import position_from_text, status_update
from streams.settings import Settings

_STATUS_SECONDS = 1.0


class SlotInUse(ServerUnavailable):
    """Another relay reads the slot; this one stands by."""


# A connection that died without a word is noticed within half a minute, on either side of a firewall that forgot it.
_CONNECTION = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


class LogStream:
    """A connection to the log; once started, the messages of the slot, without blocking.

    Whatever is asked before ``start`` is asked on this very connection: another could lead to another server.
    """

    def __init__(self, settings: Settings) -> None:
        self._slot = settings.slot
        self._connection = psycopg.connect(
            **connection_options(settings),
            autocommit=True,
            # The log's protocol knows no statement with parameters apart.
            cursor_factory=psycopg.ClientCursor,
        )
        self._pg = self._connection.pgconn
        self._reported = 0
        self._reported_at = 0.0

    def server(self) -> slot.Server:
        """Which server this is, and how far it has written."""
        row = self._connection.execute("IDENTIFY_SYSTEM").fetchone()
        assert row is not None, "the command answers one row"  # noqa: S101
        return slot.Server(str(row[0]), int(row[1]), position_from_text(row[2]))

    def history(self, timeline: int) -> str:
        """Where a timeline and those before it branched off, a line each."""
        query = sql.SQL("TIMELINE_HISTORY {}").format(sql.Literal(timeline))
        row = self._connection.execute(query).fetchone()
        assert row is not None, "the command answers one row"  # noqa: S101
        return row[1].decode() if isinstance(row[1], bytes) else str(row[1])

    def slot_position(self) -> int:
        """The position that the slot itself has confirmed.

        Raises:
            RelayBlocked: there is no such slot here.
        """
        found = slot.find(self._connection, self._slot)
        if found is None:
            raise RelayBlocked(slot.gone(self._slot))
        return found.confirmed

    def start(self, position: int) -> None:
        """Begins to read.

        Raises:
            SlotInUse: another process reads the slot.
        """
        try:
            self._connection.execute(slot.start_statement(self._slot, position))
        except errors.ObjectInUse as error:
            raise SlotInUse(str(error).strip()) from error
        self._pg.nonblocking = 1

    def read(self) -> bytes | None:
        """The next message, or None where none has arrived yet.

        Raises:
            psycopg.OperationalError: the connection or the server is gone.
        """
        length, data = self._pg.get_copy_data(1)
        if length == 0:
            self._pg.consume_input()
            length, data = self._pg.get_copy_data(1)
        if length > 0:
            return bytes(data)
        if length == 0:
            return None
        # After the copy has ended, get_result would repeat itself for ever; the connection is of no further use.
        raise psycopg.OperationalError(f"the log stream ended: {self._pg.get_error_message()}")

    def wait(self, seconds: float) -> None:
        """Returns when something has arrived, or the time is over."""
        select.select([self._pg.socket], [], [], seconds)

    def report(self, position: int, *, now: bool = False) -> None:
        """Confirms a position when it has moved or a second has passed; at once where the server asked."""
        clock = time.monotonic()
        due = clock - self._reported_at
        if not now and due < (_STATUS_SECONDS if position == self._reported else _STATUS_SECONDS / 10):
            return
        self._pg.put_copy_data(status_update(position))
        self._pg.flush()
        self._reported, self._reported_at = position, clock

    def close(self) -> None:
        self._connection.close()


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of the log's connection; what the database's URL says goes before."""
    return {
        **_CONNECTION,
        "connect_timeout": max(2, int(settings.connect_seconds)),
        **conninfo.conninfo_to_dict(settings.database_url),
        "replication": "database",
        "application_name": "fencepost relay",
        "client_encoding": "UTF8",
    }
