"""The slot peek: the log read by SQL, where no replication connection can be had."""

from __future__ import annotations

import time
from collections import deque

from streams.errors import RelayBlocked
from streams.relay import slot
from streams.relay.decoder import LogDecoder
from streams.relay.pgoutput import COMMIT, XLOG_HEADER, commit_end, position_text
from streams.relay.portal import Portal, SqlConnection, lock, server
from streams.relay.source import RequireSame, Sink
from streams.settings import Settings
from streams.stores.postgres import sql

# How many changes one look takes; a transaction is never cut in two.
_CHANGES = 20_000
_ADVANCE_SECONDS = 1.0
_SOON_SECONDS, _LATER_SECONDS = 0.002, 0.1
_NO_HEADER = bytes(XLOG_HEADER)


class SlotPeek:
    """Looks into the slot again and again. Implements ``streams.relay.source.Source``.

    A look begins where the slot stands, so the next one waits until all of the last is safe and the slot is advanced.
    """

    def __init__(self, settings: Settings) -> None:
        self._slot, self._publication = settings.slot, settings.publication
        self._sql = SqlConnection(settings, slot.ACTIVE)
        self._decoder = LogDecoder()
        self._portal: Portal | None = None
        self._messages: deque[bytes] = deque()
        self._taken = 0
        self._handed_over = 0
        self._until = 0
        self._advanced_at = 0.0
        self._pause = _SOON_SECONDS
        self.confirmed = 0
        self.ended = False

    def begin(self, require_same: RequireSame) -> int:
        lock(self._sql.connection, self._slot)
        require_same(server(self._sql.connection), lambda _: "")
        found = slot.find(self._sql.connection, self._slot)
        if found is None:
            raise RelayBlocked(slot.gone(self._slot))
        self.confirmed = self._handed_over = found.confirmed
        return found.confirmed

    def take(self, sink: Sink, limit: int) -> bool:
        if not self._messages and not self._fetch(sink):
            return False
        for _ in range(min(limit, len(self._messages))):
            message = self._messages.popleft()
            if message[XLOG_HEADER] == COMMIT:
                self._handed_over = commit_end(message)
            self._decoder.handle(message, sink)
        return True

    def _fetch(self, sink: Sink) -> bool:
        """Gets the next messages; answers whether there are any."""
        if self._portal is None:
            if self.confirmed < self._handed_over:
                self._pause = _SOON_SECONDS
                return False
            self._portal = self._look()
        rows = self._portal.page()
        self._messages.extend(_NO_HEADER + (data or b"") for (data,) in rows)
        self._taken += len(rows)
        if rows:
            return True
        self._portal.close()
        self._portal = None
        if self._taken < _CHANGES:
            sink.nothing_before(self._until)
            self._pause = _LATER_SECONDS
        return False

    def _look(self) -> Portal:
        self._taken = 0
        self._until = server(self._sql.connection).written
        query = sql.SQL(
            "SELECT data FROM pg_logical_slot_peek_binary_changes("
            "{}, {}, {}, 'proto_version', '1', 'publication_names', {}, 'binary', 'true')"
        ).format(self._slot, position_text(self._until), _CHANGES, self._publication)
        return Portal(self._sql, "fencepost_peek", query)

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, self._pause))

    def report(self, position: int, *, now: bool = False) -> None:
        due = now or time.monotonic() - self._advanced_at > _ADVANCE_SECONDS
        # At the end of a look at once, since the next one waits for it.
        if position > self.confirmed and (due or self.confirmed < self._handed_over <= position):
            advance = sql.SQL("SELECT pg_replication_slot_advance({}, {})")
            self._sql.connection.execute(advance.format(self._slot, position_text(position)))
            self._sql.spoke()
            self.confirmed, self._advanced_at = position, time.monotonic()
        self._sql.keep()

    def close(self) -> None:
        self._sql.connection.close()
