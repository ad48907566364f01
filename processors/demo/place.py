"""Where a run of the demo takes place: servers of its own, or a database and topics of its own on configured ones."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from processors.demo import mock
from processors.demo.processes import stop_leftovers
from streams import ConfigurationError, Settings
from streams.broker import kafka
from streams.dev import containers, programs, servers
from streams.dev.kafka import VERSION
from streams.dev.state import ALWAYS, Endpoints, ServerName, configured, locked
from streams.errors import Busy
from streams.settings import cache_directory, dev_directory

Report = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Servers, and what is ours on them.

    Attributes:
        directory: of the servers that were started for the run, and of its logs.
        name: tells runs on configured servers apart; empty on servers that are ours alone.
        kept: whether it stays when the run is over.
    """

    directory: Path
    settings: Settings
    name: str
    kafka: Literal["real", "mock"]
    kept: bool

    @property
    def logs(self) -> Path:
        return self.directory / "processes"

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process of the demo read these settings."""
        given = {name: str(getattr(self.settings, name)) for name in _GIVEN}
        mine = {f"STREAMS_{name.upper()}": value for name, value in given.items()}
        return {**mine, **({"DEMO_NAME": self.name} if self.name else {})}


_GIVEN = ("database_url", "kafka", "redis_url", "topic_prefix", "slot", "sweep_seconds", "group_protocol")


@contextmanager
def place(*, keep: bool, report: Report) -> Iterator[Place]:
    """A fresh place; taken down at the end, unless it is to be kept and nothing went wrong.

    Raises:
        Busy: another demo is running in the same directory.
        ServerUnavailable: a server does not start, or does not answer.
    """
    directory = dev_directory().with_name(f"{dev_directory().name}-demo")
    with locked(directory / "demo.lock", lambda: _refuse(directory)), ExitStack() as stack:
        _clear(directory)
        reason = None if configured() else _why_no_kafka()
        report(_announcement(directory, reason))
        if keep and (configured() or reason):
            keep = False  # a slot left behind would hold the log of a server for ever; the mock broker ends with us
            report("--keep is for servers of the demo's own: nothing will be kept")
        stack.enter_context(_ended(keep, lambda: _down(directory, report)))
        want = [name for name in ALWAYS if reason is None or name is not ServerName.KAFKA]
        endpoints = servers.up(directory, want=want, report=report)
        if reason is not None:
            address = stack.enter_context(mock.broker())
            settings = _settings(endpoints, kafka=address, group_protocol="classic")
            yield Place(directory, settings, "", "mock", kept=False)
        elif not configured():
            yield Place(directory, _settings(endpoints), "", "real", kept=keep)
        else:
            made = _shared(endpoints, directory)
            stack.callback(_delete, made, endpoints)
            yield made


def _announcement(directory: Path, why_no_kafka: str | None) -> str:
    if why_no_kafka is not None:
        return f"librdkafka's mock broker instead of Kafka, since {why_no_kafka}"
    return f"real Kafka and PostgreSQL, {'as configured' if configured() else f'in {directory}'}"


def _why_no_kafka() -> str | None:
    """Why no Kafka can be started here; None where one can.

    Raises:
        ConfigurationError: a container engine could, which would be better than a mock.
    """
    try:
        programs.find_java()
    except ConfigurationError as error:
        reason = str(error)
    else:
        if shutil.which("mvn") or (cache_directory() / f"kafka-{VERSION}").is_dir():
            return None
        reason = "Kafka comes through Maven, and there is no mvn"
    if containers.usable():
        raise ConfigurationError(
            f"{reason}. A container engine answers: run 'streams dev up', and tell the demo with STREAMS_KAFKA, "
            "STREAMS_DATABASE_URL and STREAMS_REDIS_URL where its servers are"
        )
    return reason


@contextmanager
def _ended(keep: bool, end: Callable[[], None]) -> Iterator[None]:
    kept = False
    try:
        yield
        kept = keep
    finally:
        if not kept:
            end()


def _clear(directory: Path) -> None:
    """Removes what an earlier run left, whether kept or killed."""
    logs = directory / "processes"
    logs.mkdir(exist_ok=True)
    stop_leftovers(logs)
    servers.reset(directory)
    for log in logs.iterdir():
        log.unlink()


def _refuse(directory: Path) -> None:
    raise Busy(f"another demo is running in {directory}; wait for it, or set STREAMS_DEV_DIR")


def _down(directory: Path, report: Report) -> None:
    report("taking the servers down")
    for name in ALWAYS:
        if name not in configured():
            # Nobody needs their data any more, so they need not put them in order first.
            servers.stop(directory, name, kill=True)
    servers.reset(directory)


def _shared(endpoints: Endpoints, directory: Path) -> Place:
    """On servers that others use too: names that nobody else has."""
    name = f"fencepost_demo_{uuid.uuid4().hex[:6]}"
    prefix = name.replace("_", "-")
    with _connect(endpoints) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    url = make_conninfo(_database_url(endpoints), dbname=name)
    settings = _settings(endpoints, database_url=url, topic_prefix=f"{prefix}.", slot=name)
    return Place(directory, settings, prefix, "real", kept=False)


def _delete(made: Place, endpoints: Endpoints) -> None:
    """Leaves nothing behind; least of all a slot, which would hold the log of the whole server."""
    slot = made.settings.slot
    with _connect(endpoints) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            (slot,),
        )
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(slot)))
    admin = kafka.admin(made.settings)
    found = admin.list_topics(timeout=made.settings.connect_seconds).topics
    ours = [topic for topic in found if topic.startswith(f"{made.name}.")]
    for deleted in (admin.delete_topics(ours) if ours else {}).values():
        deleted.result(made.settings.connect_seconds)


def _connect(endpoints: Endpoints) -> psycopg.Connection[Any]:
    return psycopg.connect(_database_url(endpoints), autocommit=True)


def _database_url(endpoints: Endpoints) -> str:
    assert endpoints.database_url is not None, "servers.up answers all that were wanted"  # noqa: S101
    return endpoints.database_url


def _settings(endpoints: Endpoints, **more: str) -> Settings:
    found = {name: value for name, value in asdict(endpoints).items() if value is not None}
    return Settings.load(
        **{"topic_prefix": "events.", "slot": "fencepost", **found, "sweep_seconds": 1.0, **more}
    )
