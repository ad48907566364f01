"""How far a run is, read from the database and the broker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from psycopg.rows import dict_row

from streams import App, Settings
from streams.broker import kafka
from streams.stores.postgres import Connection

_NUMBERS = """
SELECT appended, conflicts, replayed, rolled_back, suppressed, retries, dead_lettered, redriven
FROM (SELECT count(*) AS appended FROM fencepost.event) AS e,
    (SELECT coalesce(sum(conflicts), 0)::bigint AS conflicts, coalesce(sum(replayed), 0)::bigint AS replayed,
        coalesce(sum(rolled_back), 0)::bigint AS rolled_back FROM demo.writer) AS w,
    (SELECT coalesce(sum(stale + duplicate), 0)::bigint AS suppressed FROM fencepost.fence) AS f,
    (SELECT count(*) FILTER (WHERE from_status = 'retry' AND to_status = 'processing') AS retries,
        count(*) FILTER (WHERE to_status = 'dead_letter') AS dead_lettered FROM fencepost.job_history) AS h,
    (SELECT count(*) AS redriven FROM fencepost.redrive) AS r"""

# An event is applied when every group that reads its topic is done with it.
_APPLIED = """
SELECT coalesce(sum(least), 0)::bigint FROM (SELECT min(done) AS least FROM (
    SELECT f.topic, sum(applied + filtered) + (SELECT count(*) FROM fencepost.job j
        WHERE j.consumer_group = f.consumer_group AND j.topic = f.topic AND j.status = 'completed') AS done
    FROM fencepost.fence f GROUP BY f.topic, f.consumer_group) AS groups GROUP BY topic) AS topics"""

_FENCES = """
SELECT consumer_group, topic, partition, max(next_offset) FROM fencepost.fence GROUP BY 1, 2, 3"""

# Jobs that will move by themselves: what waits behind a dead letter waits for a person.
_MOVING = """
SELECT count(*) FROM fencepost.job j WHERE status IN ('processing', 'retry') OR status = 'queued' AND NOT EXISTS (
    SELECT FROM fencepost.job d WHERE d.consumer_group = j.consumer_group AND d.topic = j.topic
    AND d.key IS NOT DISTINCT FROM j.key AND d.status = 'dead_letter')"""

_LOG = """
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint, pg_wal_lsn_diff(confirmed_flush_lsn, '0/0')::bigint
FROM pg_replication_slots WHERE slot_name = %s"""


@dataclass(frozen=True)
class Numbers:
    """What happened so far. ``suppressed`` counts records that a group had before."""

    appended: int = 0
    conflicts: int = 0
    replayed: int = 0
    rolled_back: int = 0
    suppressed: int = 0
    retries: int = 0
    dead_lettered: int = 0
    redriven: int = 0
    relayed: int = 0
    applied: int = 0


@dataclass
class Watch:
    """Looks at a run on a connection of its own."""

    connection: Connection
    settings: Settings
    app: App
    _admin: AdminClient = field(init=False)
    _partitions: list[TopicPartition] = field(init=False)
    _quiet_at: int | None = None
    _missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._admin = kafka.admin(self.settings)
        found = self._admin.list_topics(timeout=self.settings.connect_seconds).topics
        names = [topic.name(self.settings) for topic in self.app.topics if not topic.exact]
        self._partitions = [
            TopicPartition(name, partition) for name in names for partition in found[name].partitions
        ]

    def numbers(self) -> Numbers:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(_NUMBERS).fetchone() or {}
        # Not counting what a relay sent twice; what that was, the audit finds out.
        relayed = min(found["appended"], sum(self._ends().values()))
        return Numbers(**found, relayed=relayed, applied=min(relayed, self._one(_APPLIED)))

    def redriven_job(self) -> int:
        """One of the dead letters that were sent back; 0 where there was none."""
        return self._one("SELECT coalesce(min(job_id), 0) FROM fencepost.redrive")

    def is_settled(self) -> bool:
        """Whether nothing moves any more: everything relayed, read, and run, but for what waits for a person."""
        log, confirmed = self._log()
        self._missing = list(self._unfinished())
        if self._missing:
            self._quiet_at = None
            return False
        # What is in the log up to here may hold a message that nobody has read yet.
        if self._quiet_at is None:
            self._quiet_at = log
        if confirmed < self._quiet_at:
            self._missing = [f"{self._quiet_at - confirmed:,} bytes of log to be relayed"]
            return False
        return True

    @property
    def missing(self) -> str:
        """What the last look found still to be done."""
        return ", ".join(self._missing)

    def _unfinished(self) -> Iterator[str]:
        ends = self._ends()
        if len(ends) < len(self._partitions):
            yield f"{len(self._partitions) - len(ends)} partitions without a leader"
        fences: dict[tuple[str, str], dict[int, int]] = {}
        for group, topic, partition, position in self.connection.execute(_FENCES):
            fences.setdefault((group, topic), {})[partition] = position
        for processor in self.app.processors.values():
            for topic in (each.name(self.settings) for each in processor.topics):
                positions = fences.get((processor.group, topic), {})
                behind = sum(
                    end - positions.get(number, 0) for (name, number), end in ends.items() if name == topic
                )
                if behind:
                    yield f"{processor.group} has {behind:,} records of {topic} to read"
        moving = self._one(_MOVING)
        if moving:
            yield f"{moving:,} jobs to run"

    def _ends(self) -> dict[tuple[str, int], int]:
        """The end of each partition; those are left out that the broker cannot answer for at the moment."""
        newest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = self._admin.list_offsets(dict.fromkeys(self._partitions, newest))
        found = {}
        for each, future in asked.items():
            with contextlib.suppress(KafkaException):
                found[each.topic, each.partition] = future.result(self.settings.connect_seconds).offset
        return found

    def _log(self) -> tuple[int, int]:
        row = self.connection.execute(_LOG, (self.settings.slot,)).fetchone()
        return (0, 0) if row is None else (row[0], row[1])

    def _one(self, query: str) -> int:
        row = self.connection.execute(query).fetchone()
        return int(row[0]) if row else 0
