"""How the relay's rate changes with the size of transactions, of values, and with the number of partitions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from streams.settings import Settings
from tests.bench.backlog import Shape
from tests.bench.meter import counter
from tests.bench.relay import LIMIT, OURS, bare_loop, drained, relay, topic_of, written
from tests.bench.setting import report

EVENTS = 100_000
# A backlog has no more than this in it, so that it stays in the memory of the machine.
BYTES = 300_000_000
SHAPES = (
    *(Shape(rows_per_transaction=rows) for rows in (1, 10, 100)),
    *(Shape(value_bytes=size) for size in (300, 3_000, 30_000)),
    *(Shape(partitions=partitions) for partitions in (1, 8, 64)),
)


def measure(servers: Settings, events: int | None = None) -> list[dict[str, Any]]:
    """Per shape the relay and the bare loop, each alone, over the same backlog."""
    return [_case(servers, shape, min(events or EVENTS, BYTES // shape.value_bytes)) for shape in SHAPES]


def _case(servers: Settings, shape: Shape, events: int) -> dict[str, Any]:
    named = asdict(shape)
    report(", ".join(f"{name} {value:,}" for name, value in named.items()))
    with written(servers, events, shape, LIMIT) as settings:
        my_count, limit_count = (counter(settings, topic_of(settings, name)) for name in (OURS, LIMIT))
        with relay(settings) as process:
            mine = drained(process, my_count, events)
        with bare_loop(settings) as process:
            limit = drained(process, limit_count, events)
    return {
        **named,
        "events": events,
        **mine.named(),
        **limit.named("limit_"),
        "limit_ratio": round(mine.events_per_s / limit.events_per_s, 3),
    }
