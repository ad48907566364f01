"""The SQL of the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from streams.event import Headers
from streams.stores.postgres import Connection

INSERT_ONE = """
INSERT INTO fencepost.outbox (id, topic, key, payload, header_names, header_values)
VALUES (%(id)s, %(topic)s, %(key)s, %(payload)s, %(header_names)s::text[], %(header_values)s::bytea[])"""


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    id: UUID | None = None


def insert_messages(connection: Connection, messages: Sequence[OutboxMessage]) -> None:
    """Inserts messages in their order, which is the order the relay sends them in."""
    if not messages:
        return
    with connection.cursor() as cursor:
        cursor.executemany(
            INSERT_ONE,
            [
                {
                    "id": message.id or uuid4(),
                    "topic": message.topic,
                    "key": message.key,
                    "payload": message.value,
                    "header_names": [name for name, _ in message.headers],
                    "header_values": [value for _, value in message.headers],
                }
                for message in messages
            ],
        )
