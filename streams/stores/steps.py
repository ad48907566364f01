"""One piece of database logic for both kinds of psycopg connection.

The logic is a generator: it yields a ``Query`` and is sent the rows back. ``run`` drives it over a sync
connection, and answers a coroutine over an async one. (The idea is "sans I/O", https://sans-io.readthedocs.io.)
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import psycopg
from psycopg.pq import TransactionStatus

from streams.errors import NotInTransaction

T = TypeVar("T")
SyncConnection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Query:
    sql: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


Steps = Generator[Query, Rows, T]


@overload
def run(connection: SyncConnection, steps: Steps[T]) -> T: ...
@overload
def run(connection: AsyncConnection, steps: Steps[T]) -> Coroutine[Any, Any, T]: ...
def run(connection: SyncConnection | AsyncConnection, steps: Steps[T]) -> T | Coroutine[Any, Any, T]:
    """Runs the steps in the connection's transaction, which it neither begins nor ends.

    Raises:
        NotInTransaction: the connection is in autocommit and no transaction is open.
    """
    idle = connection.info.transaction_status == TransactionStatus.IDLE
    if connection.autocommit and idle:
        steps.close()
        raise NotInTransaction(
            "the connection is in autocommit mode with no transaction open; "
            "use 'with connection.transaction():' round the business change and the append"
        )
    if isinstance(connection, psycopg.AsyncConnection):
        return _drive_async(connection, steps)
    return _drive(connection, steps)


def _drive(connection: SyncConnection, steps: Steps[T]) -> T:
    # The caller's connection may have a row factory of its own; ours answers tuples.
    with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        try:
            query = next(steps)
            while True:
                cursor.execute(query.sql, query.parameters or None)
                query = steps.send(cursor.fetchall() if cursor.description else [])
        except StopIteration as end:
            result: T = end.value
            return result


async def _drive_async(connection: AsyncConnection, steps: Steps[T]) -> T:
    async with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        try:
            query = next(steps)
            while True:
                await cursor.execute(query.sql, query.parameters or None)
                query = steps.send(await cursor.fetchall() if cursor.description else [])
        except StopIteration as end:
            result: T = end.value
            return result
