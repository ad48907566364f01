"""How fast records become rows, against a bare loop of fence and unnest over the same records."""

from __future__ import annotations

import time
import uuid
from typing import Any

import psycopg
from confluent_kafka import Consumer, Producer

from streams.broker import kafka
from streams.event import (
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TYPE,
    FP_POSITION,
    FP_VERSION,
)
from streams.settings import Settings
from tests.bench.app import TABLE, app, payload
from tests.bench.meter import Figures, measured, metered
from tests.bench.setting import fresh, prepare
from tests.processes import start, stop, streams

EVENTS = 200_000
RESOURCES = 1_000
BATCH = 2_000
UPSERT = """
INSERT INTO limit_order AS t SELECT * FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::text[])
ON CONFLICT (order_id) DO UPDATE SET version = excluded.version, customer_id = excluded.customer_id,
    total_cents = excluded.total_cents, currency = excluded.currency WHERE t.version < excluded.version"""


def measure(servers: Settings, events: int | None = None) -> dict[str, Any]:
    events = events or EVENTS
    with fresh(servers) as settings:
        prepare(settings, app)
        with psycopg.connect(settings.database_url, autocommit=True) as connection:
            connection.execute(TABLE)
        produce(kafka.producer(settings), f"{settings.topic_prefix}order", events)
        limit = limit_rate(settings, events)
        mine = processed(settings, events)
    return {
        "events": events,
        **mine.named(),
        "limit_events_per_s": round(limit),
        "ratio": round(mine.events_per_s / limit, 3),
    }


def produce(producer: Producer, topic: str, events: int) -> None:
    """The records that the relay would send."""
    value = payload()
    for n in range(events):
        key = b"o%d" % (n % RESOURCES)
        headers: list[tuple[str, str | bytes | None]] = [
            (CE_SPECVERSION, b"1.0"),
            (CE_SOURCE, b"bench"),
            (CE_ID, str(uuid.uuid4()).encode()),
            (CE_TYPE, b"OrderPlaced"),
            (CE_TIME, b"2026-01-01T00:00:00.000000+00:00"),
            (CE_SUBJECT, key),
            (FP_VERSION, b"%d" % (n // RESOURCES + 1)),
            (FP_POSITION, b"0/1234567/1"),
        ]
        while True:
            try:
                producer.produce(topic, value, key, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def processed(settings: Settings, events: int) -> Figures:
    process = start(streams("run", "tests.bench.app:app"), settings)
    try:
        with (
            metered(process) as meter,
            psycopg.connect(settings.database_url, autocommit=True) as connection,
        ):

            def count() -> int:
                row = connection.execute(
                    "SELECT coalesce(sum(applied), 0)::int FROM fencepost.fence"
                ).fetchone()
                return row[0] if row else 0

            return measured(meter, count, events)
    finally:
        stop(process)


def limit_rate(settings: Settings, events: int) -> float:
    """Consume, decode, move a fence, upsert the last row of each key; nothing is checked, nothing can fail."""
    topic = f"{settings.topic_prefix}order"
    reader = kafka.consumer(settings, f"limit-{uuid.uuid4().hex[:8]}", {"auto.offset.reset": "earliest"})
    reader.subscribe([topic])
    with psycopg.connect(settings.database_url) as connection:
        connection.execute(
            "CREATE TABLE limit_order (order_id text PRIMARY KEY, version bigint, customer_id text, total_cents bigint, currency text)"
        )
        connection.execute("CREATE TABLE limit_fence (partition int PRIMARY KEY, next_offset bigint)")
        connection.execute("INSERT INTO limit_fence SELECT p, 0 FROM generate_series(0, 5) p")
        connection.commit()
        first = 0
        while not first:
            first = limit_batch(reader, connection)
        done, began = first, time.monotonic()
        while done < events:
            done += limit_batch(reader, connection)
        seconds = time.monotonic() - began
    reader.close()
    return (events - first) / seconds


def limit_batch(reader: Consumer, connection: psycopg.Connection[Any]) -> int:
    messages = reader.consume(BATCH, 0.2)
    rows: dict[str, tuple[int, str, int, str]] = {}
    ends: dict[int, int] = {}
    for message in messages:
        headers = dict(message.headers() or [])
        data: Any = app.catalog.decode(message.value() or b"")
        key = (message.key() or b"").decode()
        rows[key] = (int(headers[FP_VERSION] or 0), data.customer_id, data.total_cents, data.currency)
        ends[message.partition() or 0] = (message.offset() or 0) + 1
    if not messages:
        return 0
    with connection.transaction():
        for partition, end in sorted(ends.items()):
            connection.execute(
                "UPDATE limit_fence SET next_offset = %s WHERE partition = %s AND next_offset < %s",
                (end, partition, end),
            )
        keys = sorted(rows)
        connection.execute(
            UPSERT, (keys, *(list(column) for column in zip(*(rows[key] for key in keys), strict=True)))
        )
    reader.commit(asynchronous=True)
    return len(messages)
