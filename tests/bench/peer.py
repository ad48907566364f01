"""The relay, the bare loop and Debezium over the same backlog, one after the other; then how late events are.

All read the same table of the same database and write to the same broker, each alone on the machine, through a slot
that was made before the first event. Of each the same first events are not counted (``meter.warm``). Debezium is set
up as its documentation and ours say, and beyond that in its own favour: it asks for changes every 10 ms instead of
every 500, compresses as the relay does, and adds none of its context headers. Its heap may have 1 GiB. It is not
started anew between backlog and latency, so that the latency is that of compiled code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streams.settings import Settings
from tests import debezium
from tests.bench.backlog import PUBLICATION, Shape
from tests.bench.latency import EVENTS as LATENCY_EVENTS
from tests.bench.latency import latency
from tests.bench.meter import counter
from tests.bench.relay import LIMIT, OURS, PEER, bare_loop, drained, relay, slot_of, topic_of, written
from tests.bench.setting import report
from tests.processes import eventually

EVENTS = 300_000


def measure(servers: Settings, events: int | None = None) -> dict[str, Any]:
    events = events or EVENTS
    report(f"writing {events:,} events")
    with written(servers, events, Shape(), LIMIT, PEER) as settings:
        topics = [topic_of(settings, name) for name in (OURS, LIMIT, PEER)]
        my_count, limit_count, their_count = (counter(settings, topic) for topic in topics)
        report("the relay")
        with relay(settings) as process:
            mine = drained(process, my_count, events)
            my_latency = latency(settings, topics[0])
        report("the bare loop")
        with bare_loop(settings) as process:
            limit = drained(process, limit_count, events)
        report(f"Debezium {debezium.VERSION}")
        with peer(settings) as other:
            theirs = drained(other, their_count, events)
            # What was written to measure the relay's latency has to be out of the way.
            written_since = events + LATENCY_EVENTS
            eventually(lambda: their_count() >= written_since, lambda: other.output, 60)
            their_latency = latency(settings, topics[2])
    return {
        "events": events,
        **mine.named(),
        **theirs.named("peer_"),
        "ratio": round(mine.events_per_s / theirs.events_per_s, 2),
        **limit.named("limit_"),
        "limit_ratio": round(mine.events_per_s / limit.events_per_s, 3),
        **my_latency.named(),
        **their_latency.named("peer_"),
    }


@contextmanager
def peer(settings: Settings) -> Iterator[debezium.Debezium]:
    changed = {
        "slot.name": slot_of(settings, PEER),
        "publication.name": PUBLICATION,
        "transforms.outbox.route.topic.replacement": f"{settings.topic_prefix}peer.${{routedByValue}}",
        "poll.interval.ms": "10",
        "extended.headers.enabled": "false",
        "producer.override.compression.type": "lz4",
    }
    with (
        tempfile.TemporaryDirectory(prefix="fencepost-debezium-") as folder,
        debezium.debezium(settings, Path(folder), debezium.EVENT_STORE.read_text(), changed) as running,
    ):
        yield running
