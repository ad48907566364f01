"""How long after its commit an event is in a consumer's hands."""

from __future__ import annotations

import random
import statistics
import threading
import time
import uuid
from contextlib import closing
from dataclasses import dataclass

import psycopg
from confluent_kafka import TopicPartition

from streams.broker import kafka
from streams.settings import Settings
from tests.bench.backlog import RESOURCES, Shape
from tests.processes import eventually

PER_SECOND = 500
SECONDS = 15.0
# At the beginning connections are made and caches filled.
NOT_COUNTED_SECONDS = 3.0
EVENTS = int(PER_SECOND * SECONDS)

_NUMBER_BYTES = 8
_APPEND = """
INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload)
VALUES ('order', %s, %s, gen_random_uuid(), 'OrderPlaced', %b)"""


@dataclass(frozen=True)
class Latency:
    p50_ms: float
    p99_ms: float

    def named(self, prefix: str = "") -> dict[str, float]:
        return {f"{prefix}p50_ms": round(self.p50_ms, 1), f"{prefix}p99_ms": round(self.p99_ms, 1)}


def latency(settings: Settings, topic: str) -> Latency:
    """Writes events, one in each transaction, and reads them from the topic of a relay that has no backlog.

    ``synchronous_commit`` is on: without it the log reaches its readers up to 200 ms after the commit. The consumer
    polls; a read of many records would wait until it has them. Both are in this process, on one clock.
    """
    arrivals: dict[int, float] = {}
    done = threading.Event()
    with closing(kafka.reader(settings, {"fetch.wait.max.ms": 10})) as consumer:
        consumer.assign(
            [TopicPartition(*place, offset) for place, offset in kafka.end_offsets(settings, [topic]).items()]
        )

        def receive() -> None:
            while not done.is_set():
                message = consumer.poll(0.05)
                if message is not None and message.error() is None:
                    number = int.from_bytes((message.value() or b"")[:_NUMBER_BYTES], "big")
                    arrivals.setdefault(number, time.monotonic())

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            commits = write_at_rate(settings)
            eventually(lambda: len(arrivals) >= len(commits), lambda: f"{len(arrivals)} of {len(commits)}")
        finally:
            done.set()
            thread.join()
    counted = range(int(PER_SECOND * NOT_COUNTED_SECONDS), len(commits))
    of_hundred = statistics.quantiles((1_000 * (arrivals[n] - commits[n]) for n in counted), n=100)
    return Latency(of_hundred[49], of_hundred[98])


def write_at_rate(settings: Settings) -> list[float]:
    """Commits the events at an even pace; answers when each commit returned."""
    values, run = random.Random(2), uuid.uuid4().hex[:8]
    commits: list[float] = []
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = on")
        began = time.monotonic()
        for n in range(EVENTS):
            value = n.to_bytes(_NUMBER_BYTES, "big") + values.randbytes(Shape().value_bytes - _NUMBER_BYTES)
            key, version = f"{run}-{n % RESOURCES}", n // RESOURCES + 1
            connection.execute(_APPEND, (key, version, value))
            commits.append(time.monotonic())
            time.sleep(max(0.0, began + (n + 1) / PER_SECOND - time.monotonic()))
    return commits
