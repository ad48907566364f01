"""What it costs to shut a frozen relay out by Kafka's transactions, instead of letting its late records be known as repeats.

The same records at the same rate, once as the relay sends them, once in transactions of one round of the loop each: how
long from handing over to a consumer that reads committed records only, and how many a second at most.
"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from confluent_kafka import OFFSET_END, Producer, TopicPartition

from streams.broker import kafka
from streams.settings import Settings
from streams.topics import Step, Wanted, apply
from tests.bench.setting import report

PARTITIONS, RATE, SECONDS, WARM_UP = 6, 500, 10, 2
VALUE = bytes(300)
# A transaction is as short as the relay's loop makes it, and as large as what has come in meanwhile.
AT_MOST = 5_000


def measure(servers: Settings, events: int | None = None) -> dict[str, Any]:
    """Both ways, one after the other."""
    figures: dict[str, Any] = {}
    for name, transactional in (("", False), ("transactional_", True)):
        topic = f"bench.fencing.{uuid.uuid4().hex[:8]}"
        apply([Step(Wanted(topic, PARTITIONS, -1), 0)], servers)
        report(f"{name or 'plain '}: latency, then throughput")
        p50, p99 = latency(servers, topic, transactional=transactional)
        figures[f"{name}p50_ms"], figures[f"{name}p99_ms"] = p50, p99
        figures[f"{name}events_per_s"] = throughput(
            servers, topic, events or 200_000, transactional=transactional
        )
    return figures


def made(settings: Settings, *, transactional: bool) -> Producer:
    producer = kafka.producer(
        settings,
        {"transactional.id": uuid.uuid4().hex, "enable.gapless.guarantee": False} if transactional else {},
    )
    if transactional:
        producer.init_transactions(30)
    return producer


def latency(settings: Settings, topic: str, *, transactional: bool) -> tuple[float, float]:
    """The median and the 99th percentile of the time to the consumer, in milliseconds."""
    reader = kafka.reader(settings, {"fetch.wait.max.ms": 5})
    reader.assign([TopicPartition(topic, partition, OFFSET_END) for partition in range(PARTITIONS)])
    seen: list[float] = []
    total = RATE * (SECONDS + WARM_UP)
    begun = threading.Event()

    def read() -> None:
        while len(seen) < total:
            message = reader.poll(0.05)
            begun.set()
            if message is not None and message.error() is None:
                seen.append(time.time() - float(message.value() or b"0"))

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait(30)
    producer = made(settings, transactional=transactional)
    first = time.time()
    sent = 0
    while sent < total:
        due = min(total, int((time.time() - first) * RATE) + 1)
        send(
            producer, topic, range(sent, due), transactional=transactional, value=lambda: b"%f" % time.time()
        )
        sent = due
        time.sleep(max(0.0, first + sent / RATE - time.time()))
    producer.flush(10)
    thread.join(30)
    reader.close()
    counted = sorted(seen[RATE * WARM_UP :])
    return (
        round(1_000 * statistics.median(counted), 1),
        round(1_000 * counted[int(len(counted) * 0.99)], 1),
    )


def throughput(settings: Settings, topic: str, events: int, *, transactional: bool) -> int:
    producer = made(settings, transactional=transactional)
    began = time.monotonic()
    for first in range(0, events, AT_MOST):
        numbers = range(first, min(events, first + AT_MOST))
        send(producer, topic, numbers, transactional=transactional, value=lambda: VALUE)
    producer.flush(30)
    return round(events / (time.monotonic() - began))


def send(
    producer: Producer, topic: str, numbers: range, *, transactional: bool, value: Callable[[], bytes]
) -> None:
    if not numbers:
        return
    if transactional:
        producer.begin_transaction()
    for number in numbers:
        while True:
            try:
                producer.produce(topic, value(), b"o%d" % (number % 1_000))
            except BufferError:
                producer.poll(0.1)
            else:
                break
    producer.poll(0)
    if transactional:
        producer.commit_transaction(30)
