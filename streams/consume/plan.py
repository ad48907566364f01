"""What becomes of each record of a batch. A pure function of what was decided and what the database knows."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import assert_never

from streams.app import Processor
from streams.consume.dispatch import Apply, Fail, Filter, Item, Stop
from streams.dispositions import Disposition, Known, Lane, Partition, standing_of


@dataclass(slots=True)
class Halted:
    """A partition that must not go further. ``retry`` where the record is tried again in place."""

    item: Item
    reason: str
    retry: bool


Planned = tuple[Item, Disposition]


class Planner:
    """Walks records in order and keeps what follows from each for those behind it.

    Args:
        known: what the database says of their lanes and events.
        from_jobs: the records are jobs already, so none of them can halt a partition.
    """

    def __init__(self, processor: Processor, known: Known, *, from_jobs: bool = False) -> None:
        self._versions = dict(known.versions)
        self._waiting = {lane: set(versions) for lane, versions in known.waiting.items()}
        self._seen = set(known.seen)
        self._strict = processor.versions == "strict"
        self._latest = processor.versions == "latest"
        self._has_lanes = processor.has_lanes
        self._in_place = processor.ordering == "partition" and not from_jobs
        self.halted: dict[Partition, Halted] = {}
        self.advanced: dict[Lane, int] = {}
        self.received: list[str] = []

    def fork(self) -> Planner:
        """A planner that goes on from here, and leaves this one as it is."""
        other = copy(self)
        other._versions = dict(self._versions)  # noqa: SLF001 - its own kind
        other._waiting = {lane: set(versions) for lane, versions in self._waiting.items()}  # noqa: SLF001
        other._seen = set(self._seen)  # noqa: SLF001
        other.halted, other.advanced = dict(self.halted), dict(self.advanced)
        other.received = list(self.received)
        return other

    @property
    def open_lanes(self) -> list[Lane]:
        """Lanes that went forward and in which something waits."""
        return [lane for lane in self.advanced if lane in self._waiting]

    def plan(self, items: Iterable[Item]) -> list[Planned]:
        """Each record with what becomes of it; records from a halted partition's halt on are left out."""
        planned = []
        for item in items:
            record = item.record
            if self.halted and (record.topic, record.partition) in self.halted:
                continue
            disposition = self._dispose(item)
            if disposition is not None:
                planned.append((item, disposition))
        return planned

    def _dispose(self, item: Item) -> Disposition | None:
        """What becomes of the next record; None where it halts its partition."""
        lane = (item.record.topic, item.record.key)
        before = self._before(item, lane)
        if before is not None:
            return before
        decision = item.decision
        match decision:
            case Apply():
                self._passed(item, lane)
                return Disposition.APPLIED
            case Filter():
                self._passed(item, lane)
                return Disposition.FILTERED
            case Fail():
                return self._failed(item, decision, lane)
            case Stop(reason=reason):
                self._halt(item, reason, retry=False)
                return None
            case _:
                assert_never(decision)

    def _failed(self, item: Item, decision: Fail, lane: Lane) -> Disposition | None:
        if decision.failure.permanent or item.attempts_left < 1:
            return Disposition.DEAD
        if self._in_place:
            self._halt(item, decision.failure.message, retry=True)
            return None
        self._waits(item, lane)
        return Disposition.RETRIED

    def _before(self, item: Item, lane: Lane) -> Disposition | None:
        """What is clear from the database alone, whatever the handler decided."""
        if self._strict or self._latest:
            return self._by_version(item, lane) if item.version else None
        if item.event_id in self._seen:
            return Disposition.DUPLICATE
        # From here on this group answers for the event, whether it is applied, waits, or is buried.
        self._seen.add(item.event_id)
        self.received.append(item.event_id)
        return self._behind(item, lane) if lane in self._waiting else None

    def _by_version(self, item: Item, lane: Lane) -> Disposition | None:
        standing = standing_of(item.version, self._versions.get(lane, 0), strict=self._strict)
        if standing is Disposition.STALE:
            return standing
        waiting = self._waiting.get(lane)
        if waiting is not None and item.version in waiting:
            return Disposition.DUPLICATE
        if standing is Disposition.BEHIND or (self._latest and waiting is not None):
            return self._behind(item, lane)
        return None

    def _behind(self, item: Item, lane: Lane) -> Disposition:
        self._waits(item, lane)
        return Disposition.BEHIND

    def _waits(self, item: Item, lane: Lane) -> None:
        if self._has_lanes:
            self._waiting.setdefault(lane, set()).add(item.version)

    def _passed(self, item: Item, lane: Lane) -> None:
        if self._strict or self._latest:
            self._versions[lane] = self.advanced[lane] = item.version

    def _halt(self, item: Item, reason: str, *, retry: bool) -> None:
        if self.received and self.received[-1] == item.event_id:
            self.received.pop()  # it will come again, and must not look like a repetition then
        self.halted[item.record.topic, item.record.partition] = Halted(item, reason, retry)
