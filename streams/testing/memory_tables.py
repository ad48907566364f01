"""Read models in memory: what effects do to rows, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never

from streams.effects import Add, DatabaseEffect, Delete, Execute, Update, Upsert

RowKey = tuple[tuple[str, Any], ...]


class MemoryTables:
    """Rows by table and key. A column that was never set is absent; defaults are the database's affair.

    Attributes:
        executed: the statements of ``effects.execute``, which nothing here runs.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[RowKey, dict[str, Any]]] = {}
        self.executed: list[Execute] = []

    def apply(self, effects: Iterable[DatabaseEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Execute):
                self.executed.append(effect)
                continue
            rows = self._tables.setdefault(effect.table, {})
            match effect:
                case Upsert(key=key, columns=columns):
                    rows.setdefault(key, {}).update(columns)
                case Update(key=key, columns=columns):
                    if key in rows:
                        rows[key].update(columns)
                case Add(key=key, deltas=deltas):
                    _add(rows, key, deltas)
                case Delete(key=key):
                    rows.pop(key, None)
                case _:
                    assert_never(effect)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table, key columns included, in the order of their keys."""
        found = self._tables.get(table, {})
        return [dict(key) | found[key] for key in sorted(found, key=str)]

    def everything(self) -> dict[str, Sequence[object]]:
        """The rows of all tables."""
        return {table: self.rows(table) for table in self._tables}

    def row(self, table: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """One row, key columns included; None where it is not there."""
        place = tuple(sorted(key.items()))
        found = self._tables.get(table, {}).get(place)
        return None if found is None else dict(place) | found


def _add(rows: dict[RowKey, dict[str, Any]], key: RowKey, deltas: Mapping[str, Any]) -> None:
    if not deltas:
        return
    row = rows.setdefault(key, {})
    for name, delta in deltas.items():
        now = row.get(name)
        row[name] = delta if now is None else now + delta
