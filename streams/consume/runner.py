"""Runs a job that waited, and those that waited behind it, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import assert_never

from streams.app import Processor
from streams.consume.dispatch import Apply, Dispatcher, Fail, Filter, Item, Stop
from streams.consume.failures import refusal
from streams.consume.plan import standing_of
from streams.dispositions import Disposition, Lane
from streams.errors import Failure
from streams.jobs import letters
from streams.points import reach
from streams.stores.effects import EffectWriter
from streams.stores.jobs import Job, Jobs
from streams.stores.ledger import Ledger
from streams.stores.outbox import insert_messages
from streams.stores.postgres import DATA_ERRORS, Connection

# How many jobs of a lane run in one transaction before it commits and begins another.
_LANE_BATCH = 200


class Outcome(StrEnum):
    """What a run came to."""

    APPLIED = "applied"
    STALE = "stale"
    FILTERED = "filtered"
    WAITS = "waits"  # an earlier version is still missing
    RETRY = "retry"
    DEAD = "dead"
    NOT_DUE = "not_due"  # done already, taken by another, or not yet due


_PASSED = (Outcome.APPLIED, Outcome.STALE, Outcome.FILTERED)


class Runner:
    """Runs jobs of one processor on one connection."""

    def __init__(
        self, connection: Connection, processor: Processor, dispatcher: Dispatcher, worker: str
    ) -> None:
        self._connection = connection
        self._processor = processor
        self._dispatcher = dispatcher
        self._jobs = Jobs(connection, processor.group, worker)
        self._ledger = Ledger(connection, processor.group)
        self._writer = EffectWriter(connection)

    def wake(self, job_id: int, attempt: int, observe: Callable[[Job], None] = lambda _: None) -> Outcome:
        """Runs a job if it still waits after this attempt, then what waited behind it.

        A wake-up that comes twice, late or after the sweeper finds nothing to do.

        Args:
            observe: is shown the job before it runs.

        Raises:
            psycopg.OperationalError: the database is away; no attempt is spent.
        """
        with self._connection.transaction():
            self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            job = self._jobs.take(job_id, attempt)
            if job is None:
                return Outcome.NOT_DUE
            observe(job)
            outcome = self._run(job)
            reach("retry.woken")
            more = self._opens_lane(outcome) and self._run_lane(job.lane)
        while more:
            more = self.drain(job.lane)
        return outcome

    def drain(self, lane: Lane) -> bool:
        """Runs what waits in a lane, as far as it can go; answers whether there may be more."""
        with self._connection.transaction():
            self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            return self._run_lane(lane)

    def overdue(self, grace_seconds: float, limit: int = 500) -> list[tuple[int, int]]:
        """Jobs whose wake-up should have come by now."""
        return self._jobs.overdue(grace_seconds, limit)

    def ready_lanes(self, limit: int = 500) -> list[Lane]:
        """Lanes whose waiting jobs could run, and that nobody ran: their runner died after its commit."""
        return self._jobs.ready_lanes(limit, strict=self._processor.versions == "strict")

    def _opens_lane(self, outcome: Outcome) -> bool:
        if self._processor.ordering != "key":
            return False
        # Where full states replace one another, those behind a dead letter need not wait for it.
        return outcome in _PASSED or (outcome is Outcome.DEAD and self._processor.versions != "strict")

    def _run_lane(self, lane: Lane) -> bool:
        for _ in range(_LANE_BATCH):
            if self._jobs.has_head(lane):
                return False
            job = self._jobs.next_in_lane(lane)
            if job is None or not self._opens_lane(self._run(job)):
                return False
        return True

    def _run(self, job: Job) -> Outcome:
        self._jobs.start(job)
        item = self._dispatcher.decide(job.record)
        match self._standing(job, item):
            case Disposition.STALE:
                return self._complete(job, Outcome.STALE)
            case Disposition.BEHIND:
                self._jobs.give_back(job)
                return Outcome.WAITS
            case _:
                return self._finish(job, item)

    def _standing(self, job: Job, item: Item) -> Disposition | None:
        if self._processor.versions == "none" or not item.version:
            return None
        known = self._ledger.know([job.lane], [], versions=True, waiting=False)
        return standing_of(
            item.version, known.versions.get(job.lane, 0), strict=self._processor.versions == "strict"
        )

    def _finish(self, job: Job, item: Item) -> Outcome:
        match item.decision:
            case Apply() as decision:
                return self._apply(job, item, decision)
            case Filter():
                self._advance(job, item)
                return self._complete(job, Outcome.FILTERED)
            case Fail(failure=failure):
                return self._fail(job, failure)
            case Stop(reason=reason):
                # A job has no partition to stop; it waits, and its lane with it, until its attempts are spent.
                return self._fail(job, Failure("Halt", reason, "halt", permanent=False))
            case _:
                assert_never(item.decision)

    def _apply(self, job: Job, item: Item, decision: Apply) -> Outcome:
        try:
            with self._connection.transaction():
                self._writer.apply(decision.effects)
                insert_messages(self._connection, decision.messages)
        except DATA_ERRORS as error:
            return self._fail(job, refusal(error))
        self._advance(job, item)
        return self._complete(job, Outcome.APPLIED)

    def _advance(self, job: Job, item: Item) -> None:
        if self._processor.versions != "none" and item.version:
            self._ledger.advance({job.lane: item.version})

    def _complete(self, job: Job, outcome: Outcome) -> Outcome:
        self._jobs.complete(job, outcome.value)
        return outcome

    def _fail(self, job: Job, failure: Failure) -> Outcome:
        attempts = job.attempt_count + 1
        if failure.permanent or attempts >= job.max_attempts:
            self._jobs.fail(job, "dead_letter", failure, 0)
            message = letters.dead(self._processor, job.record, job.id, attempts, failure)
            outcome = Outcome.DEAD
        else:
            retry = self._processor.retry
            delay = retry.delay(attempts) if failure.delay_seconds is None else failure.delay_seconds
            due = self._jobs.fail(job, "retry", failure, delay)
            message = letters.retry(self._processor, job.record, job.id, attempts, due, delay)
            outcome = Outcome.RETRY
        insert_messages(self._connection, [message])
        return outcome
