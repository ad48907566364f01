"""The SQL of jobs: records that did not pass, and their way through retry, dead letter and redrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from psycopg.rows import class_row

from streams.dispositions import Lane
from streams.errors import Failure
from streams.event import Headers, Record
from streams.stores.postgres import Connection

Status = Literal["queued", "processing", "retry", "completed", "failed", "dead_letter", "unknown"]

_INSERT = """
INSERT INTO fencepost.job (consumer_group, topic, topic_id, partition, record_offset, record_timestamp, key, value,
    header_names, header_values, version, status, attempt_count, max_attempts, available_at, worker_id,
    error_class, error_fingerprint, last_error)
VALUES (%(group)s, %(topic)s, %(topic_id)s, %(partition)s, %(offset)s, %(timestamp)s, %(key)s, %(value)s,
    %(header_names)s::text[], %(header_values)s::bytea[], %(version)s, %(status)s, %(attempt_count)s, %(max_attempts)s,
    clock_timestamp() + make_interval(secs => %(delay)s), %(worker)s, %(error_class)s, %(fingerprint)s, %(error)s)
RETURNING id, (extract(epoch FROM available_at) * 1000)::bigint"""

_COLUMNS = """
    id, consumer_group, topic, topic_id, partition, record_offset, record_timestamp, key, value, header_names,
    header_values, version, status, attempt_count, max_attempts, redrive_count, error_class, error_fingerprint, last_error,
    created_at, updated_at, available_at, (extract(epoch FROM available_at) * 1000)::bigint AS due,
    extract(epoch FROM clock_timestamp() - available_at)::float AS late_seconds"""

_DUE = f"""
SELECT {_COLUMNS} FROM fencepost.job
WHERE id = %(id)s AND consumer_group = %(group)s AND status = 'retry' AND attempt_count = %(attempt)s
    AND available_at <= clock_timestamp() + interval '5 milliseconds'"""  # noqa: S608 - a constant list of columns

_OVERDUE = """
SELECT id, attempt_count FROM fencepost.job
WHERE consumer_group = %(group)s AND status = 'retry'
    AND available_at <= clock_timestamp() - make_interval(secs => %(grace)s)
ORDER BY available_at LIMIT %(limit)s"""

_LANE = f"""
SELECT {_COLUMNS} FROM fencepost.job
WHERE consumer_group = %(group)s AND topic = %(topic)s AND key IS NOT DISTINCT FROM %(key)s AND status = 'queued'
ORDER BY version, id LIMIT %(limit)s"""  # noqa: S608

_LOCK = """
SELECT id, status, attempt_count FROM fencepost.job WHERE id = ANY(%(ids)s) ORDER BY version, id FOR UPDATE"""

_HEAD_OF_LANE = """
SELECT EXISTS (SELECT FROM fencepost.job
WHERE consumer_group = %(group)s AND topic = %(topic)s AND key IS NOT DISTINCT FROM %(key)s
    AND status IN ('processing', 'retry'))"""

_READY_STRICT = """
SELECT DISTINCT j.topic, j.key FROM fencepost.job j
JOIN fencepost.progress p ON p.consumer_group = j.consumer_group AND p.topic = j.topic AND p.key = j.key
WHERE j.consumer_group = %(group)s AND j.status = 'queued' AND j.version <= p.version + 1 LIMIT %(limit)s"""

_READY = """
SELECT DISTINCT j.topic, j.key FROM fencepost.job j
WHERE j.consumer_group = %(group)s AND j.status = 'queued' AND NOT EXISTS (
    SELECT FROM fencepost.job h WHERE h.consumer_group = j.consumer_group AND h.topic = j.topic
    AND h.key IS NOT DISTINCT FROM j.key AND h.status IN ('processing', 'retry'))
LIMIT %(limit)s"""

_START = """
UPDATE fencepost.job SET status = 'processing', attempt_count = attempt_count + 1, worker_id = %(worker)s,
    updated_at = clock_timestamp() WHERE id = ANY(%(ids)s)"""

_COMPLETE = """
UPDATE fencepost.job j SET status = 'completed', result = done.result, updated_at = clock_timestamp()
FROM unnest(%(ids)s::bigint[], %(results)s::text[]) AS done (id, result)
WHERE j.id = done.id AND j.status = 'processing'"""

_GIVE_BACK = """
UPDATE fencepost.job SET status = 'queued', attempt_count = attempt_count - 1, updated_at = clock_timestamp()
WHERE id = %(id)s AND status = 'processing'"""

_FAIL = """
UPDATE fencepost.job SET status = %(status)s, error_class = %(error_class)s, error_fingerprint = %(fingerprint)s,
    last_error = %(error)s, available_at = clock_timestamp() + make_interval(secs => %(delay)s),
    updated_at = clock_timestamp()
WHERE id = %(id)s AND status = 'processing' RETURNING (extract(epoch FROM available_at) * 1000)::bigint"""

_REDRIVE = """
WITH sent AS (
    UPDATE fencepost.job SET status = 'retry', attempt_count = 0, redrive_count = redrive_count + 1,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = %(id)s AND status = 'dead_letter' AND redrive_count = %(redrive_count)s
    RETURNING id, redrive_count, (extract(epoch FROM available_at) * 1000)::bigint AS due)
INSERT INTO fencepost.redrive (job_id, redrive_number, plan, requested_by)
SELECT id, redrive_count, %(plan)s, %(requested_by)s FROM sent
RETURNING (SELECT due FROM sent)"""


@dataclass(frozen=True, slots=True)
class Job:
    """A row of ``fencepost.job``. ``due`` in milliseconds since the epoch, by the database's clock."""

    id: int
    consumer_group: str
    topic: str
    topic_id: str
    partition: int
    record_offset: int
    record_timestamp: int
    key: bytes | None
    value: bytes | None
    header_names: list[str]
    header_values: list[bytes | None]
    version: int | None
    status: Status
    attempt_count: int
    max_attempts: int
    redrive_count: int
    error_class: str | None
    error_fingerprint: str | None
    last_error: str | None
    created_at: Any
    updated_at: Any
    available_at: Any
    due: int
    late_seconds: float

    @property
    def lane(self) -> Lane:
        return self.topic, self.key

    @property
    def headers(self) -> Headers:
        return tuple(zip(self.header_names, self.header_values, strict=True))

    @property
    def record(self) -> Record:
        """The record as it was consumed, byte for byte."""
        return Record(
            self.topic,
            self.partition,
            self.record_offset,
            self.key,
            self.value,
            self.headers,
            self.record_timestamp,
        )


@dataclass(frozen=True, slots=True)
class NewJob:
    record: Record
    topic_id: str
    version: int
    status: Status
    attempts: int
    max_attempts: int
    failure: Failure | None
    delay_seconds: float = 0.0


class Jobs:
    """One group's jobs, within the transaction that is open on the connection."""

    def __init__(self, connection: Connection, group: str, worker: str) -> None:
        self._connection = connection
        self._group = group
        self._worker = worker

    def insert(self, job: NewJob) -> tuple[int, int]:
        """Adds a job; answers its id and when it is due."""
        record, failure = job.record, job.failure
        row = self._connection.execute(
            _INSERT,
            {
                "group": self._group,
                "topic": record.topic,
                "topic_id": job.topic_id,
                "partition": record.partition,
                "offset": record.offset,
                "timestamp": record.timestamp,
                "key": record.key,
                "value": record.value,
                "header_names": [name for name, _ in record.headers],
                "header_values": [value for _, value in record.headers],
                "version": job.version or None,
                "status": job.status,
                "attempt_count": job.attempts,
                "max_attempts": job.max_attempts,
                "delay": job.delay_seconds,
                "worker": self._worker,
                **_failure_row(failure),
            },
        ).fetchone()
        assert row is not None, "an insert answers its row"  # noqa: S101
        return row[0], row[1]

    def due(self, job_id: int, attempt: int) -> Job | None:
        """A job that waits after this attempt and is due, not locked; None where it is not."""
        parameters = {"id": job_id, "group": self._group, "attempt": attempt}
        with self._connection.cursor(row_factory=class_row(Job)) as cursor:
            return cursor.execute(_DUE, parameters).fetchone()

    def lane(self, lane: Lane, limit: int) -> list[Job]:
        """What waits in a lane, in the order in which it must run, not locked."""
        parameters = {"group": self._group, "topic": lane[0], "key": lane[1], "limit": limit}
        with self._connection.cursor(row_factory=class_row(Job)) as cursor:
            return cursor.execute(_LANE, parameters).fetchall()

    def lock(self, jobs: Sequence[Job]) -> list[Job]:
        """Locks jobs as they were read; answers those before the first that somebody has moved meanwhile."""
        rows = self._connection.execute(_LOCK, {"ids": [job.id for job in jobs]})
        found = {id: (status, attempts) for id, status, attempts in rows}
        unmoved = takewhile(lambda job: found.get(job.id) == (job.status, job.attempt_count), jobs)
        return list(unmoved)

    def has_head(self, lane: Lane) -> bool:
        """Whether a job of the lane is being retried, so that those behind it must wait."""
        row = self._connection.execute(
            _HEAD_OF_LANE, {"group": self._group, "topic": lane[0], "key": lane[1]}
        ).fetchone()
        return row is not None and bool(row[0])

    def overdue(self, grace_seconds: float, limit: int) -> list[tuple[int, int]]:
        """Jobs whose wake-up has not come: their ids, and the attempt they wait after."""
        parameters = {"group": self._group, "grace": grace_seconds, "limit": limit}
        return [(row[0], row[1]) for row in self._connection.execute(_OVERDUE, parameters)]

    def ready_lanes(self, limit: int, *, strict: bool) -> list[Lane]:
        """Lanes whose earliest waiting job could run."""
        query = _READY_STRICT if strict else _READY
        return [
            (row[0], row[1])
            for row in self._connection.execute(query, {"group": self._group, "limit": limit})
        ]

    def start(self, jobs: Sequence[Job]) -> None:
        self._connection.execute(_START, {"ids": [job.id for job in jobs], "worker": self._worker})

    def complete(self, results: Sequence[tuple[Job, str]]) -> None:
        """Ends started jobs, each with what it came to."""
        ids, texts = [job.id for job, _ in results], [result for _, result in results]
        self._connection.execute(_COMPLETE, {"ids": ids, "results": texts})

    def give_back(self, job: Job) -> None:
        """Puts a started job back to wait in its lane; the attempt does not count."""
        self._connection.execute(_GIVE_BACK, {"id": job.id})

    def fail(
        self, job: Job, status: Literal["retry", "dead_letter"], failure: Failure, delay_seconds: float
    ) -> int:
        """Records a failed attempt; answers when the next one is due."""
        parameters = {"id": job.id, "status": status, "delay": delay_seconds, **_failure_row(failure)}
        row = self._connection.execute(_FAIL, parameters).fetchone()
        assert row is not None, "the job is locked and processing"  # noqa: S101
        due: int = row[0]
        return due

    def redrive(self, job: Job, plan: str, requested_by: str) -> int | None:
        """Sends a dead letter back, and enters it in the ledger; answers when it is due.

        None where somebody else did so first.
        """
        row = self._connection.execute(
            _REDRIVE,
            {"id": job.id, "redrive_count": job.redrive_count, "plan": plan, "requested_by": requested_by},
        ).fetchone()
        return None if row is None else row[0]


def find_jobs(connection: Connection, where: str, parameters: dict[str, Any], limit: int) -> list[Job]:
    """Jobs by a condition of our own modules, oldest first."""
    query = f"SELECT {_COLUMNS} FROM fencepost.job WHERE {where} ORDER BY id LIMIT %(limit)s"  # noqa: S608
    with connection.cursor(row_factory=class_row(Job)) as cursor:
        return cursor.execute(query, {**parameters, "limit": limit}).fetchall()


def _failure_row(failure: Failure | None) -> dict[str, str | None]:
    if failure is None:
        return {"error_class": None, "fingerprint": None, "error": None}
    return {"error_class": failure.error_class, "fingerprint": failure.fingerprint, "error": failure.message}
