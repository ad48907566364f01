"""How far each group is, which takes the database and the broker to say."""

from __future__ import annotations

from typing import Any

from streams.dispositions import Disposition
from streams.stores import overview
from streams.stores.postgres import Connection

Rows = list[dict[str, Any]]


def groups(connection: Connection, ends: dict[tuple[str, int], int]) -> Rows:
    """Per group: its lag in records, and what became of those behind it."""
    totals: dict[str, dict[str, Any]] = {}
    for fence in overview.fences(connection):
        row = totals.setdefault(
            fence["consumer_group"],
            {
                "group": fence["consumer_group"],
                "lag": 0,
                "partitions": 0,
                **dict.fromkeys(map(str, Disposition), 0),
            },
        )
        end = ends.get((fence["topic"], fence["partition"]))
        row["lag"] += max(0, end - fence["next_offset"]) if end is not None else 0
        row["partitions"] += 1
        for name in map(str, Disposition):
            row[name] += fence[name]
    return list(totals.values())
