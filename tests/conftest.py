"""Real servers for the tests: started once, a database and topics of its own for each test."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from streams.dev import servers
from streams.dev.state import ALWAYS, Endpoints
from streams.errors import StreamsError
from streams.migrations import runner
from streams.relay import slot
from streams.settings import Settings

TABLES = Path(__file__).parent.parent / "processors" / "tables.sql"


@pytest.fixture(scope="session")
def server_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this run's Kafka, PostgreSQL and Redis live; they are taken down and deleted at its end."""
    directory = tmp_path_factory.mktemp("servers")
    try:
        servers.up(directory, want=ALWAYS)
    except StreamsError as error:
        if os.environ.get("STREAMS_REQUIRE_REAL"):
            raise
        pytest.skip(f"no real servers: {error}")
    yield directory
    servers.reset(directory)


@pytest.fixture(scope="session")
def endpoints(server_directory: Path) -> Endpoints:
    return servers.up(server_directory, want=ALWAYS)


@pytest.fixture(scope="session")
def template_database(endpoints: Endpoints) -> str:
    """The name of a migrated database with the shop's tables, to copy for each test."""
    assert endpoints.database_url is not None
    name = f"template_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(endpoints.database_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = _database_url(endpoints, name)
    runner.migrate(url)
    with psycopg.connect(url) as connection:
        connection.execute(TABLES.read_bytes())
    return name


@pytest.fixture
def settings(endpoints: Endpoints, template_database: str) -> Iterator[Settings]:
    """Settings of a fresh, migrated database, with a slot and a topic prefix of its own."""
    assert endpoints.database_url is not None
    name = f"test_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(endpoints.database_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template_database}")
    made = Settings.load(
        kafka=endpoints.kafka,
        database_url=_database_url(endpoints, name),
        redis_url=endpoints.redis_url,
        topic_prefix=f"{name}.",
        slot=name,
        sweep_seconds=1.0,
    )
    slot.ensure(made.database_url, made.slot)
    yield made
    with psycopg.connect(endpoints.database_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
        )
        with contextlib.suppress(psycopg.errors.UndefinedObject):
            connection.execute("SELECT pg_drop_replication_slot(%s)", (made.slot,))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def connection(settings: Settings) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A plain connection of a service to the test's database."""
    with psycopg.connect(settings.database_url) as connection:
        yield connection


def _database_url(endpoints: Endpoints, name: str) -> str:
    assert endpoints.database_url is not None
    return endpoints.database_url.rsplit("/", 1)[0] + f"/{name}"
