"""Servers, and for each measurement a database, a slot and topics of its own."""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from streams.app import App
from streams.dev import servers
from streams.dev.state import ALWAYS
from streams.migrations import runner
from streams.relay import slot
from streams.settings import Settings
from streams.topics import apply, plan
from tests.processes import eventually

_DROP_SLOTS = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s"
_READ_SLOTS = "SELECT FROM pg_replication_slots WHERE database = %s AND active"


def report(message: str) -> None:
    """Says on stderr what a long run is at."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


@contextmanager
def bench_servers() -> Iterator[Settings]:
    """Settings of servers of their own; everything is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as folder:
        directory = Path(folder)
        endpoints = servers.up(directory, want=ALWAYS)
        assert endpoints.database_url is not None
        try:
            yield Settings.load(kafka=endpoints.kafka, database_url=endpoints.database_url)
        finally:
            servers.reset(directory)


@contextmanager
def fresh(settings: Settings) -> Iterator[Settings]:
    """Settings of a new database on the same servers; it and its slots are gone afterwards, and so is their log."""
    name = f"bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield settings.model_copy(
            update={
                "database_url": settings.database_url.rsplit("/", 1)[0] + f"/{name}",
                "topic_prefix": f"{name}.",
                "slot": name,
            }
        )
        eventually(
            lambda: connection.execute(_READ_SLOTS, (name,)).fetchone() is None, "nobody reads the slots"
        )
        connection.execute(_DROP_SLOTS, (name,))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def prepare(settings: Settings, app: App) -> None:
    runner.migrate(settings.database_url)
    slot.ensure(settings.database_url, settings.slot)
    apply(plan(app, settings), settings)
