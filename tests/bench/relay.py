"""How fast committed rows reach their topic."""

from __future__ import annotations

from typing import Any

import psycopg

from streams.broker.kafka import end_offsets
from streams.settings import Settings
from tests.bench.app import app, payload
from tests.bench.setting import metered, prepare, rate
from tests.processes import start, stop, streams

# 1,000 resources, five events in each transaction, as services write them.
FILL = """
INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload)
SELECT 'order', 'o' || (n %% 1000), n / 1000 + 1, gen_random_uuid(), 'OrderPlaced', %s
FROM generate_series(%s::int, %s::int) n"""


def fill(settings: Settings, events: int, per_transaction: int = 5) -> None:
    value = payload()
    with psycopg.connect(settings.database_url) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.commit()
        for first in range(0, events, per_transaction):
            connection.execute(FILL, (value, first, min(first + per_transaction, events) - 1))
            connection.commit()
        connection.execute("CHECKPOINT")


def measure(settings: Settings, events: int) -> dict[str, Any]:
    prepare(settings, app)
    fill(settings, events)
    topic = f"{settings.topic_prefix}order"
    relay = start(streams("relay", "run"), settings)
    try:
        with metered(relay.pid) as usage:
            events_per_s = rate(lambda: sum(end_offsets(settings, [topic]).values()), events)
            used = usage()
    finally:
        stop(relay)
    return {"events": events, "events_per_s": round(events_per_s), "cpu_s": used.cpu_s, "rss_mb": used.rss_mb}
