"""The event store behind each kind of connection, with one set of blocking methods to test it by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import psycopg

from schemas import catalog
from streams import Appended, Decider, StoredEvent, append, execute, load, publish
from streams.stores.steps import SyncConnection
from streams.testing import MemoryStore

T = TypeVar("T")


class Session(Protocol):
    """One connection of a service."""

    def append(
        self,
        resource_id: str,
        events: Sequence[object],
        expected: int | None,
        key: str | None = None,
        request: bytes | None = None,
    ) -> Appended: ...
    def load(self, resource_id: str, after: int = 0) -> list[StoredEvent]: ...
    def execute(
        self, decider: Decider[Any, Any], command: Any, key: str | None = None
    ) -> Appended | None: ...
    def publish(
        self, topic: str, key: bytes | None, value: bytes | None, **headers: bytes | None
    ) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


Connect = Callable[..., Session]


class SyncSession:
    def __init__(self, connection: SyncConnection) -> None:
        self._connection = connection
        self.commit, self.rollback, self.close = connection.commit, connection.rollback, connection.close

    def append(
        self,
        resource_id: str,
        events: Sequence[object],
        expected: int | None,
        key: str | None = None,
        request: bytes | None = None,
    ) -> Appended:
        return append(
            self._connection, "stock", resource_id, events, expected, idempotency_key=key, request=request
        )

    def load(self, resource_id: str, after: int = 0) -> list[StoredEvent]:
        return load(self._connection, catalog, "stock", resource_id, after=after)

    def execute(self, decider: Decider[Any, Any], command: Any, key: str | None = None) -> Appended | None:
        return execute(self._connection, decider, "sku-1", command, idempotency_key=key)

    def publish(self, topic: str, key: bytes | None, value: bytes | None, **headers: bytes | None) -> None:
        publish(self._connection, topic, key, value, headers)


class AsyncSession:
    def __init__(self, database_url: str, *, autocommit: bool = False) -> None:
        self._loop = asyncio.Runner()
        self._connection = self._loop.run(
            psycopg.AsyncConnection.connect(database_url, autocommit=autocommit)
        )

    def append(
        self,
        resource_id: str,
        events: Sequence[object],
        expected: int | None,
        key: str | None = None,
        request: bytes | None = None,
    ) -> Appended:
        async def appended() -> Appended:
            return await append(
                self._connection, "stock", resource_id, events, expected, idempotency_key=key, request=request
            )

        return self._loop.run(appended())

    def load(self, resource_id: str, after: int = 0) -> list[StoredEvent]:
        async def loaded() -> list[StoredEvent]:
            return await load(self._connection, catalog, "stock", resource_id, after=after)

        return self._loop.run(loaded())

    def execute(self, decider: Decider[Any, Any], command: Any, key: str | None = None) -> Appended | None:
        async def executed() -> Appended | None:
            return await execute(self._connection, decider, "sku-1", command, idempotency_key=key)

        return self._loop.run(executed())

    def publish(self, topic: str, key: bytes | None, value: bytes | None, **headers: bytes | None) -> None:
        async def published() -> None:
            await publish(self._connection, topic, key, value, headers)

        self._loop.run(published())

    def commit(self) -> None:
        self._loop.run(self._connection.commit())

    def rollback(self) -> None:
        self._loop.run(self._connection.rollback())

    def close(self) -> None:
        self._loop.run(self._connection.close())
        self._loop.close()


def memory() -> Connect:
    store = MemoryStore()
    return lambda **options: SyncSession(store.connect(**options))


def sync(database_url: str) -> Connect:
    return lambda **options: SyncSession(psycopg.connect(database_url, **options))


def asynchronous(database_url: str) -> Connect:
    return lambda **options: AsyncSession(database_url, **options)
