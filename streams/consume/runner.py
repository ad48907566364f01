"""Runs a job that waited, and those that waited behind it.

Handlers run before the transaction, as they do for a batch: a slow one holds no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from streams.app import Processor
from streams.consume.apply import Applier
from streams.consume.dispatch import Dispatcher, Fail, Item, Stop
from streams.consume.plan import Planned, Planner
from streams.dispositions import Disposition, Known, Lane
from streams.errors import Failure
from streams.jobs import letters
from streams.points import reach
from streams.stores.jobs import Job, Jobs
from streams.stores.ledger import Ledger
from streams.stores.outbox import OutboxMessage, insert_messages
from streams.stores.postgres import Connection

# How many jobs of a lane run in one transaction, and for how long their handlers may take before it begins.
_LANE_BATCH = 200
_DECIDE_SECONDS = 2.0

_PASSED = frozenset({Disposition.APPLIED, Disposition.STALE, Disposition.FILTERED, Disposition.DUPLICATE})


class Runner:
    """Runs jobs of one processor on one connection, which is in autocommit."""

    def __init__(
        self, connection: Connection, processor: Processor, dispatcher: Dispatcher, worker: str
    ) -> None:
        self._connection = connection
        self._processor = processor
        self._dispatcher = dispatcher
        self._jobs = Jobs(connection, processor.group, worker)
        self._ledger = Ledger(connection, processor.group)
        self._applier = Applier(connection)

    def wake(
        self, job_id: int, attempt: int, observe: Callable[[Job], None] = lambda _: None
    ) -> Disposition | None:
        """Runs a job if it still waits after this attempt and is due, with what waits behind it.

        A wake-up that comes twice, late or after the sweeper finds nothing to do.

        Args:
            observe: is shown the job before it runs.

        Returns:
            What became of the job; None where there was nothing to do.

        Raises:
            psycopg.Error: the database is away; no attempt is spent.
        """
        head = self._jobs.due(job_id, attempt)
        if head is None:
            return None
        observe(head)
        behind = self._jobs.lane(head.lane, _LANE_BATCH - 1) if self._processor.has_lanes else []
        planned = self._run([head, *behind])
        if not planned:
            return None
        if self._processor.has_lanes and self._passes(planned[-1][1]):
            while self.drain(head.lane):
                pass
        return planned[0][1]

    def drain(self, lane: Lane) -> bool:
        """Runs what waits in a lane, as far as it can go at once; answers whether there may be more."""
        if self._jobs.has_head(lane):
            return False
        planned = self._run(self._jobs.lane(lane, _LANE_BATCH))
        return bool(planned) and self._passes(planned[-1][1])

    def overdue(self, grace_seconds: float, limit: int = 500) -> list[tuple[int, int]]:
        """Jobs whose wake-up should have come by now."""
        return self._jobs.overdue(grace_seconds, limit)

    def ready_lanes(self, limit: int = 500) -> list[Lane]:
        """Lanes whose waiting jobs could run, and that nobody ran: their runner died after its commit."""
        return self._jobs.ready_lanes(limit, strict=self._processor.versions == "strict")

    def _passes(self, disposition: Disposition) -> bool:
        """Whether what waits behind such a job may run."""
        # Where full states replace one another, those behind a dead letter need not wait for it.
        return disposition in _PASSED or (
            disposition is Disposition.DEAD and self._processor.versions != "strict"
        )

    def _run(self, jobs: Sequence[Job]) -> list[Planned]:
        """Settles jobs of one lane in one transaction; answers what became of those it got to."""
        items = self._decide(jobs)
        if not items:
            return []
        with self._connection.transaction():
            self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            # Another runner may have been faster: what is left then begins behind what it moved, and must wait.
            locked = self._jobs.lock(jobs[: len(items)])
            if not locked:
                return []
            planner = Planner(self._processor, self._know(locked[0].lane), from_jobs=True)
            planner, planned = self._applier.apply(planner, items[: len(locked)])
            self._ledger.advance(planner.advanced)
            self._record(locked, planned)
            reach("retry.woken")
        return planned

    def _decide(self, jobs: Sequence[Job]) -> list[Item]:
        items: list[Item] = []
        until = time.monotonic() + _DECIDE_SECONDS
        for job in jobs:
            item = self._dispatcher.decide(job.record)
            item.attempts_left = job.max_attempts - job.attempt_count - 1
            if isinstance(item.decision, Stop):
                # A job has no partition to stop: its lane waits, until its attempts are spent.
                item.decision = Fail(Failure("Halt", item.decision.reason, "halt", permanent=False))
            items.append(item)
            if time.monotonic() > until:
                break
        return items

    def _know(self, lane: Lane) -> Known:
        topic, key = lane
        if key is None or self._processor.versions == "none":
            return Known()
        return Known(versions=self._ledger.versions(topic, [key]))

    def _record(self, jobs: Sequence[Job], planned: Sequence[Planned]) -> None:
        """Writes what became of the jobs, and the letters of those that failed."""
        moved = [
            (job, item, disposition)
            for job, (item, disposition) in zip(jobs, planned, strict=True)
            if disposition is not Disposition.BEHIND or job.status == "retry"
        ]
        self._jobs.start([job for job, _, _ in moved])
        self._jobs.complete(
            [(job, disposition.value) for job, _, disposition in moved if disposition in _PASSED]
        )
        messages = []
        for job, item, disposition in moved:
            if disposition is Disposition.BEHIND:
                self._jobs.give_back(job)
            elif isinstance(item.decision, Fail) and disposition not in _PASSED:
                messages.append(self._fail(job, item.decision.failure, disposition))
        insert_messages(self._connection, messages)

    def _fail(self, job: Job, failure: Failure, disposition: Disposition) -> OutboxMessage:
        attempts = job.attempt_count + 1
        if disposition is Disposition.DEAD:
            self._jobs.fail(job, "dead_letter", failure, 0)
            return letters.dead(self._processor, job.record, job.id, attempts, failure)
        delay = self._processor.retry.delay_of(failure, attempts)
        due = self._jobs.fail(job, "retry", failure, delay)
        return letters.retry(self._processor, job.record, job.id, attempts, due, delay)
