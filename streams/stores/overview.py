"""What the database says of a running system, as rows for the commands to show."""

from __future__ import annotations

from typing import Any

from psycopg.rows import dict_row

from streams.stores.postgres import Connection

Rows = list[dict[str, Any]]

_FENCES = """
SELECT DISTINCT ON (consumer_group, topic, partition)
    consumer_group, topic, partition, next_offset, applied, stale, duplicate, filtered, retried, behind, dead, updated_at
FROM fencepost.fence ORDER BY consumer_group, topic, partition, updated_at DESC"""

_JOBS = """
SELECT consumer_group AS group, status, count(*) AS jobs, count(DISTINCT (topic, key)) AS keys,
    round(extract(epoch FROM clock_timestamp() - min(created_at)))::bigint AS oldest_seconds
FROM fencepost.job WHERE status <> 'completed' GROUP BY 1, 2 ORDER BY 1, 2"""

_WAITING = """
SELECT id, consumer_group AS group, status, key, version,
    attempt_count || ' of ' || max_attempts AS attempts,
    CASE WHEN status = 'retry' THEN round(extract(epoch FROM available_at - clock_timestamp())::numeric, 1)::float END
        AS due_in_seconds,
    left(coalesce(error_class || ': ' || split_part(last_error, E'\\n', 1), 'waits for an earlier version'), 120) AS reason
FROM fencepost.job
WHERE status IN ('queued', 'processing', 'retry') AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
ORDER BY (status = 'queued'), available_at LIMIT %(limit)s"""

_DEAD_GROUPS = """
SELECT consumer_group AS group, error_fingerprint AS fingerprint, count(*) AS count, count(DISTINCT key) AS keys,
    to_char(min(updated_at), 'YYYY-MM-DD HH24:MI:SS') AS first, to_char(max(updated_at), 'YYYY-MM-DD HH24:MI:SS') AS last,
    min(error_class) || ': ' || left(split_part(min(last_error), E'\\n', 1), 160) AS error
FROM fencepost.job WHERE status = 'dead_letter' AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
GROUP BY 1, 2 ORDER BY 3 DESC"""

_HISTORY = """
SELECT to_char(at, 'YYYY-MM-DD HH24:MI:SS.MS') AS at, from_status AS from, to_status AS to, attempt, left(error, 160) AS error
FROM fencepost.job_history WHERE job_id = %(job)s ORDER BY at, to_status"""

_SLOT = """
SELECT CASE WHEN active THEN 'is being read by pid ' || active_pid ELSE 'is not being read' END AS state,
    pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint AS behind_bytes, wal_status
FROM pg_replication_slots WHERE slot_name = %(slot)s"""


def relay(connection: Connection, slot: str) -> dict[str, Any]:
    """The relay's slot: whether somebody reads it, and how much log it has not confirmed."""
    found = _query(connection, _SLOT, slot=slot)
    return (
        found[0]
        if found
        else {"state": "is missing; run: streams migrate", "behind_bytes": 0, "wal_status": None}
    )


def topics(connection: Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT DISTINCT topic FROM fencepost.fence ORDER BY 1")]


def fences(connection: Connection) -> Rows:
    """The newest fence of each group in each partition."""
    return _query(connection, _FENCES)


def jobs(connection: Connection) -> Rows:
    """Jobs that are not completed, by group and state."""
    return _query(connection, _JOBS)


def waiting_jobs(connection: Connection, group: str | None, limit: int) -> Rows:
    """Jobs that are to run, the soonest first, then those that wait behind them."""
    rows = _query(connection, _WAITING, group=group, limit=limit)
    return [
        {**row, "key": None if row["key"] is None else row["key"].decode(errors="backslashreplace")}
        for row in rows
    ]


def dead_letter_groups(connection: Connection, group: str | None) -> Rows:
    """Dead letters with like errors, most first."""
    return _query(connection, _DEAD_GROUPS, group=group)


def job_history(connection: Connection, job_id: int) -> Rows:
    return _query(connection, _HISTORY, job=job_id)


def _query(connection: Connection, query: str, **parameters: Any) -> Rows:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, parameters).fetchall()
