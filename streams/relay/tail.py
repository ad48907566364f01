"""What a topic holds already of transactions that the slot will send again.

A relay that died had sent more than was confirmed. Before its successor sends the first record to a topic, it reads
the end of each partition, back to what was certainly confirmed, and remembers what is there by content. The same row
makes the same bytes, its position in the log among them, so what is there need not be sent a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from streams.broker import kafka
from streams.broker.kafka import Place
from streams.event import FP_ERROR, FP_POSITION, Record
from streams.relay.pgoutput import position_from_text
from streams.relay.rows import Produced
from streams.settings import Settings

_FIRST_STRETCH = 2_000
_GROWTH = 8


class Tail:
    """The unconfirmed ends of topics, read when they are first asked for.

    Args:
        confirmed: the position from which on the slot sends again.
    """

    def __init__(self, settings: Settings, confirmed: int) -> None:
        self._settings = settings
        self._confirmed = confirmed
        self._held: set[bytes] = set()
        self.horizon = 0
        """The highest commit position found; beyond it nothing can be there already."""

    def read(self, topic: str) -> None:
        """Reads a topic's ends.

        Raises:
            ServerUnavailable: the broker does not answer.
        """
        ends = kafka.end_offsets(self._settings, [topic])
        begins = kafka.begin_offsets(self._settings, [topic])
        stretch, unread = _FIRST_STRETCH, set(ends)
        while unread:
            start = {place: max(begins[place], ends[place] - stretch) for place in unread}
            oldest = self._take(start, {place: ends[place] for place in unread})
            unread = {
                place
                for place in unread
                if start[place] > begins[place] and oldest.get(place, 1 << 64) >= self._confirmed
            }
            stretch *= _GROWTH

    def holds(self, record: Produced) -> bool:
        """Whether this very record is in its topic already."""
        topic, key, value, headers = record
        return _digest(topic, key, value, headers) in self._held

    def _take(self, start: dict[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        """Remembers the unconfirmed records of a stretch; answers the oldest position seen in each partition."""
        oldest: dict[Place, int] = {}
        for record in kafka.read(self._settings, start, end):
            position = commit_position(record)
            if position is None:
                continue  # another producer's; it says nothing about ours
            oldest.setdefault((record.topic, record.partition), position)
            if position >= self._confirmed:
                self._held.add(_digest(record.topic, record.key, record.value, record.headers))
                self.horizon = max(self.horizon, position)
        return oldest


def commit_position(record: Record) -> int | None:
    """The commit position of the row that a record was; None where no relay sent it."""
    name, error = record.headers[-1] if record.headers else ("", None)
    text = _position_of_letter(error) if name == FP_ERROR else record.header(FP_POSITION)
    if text is None:
        return None
    try:
        return position_from_text(text.decode().rpartition("/")[0])
    except ValueError:
        return None


def _position_of_letter(error: bytes | None) -> bytes | None:
    try:
        return str(json.loads(error or b"")["position"]).encode()
    except (ValueError, KeyError, TypeError):
        return None


def _digest(
    topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, str | bytes | None]]
) -> bytes:
    digest = hashlib.blake2b(topic.encode(), digest_size=16)
    for part in (key, value, *(part for name, content in headers for part in (name, content))):
        content = part.encode() if isinstance(part, str) else part
        # Lengths, so that no two different records make the same bytes; -1 for what is absent.
        digest.update((-1 if content is None else len(content)).to_bytes(8, "big", signed=True))
        digest.update(content or b"")
    return digest.digest()
