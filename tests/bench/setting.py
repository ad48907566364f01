"""Servers, a fresh database and topics for a measurement, and a meter for processes."""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from streams.app import App
from streams.dev import servers
from streams.dev.state import ALWAYS
from streams.migrations import runner
from streams.relay import slot
from streams.settings import Settings
from streams.topics import apply, plan


@contextmanager
def bench_settings() -> Iterator[Settings]:
    """Settings of a fresh database on servers of their own; everything is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as folder:
        directory = Path(folder)
        endpoints = servers.up(directory, want=ALWAYS)
        assert endpoints.database_url is not None
        name = f"bench_{uuid.uuid4().hex[:8]}"
        try:
            with psycopg.connect(endpoints.database_url, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}")
            yield Settings.load(
                kafka=endpoints.kafka,
                database_url=endpoints.database_url.rsplit("/", 1)[0] + f"/{name}",
                topic_prefix=f"{name}.",
                slot=name,
            )
        finally:
            servers.reset(directory)


def prepare(settings: Settings, app: App) -> None:
    runner.migrate(settings.database_url)
    slot.ensure(settings.database_url, settings.slot)
    apply(plan(app, settings), settings)


@dataclass(frozen=True)
class Usage:
    cpu_s: float
    rss_mb: float


@contextmanager
def metered(pid: int) -> Iterator[Callable[[], Usage]]:
    """Watches a process; answers its CPU time and the largest memory seen."""
    process, largest, stop = psutil.Process(pid), [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            largest[0] = max(largest[0], process.memory_info().rss / 1e6)

    def usage() -> Usage:
        times = process.cpu_times()
        return Usage(round(times.user + times.system, 2), round(largest[0], 1))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        stop.set()
        thread.join()


def rate(count: Callable[[], int], until: int, seconds: float = 180) -> float:
    """Events per second from the first that is counted to the last."""
    deadline = time.monotonic() + seconds
    first, began = 0, 0.0
    while (now := count()) < until:
        if now and not first:
            first, began = now, time.monotonic()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{now:,} of {until:,} after {seconds} s")
        time.sleep(0.02)
    return (until - first) / (time.monotonic() - began)
