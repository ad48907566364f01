"""The application under fire: a total per key, summed from deltas, so that a doubled or lost event shows."""

from __future__ import annotations

import os

import schemas
from streams import App, Effects, Event, Permanent, Retry, Topic, Transient

TABLE = "CREATE TABLE chaos_total (key text PRIMARY KEY, total bigint NOT NULL, last_version bigint NOT NULL)"
POISONED = 13

app = App("chaos", catalog=schemas.catalog, topics=[Topic("stock", partitions=2)])


@app.projection(
    "total", topics=["stock"], retry=Retry(attempts=20, base_seconds=0.2, factor=1.5, tier_seconds=(1, 10))
)
def total(event: Event, effects: Effects) -> None:
    received: schemas.StockReceived = event.data
    failing = os.environ.get("CHAOS_FAIL")
    if failing and received.quantity == POISONED:
        raise Permanent("thirteen") if failing == "permanent" else Transient("thirteen")
    row = {"key": event.resource_id}
    effects.add("chaos_total", row, total=received.quantity)
    effects.upsert("chaos_total", row, last_version=event.version)
