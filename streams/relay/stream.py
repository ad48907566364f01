"""The log stream: PostgreSQL pushes what is committed over a replication connection."""

from __future__ import annotations

import select
import time
from typing import Any

import psycopg
from psycopg import conninfo, errors, sql

from streams.errors import ConfigurationError, RelayBlocked
from streams.relay import pgoutput, slot
from streams.relay.decoder import LogDecoder
from streams.relay.pgoutput import position_from_text, status_update
from streams.relay.portal import lock
from streams.relay.source import SILENCE_SECONDS, RequireSame, Server, Sink, StandBy
from streams.settings import Settings

_STATUS_SECONDS = 1.0
# A connection that died without a word is noticed within half a minute, on either side of a firewall that forgot it.
_CONNECTION = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


class LogStream:
    """One replication connection. Implements ``streams.relay.source.Source``.

    Whatever is asked before the stream starts is asked on this very connection: another could lead to another server.
    """

    def __init__(self, settings: Settings) -> None:
        self._slot, self._publication = settings.slot, settings.publication
        self._connection = connect_to_log(settings)
        self._pg = self._connection.pgconn
        self._decoder = LogDecoder()
        self._reported_at = 0.0
        self._asked = False
        self.confirmed = 0
        self.ended = False

    def begin(self, require_same: RequireSame) -> int:
        lock(self._connection, self._slot)
        require_same(self._server(), self._history)
        found = slot.find(self._connection, self._slot)
        if found is None:
            raise RelayBlocked(slot.gone(self._slot))
        # The slot's own position, not one remembered here: a server that was restored, or took over, has a slot that
        # is behind, and what lies between the two would never be sent.
        try:
            self._connection.execute(slot.start_statement(self._slot, found.confirmed, self._publication))
        except errors.ObjectInUse as error:
            raise StandBy(str(error).strip()) from error
        self._pg.nonblocking = 1
        self.confirmed = found.confirmed
        return found.confirmed

    def take(self, sink: Sink, limit: int) -> bool:
        pg, handle, insert = self._pg, self._decoder.handle, sink.insert
        get, inserted = pg.get_copy_data, pgoutput.inserted
        for _ in range(limit):
            length, data = get(1)
            if length == 0:
                pg.consume_input()
                length, data = get(1)
            if length > 0:
                message = bytes(data)
                if message[0] != pgoutput.KEEPALIVE and message[pgoutput.XLOG_HEADER] == pgoutput.INSERT:
                    insert(*inserted(message))  # as the decoder does it, in one step less for most messages
                elif handle(message, sink):
                    self._asked = True
            elif length == 0:
                return False
            else:
                # After the copy has ended, get_result would repeat itself for ever; the connection is of no further use.
                raise psycopg.OperationalError(f"the log stream ended: {pg.get_error_message()}")
        return True

    def wait(self, seconds: float) -> None:
        select.select([self._pg.socket], [], [], seconds)

    def report(self, position: int, *, now: bool = False) -> None:
        """Confirms a position when it has moved or a second has passed; at once where the server asked."""
        clock = time.monotonic()
        due = clock - self._reported_at
        if not (now or self._asked) and due < (
            _STATUS_SECONDS if position == self.confirmed else _STATUS_SECONDS / 10
        ):
            return
        self._pg.put_copy_data(status_update(position))
        self._pg.flush()
        self.confirmed, self._reported_at, self._asked = position, clock, False

    def close(self) -> None:
        self._connection.close()

    def _server(self) -> Server:
        row = self._connection.execute("IDENTIFY_SYSTEM").fetchone()
        assert row is not None, "the command answers one row"  # noqa: S101
        return Server(str(row[0]), int(row[1]), position_from_text(row[2]))

    def _history(self, timeline: int) -> str:
        query = sql.SQL("TIMELINE_HISTORY {}").format(sql.Literal(timeline))
        row = self._connection.execute(query).fetchone()
        assert row is not None, "the command answers one row"  # noqa: S101
        return row[1].decode() if isinstance(row[1], bytes) else str(row[1])


def connect_to_log(settings: Settings) -> psycopg.Connection[Any]:
    """A replication connection.

    Raises:
        ConfigurationError: the role may not replicate.
        psycopg.OperationalError: the server is not there, or has no sender left.
    """
    try:
        return psycopg.connect(
            **connection_options(settings),
            autocommit=True,
            # The log's protocol knows no statement with parameters apart.
            cursor_factory=psycopg.ClientCursor,
        )
    except psycopg.OperationalError as error:
        if "REPLICATION" in str(error) or "replication role" in str(error):
            raise ConfigurationError(slot.LACKS_REPLICATION) from error
        raise


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of the log's connection; what the database's URL says goes before."""
    url = conninfo.conninfo_to_dict(settings.database_url)
    silence = f"-c wal_sender_timeout={SILENCE_SECONDS * 1_000}"
    return {
        **_CONNECTION,
        "connect_timeout": max(2, int(settings.connect_seconds)),
        **url,
        # Of two, the later one holds.
        "options": f"{silence} {url.get('options', '')}".strip(),
        "replication": "database",
        "application_name": slot.ACTIVE,
        "client_encoding": "UTF8",
    }
