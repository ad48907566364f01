"""The one transaction that decides everything about a batch of records.

Fence, effects, versions, jobs and outbox rows commit together or not at all. Kafka's offsets come after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streams.app import Processor
from streams.consume.dispatch import Apply, Fail, Item
from streams.consume.failures import refusal
from streams.consume.plan import Halted, Planner
from streams.dispositions import Disposition, Known, Lane
from streams.errors import Failure
from streams.event import Record
from streams.jobs import letters
from streams.points import reach
from streams.stores.effects import EffectWriter
from streams.stores.jobs import Jobs, NewJob, Status
from streams.stores.ledger import Claim, Ledger, Move
from streams.stores.outbox import OutboxMessage, insert_messages
from streams.stores.postgres import DATA_ERRORS, Connection

Partition = tuple[str, int]

_STATUS: dict[Disposition, Status] = {
    Disposition.RETRIED: "retry",
    Disposition.BEHIND: "queued",
    Disposition.DEAD: "dead_letter",
}


@dataclass(frozen=True, slots=True)
class Settled:
    """What a committed batch came to.

    Attributes:
        positions: the next offset of each partition, for Kafka.
        counts: records by disposition.
        halted: partitions that stand still, with the record they stand at.
        open_lanes: lanes whose waiting jobs can run now.
    """

    positions: dict[Partition, int]
    counts: Counter[Disposition]
    halted: dict[Partition, Halted]
    open_lanes: list[Lane]


class Settler:
    """Settles batches of one processor on one connection."""

    def __init__(self, connection: Connection, processor: Processor, worker: str) -> None:
        self._connection = connection
        self._processor = processor
        self._ledger = Ledger(connection, processor.group)
        self._jobs = Jobs(connection, processor.group, worker)
        self._writer = EffectWriter(connection)

    def settle(self, items: Sequence[Item], claims: dict[Partition, Claim]) -> Settled:
        """Commits what the items came to.

        Args:
            items: decided records, per partition in the order of their offsets.
            claims: the claim on each of their partitions.

        Raises:
            Fenced: a partition has another owner; nothing was committed.
            ConfigurationError: an effect names what the database does not have; nothing was committed.
            psycopg.OperationalError: the database is away, or asks for the transaction to be repeated.
        """
        with self._connection.transaction():
            # A constraint that is checked only at commit could no longer be laid at one record's door.
            self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            reach("consume.in_transaction")
            positions = self._ledger.lock([claims[partition] for partition in _partitions(items)])
            fresh = [item for item in items if item.record.offset >= positions[_partition(item.record)]]
            known = self._know(fresh)
            planner, planned = self._apply(fresh, known)
            self._ledger.advance(planner.advanced)
            self._ledger.receive(planner.received)
            self._keep(planned, claims)
            moves = _moves(planned, positions, claims)
            self._ledger.move(moves)
        return Settled(
            positions={(move.claim.topic, move.claim.partition): move.next_offset for move in moves},
            counts=Counter(disposition for _, disposition in planned),
            halted=planner.halted,
            open_lanes=[lane for lane in planner.advanced if lane in known.waiting],
        )

    def _know(self, items: Sequence[Item]) -> Known:
        versioned = self._processor.versions != "none"
        lanes = {(item.record.topic, item.record.key) for item in items}
        return self._ledger.know(
            lanes,
            [] if versioned else [item.event_id for item in items],
            versions=versioned,
            waiting=self._processor.ordering == "key",
        )

    def _apply(self, items: Sequence[Item], known: Known) -> tuple[Planner, list[tuple[Item, Disposition]]]:
        """Applies the effects of all that pass; those the database refuses fail, and the rest is planned again."""
        while True:
            planner = Planner(self._processor, known)
            planned = planner.plan(items)
            passed = [item for item, disposition in planned if disposition is Disposition.APPLIED]
            try:
                with self._connection.transaction():
                    self._write(passed)
            except DATA_ERRORS:
                for item, failure in self._refused(passed):
                    item.decision = Fail(failure)
                continue
            return planner, planned

    def _refused(self, items: Sequence[Item]) -> list[tuple[Item, Failure]]:
        """Which records' effects the database refuses: found by halving, with the others' effects in place."""
        found: list[tuple[Item, Failure]] = []
        with self._connection.transaction(force_rollback=True):
            self._bisect(items, found)
        return found

    def _bisect(self, items: Sequence[Item], found: list[tuple[Item, Failure]]) -> None:
        try:
            with self._connection.transaction():
                self._write(items)
        except DATA_ERRORS as error:
            if len(items) == 1:
                found.append((items[0], refusal(error)))
                return
            middle = len(items) // 2
            self._bisect(items[:middle], found)
            self._bisect(items[middle:], found)

    def _write(self, items: Sequence[Item]) -> None:
        applied = [item.decision for item in items if isinstance(item.decision, Apply)]
        self._writer.apply(effect for decision in applied for effect in decision.effects)
        insert_messages(self._connection, [message for decision in applied for message in decision.messages])

    def _keep(self, planned: Sequence[tuple[Item, Disposition]], claims: dict[Partition, Claim]) -> None:
        """Writes a job for each record that did not pass, and the outbox row that sends it on its way."""
        messages: list[OutboxMessage] = []
        for item, disposition in planned:
            if disposition not in _STATUS:
                continue
            topic_id = claims[_partition(item.record)].topic_id
            job = self._new_job(item, disposition, topic_id)
            job_id, due = self._jobs.insert(job)
            if disposition is Disposition.RETRIED:
                messages.append(
                    letters.retry(self._processor, item.record, job_id, 1, due, job.delay_seconds)
                )
            elif disposition is Disposition.DEAD and job.failure is not None:
                messages.append(letters.dead(self._processor, item.record, job_id, 1, job.failure))
        insert_messages(self._connection, messages)
        if messages:
            reach("retry.row_written")

    def _new_job(self, item: Item, disposition: Disposition, topic_id: str) -> NewJob:
        retry = self._processor.retry
        failure = None
        if isinstance(item.decision, Fail) and disposition is not Disposition.BEHIND:
            failure = item.decision.failure
        delay = 0.0
        if failure is not None and disposition is Disposition.RETRIED:
            delay = retry.delay(1) if failure.delay_seconds is None else failure.delay_seconds
        return NewJob(
            item.record, topic_id, item.version, _STATUS[disposition], retry.attempts, failure, delay
        )


def _partition(record: Record) -> Partition:
    return record.topic, record.partition


def _partitions(items: Sequence[Item]) -> list[Partition]:
    return sorted({_partition(item.record) for item in items})


def _moves(
    planned: Sequence[tuple[Item, Disposition]],
    positions: dict[Partition, int],
    claims: dict[Partition, Claim],
) -> list[Move]:
    by_partition: dict[Partition, list[tuple[int, Disposition]]] = {}
    for item, disposition in planned:
        by_partition.setdefault(_partition(item.record), []).append((item.record.offset, disposition))
    moves = []
    for partition, records in sorted(by_partition.items()):
        after = records[-1][0] + 1
        # Compaction and transaction markers leave offsets that never held a record for us.
        absent = after - positions[partition] - len(records)
        moves.append(
            Move(claims[partition], after, Counter(disposition for _, disposition in records), absent)
        )
    return moves
