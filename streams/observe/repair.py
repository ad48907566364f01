"""Sends again what is not in its topic: through the outbox, so that the one relay carries it as it carries all else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from streams.errors import Busy
from streams.event import (
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TYPE,
    FP_VERSION,
    TRACEPARENT,
)
from streams.observe.versions import Stretch
from streams.settings import Settings
from streams.stores.postgres import Connection

_BATCH = 1_000
_MEMORY_BYTES = 8 * 1024 * 1024

_CLAIM = "SELECT pg_try_advisory_lock(hashtext('fencepost.repair'))"

# The headers that the relay gives an event; it adds the position by itself, which is that of the row in the outbox.
_REPUBLISH = f"""
INSERT INTO fencepost.outbox (topic, key, payload, header_names, header_values)
SELECT %(prefix)s || e.resource_type, convert_to(e.resource_id, 'UTF8'), e.payload,
    ARRAY['{CE_SPECVERSION}', '{CE_SOURCE}', '{CE_ID}', '{CE_TYPE}', '{CE_TIME}', '{CE_SUBJECT}', '{FP_VERSION}']
        || CASE WHEN e.traceparent IS NULL THEN ARRAY[]::text[] ELSE ARRAY['{TRACEPARENT}'] END,
    ARRAY(SELECT convert_to(value, 'UTF8') FROM unnest(
        ARRAY['1.0', %(source)s, e.id::text, e.type,
            to_char(e.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') || '+00:00',
            e.resource_id, e.version::text]
        || CASE WHEN e.traceparent IS NULL THEN ARRAY[]::text[] ELSE ARRAY[e.traceparent] END
    ) WITH ORDINALITY AS v (value, place) ORDER BY place)
FROM unnest(%(types)s::text[], %(ids)s::text[], %(firsts)s::bigint[], %(lasts)s::bigint[])
    WITH ORDINALITY AS g (resource_type, resource_id, first, last, place)
JOIN fencepost.event e ON e.resource_type = g.resource_type AND e.resource_id = g.resource_id
    AND e.version BETWEEN g.first AND g.last
ORDER BY g.place, e.version"""  # noqa: S608 - the names are our own


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions of a resource that follow one another, both ends inclusive, and are not in the topic."""

    resource_type: str
    resource_id: str
    first: int
    last: int


class Gaps:
    """What is missing, kept until it is sent again: in memory if it is little, otherwise in a file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES, "w+", encoding="utf-8")  # noqa: SIM115 - closed below
        self.events = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, resource_type: str, stretch: Stretch) -> None:
        line = [resource_type, stretch.key.decode(), stretch.first, stretch.last]
        self._file.write(json.dumps(line) + "\n")
        self.events += stretch.events

    def __iter__(self) -> Iterator[Gap]:
        self._file.seek(0)
        for line in self._file:
            yield Gap(*json.loads(line))


def claim(connection: Connection) -> None:
    """Makes this connection the only one that repairs: two at once would send everything twice.

    Raises:
        Busy: another one does.
    """
    row = connection.execute(_CLAIM).fetchone()
    if row is None or not row[0]:
        raise Busy("another repair is running on this database; let it end, and audit again")


def republish(
    connection: Connection,
    settings: Settings,
    gaps: Iterable[Gap],
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Writes the events of the gaps to the outbox, per resource in their order; answers how many there were.

    Args:
        connection: in autocommit; each batch is a transaction.
        progress: is told how many are written.
    """
    done = 0
    for batch in _batches(gaps):
        columns = zip(
            *((gap.resource_type, gap.resource_id, gap.first, gap.last) for gap in batch), strict=True
        )
        types, ids, firsts, lasts = map(list, columns)
        parameters = {
            "prefix": settings.topic_prefix,
            "source": settings.source,
            "types": types,
            "ids": ids,
            "firsts": firsts,
            "lasts": lasts,
        }
        done += connection.execute(_REPUBLISH, parameters).rowcount
        progress(done)
    return done


def _batches(gaps: Iterable[Gap]) -> Iterator[list[Gap]]:
    """The gaps in batches of a bounded number of events; long ones in parts."""
    batch: list[Gap] = []
    room = _BATCH
    for gap in gaps:
        first = gap.first
        while first <= gap.last:
            last = min(gap.last, first + room - 1)
            batch.append(Gap(gap.resource_type, gap.resource_id, first, last))
            room -= last - first + 1
            first = last + 1
            if not room:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch
