"""An event store in memory, behind the same functions: ``append``, ``load``, ``execute`` and ``publish``.

``MemoryStore.connect`` answers what stands in for a psycopg connection. It understands the statements of the
event store and the outbox and nothing else, so the code under test is the code that runs on PostgreSQL.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Self, cast
from uuid import UUID

from psycopg.pq import TransactionStatus

from streams.errors import StreamsError
from streams.event import Headers
from streams.stores import event_store
from streams.stores.outbox import INSERT_ONE, OutboxMessage
from streams.stores.steps import Rows, SyncConnection

Parameters = Mapping[str, Any]
ResourceKey = tuple[str, str]


class WriterWaits(StreamsError):
    """Another connection has written and neither committed nor rolled back; PostgreSQL would wait for it."""


@dataclass
class Tables:
    """What is committed, or what one transaction sees of it."""

    versions: dict[ResourceKey, int] = field(default_factory=dict)
    events: dict[ResourceKey, tuple[event_store.Row, ...]] = field(default_factory=dict)
    keys: dict[str, tuple[bytes, str, str, int, int]] = field(default_factory=dict)
    snapshots: dict[tuple[str, str, str], tuple[int, bytes]] = field(default_factory=dict)
    messages: tuple[OutboxMessage, ...] = ()

    def copied(self) -> Tables:
        """Rows never change in place, so copying what holds them is enough."""
        return Tables(*(copy(getattr(self, name)) for name in self.__dataclass_fields__))


class MemoryStore:
    """An empty event store and outbox.

    One connection writes at a time: a second writer waits until the first commits or rolls back.

    Args:
        wait_seconds: how long a second writer waits before ``WriterWaits`` is raised.
    """

    def __init__(self, wait_seconds: float = 5.0) -> None:
        self.committed = Tables()
        self.wait_seconds = wait_seconds
        self.writing = threading.Lock()

    def connect(self, *, autocommit: bool = False) -> SyncConnection:
        """A connection for ``append`` and the others. Its transaction begins with its first statement."""
        return cast(SyncConnection, MemoryConnection(self, autocommit=autocommit))

    @property
    def messages(self) -> tuple[OutboxMessage, ...]:
        """The outbox messages that are committed, in their order."""
        return self.committed.messages


class MemoryConnection:
    """The part of ``psycopg.Connection`` that a service needs round an append."""

    def __init__(self, store: MemoryStore, *, autocommit: bool) -> None:
        self.autocommit = autocommit
        self._store = store
        self._mine: Tables | None = None
        self._saved: dict[str, Tables] = {}
        self._status = TransactionStatus.IDLE

    @property
    def info(self) -> SimpleNamespace:
        return SimpleNamespace(transaction_status=self._status)

    @contextlib.contextmanager
    def cursor(self, row_factory: object = None) -> Iterator[MemoryCursor]:  # noqa: ARG002 - rows are tuples
        self._status = TransactionStatus.INTRANS
        yield MemoryCursor(self)

    def commit(self) -> None:
        if self._mine is not None:
            self._store.committed = self._mine
        self.rollback()

    def rollback(self) -> None:
        if self._mine is not None:
            self._store.writing.release()
        self._mine, self._saved, self._status = None, {}, TransactionStatus.IDLE

    def close(self) -> None:
        self.rollback()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits at the end, or rolls back on an exception; inside another transaction, only its own part."""
        outermost = self._status == TransactionStatus.IDLE
        self._status = TransactionStatus.INTRANS
        before = self.readable.copied()
        try:
            yield
        except BaseException:
            if outermost:
                self.rollback()
            elif self._mine is not None:
                self._mine = before
            raise
        if outermost:
            self.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.rollback() if kind is not None else self.commit()

    @property
    def readable(self) -> Tables:
        return self._store.committed if self._mine is None else self._mine

    @property
    def writable(self) -> Tables:
        """The transaction's own copy, from the moment when no other connection writes."""
        if self._mine is None:
            if not self._store.writing.acquire(timeout=self._store.wait_seconds):
                raise WriterWaits("another connection has an open transaction; commit it or roll it back")
            self._mine = self._store.committed.copied()
        return self._mine

    def save(self, name: str) -> None:
        self._saved[name] = self.writable.copied()

    def restore(self, name: str) -> None:
        self._mine = self._saved[name].copied()


class MemoryCursor:
    """Runs the statements of ``streams.stores.event_store`` and ``streams.stores.outbox``."""

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection
        self._rows: Rows = []
        self.description: bool = True

    def execute(self, sql: str, parameters: Parameters | None = None) -> None:
        statement = _STATEMENTS.get(sql)
        if statement is not None:
            self._rows = statement(self._connection, parameters or {})
            return
        verb, _, name = sql.partition(" SAVEPOINT ") if " SAVEPOINT " in sql else ("", "", "")
        if sql.startswith("SAVEPOINT "):
            self._connection.save(sql.removeprefix("SAVEPOINT "))
        elif verb == "ROLLBACK TO":
            self._connection.restore(name)
        elif verb != "RELEASE":
            raise StreamsError(
                f"MemoryStore does not know this statement; test it on PostgreSQL: {sql.strip()}"
            )
        self._rows = []

    def fetchall(self) -> Rows:
        return self._rows


def _insert(connection: MemoryConnection, new: Parameters) -> Rows:
    tables, resource = connection.writable, _resource(new)
    before = tables.versions.get(resource, 0)
    if new["expected"] is not None and new["expected"] != before:
        return []
    now = datetime.now(UTC)
    events = zip(new["ids"], new["types"], new["payloads"], strict=True)
    rows = [
        event_store.Row(version, cast(UUID, id), type, payload, new["traceparent"], now)
        for version, (id, type, payload) in enumerate(events, before + 1)
    ]
    tables.versions[resource] = before + new["count"]
    tables.events[resource] = (*tables.events.get(resource, ()), *rows)
    return [(row.version,) for row in rows]


def _version(connection: MemoryConnection, of: Parameters) -> Rows:
    version = connection.readable.versions.get(_resource(of))
    return [] if version is None else [(version,)]


def _find_key(connection: MemoryConnection, of: Parameters) -> Rows:
    found = connection.readable.keys.get(of["idempotency_key"])
    return [] if found is None else [found]


def _keep_key(connection: MemoryConnection, new: Parameters) -> Rows:
    keys = connection.writable.keys
    if new["idempotency_key"] in keys:
        return []
    keys[new["idempotency_key"]] = (new["request_hash"], *_resource(new), new["first"], new["last"])
    return [(True,)]


def _load(connection: MemoryConnection, of: Parameters) -> Rows:
    return [
        (row.version, row.id, row.type, row.payload, row.traceparent, row.recorded_at)
        for row in connection.readable.events.get(_resource(of), ())
        if row.version > of["after"] and (of["until"] is None or row.version <= of["until"])
    ]


def _find_snapshot(connection: MemoryConnection, of: Parameters) -> Rows:
    found = connection.readable.snapshots.get((*_resource(of), of["tag"]))
    return [] if found is None else [found]


def _keep_snapshot(connection: MemoryConnection, new: Parameters) -> Rows:
    snapshots, place = connection.writable.snapshots, (*_resource(new), new["tag"])
    if place not in snapshots or snapshots[place][0] < new["version"]:
        snapshots[place] = (new["version"], new["state"])
    return []


def _message(connection: MemoryConnection, new: Parameters) -> Rows:
    headers: Headers = tuple(zip(new["header_names"], new["header_values"], strict=True))
    message = OutboxMessage(new["topic"], new["key"], new["payload"], headers, new["id"])
    tables = connection.writable
    tables.messages = (*tables.messages, message)
    return []


def _resource(parameters: Parameters) -> ResourceKey:
    return parameters["resource_type"], parameters["resource_id"]


_STATEMENTS: dict[str, Callable[[MemoryConnection, Parameters], Rows]] = {
    **dict.fromkeys(event_store.APPENDS, _insert),
    event_store.VERSION: _version,
    event_store.FIND_KEY: _find_key,
    event_store.KEEP_KEY: _keep_key,
    event_store.LOAD: _load,
    event_store.FIND_SNAPSHOT: _find_snapshot,
    event_store.KEEP_SNAPSHOT: _keep_snapshot,
    INSERT_ONE: _message,
}
