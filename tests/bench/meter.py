"""A meter for one process: how fast it gets through its events, and what that takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from streams.broker import kafka
from streams.settings import Settings

_EVERY_SECONDS = 0.02
_LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class Running(Protocol):
    """A process, with what it said for where it ends too early."""

    pid: int

    @property
    def is_running(self) -> bool: ...

    @property
    def output(self) -> str: ...


@dataclass(frozen=True)
class Figures:
    """What a process did with the events that were counted."""

    events_per_s: float
    cpu_s_per_million: float
    rss_mb: float

    def named(self, prefix: str = "") -> dict[str, float]:
        return {
            f"{prefix}events_per_s": round(self.events_per_s),
            f"{prefix}cpu_s_per_million": round(self.cpu_s_per_million, 1),
            f"{prefix}rss_mb": round(self.rss_mb, 1),
        }


class Meter:
    """Counts the CPU time of a process, and watches for the largest memory it had."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.rss_mb = 0.0
        self._process = psutil.Process(running.pid)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def look(self) -> None:
        self.rss_mb = max(self.rss_mb, self._process.memory_info().rss / 1e6)


@contextmanager
def metered(running: Running) -> Iterator[Meter]:
    meter, stop = Meter(running), threading.Event()

    def watch() -> None:
        while running.is_running and not stop.wait(0.1):
            meter.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()


def warm(events: int) -> int:
    """How many of so many events are let pass before the rest is measured: 50,000, of fewer than 300,000 a sixth.

    For whoever is measured: Java compiles meanwhile, and everybody's connections and caches are there afterwards.
    """
    return min(50_000, max(1, events // 6))


def measured(meter: Meter, count: Callable[[], int], events: int, seconds: float = 180) -> Figures:
    """The figures of a process from the end of its warming up until all events are counted.

    Raises:
        TimeoutError: it takes longer than these seconds.
        RuntimeError: it ended, or was too quick to be measured.
    """
    deadline = time.monotonic() + seconds
    first, began, cpu_s = 0, 0.0, 0.0
    while (now := count()) < events:
        if now >= warm(events) and not first:
            first, began, cpu_s = now, time.monotonic(), meter.cpu_s()
        if not meter.running.is_running:
            raise RuntimeError(f"it ended after {now:,} of {events:,} events:\n{meter.running.output}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{now:,} of {events:,} after {seconds} s:\n{meter.running.output}")
        time.sleep(_EVERY_SECONDS)
    if not first:
        raise RuntimeError(f"{events:,} events are too few to be measured")
    rest = events - first
    return Figures(
        rest / (time.monotonic() - began), (meter.cpu_s() - cpu_s) / rest * 1_000_000, meter.rss_mb
    )


def counter(settings: Settings, topic: str) -> Callable[[], int]:
    """How many records a topic has had, asked through one client: whoever is measured wants the processor."""
    client = kafka.admin(settings)
    latest = {TopicPartition(*place): _LATEST for place in kafka.end_offsets(settings, [topic])}

    def count() -> int:
        return sum(future.result(10).offset for future in client.list_offsets(latest).values())

    return count
