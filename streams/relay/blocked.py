"""Records that the broker refuses for good stop their own key only.

They are set aside in the database, and what comes after them of the same key is put behind them, in the order of
commits. So the position can be confirmed, and every other key goes on. Once somebody has decided, the lane is sent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Protocol

from streams.broker.types import KafkaError
from streams.errors import StreamsError
from streams.event import as_headers
from streams.relay.rows import Produced, identity
from streams.relay.tail import position_in
from streams.settings import Settings
from streams.stores import blocked as store
from streams.stores.blocked import Head, LaneKind, NewlyBlocked, Waiting
from streams.stores.postgres import Connection, connect

logger = logging.getLogger(__name__)

Lane = tuple[str, bytes | None]

_BUFFERED_RECORDS = 500
_BUFFERED_BYTES = 8 * 1024 * 1024
_PAGE = 500

# Refusals that say something of the record; whatever else comes to that topic may pass.
_OF_RECORD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
    }
)
# And those that every record of the topic would meet.
_OF_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - its public name
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
ABSENT = "the topic is not there"


def concerns_a_lane(error: KafkaError) -> bool:
    """Whether a refusal can be isolated; any other concerns the producer or the cluster."""
    return error.code() in _OF_RECORD or error.code() in _OF_TOPIC


class Refusal(StreamsError):
    """The broker refused records, and the producer is of no further use.

    Attributes:
        suspects: how many records of each key were refused, for whatever reason of theirs or of those sent with them;
            one by one they will show. Empty where not every record was asked.
    """

    def __init__(self, suspects: Counter[Lane]) -> None:
        self.suspects = suspects
        super().__init__(f"{suspects.total()} records were refused together")


class Held(Protocol):
    """A transaction that may not be confirmed while records of it are in no safe place."""

    outstanding: int


class Blocked:
    """The lanes that wait, as one session knows them. All of them are read once; after that, what changes.

    Args:
        settings: for a connection of its own, and the slot.
        since: the position before which everything is confirmed.
    """

    def __init__(self, settings: Settings, since: int = 0) -> None:
        self._settings = settings
        self._lanes: set[Lane] = set()
        self._topics: set[str] = set()
        self._absent: dict[str, Head] = {}
        self._flowing: dict[tuple[str, bytes | None, int], Head] = {}
        self._records = 0
        self._buffer: list[tuple[NewlyBlocked, Held]] = []
        self._bytes = 0
        self._connection: Connection | None = None
        self.given_up = {
            row.identity
            for row in store.given_up(self._database(), settings.slot)
            if (position_in(tuple(zip(row.header_names, row.header_values, strict=True))) or 0) >= since
        }
        """What was let go and may be read once more, since its position was not confirmed then."""
        for head in store.heads(self._database(), settings.slot):
            self._learn(head)

    @property
    def any(self) -> bool:
        """Whether something waits."""
        return bool(self._lanes or self._topics or self._records or self._flowing)

    def holds(self, topic: str, key: bytes | None) -> bool:
        """Whether a record has to wait behind others."""
        return topic in self._topics or (topic, key) in self._lanes

    def refuse(self, record: Produced, error: KafkaError) -> None:
        """Sets a record aside that was refused; it is safe then. Whatever follows it of its key, or its topic, waits."""
        of_topic = error.code() in _OF_TOPIC
        self._refuse(record, "topic" if of_topic else _lane(record), f"{error.name()}: {error.str()}")

    def refuse_absent(self, record: Produced) -> None:
        """Sets a record aside whose topic does not exist, and all that follow it there."""
        self._refuse(record, "topic", ABSENT)

    def refuse_unframed(self, record: Produced, error: StreamsError) -> None:
        """Sets a record aside whose schema the registry, or the relay, does not have."""
        self._refuse(record, _lane(record), f"{type(error).__name__}: {error}")

    def put_behind(self, record: Produced, held: Held) -> None:
        """Puts a record behind those that its key or its topic waits for. It is safe after the next ``flush``."""
        topic, key, value, _ = record
        held.outstanding += 1
        self._buffer.append((_new(record, "key" if (topic, key) in self._lanes else "topic", None), held))
        self._bytes += len(value or b"")
        if len(self._buffer) >= _BUFFERED_RECORDS or self._bytes >= _BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes down what was put aside."""
        if not self._buffer:
            return
        store.add(self._database(), self._settings.slot, [record for record, _ in self._buffer])
        for _, held in self._buffer:
            held.outstanding -= 1
        self._buffer.clear()
        self._bytes = 0

    def released(self, exists: Callable[[str], bool]) -> list[Head]:
        """The lanes that go on: their first record is to be sent again, or was let go, or its topic is there now."""
        self.flush()
        for lane in store.decided(self._database(), self._settings.slot):
            head = store.head_of(self._database(), self._settings.slot, lane)
            if head is None:
                self._forget_lane(lane)
            else:
                self._learn(head)
        for head in [head for topic, head in self._absent.items() if exists(topic)]:
            self._flowing[_name(head)] = head
        return list(self._flowing.values())

    def next_of(self, lane: Head) -> list[Waiting]:
        """The next records of a lane; where there are none, it is open again."""
        self.flush()
        found = store.following(self._database(), self._settings.slot, lane, _PAGE)
        if not found:
            self._forget_lane(lane)
        going = list(takewhile(lambda record: record.reason in (None, ABSENT) or record.decision, found))
        if found and not going:
            self.halt(lane)
        return going

    def halt(self, lane: Head) -> None:
        """A record of a lane that was to go on was refused again."""
        self._flowing.pop(_name(lane), None)

    def mark_tried(self, records: list[Waiting]) -> None:
        """These are about to be sent; should we die before we forget them, the next session asks their topic."""
        store.mark_tried(self._database(), [record.id for record in records])

    def forget(self, records: list[Waiting]) -> None:
        """These have reached their topic."""
        store.forget(self._database(), [record.id for record in records])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _refuse(self, record: Produced, lane: LaneKind, reason: str) -> None:
        topic, key, value, _ = record
        logger.error(
            "a record for topic %s, %s, %s bytes, was refused (%s); %s waits from now on. Look at it with: streams relay blocked",
            topic,
            "no key" if key is None else f"key {key[:80]!r}",
            f"{len(value or b''):,}",
            reason,
            {"record": "it alone", "key": "its key", "topic": "the topic"}[lane],
        )
        self.flush()
        store.add(self._database(), self._settings.slot, [_new(record, lane, reason)])
        # As a lane it may be flowing, or part of one that is; what waits in it now, the database knows.
        self._learn(Head(topic, lane, key, 0, reason, None))

    def _learn(self, head: Head) -> None:
        if head.lane == "key":
            self._lanes.add((head.topic, head.key))
        elif head.lane == "topic":
            self._topics.add(head.topic)
        else:
            self._records += 1
        if head.goes_on:
            self._flowing[_name(head)] = head
        else:
            self._flowing.pop(_name(head), None)
        if head.reason == ABSENT:
            self._absent[head.topic] = head

    def _forget_lane(self, head: Head) -> None:
        self._flowing.pop(_name(head), None)
        if head.lane == "key":
            self._lanes.discard((head.topic, head.key))
        elif head.lane == "topic":
            self._topics.discard(head.topic)
            self._absent.pop(head.topic, None)

    def _database(self) -> Connection:
        if self._connection is None:
            self._connection = connect(
                self._settings.database_url, name="fencepost relay, blocked records", autocommit=True
            )
        return self._connection


def _name(head: Head) -> tuple[str, bytes | None, int]:
    """What tells a lane from others."""
    return (
        head.topic,
        head.key if head.lane == "key" else None,
        head.id if head.lane == "record" else -(head.lane == "key"),
    )


def _new(record: Produced, lane: LaneKind, reason: str | None) -> NewlyBlocked:
    topic, key, value, headers = record
    return NewlyBlocked(
        identity(topic, key, value, headers), topic, key, value, as_headers(headers), lane, reason
    )


def _lane(record: Produced) -> LaneKind:
    return "record" if record[1] is None else "key"


def as_produced(record: Waiting) -> Produced:
    return (
        record.topic,
        record.key,
        record.payload,
        [*zip(record.header_names, record.header_values, strict=True)],
    )
