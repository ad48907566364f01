"""Follows a stream of pgoutput messages."""

from __future__ import annotations

from streams.points import reach
from streams.relay import pgoutput
from streams.relay.source import Sink


class LogDecoder:
    """Hands over what messages say, whether they were pushed or fetched."""

    def __init__(self) -> None:
        self._inside = False

    def handle(self, message: bytes, sink: Sink) -> bool:
        """Takes one message with its header; answers whether the server asks for an answer."""
        if message[0] == pgoutput.KEEPALIVE:
            end, asked = pgoutput.keepalive(message)
            # Between BEGIN and COMMIT the server's position says nothing about rows still to come.
            if not self._inside:
                sink.nothing_before(end)
            return asked
        tag = message[pgoutput.XLOG_HEADER]
        if tag == pgoutput.INSERT:
            sink.insert(*pgoutput.inserted(message))
        elif tag == pgoutput.BEGIN:
            commit = pgoutput.begin_position(message)
            sink.begin(commit, commit)
            self._inside = True
        elif tag == pgoutput.COMMIT:
            sink.commit(pgoutput.commit_end(message))
            self._inside = False
            reach("relay.produced")
        elif tag == pgoutput.RELATION:
            sink.table(pgoutput.relation(message))
        # Types, origins and truncations carry nothing to send.
        return False
