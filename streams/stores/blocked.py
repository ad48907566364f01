"""The SQL of records that the broker refused, and of those that wait behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from psycopg.rows import class_row

from streams.event import Headers
from streams.stores.postgres import Connection

# What waits behind a refused record: nothing where it has no key, its key, or its whole topic.
LaneKind = Literal["record", "key", "topic"]
Decision = Literal["resend", "let_go"]

_ADD = """
INSERT INTO fencepost.relay_blocked AS relay_blocked (slot, identity, topic, key, payload, header_names, header_values, lane, reason)
VALUES (%(slot)s, %(identity)s, %(topic)s, %(key)s, %(payload)s, %(header_names)s::text[], %(header_values)s::bytea[],
    %(lane)s, %(reason)s)
ON CONFLICT (slot, identity) DO UPDATE SET reason = excluded.reason, decision = NULL, decided_at = NULL,
    -- What waits for its key goes on waiting for it: those behind it stand in that lane.
    lane = CASE relay_blocked.lane WHEN 'key' THEN 'key' ELSE excluded.lane END
    WHERE excluded.reason IS NOT NULL AND relay_blocked.decision IS DISTINCT FROM 'let_go'"""

# One of the records of a topic that waits as a whole was refused for itself: those of its key wait for it from now on.
_NARROW = """
UPDATE fencepost.relay_blocked SET lane = 'key'
WHERE slot = %(slot)s AND topic = %(topic)s AND key = %(key)s AND lane = 'topic'"""

_LANE_KEY = "CASE lane WHEN 'key' THEN key WHEN 'record' THEN int8send(id) END"

_HEADS = f"""
SELECT DISTINCT ON (topic, lane, {_LANE_KEY}) topic, lane, key, id, reason, decision FROM fencepost.relay_blocked
WHERE slot = %s AND decision IS DISTINCT FROM 'let_go' ORDER BY topic, lane, {_LANE_KEY}, id"""  # noqa: S608 - constants

# By kind, so that each finds its index.
_OF_LANE: dict[LaneKind, str] = {
    "record": "id = %(id)s",
    "key": "topic = %(topic)s AND key = %(key)s AND lane = 'key'",
    "topic": "topic = %(topic)s AND lane = 'topic'",
}

_NEXT = """
SELECT id, topic, key, payload, header_names, header_values, reason, decision, tried_at
FROM fencepost.relay_blocked WHERE slot = %(slot)s AND {} AND decision IS DISTINCT FROM 'let_go' ORDER BY id LIMIT %(limit)s"""

_HEAD = """
SELECT topic, lane, key, id, reason, decision FROM fencepost.relay_blocked
WHERE slot = %(slot)s AND {} AND decision IS DISTINCT FROM 'let_go' ORDER BY id LIMIT 1"""

# What is decided goes soon: sent again, and then it is not here any more, or it was let go a moment ago.
_DECIDED = """
SELECT DISTINCT ON (topic, lane, key, CASE lane WHEN 'record' THEN id END) topic, lane, key, id, reason, decision
FROM fencepost.relay_blocked
WHERE slot = %s AND reason IS NOT NULL AND (decision = 'resend' OR decided_at > clock_timestamp() - interval '1 minute')"""

_GIVEN_UP = """
SELECT identity, header_names, header_values FROM fencepost.relay_blocked WHERE slot = %s AND decision = 'let_go'"""

_LIST = """
SELECT id, slot, topic, key, coalesce(octet_length(payload), 0) AS bytes, lane, reason, decision, blocked_at, decided_at,
    CASE lane WHEN 'record' THEN 0 ELSE (
        SELECT count(*) FROM fencepost.relay_blocked o WHERE o.slot = b.slot AND o.topic = b.topic AND o.lane = b.lane
            AND (b.lane = 'topic' OR o.key = b.key) AND o.reason IS NULL AND o.id > b.id) END AS behind
FROM fencepost.relay_blocked b WHERE slot = %s AND reason IS NOT NULL AND (%s OR decision IS NULL) ORDER BY id LIMIT %s"""

_DECIDE = """
UPDATE fencepost.relay_blocked SET decision = %(decision)s, decided_at = clock_timestamp()
WHERE slot = %(slot)s AND reason IS NOT NULL AND decision IS NULL AND (%(ids)s::bigint[] IS NULL OR id = ANY(%(ids)s))
    AND (%(topic)s::text IS NULL OR topic = %(topic)s)
RETURNING id"""

_COUNT = """
SELECT count(*) FILTER (WHERE reason IS NOT NULL), count(*) FILTER (WHERE reason IS NULL)
FROM fencepost.relay_blocked WHERE slot = %s AND decision IS DISTINCT FROM 'let_go'"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record that waits."""

    id: int
    topic: str
    key: bytes | None
    payload: bytes | None
    header_names: list[str]
    header_values: list[bytes | None]
    reason: str | None
    decision: Decision | None
    tried_at: datetime | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A record that was let go, as far as is needed to know it again."""

    identity: bytes
    header_names: list[str]
    header_values: list[bytes | None]


@dataclass(frozen=True, slots=True)
class Head:
    """The first record of a lane; the lane goes on if it was not refused, or is to be sent again."""

    topic: str
    lane: LaneKind
    key: bytes | None
    id: int
    reason: str | None
    decision: Decision | None

    @property
    def goes_on(self) -> bool:
        return self.reason is None or self.decision == "resend"


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused record, for display; ``behind`` counts those that wait for it."""

    id: int
    slot: str
    topic: str
    key: bytes | None
    bytes: int
    lane: LaneKind
    reason: str
    decision: Decision | None
    blocked_at: datetime
    decided_at: datetime | None
    behind: int


@dataclass(frozen=True, slots=True)
class NewlyBlocked:
    """A record to set aside; without a reason it waits behind another."""

    identity: bytes
    topic: str
    key: bytes | None
    payload: bytes | None
    headers: Headers
    lane: LaneKind
    reason: str | None


def add(connection: Connection, slot: str, records: Sequence[NewlyBlocked]) -> None:
    """Sets records aside, in their order; one that is there already keeps its place."""
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(
            _ADD,
            [
                {
                    "slot": slot,
                    "identity": record.identity,
                    "topic": record.topic,
                    "key": record.key,
                    "payload": record.payload,
                    "header_names": [name for name, _ in record.headers],
                    "header_values": [value for _, value in record.headers],
                    "lane": record.lane,
                    "reason": record.reason,
                }
                for record in records
            ],
        )
        for record in records:
            if record.lane == "key" and record.reason is not None:
                cursor.execute(_NARROW, {"slot": slot, "topic": record.topic, "key": record.key})


def heads(connection: Connection, slot: str) -> list[Head]:
    """The first record of each lane."""
    with connection.cursor(row_factory=class_row(Head)) as cursor:
        return cursor.execute(_HEADS.encode(), (slot,)).fetchall()


def decided(connection: Connection, slot: str) -> list[Head]:
    """A refused record of each lane on which somebody has decided."""
    with connection.cursor(row_factory=class_row(Head)) as cursor:
        return cursor.execute(_DECIDED, (slot,)).fetchall()


def head_of(connection: Connection, slot: str, lane: Head) -> Head | None:
    """The first record of a lane now; None where nothing waits in it."""
    with connection.cursor(row_factory=class_row(Head)) as cursor:
        return cursor.execute(_HEAD.format(_OF_LANE[lane.lane]).encode(), _parameters(slot, lane)).fetchone()


def following(connection: Connection, slot: str, lane: Head, limit: int) -> list[Waiting]:
    """The next records of a lane, in their order."""
    query = _NEXT.format(_OF_LANE[lane.lane]).encode()
    with connection.cursor(row_factory=class_row(Waiting)) as cursor:
        return cursor.execute(query, {**_parameters(slot, lane), "limit": limit}).fetchall()


def _parameters(slot: str, lane: Head) -> dict[str, object]:
    return {"slot": slot, "topic": lane.topic, "key": lane.key, "id": lane.id}


def given_up(connection: Connection, slot: str) -> list[GivenUp]:
    """The records that somebody has let go."""
    with connection.cursor(row_factory=class_row(GivenUp)) as cursor:
        return cursor.execute(_GIVEN_UP, (slot,)).fetchall()


def mark_tried(connection: Connection, ids: Sequence[int]) -> None:
    """These are about to be sent again."""
    connection.execute(
        "UPDATE fencepost.relay_blocked SET tried_at = clock_timestamp() WHERE id = ANY(%s) AND tried_at IS NULL",
        (list(ids),),
    )


def forget(connection: Connection, ids: Sequence[int]) -> None:
    """These have reached their topic."""
    connection.execute("DELETE FROM fencepost.relay_blocked WHERE id = ANY(%s)", (list(ids),))


def refused(connection: Connection, slot: str, *, decided: bool, limit: int) -> list[Refused]:
    """The refused records, the oldest first; with ``decided`` those too that were let go or are to be sent again."""
    with connection.cursor(row_factory=class_row(Refused)) as cursor:
        return cursor.execute(_LIST, (slot, decided, limit)).fetchall()


def decide(
    connection: Connection, slot: str, decision: Decision, ids: Sequence[int] | None, topic: str | None
) -> list[int]:
    """Says what becomes of refused records; answers which ones."""
    return [
        row[0]
        for row in connection.execute(
            _DECIDE,
            {"slot": slot, "decision": decision, "ids": None if ids is None else list(ids), "topic": topic},
        )
    ]


def counts(connection: Connection, slot: str) -> tuple[int, int]:
    """How many records are refused, and how many wait behind them."""
    row = connection.execute(_COUNT, (slot,)).fetchone()
    return (0, 0) if row is None else (int(row[0]), int(row[1]))
