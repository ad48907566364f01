"""Proof from what is stored that a group's books balance. No counter is trusted: fences and jobs are counted again."""

from __future__ import annotations

from dataclasses import dataclass

from streams.dispositions import Disposition
from streams.stores.postgres import Connection

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


def groups(connection: Connection) -> list[GroupAudit]:
    """The books of every group. Needs the outbox rows of unfinished jobs, so prune none that is younger."""
    return [GroupAudit(*row) for row in connection.execute(_GROUPS)]
