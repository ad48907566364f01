"""One connection to the database's log."""

from __future__ import annotations

import select
import time

import psycopg
from psycopg import errors

from streams.errors import ServerUnavailable
from streams.relay import slot
from streams.relay.pgoutput import status_update

_STATUS_SECONDS = 1.0


class SlotInUse(ServerUnavailable):
    """Another relay reads the slot; this one stands by."""


class LogStream:
    """The messages of a slot from a position on, without blocking.

    Raises (on construction):
        SlotInUse: another process reads it.
    """

    def __init__(self, database_url: str, slot_name: str, position: int) -> None:
        self._connection = psycopg.connect(
            database_url,
            autocommit=True,
            replication="database",
            application_name="fencepost relay",
            client_encoding="UTF8",
        )
        try:
            self._connection.execute(slot.start_statement(slot_name, position))
        except errors.ObjectInUse as error:
            self._connection.close()
            raise SlotInUse(str(error).strip()) from error
        self._pg = self._connection.pgconn
        self._pg.nonblocking = 1
        self._reported = 0
        self._reported_at = 0.0

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
