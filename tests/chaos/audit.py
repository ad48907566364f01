"""The chaos application's workload, and what its read model must equal."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import psycopg

import schemas
from streams import append
from tests.chaos.app import POISONED

KEYS, PER_KEY = 20, 15


def append_events(connection: psycopg.Connection[Any], *, poisoned: bool = False) -> int:
    """Fifteen receipts for each of twenty keys; of the poisoned ones the eighth of each key fails."""
    for n in range(PER_KEY):
        for key in range(KEYS):
            quantity = POISONED if poisoned and n == PER_KEY // 2 else n + 1 if n + 1 != POISONED else 1
            with connection.transaction():
                append(connection, "stock", f"s{key}", [schemas.StockReceived(quantity)], None)
    return KEYS * PER_KEY


def is_clean(connection: psycopg.Connection[Any]) -> bool:
    """Whether every total equals the fold over the store."""
    return not differences(connection)


def differences(connection: psycopg.Connection[Any]) -> list[Any]:
    """Keys whose row differs from the fold: what is there, and what should be."""
    expected: dict[str, int] = defaultdict(int)
    versions: dict[str, int] = {}
    for key, version, payload in connection.execute(
        "SELECT resource_id, version, payload FROM fencepost.event"
    ):
        expected[key] += schemas.catalog.decode(payload).quantity
        versions[key] = max(version, versions.get(key, 0))
    found = {
        row[0]: (row[1], row[2])
        for row in connection.execute("SELECT key, total, last_version FROM chaos_total")
    }
    return [
        (key, found.get(key), (total, versions[key]))
        for key, total in expected.items()
        if found.get(key) != (total, versions[key])
    ]


def count(connection: psycopg.Connection[Any], what: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {what}").fetchone()  # noqa: S608 - a test's own words
    assert row is not None
    return int(row[0])
