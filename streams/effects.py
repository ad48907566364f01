"""What a projection wants to change. Effects are values; nothing happens until the batch is settled."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from streams.errors import ConfigurationError
from streams.event import as_headers, require_size


class Upsert(NamedTuple):
    table: str
    key: tuple[tuple[str, Any], ...]
    columns: dict[str, Any]


class Update(NamedTuple):
    table: str
    key: tuple[tuple[str, Any], ...]
    columns: dict[str, Any]


class Add(NamedTuple):
    table: str
    key: tuple[tuple[str, Any], ...]
    deltas: dict[str, Any]


class Delete(NamedTuple):
    table: str
    key: tuple[tuple[str, Any], ...]


class Execute(NamedTuple):
    sql: str
    parameters: Any


class Publish(NamedTuple):
    topic: str
    key: bytes | None
    data: Any
    headers: tuple[tuple[str, bytes | None], ...]


RowEffect = Upsert | Update | Add | Delete
DatabaseEffect = RowEffect | Execute
Effect = DatabaseEffect | Publish


class Effects:
    """Collects what one event changes. All of it is applied in one transaction with the group's position, or nothing.

    A table is named ``table`` or ``schema.table``. A key names the columns of a primary key or unique constraint.
    """

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected: list[Effect] = []

    def upsert(self, table: str, key: Mapping[str, Any], **columns: Any) -> None:
        """Inserts the row, or sets these columns of it; others keep their value."""
        self.collected.append(Upsert(table, _key(key), columns))

    def update(self, table: str, key: Mapping[str, Any], **columns: Any) -> None:
        """Sets these columns of the row if it is there; does nothing where it is not."""
        self.collected.append(Update(table, _key(key), columns))

    def add(self, table: str, key: Mapping[str, Any], **deltas: Any) -> None:
        """Adds to numeric columns; a row that is not there begins at the deltas.

        Raises:
            ConfigurationError: a delta is not a number.
        """
        for name, delta in deltas.items():
            # NULL would make the column NULL, and stay unseen until somebody misses the sum.
            if not isinstance(delta, int | float | Decimal) or isinstance(delta, bool):
                raise ConfigurationError(f"the delta of {table}.{name} is {delta!r}, not a number")
        self.collected.append(Add(table, _key(key), deltas))

    def delete(self, table: str, key: Mapping[str, Any]) -> None:
        """Deletes the row if it is there.

        The group's progress keeps the version, as a tombstone: an older event cannot bring the row back.
        """
        self.collected.append(Delete(table, _key(key)))

    def publish(
        self,
        topic: str,
        data: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes | None] | None = None,
    ) -> None:
        """Sends a derived event through the outbox.

        Args:
            topic: its whole name.
            data: an instance of an event class, or bytes.
            key: by default the key of the event that caused it, so that order is kept.
            headers: further headers. The id is derived from the causing event's, so a repetition has the same.

        Raises:
            RecordTooLarge: bytes that no topic would take. An event class is measured once it is encoded.
        """
        pairs = as_headers((headers or {}).items())
        raw_key = key.encode() if isinstance(key, str) else key
        require_size(topic, raw_key, data if isinstance(data, bytes) else None, pairs)
        self.collected.append(Publish(topic, raw_key, data, pairs))

    def execute(self, sql: str, parameters: Any = None) -> None:
        """Runs a statement of your own, after the effects collected before it and before those after it."""
        self.collected.append(Execute(sql, parameters))


def _key(key: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    if not key:
        raise ConfigurationError(
            "an effect needs the key of its row, such as {'order_id': event.resource_id}"
        )
    return tuple(key.items()) if len(key) == 1 else tuple(sorted(key.items()))
