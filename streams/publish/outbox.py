"""Plain messages through the outbox, for services that publish without event sourcing."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Mapping
from typing import overload

from streams.event import CE_ID, CE_TYPE, require_size
from streams.stores.outbox import INSERT_ONE
from streams.stores.steps import AsyncConnection, Query, Steps, SyncConnection, run


@overload
def publish(
    connection: SyncConnection,
    topic: str,
    key: str | bytes | None,
    value: bytes | None,
    headers: Mapping[str, str | bytes | None] | None = None,
    *,
    type: str | None = None,
) -> uuid.UUID: ...
@overload
def publish(
    connection: AsyncConnection,
    topic: str,
    key: str | bytes | None,
    value: bytes | None,
    headers: Mapping[str, str | bytes | None] | None = None,
    *,
    type: str | None = None,
) -> Awaitable[uuid.UUID]: ...
def publish(
    connection: SyncConnection | AsyncConnection,
    topic: str,
    key: str | bytes | None,
    value: bytes | None,
    headers: Mapping[str, str | bytes | None] | None = None,
    *,
    type: str | None = None,
) -> uuid.UUID | Awaitable[uuid.UUID]:
    """Writes a message for a topic in the transaction that is open on the connection.

    Args:
        connection: any psycopg 3 connection, sync or async (then await the answer).
        topic: the topic's whole name.
        key: decides the partition; messages of one key stay in order. None spreads them.
        value: the bytes to send; None is a tombstone.
        headers: further headers. ``ce_id`` is added unless it is among them.
        type: sent as ``ce_type``.

    Returns:
        The message's id, which consumers may suppress duplicates by.

    Raises:
        NotInTransaction: the connection is in autocommit and no transaction is open.
        RecordTooLarge: a message that no topic would take.
    """
    return run(connection, _publish(topic, key, value, dict(headers or {}), type))


def _publish(
    topic: str,
    key: str | bytes | None,
    value: bytes | None,
    headers: dict[str, str | bytes | None],
    type: str | None,
) -> Steps[uuid.UUID]:
    message_id = uuid.uuid4()
    headers.setdefault(CE_ID, str(message_id))
    if type is not None:
        headers.setdefault(CE_TYPE, type)
    raw_key = key.encode() if isinstance(key, str) else key
    require_size(topic, raw_key, value, headers.items())
    yield Query(
        INSERT_ONE,
        {
            "id": message_id,
            "topic": topic,
            "key": raw_key,
            "payload": value,
            "header_names": list(headers),
            "header_values": [v.encode() if isinstance(v, str) else v for v in headers.values()],
        },
    )
    return message_id
