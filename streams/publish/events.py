"""Append events to a resource inside the caller's transaction, and read them back."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, overload

from streams.errors import ConfigurationError
from streams.event import CE_SUBJECT, CE_TYPE, TRACEPARENT, require_size
from streams.schema.catalog import Catalog, encode, type_name
from streams.stores import event_store
from streams.stores.event_store import IdempotencyKey, NewEvent, Resource
from streams.stores.steps import AsyncConnection, Steps, SyncConnection, run


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event of the store. ``version`` counts from 1 per resource; ``recorded_at`` is the database's clock."""

    version: int
    id: uuid.UUID
    type: str
    data: Any
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did.

    Attributes:
        first_version, last_version: the versions of the events, both inclusive.
        replayed: the idempotency key had appended them before; nothing was written now.
    """

    first_version: int
    last_version: int
    replayed: bool


@overload
def append(
    connection: SyncConnection,
    resource_type: str,
    resource_id: str,
    events: Sequence[object],
    expected_version: int | None,
    *,
    idempotency_key: str | None = None,
    request: bytes | None = None,
    traceparent: str | None = None,
) -> Appended: ...
@overload
def append(
    connection: AsyncConnection,
    resource_type: str,
    resource_id: str,
    events: Sequence[object],
    expected_version: int | None,
    *,
    idempotency_key: str | None = None,
    request: bytes | None = None,
    traceparent: str | None = None,
) -> Awaitable[Appended]: ...
def append(
    connection: SyncConnection | AsyncConnection,
    resource_type: str,
    resource_id: str,
    events: Sequence[object],
    expected_version: int | None,
    *,
    idempotency_key: str | None = None,
    request: bytes | None = None,
    traceparent: str | None = None,
) -> Appended | Awaitable[Appended]:
    """Appends events in the transaction that is open on the connection; commits nothing.

    Args:
        connection: any psycopg 3 connection, sync or async (then await the answer), such as the driver
            connection below SQLAlchemy or Django.
        resource_type: which topic they go to.
        resource_id: the key within it; order is kept per resource.
        events: instances of event classes, at least one.
        expected_version: the version the decision was based on, 0 for a new resource; None appends to whatever
            is there, which is right only where the events do not depend on the state.
        idempotency_key: a business key; the same key with the same request appends once.
        request: what "the same request" means, as bytes; without it, the events themselves.
        traceparent: W3C trace context to travel with the events.

    Raises:
        VersionConflict: the resource is at another version. The transaction remains usable.
        IdempotencyMismatch: the key was used with another request.
        NotInTransaction: the connection is in autocommit and no transaction is open.
        SchemaError: an event does not fit its schema.
        RecordTooLarge: an event that no topic would take.
    """
    steps = append_steps(
        resource_type, resource_id, events, expected_version, idempotency_key, request, traceparent
    )
    return run(connection, steps)


@overload
def load(
    connection: SyncConnection,
    catalog: Catalog,
    resource_type: str,
    resource_id: str,
    *,
    after: int = 0,
) -> list[StoredEvent]: ...
@overload
def load(
    connection: AsyncConnection,
    catalog: Catalog,
    resource_type: str,
    resource_id: str,
    *,
    after: int = 0,
) -> Awaitable[list[StoredEvent]]: ...
def load(
    connection: SyncConnection | AsyncConnection,
    catalog: Catalog,
    resource_type: str,
    resource_id: str,
    *,
    after: int = 0,
) -> list[StoredEvent] | Awaitable[list[StoredEvent]]:
    """The events of a resource in version order, those after a version; empty where there are none."""
    return run(connection, load_steps(catalog, Resource(resource_type, resource_id), after))


def append_steps(
    resource_type: str,
    resource_id: str,
    events: Sequence[object],
    expected: int | None,
    idempotency_key: str | None,
    request: bytes | None,
    traceparent: str | None,
) -> Steps[Appended]:
    if not events:
        raise ConfigurationError("append needs at least one event")
    new = [NewEvent(uuid.uuid4(), type_name(event), encode(event)) for event in events]
    for event in new:
        headers = [(CE_TYPE, event.type), (CE_SUBJECT, resource_id), (TRACEPARENT, traceparent)]
        require_size(f"resource type {resource_type}", resource_id.encode(), event.payload, headers)
    key = None
    if idempotency_key is not None:
        key = IdempotencyKey.of(idempotency_key, _as_request(new) if request is None else request)
    resource = Resource(resource_type, resource_id)
    written = yield from event_store.append(resource, new, expected, key, traceparent)
    return Appended(written.first_version, written.last_version, written.replayed)


def load_steps(
    catalog: Catalog, resource: Resource, after: int, until: int | None = None
) -> Steps[list[StoredEvent]]:
    rows = yield from event_store.load(resource, after, until)
    return [
        StoredEvent(row.version, row.id, row.type, catalog.decode(row.payload), row.recorded_at)
        for row in rows
    ]


def _as_request(events: Sequence[NewEvent]) -> bytes:
    # Lengths before the payloads, so that two different lists never make the same bytes.
    return b"".join(len(event.payload).to_bytes(8, "big") + event.payload for event in events)
