"""Proofs from what is stored: that a group's books balance, and that every event of the store is in its topic.

Nothing here trusts a counter: fences, jobs and topics are read and counted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from streams.broker import kafka
from streams.broker.kafka import end_offsets
from streams.dispositions import Disposition
from streams.errors import ServerUnavailable
from streams.event import FP_VERSION, Record
from streams.settings import Settings
from streams.stores.postgres import Connection

_EXAMPLES = 20

_COUNTS = " + ".join((*Disposition, "absent"))

# The history of a job is a walk from nothing to its status. Whatever order its rows are read in, it is whole if
# the walk enters each status as often as it leaves it, except the one where the job stands: that once more.
_GROUPS = f"""
WITH offsets AS (
    SELECT consumer_group, sum(next_offset - first_offset) AS passed, sum({_COUNTS}) AS counted,
        sum(retried + behind + dead) AS kept
    FROM fencepost.fence GROUP BY 1),
illegal AS (
    SELECT DISTINCT h.job_id FROM fencepost.job_history h
    LEFT JOIN fencepost.job_transition t USING (from_status, to_status)
    WHERE h.from_status IS NOT NULL AND t.to_status IS NULL),
standing AS (
    SELECT job_id, status FROM (
        SELECT job_id, to_status AS status, 1 AS step FROM fencepost.job_history
        UNION ALL
        SELECT job_id, from_status, -1 FROM fencepost.job_history WHERE from_status IS NOT NULL) AS steps
    GROUP BY 1, 2 HAVING sum(step) <> 0),
walked AS (
    SELECT job_id, array_agg(status) AS ends FROM standing GROUP BY 1),
sent AS (
    SELECT topic, header_values[cardinality(header_values) - 2] AS job,
        header_values[cardinality(header_values) - 1] AS attempt
    FROM fencepost.outbox WHERE header_names[cardinality(header_names)] = 'fp_due'),
buried AS (
    SELECT topic, (convert_from(header_values[cardinality(header_values)], 'UTF8')::jsonb ->> 'job')::bigint AS job
    FROM fencepost.outbox WHERE header_names[cardinality(header_names)] = 'fp_error'),
unsent AS (
    SELECT j.id FROM fencepost.job j WHERE j.status = 'retry' AND NOT EXISTS (
        SELECT FROM sent s WHERE s.job = convert_to(j.id::text, 'UTF8')
        AND s.attempt = convert_to(j.attempt_count::text, 'UTF8') AND starts_with(s.topic, j.consumer_group || '.retry.'))
    UNION ALL
    SELECT j.id FROM fencepost.job j WHERE j.status = 'dead_letter' AND NOT EXISTS (
        SELECT FROM buried b WHERE b.job = j.id AND b.topic = j.consumer_group || '.dlq')),
jobs AS (
    SELECT j.consumer_group, count(*) AS jobs,
        count(*) FILTER (WHERE j.status IN ('queued', 'processing', 'retry')) AS unfinished,
        count(*) FILTER (WHERE j.status = 'dead_letter') AS dead_letters,
        count(*) FILTER (WHERE j.id IN (SELECT job_id FROM illegal)
            OR w.ends IS DISTINCT FROM ARRAY[j.status]) AS bad_histories,
        count(*) FILTER (WHERE j.id IN (SELECT id FROM unsent)) AS without_message
    FROM fencepost.job j LEFT JOIN walked w ON w.job_id = j.id GROUP BY 1)
SELECT coalesce(o.consumer_group, j.consumer_group) AS group, coalesce(passed, 0)::bigint AS offsets_passed,
    coalesce(counted, 0)::bigint AS offsets_counted, coalesce(kept, 0)::bigint AS jobs_counted,
    coalesce(jobs, 0) AS jobs, coalesce(unfinished, 0) AS unfinished, coalesce(dead_letters, 0) AS dead_letters,
    coalesce(bad_histories, 0) AS bad_histories, coalesce(without_message, 0) AS without_message
FROM offsets o FULL JOIN jobs j USING (consumer_group) ORDER BY 1"""  # noqa: S608 - the names are the enum's

_RESOURCES = "SELECT resource_id, max(version) FROM fencepost.event WHERE resource_type = %s GROUP BY 1"


@dataclass(frozen=True, slots=True)
class GroupAudit:
    """The books of one group.

    Attributes:
        offsets_passed, offsets_counted: how far its fences moved, and the dispositions that explain it.
        jobs_counted, jobs: records its fences counted as not passed at once, and its jobs.
        unfinished: jobs that wait or run.
        dead_letters: jobs that are buried and not sent back.
        bad_histories: jobs whose history makes an illegal move, or does not lead to where they stand.
        without_message: jobs in retry or buried whose outbox row is missing: nobody would wake them, or be told.
    """

    group: str
    offsets_passed: int
    offsets_counted: int
    jobs_counted: int
    jobs: int
    unfinished: int
    dead_letters: int
    bad_histories: int
    without_message: int

    @property
    def problems(self) -> list[str]:
        """What does not balance, in words. Jobs that wait and dead letters are no fault of the books."""
        found = []
        if self.offsets_passed != self.offsets_counted:
            found.append(f"{self.offsets_passed} offsets passed, {self.offsets_counted} counted")
        if self.jobs_counted != self.jobs:
            found.append(f"{self.jobs_counted} records did not pass at once, {self.jobs} have a job")
        if self.bad_histories:
            found.append(f"{self.bad_histories} jobs with an illegal or broken history")
        if self.without_message:
            found.append(f"{self.without_message} jobs without the message that wakes or buries them")
        return [f"{self.group}: {problem}" for problem in found]


@dataclass(frozen=True, slots=True)
class TopicAudit:
    """One topic compared with the store.

    Attributes:
        stored: events of the resource type.
        relayed: those of them that the topic holds.
        repeated: records of an event that the topic held before.
        out_of_order: events that first appear after a later version of their resource.
        unknown: records of no event of the store, such as one whose transaction was rolled back.
        examples: the first of the missing events, as resource id and version.
    """

    topic: str
    stored: int
    relayed: int
    repeated: int
    out_of_order: int
    unknown: int
    examples: tuple[tuple[str, int], ...] = ()

    @property
    def missing(self) -> int:
        return self.stored - self.relayed


@dataclass(slots=True)
class _Seen:
    """One resource of the store, and the versions of it that the topic held so far."""

    stored: int
    newest: int = 0
    versions: set[int] = field(default_factory=set)


def groups(connection: Connection) -> list[GroupAudit]:
    """The books of every group. Needs the outbox rows of unfinished jobs, so prune none that is younger."""
    return [GroupAudit(*row) for row in connection.execute(_GROUPS)]


def topic(connection: Connection, settings: Settings, resource_type: str) -> TopicAudit:
    """Reads a whole topic and compares it with the store as it was before.

    Events that are still on their way count as missing, and records that retention has deleted do too. Holds the
    ids and versions of one resource type in memory.

    Raises:
        ServerUnavailable: the broker does not answer.
    """
    name = settings.topic_prefix + resource_type
    rows = connection.execute(_RESOURCES, (resource_type,))
    # Versions run without a hole, so the newest one says which there are.
    known = {key.encode(): _Seen(newest) for key, newest in rows}
    repeated = out_of_order = unknown = 0
    for record in records(settings, name):
        seen = known.get(record.key or b"")
        version = int(record.header(FP_VERSION) or 0)
        if seen is None or not 1 <= version <= seen.stored:
            unknown += 1
        elif version in seen.versions:
            repeated += 1
        else:
            seen.versions.add(version)
            out_of_order += version < seen.newest
            seen.newest = max(seen.newest, version)
    return TopicAudit(
        topic=name,
        stored=sum(seen.stored for seen in known.values()),
        relayed=sum(len(seen.versions) for seen in known.values()),
        repeated=repeated,
        out_of_order=out_of_order,
        unknown=unknown,
        examples=tuple(islice(_missing(known), _EXAMPLES)),
    )


def resource_types(connection: Connection) -> list[str]:
    """The types of the resources in the store."""
    return [
        row[0]
        for row in connection.execute("SELECT DISTINCT resource_type FROM fencepost.resource ORDER BY 1")
    ]


def _missing(known: dict[bytes, _Seen]) -> Iterator[tuple[str, int]]:
    for key, seen in known.items():
        if len(seen.versions) < seen.stored:
            yield from ((key.decode(), v) for v in range(1, seen.stored + 1) if v not in seen.versions)


def records(settings: Settings, name: str) -> Iterator[Record]:
    """Every record that a topic holds now; per partition in the order of the log.

    Raises:
        ServerUnavailable: the broker does not answer, or the topic is not there.
    """
    ends = end_offsets(settings, [name])
    if not ends:
        raise ServerUnavailable(f"topic {name} is not there; run: streams topics apply")
    return kafka.read(settings, dict.fromkeys(ends, 0), ends)
