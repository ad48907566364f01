"""What a topic holds already of transactions that the slot will send again.

A relay that died had sent more than was confirmed. Before its successor sends the first record to a topic, it reads
the end of each partition, back to what was certainly confirmed, and remembers what is there by content. The same row
makes the same bytes, its position in the log among them, so what is there need not be sent a second time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from streams.broker import kafka
from streams.broker.kafka import Place
from streams.event import FP_ERROR, FP_POSITION, Headers, Record
from streams.observe import metrics
from streams.relay.pgoutput import position_from_text
from streams.relay.rows import Produced, identity
from streams.settings import Settings

logger = logging.getLogger(__name__)

# A record's time is of the relay's clock, the database's that of its own.
CLOCKS_APART = timedelta(minutes=5)

_FIRST_STRETCH = 2_000
_GROWTH = 8
# Topics that others write to may hold none of ours for long; somewhere the search must end.
_LONGEST = 1_000_000


class Tail:
    """The unconfirmed ends of topics, read when they are first asked for.

    Args:
        confirmed: the position from which on the slot sends again.
        while_reading: called every so often; what it raises ends the reading.
    """

    def __init__(
        self, settings: Settings, confirmed: int, while_reading: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._confirmed = confirmed
        self._while_reading = while_reading
        self._held: set[bytes] = set()
        self._sent_keys: set[tuple[str, bytes]] = set()
        self.horizon = 0
        """The highest commit position found; beyond it nothing can be there already."""

    def read(self, topic: str) -> None:
        """Reads a topic's ends, backwards in stretches.

        Raises:
            ServerUnavailable: the broker does not answer.
        """
        ends = kafka.end_offsets(self._settings, [topic])
        begins = kafka.begin_offsets(self._settings, [topic])
        limits = {place: max(begins[place], end - _LONGEST) for place, end in ends.items()}
        stretch = _FIRST_STRETCH
        until = {place: end for place, end in ends.items() if end > begins[place]}
        while until:
            start = {place: max(limits[place], end - stretch) for place, end in until.items()}
            oldest = self._take(start, until)
            wanting = {place for place in until if oldest.get(place, 1 << 64) >= self._confirmed}
            for place in wanting:
                if start[place] == limits[place] > begins[place]:
                    _warn(place)
            # The next stretch ends where this one began, so nothing is read twice.
            until = {place: start[place] for place in wanting if start[place] > limits[place]}
            stretch *= _GROWTH

    def need_not_send(self, record: Produced) -> bool:
        """Whether this very record is in its topic already, and stands there behind those before it of its key.

        Once an earlier record of its key had to be sent, the later ones are sent again behind it, whether they are
        there or not. So behind each record that is sent stand all that follow it, in their order, whatever the broker
        took and refused before.
        """
        topic, key, value, headers = record
        if key is None:
            return identity(topic, key, value, headers) in self._held
        if (topic, key) not in self._sent_keys and identity(topic, key, value, headers) in self._held:
            return True
        self._sent_keys.add((topic, key))
        return False

    def _take(self, start: dict[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        """Remembers the unconfirmed records of a stretch; answers the oldest position seen in each partition."""
        oldest: dict[Place, int] = {}
        for record in kafka.read(self._settings, start, end, self._while_reading):
            position = commit_position(record)
            if position is None:
                continue  # another producer's; it says nothing about ours
            oldest.setdefault((record.topic, record.partition), position)
            if position >= self._confirmed:
                self._held.add(identity(record.topic, record.key, record.value, record.headers))
                self.horizon = max(self.horizon, position)
        return oldest


def sent_since(
    settings: Settings, topic: str, since: datetime, while_reading: Callable[[], None]
) -> set[bytes]:
    """The identities of what was sent to a topic since then, as far as clocks agree.

    Raises:
        ServerUnavailable: the broker does not answer.
    """
    begins = kafka.offsets_since(settings, [topic], since - CLOCKS_APART)
    ends = kafka.end_offsets(settings, [topic])
    return {
        identity(record.topic, record.key, record.value, record.headers)
        for record in kafka.read(settings, begins, ends, while_reading)
    }


def _warn(place: Place) -> None:
    metrics.RELAY_TAILS_CUT.inc()
    logger.warning(
        "the last %s records of %s/%s hold none that is certainly confirmed; none older was read, so a relay that died "
        "before may have sent some records that are now sent again",
        f"{_LONGEST:,}",
        *place,
    )


def commit_position(record: Record) -> int | None:
    """The commit position of the row that a record was; None where no relay sent it."""
    return position_in(record.headers)


def position_in(headers: Headers) -> int | None:
    """The commit position that a record's headers say; None where they do not."""
    name, error = headers[-1] if headers else ("", None)
    said = (value for name, value in reversed(headers) if name == FP_POSITION)
    text = _position_of_letter(error) if name == FP_ERROR else next(said, None)
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
