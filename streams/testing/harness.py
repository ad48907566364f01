"""Runs a projection over events in memory: decided and planned by the code that runs in production."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from streams.app import Processor
from streams.consume.dispatch import Apply, Dispatcher, Fail, Item
from streams.consume.plan import Planner
from streams.dispositions import Disposition, Known
from streams.errors import ConfigurationError, Failure
from streams.event import CE_ID, CE_TYPE, FP_VERSION, Record, as_headers
from streams.schema.catalog import encode, type_name
from streams.stores.outbox import OutboxMessage
from streams.testing.memory_tables import MemoryTables


class Harness:
    """One processor with read models in memory.

    ::

        harness = Harness(app.processor("stock-level"))
        harness.given("sku-1", StockReceived(5), StockReserved("order-1", 2))
        assert harness.tables.row("shop.stock_level", {"sku": "sku-1"}) == {"sku": "sku-1", "on_hand": 5, "reserved": 2}

    What fails is kept in ``failures`` and its followers wait, as in production; nothing is tried again.

    Attributes:
        tables: the read models.
        messages: derived events that would be published.
        failures: per failed record, why.
        halted: why the handler stopped its partition, if it did.
    """

    def __init__(self, processor: Processor) -> None:
        self.tables = MemoryTables()
        self.messages: list[OutboxMessage] = []
        self.failures: list[tuple[Record, Failure]] = []
        self.halted: str | None = None
        self._processor = processor
        self._types = {topic.resource_type: topic.resource_type for topic in processor.topics}
        self._dispatcher = Dispatcher(processor, self._types)
        self._known = Known()
        self._versions: Counter[tuple[str, str]] = Counter()
        self._next_offset = itertools.count().__next__

    def given(self, resource_id: str, *events: object, topic: str | None = None) -> list[Disposition]:
        """Delivers the resource's next events; answers what became of each."""
        return self.deliver(*self.records(resource_id, *events, topic=topic))

    def records(self, resource_id: str, *events: object, topic: str | None = None) -> list[Record]:
        """The records of a resource's next events, to be delivered late, twice or in another order."""
        chosen = self._topic(topic)
        return [self._record(chosen, resource_id, event) for event in events]

    def deliver(self, *records: Record) -> list[Disposition]:
        """Settles records as one batch; a record that halts its partition, and those behind it, have no answer."""
        planner = Planner(self._processor, self._known)
        planned = planner.plan([self._dispatcher.decide(record) for record in records])
        for item, disposition in planned:
            self._settle(item, disposition)
        for halted in planner.halted.values():
            self.halted = halted.reason
        self._known.versions.update(planner.advanced)
        self._known.seen.update(planner.received)
        return [disposition for _, disposition in planned]

    def check_redelivery(self, *records: Record) -> None:
        """Delivers everything a second time, at new offsets, and fails where that changed something.

        Raises:
            AssertionError: with the rows and messages before and after.
        """
        self.deliver(*records)
        before = self._seen()
        self.deliver(*(replace(record, offset=self._next_offset()) for record in records))
        after = self._seen()
        if before != after:
            raise AssertionError(f"a second delivery changed the result: {before} became {after}")

    def _settle(self, item: Item, disposition: Disposition) -> None:
        decision, lane = item.decision, (item.record.topic, item.record.key)
        if disposition is Disposition.APPLIED and isinstance(decision, Apply):
            self.tables.apply(decision.effects)
            self.messages += decision.messages
        elif disposition in (Disposition.RETRIED, Disposition.BEHIND) and self._processor.ordering == "key":
            self._known.waiting.setdefault(lane, set()).add(item.version)
        if disposition in (Disposition.RETRIED, Disposition.DEAD) and isinstance(decision, Fail):
            self.failures.append((item.record, decision.failure))

    def _seen(self) -> tuple[dict[str, Sequence[object]], list[OutboxMessage]]:
        return self.tables.everything(), list(self.messages)

    def _record(self, topic: str, resource_id: str, event: object) -> Record:
        self._versions[topic, resource_id] += 1
        headers = as_headers(
            [
                (CE_ID, str(uuid.uuid4())),
                (CE_TYPE, type_name(event)),
                (FP_VERSION, str(self._versions[topic, resource_id])),
            ]
        )
        return Record(topic, 0, self._next_offset(), resource_id.encode(), encode(event), headers)

    def _topic(self, topic: str | None) -> str:
        if topic is None and len(self._types) == 1:
            return next(iter(self._types))
        if topic in self._types:
            return topic
        raise ConfigurationError(
            f"processor {self._processor.name} reads {', '.join(self._types)}; say topic=… which one the events are of"
        )
