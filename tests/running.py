"""Processors running inside the test's own process, and records put straight into topics."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from streams.app import App
from streams.broker import kafka
from streams.broker.kafka import end_offsets
from streams.consume.supervise import Supervisor
from streams.event import CE_ID, CE_TYPE, FP_VERSION, Headers, Record
from streams.schema.catalog import encode
from streams.settings import Settings
from streams.topics import apply, plan


@contextmanager
def running(settings: Settings, app: App, *, with_relay: bool = True) -> Iterator[Supervisor]:
    """Runs an application's processors until the block ends; they must then stop within ten seconds."""
    apply(plan(app, settings), settings)
    stop = threading.Event()
    supervisor = Supervisor(settings, list(app.processors.values()), stop, with_relay=with_relay)
    supervisor.start()
    try:
        yield supervisor
    finally:
        stop.set()
        assert supervisor.join(10) == []


def produce(
    settings: Settings, topic: str, records: Iterable[tuple[bytes | None, bytes | None, Headers]]
) -> None:
    """Puts records into a topic as they are, and waits until the broker has them."""
    producer = kafka.producer(settings)
    for key, value, headers in records:
        producer.produce(topic, value, key, headers=list(headers))
    assert producer.flush(10) == 0


def headers_of(version: int, event_id: str, kind: str = "StockReceived") -> Headers:
    return ((CE_ID, event_id.encode()), (CE_TYPE, kind.encode()), (FP_VERSION, b"%d" % version))


def as_record(key: str, version: int, event: object) -> tuple[bytes, bytes, Headers]:
    """A record as the relay would send it."""
    return key.encode(), encode(event), headers_of(version, f"{key}-{version}", type(event).__name__)


def everything_in(settings: Settings, topic: str) -> list[Record]:
    ends = end_offsets(settings, [topic])
    return list(kafka.read(settings, dict.fromkeys(ends, 0), ends))


def one(settings: Settings, query: str, *parameters: Any) -> Any:
    """The first column of the first row."""
    with psycopg.connect(settings.database_url) as connection:
        row = connection.execute(query, parameters).fetchone()
    return None if row is None else row[0]
