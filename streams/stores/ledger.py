"""The SQL of a group's ledger: its fences, its progress, its inbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streams.dispositions import Disposition, Lane
from streams.errors import Fenced
from streams.stores.postgres import Connection

_CLAIM = """
INSERT INTO fencepost.fence AS f (consumer_group, topic, topic_id, partition, epoch, first_offset, next_offset, worker)
VALUES (%(group)s, %(topic)s, %(topic_id)s, %(partition)s, 1, %(first)s, %(first)s, %(worker)s)
ON CONFLICT (consumer_group, topic, topic_id, partition)
DO UPDATE SET epoch = f.epoch + 1, worker = excluded.worker, updated_at = clock_timestamp()
RETURNING epoch, next_offset"""

_FIND = """
SELECT next_offset FROM fencepost.fence
WHERE consumer_group = %s AND topic = %s AND topic_id = %s AND partition = %s"""

_LOCK = """
SELECT f.topic, f.partition, f.next_offset
FROM fencepost.fence f JOIN unnest(%(topics)s::text[], %(topic_ids)s::text[], %(partitions)s::int[], %(epochs)s::bigint[])
    AS mine (topic, topic_id, partition, epoch)
    ON f.topic = mine.topic AND f.topic_id = mine.topic_id AND f.partition = mine.partition AND f.epoch = mine.epoch
WHERE f.consumer_group = %(group)s
ORDER BY f.topic, f.partition FOR UPDATE OF f"""

_COUNTS = ", ".join(f"{name} = {name} + %({name})s" for name in (*Disposition, "absent"))
_MOVE = f"""
UPDATE fencepost.fence SET next_offset = %(next)s, updated_at = clock_timestamp(), {_COUNTS}
WHERE consumer_group = %(group)s AND topic = %(topic)s AND topic_id = %(topic_id)s AND partition = %(partition)s
    AND epoch = %(epoch)s"""  # noqa: S608 - the names are the enum's

_VERSIONS = (
    "SELECT key, version FROM fencepost.progress WHERE consumer_group = %s AND topic = %s AND key = ANY(%b)"
)

# The first job of each lane, locked against the lane's runner: either the runner sees what is put behind it here, or
# this waits and sees it done. Only the first, since a lane may be long.
_WAITING = """
SELECT key FROM fencepost.job
WHERE status IN ('queued', 'processing', 'retry') AND id IN (
    SELECT head.id FROM unnest(%b::bytea[]) AS lane (key) CROSS JOIN LATERAL (
        SELECT id FROM fencepost.job j
        WHERE j.consumer_group = %s AND j.topic = %s AND j.key = lane.key
            AND j.status IN ('queued', 'processing', 'retry')
        ORDER BY version, id LIMIT 1) AS head)
ORDER BY key FOR SHARE"""

_WAITING_VERSIONS = """
SELECT key, version FROM fencepost.job
WHERE consumer_group = %s AND topic = %s AND key = ANY(%b) AND version = ANY(%s)
    AND status IN ('queued', 'processing', 'retry')"""

_SEEN = "SELECT event_id FROM fencepost.inbox WHERE consumer_group = %s AND event_id = ANY(%s)"

_ADVANCE = """
INSERT INTO fencepost.progress AS p (consumer_group, topic, key, version)
SELECT %s, %s, n.key, n.version FROM unnest(%b::bytea[], %s::bigint[]) AS n (key, version)
ON CONFLICT (consumer_group, topic, key) DO UPDATE SET version = excluded.version WHERE p.version < excluded.version"""

_RECEIVE = """
INSERT INTO fencepost.inbox (consumer_group, event_id) SELECT %s, unnest(%s::text[])
ON CONFLICT (consumer_group, event_id) DO NOTHING"""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to move one partition's fence, until somebody raises its epoch."""

    topic: str
    topic_id: str
    partition: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Move:
    """How far a partition's fence moves, and what became of the offsets it passes."""

    claim: Claim
    next_offset: int
    counts: Mapping[Disposition, int]
    absent: int


class Ledger:
    """One group's ledger, within the transaction that is open on the connection."""

    def __init__(self, connection: Connection, group: str) -> None:
        self._connection = connection
        self._group = group

    def find_position(self, topic: str, topic_id: str, partition: int) -> int | None:
        """The next offset of a partition, or None where the group has never been there."""
        row = self._connection.execute(_FIND, (self._group, topic, topic_id, partition)).fetchone()
        return None if row is None else row[0]

    def claim(
        self, topic: str, topic_id: str, partition: int, first_offset: int, worker: str
    ) -> tuple[Claim, int]:
        """Raises a partition's epoch, which shuts out whoever had it; answers the position to seek to.

        ``first_offset`` is where a group begins that has never been there.

        Raises:
            psycopg.errors.LockNotAvailable: a transaction of the one who had it is still open; ask again later.
        """
        self._connection.execute("SET LOCAL lock_timeout = '5s'")
        row = self._connection.execute(
            _CLAIM,
            {
                "group": self._group,
                "topic": topic,
                "topic_id": topic_id,
                "partition": partition,
                "first": first_offset,
                "worker": worker,
            },
        ).fetchone()
        assert row is not None, "an upsert answers its row"  # noqa: S101
        return Claim(topic, topic_id, partition, row[0]), row[1]

    def lock(self, claims: Sequence[Claim]) -> dict[tuple[str, int], int]:
        """Locks the fences until the transaction ends; answers the positions by topic and partition.

        Raises:
            Fenced: one of them has another owner.
        """
        rows = self._connection.execute(
            _LOCK,
            {
                "group": self._group,
                "topics": [claim.topic for claim in claims],
                "topic_ids": [claim.topic_id for claim in claims],
                "partitions": [claim.partition for claim in claims],
                "epochs": [claim.epoch for claim in claims],
            },
        ).fetchall()
        found = {(topic, partition): position for topic, partition, position in rows}
        lost = [claim for claim in claims if (claim.topic, claim.partition) not in found]
        if lost:
            names = ", ".join(f"{claim.topic}/{claim.partition}" for claim in lost)
            raise Fenced(f"{self._group}: {names} belongs to another worker now")
        return found

    def move(self, moves: Iterable[Move]) -> None:
        with self._connection.cursor() as cursor:
            for move in moves:
                counts = {name.value: move.counts.get(name, 0) for name in Disposition}
                cursor.execute(
                    _MOVE,
                    {
                        "group": self._group,
                        "topic": move.claim.topic,
                        "topic_id": move.claim.topic_id,
                        "partition": move.claim.partition,
                        "epoch": move.claim.epoch,
                        "next": move.next_offset,
                        "absent": move.absent,
                        **counts,
                    },
                )

    def versions(self, topic: str, keys: Sequence[bytes]) -> dict[Lane, int]:
        """The version each lane of a topic has applied; lanes without one are absent."""
        rows = self._connection.execute(_VERSIONS, (self._group, topic, keys))
        return {(topic, key): version for key, version in rows}

    def waiting(self, topic: str, keys: Sequence[bytes], versions: Sequence[int]) -> dict[Lane, set[int]]:
        """The lanes of a topic in which jobs wait, locked against their runners, and which of these versions wait."""
        # One key or thousands, the lookup is by the partial index of unfinished jobs, which is nearly always empty.
        lanes = [key for (key,) in self._connection.execute(_WAITING, (keys, self._group, topic))]
        found: dict[Lane, set[int]] = {(topic, key): set() for key in lanes}
        if lanes and versions:
            for key, version in self._connection.execute(
                _WAITING_VERSIONS, (self._group, topic, lanes, versions)
            ):
                found[topic, key].add(version)
        return found

    def seen(self, event_ids: Sequence[str]) -> set[str]:
        """Which of these events are in the inbox."""
        return {event_id for (event_id,) in self._connection.execute(_SEEN, (self._group, event_ids))}

    def advance(self, versions: Mapping[Lane, int]) -> None:
        """Records the version each lane has applied.

        Raises:
            Fenced: another transaction has taken a lane as far, or further; this one must not commit.
        """
        by_topic: dict[str, dict[bytes, int]] = {}
        for (topic, key), version in versions.items():
            by_topic.setdefault(topic, {})[key or b""] = version
        for topic, rows in sorted(by_topic.items()):
            keys = sorted(rows)
            cursor = self._connection.execute(
                _ADVANCE, (self._group, topic, keys, [rows[key] for key in keys])
            )
            if cursor.rowcount != len(keys):
                raise Fenced(f"{self._group}: lanes of {topic} were advanced by another worker meanwhile")

    def receive(self, event_ids: Sequence[str]) -> None:
        """Enters event ids into the inbox.

        Raises:
            Fenced: another transaction has entered one of them meanwhile.
        """
        if not event_ids:
            return
        cursor = self._connection.execute(_RECEIVE, (self._group, sorted(event_ids)))
        if cursor.rowcount != len(event_ids):
            raise Fenced(f"{self._group}: an event was received by another worker meanwhile")
