"""How fast committed rows reach their topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import schemas
from streams import App, Topic
from streams.settings import Settings
from tests.bench import backlog
from tests.bench.backlog import Shape
from tests.bench.meter import Figures, Running, counter, measured, metered
from tests.bench.setting import fresh, prepare
from tests.processes import Process, start, stop, streams

EVENTS = 200_000
# Everybody who reads the store writes to a topic of its own, and reads through a slot of its own.
OURS, LIMIT, PEER = "order", "limit.order", "peer.order"


def measure(servers: Settings, events: int | None = None) -> dict[str, Any]:
    """The relay alone."""
    events = events or EVENTS
    with written(servers, events, Shape()) as settings:
        count = counter(settings, topic_of(settings, OURS))
        with relay(settings) as process:
            return {"events": events, **drained(process, count, events).named()}


@contextmanager
def written(servers: Settings, events: int, shape: Shape, *others: str) -> Iterator[Settings]:
    """A database with a backlog that neither the relay's slot nor those of the others have sent."""
    with fresh(servers) as settings:
        topics = [Topic(name, partitions=shape.partitions) for name in (OURS, *others)]
        prepare(settings, App("bench", catalog=schemas.catalog, topics=topics))
        backlog.make_slots(settings, [slot_of(settings, other) for other in others])
        backlog.write(settings, events, shape)
        yield settings


def slot_of(settings: Settings, reader: str) -> str:
    return f"{settings.slot}_{reader.partition('.')[0]}"


def topic_of(settings: Settings, reader: str) -> str:
    return settings.topic_prefix + reader


@contextmanager
def relay(settings: Settings) -> Iterator[Process]:
    with _running(settings, streams("relay", "run")) as process:
        yield process


@contextmanager
def bare_loop(settings: Settings) -> Iterator[Process]:
    arguments = [topic_of(settings, LIMIT), slot_of(settings, LIMIT)]
    with _running(settings, ["-m", "tests.bench.limit", *arguments]) as process:
        yield process


@contextmanager
def _running(settings: Settings, arguments: list[str]) -> Iterator[Process]:
    process = start(arguments, settings)
    try:
        yield process
    finally:
        stop(process)


def drained(process: Running, count: Callable[[], int], events: int) -> Figures:
    """The figures of a process that works off the backlog."""
    with metered(process) as meter:
        return measured(meter, count, events)
