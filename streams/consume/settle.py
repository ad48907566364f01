"""The one transaction that decides everything about a batch of records.

Fence, effects, versions, jobs and outbox rows commit together or not at all. Kafka's offsets come after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streams.app import Processor
from streams.consume.apply import Applier
from streams.consume.dispatch import MAX_INDEXED_BYTES, Fail, Item
from streams.consume.plan import Halted, Planned, Planner
from streams.dispositions import Disposition, Known, Lane, Partition
from streams.event import Record
from streams.jobs import letters
from streams.points import reach
from streams.stores.jobs import Jobs, NewJob, Status
from streams.stores.ledger import Claim, Ledger, Move
from streams.stores.outbox import OutboxMessage, insert_messages
from streams.stores.postgres import Connection

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
        self._applier = Applier(connection)

    def settle(self, items: Sequence[Item], claims: dict[Partition, Claim]) -> Settled:
        """Commits what the items came to.

        Args:
            items: decided records, per partition in the order of their offsets.
            claims: the claim on each of their partitions.

        Raises:
            Fenced: a partition has another owner; nothing was committed.
            ConfigurationError: an effect names what the database does not have; nothing was committed.
            psycopg.Error: the database is away, or asks for the transaction to be repeated.
        """
        with self._connection.transaction():
            # A constraint that is checked only at commit could no longer be laid at one record's door.
            self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            reach("consume.in_transaction")
            positions = self._ledger.lock([claims[partition] for partition in _partitions(items)])
            fresh = [item for item in items if item.record.offset >= positions[_partition(item.record)]]
            planner, planned = self._applier.apply(Planner(self._processor, self._know(fresh)), fresh)
            self._ledger.advance(planner.advanced)
            self._ledger.receive(planner.received)
            self._keep(planned, claims)
            moves = _moves(planned, positions, claims)
            self._ledger.move(moves)
        return Settled(
            positions={(move.claim.topic, move.claim.partition): move.next_offset for move in moves},
            counts=Counter(disposition for _, disposition in planned),
            halted=planner.halted,
            open_lanes=planner.open_lanes,
        )

    def _know(self, items: Sequence[Item]) -> Known:
        """What the database says about the lanes and events of these records."""
        known = Known()
        by_topic: dict[str, set[bytes]] = {}
        for item in items:
            key = item.record.key
            if key is not None and len(key) <= MAX_INDEXED_BYTES:
                by_topic.setdefault(item.record.topic, set()).add(key)
        versions = sorted({item.version for item in items if item.version})
        for topic, keys in by_topic.items():
            # The jobs first: their locks wait for a runner, and what it committed is then seen below.
            if self._processor.has_lanes:
                known.waiting.update(self._ledger.waiting(topic, list(keys), versions))
            if self._processor.versions != "none":
                known.versions.update(self._ledger.versions(topic, list(keys)))
        if self._processor.versions == "none" and items:
            known.seen.update(self._ledger.seen([item.event_id for item in items]))
        return known

    def _keep(self, planned: Sequence[Planned], claims: dict[Partition, Claim]) -> None:
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
                messages.append(letters.dead(self._processor, item.record, job_id, job.attempts, job.failure))
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
            delay = retry.delay_of(failure, 1)
        attempts = 0 if failure is None else retry.attempts - item.attempts_left
        return NewJob(
            item.record,
            topic_id,
            item.version,
            _STATUS[disposition],
            attempts,
            retry.attempts,
            failure,
            delay,
        )


def _partition(record: Record) -> Partition:
    return record.topic, record.partition


def _partitions(items: Sequence[Item]) -> list[Partition]:
    return sorted({_partition(item.record) for item in items})


def _moves(
    planned: Sequence[Planned],
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
