"""Effects in bulk: one statement for all rows that change in the same columns.

Effects on one row are folded into one change first, since ``ON CONFLICT`` refuses to touch a row twice, and
rows are sorted by key, since two processes that lock rows in different orders wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, assert_never

from psycopg import sql
from psycopg.types.json import Json, Jsonb

from streams.effects import Add, DatabaseEffect, Delete, Execute, RowEffect, Update, Upsert
from streams.errors import ConfigurationError
from streams.stores.postgres import Connection

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, -1), t.typcategory = 'A'
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped"""

_WRAPPERS = {"json": Json, "jsonb": Jsonb}

RowKey = tuple[str, tuple[tuple[str, Any], ...]]

# What rows must have in common to change in one statement: kind, table, key columns, columns set, columns added to.
Names = tuple[str, ...]
Group = tuple[str, str, Names, Names, Names]


class Change:
    """All effects on one row, folded: an update of a row that may be absent, or a delete, then columns and deltas."""

    __slots__ = ("adds", "deletes", "sets", "updates")

    def __init__(self) -> None:
        self.updates: dict[str, Any] | None = None
        self.deletes = False
        self.sets: dict[str, Any] | None = None
        self.adds: dict[str, Any] = {}

    def fold(self, effect: RowEffect) -> bool:
        """Takes one more effect in; False where it must wait until what is folded so far is written."""
        match effect:
            case Delete():
                self.updates, self.deletes, self.sets, self.adds = None, True, None, {}
                return True
            case Update(columns=columns):
                self._update(columns)
                return True
            case Upsert() | Add() if self.updates is not None:
                # Whether the update meets a row decides what the insert may bring in.
                return False
            case Upsert(columns=columns):
                self._set(columns)
                return True
            case Add(deltas=deltas):
                self._add(deltas)
                return True
            case _:
                assert_never(effect)

    def _update(self, columns: dict[str, Any]) -> None:
        if self.sets is not None or self.adds:
            self._set(columns)  # the row is there by then
        elif not self.deletes:
            self.updates = {**(self.updates or {}), **columns}

    def _set(self, columns: dict[str, Any]) -> None:
        self.sets = columns if self.sets is None else {**self.sets, **columns}
        for name in columns:
            self.adds.pop(name, None)

    def _add(self, deltas: dict[str, Any]) -> None:
        for name, delta in deltas.items():
            if self.sets is not None and self.sets.get(name) is not None:
                self.sets = {**self.sets, name: self.sets[name] + delta}
            else:
                self.adds[name] = self.adds[name] + delta if name in self.adds else delta


class EffectWriter:
    """Applies effects on one connection; remembers the column types of the tables it met."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._types: dict[str, dict[str, tuple[str, bool]]] = {}
        self._statements: dict[Group, sql.Composed] = {}

    def apply(self, effects: Iterable[DatabaseEffect]) -> None:
        """Applies effects in their order, as far as anyone can tell.

        Raises:
            ConfigurationError: a table or column does not exist.
            psycopg.Error: what the database says of a row or a statement.
        """
        for phase in _phases(effects):
            if isinstance(phase, dict):
                self._write(phase)
            else:
                self._execute(phase)

    def _execute(self, statements: Sequence[Execute]) -> None:
        with self._connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement.sql, statement.parameters)

    def _write(self, changes: dict[RowKey, Change]) -> None:
        deletes: dict[Group, list[tuple[Any, ...]]] = {}
        writes: dict[Group, list[tuple[Any, ...]]] = {}
        for (table, key), change in sorted(changes.items(), key=_lock_order):
            names, values = tuple(name for name, _ in key), tuple(value for _, value in key)
            if change.deletes:
                deletes.setdefault(("delete", table, names, (), ()), []).append(values)
            if change.updates is not None:
                group: Group = ("update", table, names, tuple(change.updates), ())
                writes.setdefault(group, []).append((*values, *change.updates.values()))
            elif change.sets is not None or change.adds:
                sets = change.sets or {}
                group = ("upsert", table, names, tuple(sets), tuple(change.adds))
                writes.setdefault(group, []).append((*values, *sets.values(), *change.adds.values()))
        for group, rows in (*deletes.items(), *writes.items()):
            self._bulk(group, rows)

    def _bulk(self, group: Group, rows: list[tuple[Any, ...]]) -> None:
        _, table, names, sets, adds = group
        types = [self._type(table, column) for column in (*names, *sets, *adds)]
        statement = self._statements.get(group)
        if statement is None:
            statement = self._statements[group] = _statement(group, [name for name, _ in types])
        wrappers = [_WRAPPERS.get(name) for name, _ in types]
        with self._connection.cursor() as cursor:
            if any(is_array for _, is_array in types):
                # unnest would flatten a list of arrays, so these rows go one by one
                for row in rows:
                    cursor.execute(statement, [[_wrapped(v, w)] for v, w in zip(row, wrappers, strict=True)])
                return
            cursor.execute(
                statement,
                [
                    [_wrapped(value, wrapper) for value in column] if wrapper else list(column)
                    for column, wrapper in zip(zip(*rows, strict=True), wrappers, strict=True)
                ],
            )

    def _type(self, table: str, column: str) -> tuple[str, bool]:
        if table not in self._types:
            rows = self._connection.execute(_COLUMNS, (table,)).fetchall()
            if not rows:
                raise ConfigurationError(
                    f"an effect names the table {table}, which the database does not have"
                )
            self._types[table] = {name: (type_name, is_array) for name, type_name, is_array in rows}
        try:
            return self._types[table][column]
        except KeyError:
            raise ConfigurationError(
                f"an effect names the column {table}.{column}, which does not exist"
            ) from None


def _phases(effects: Iterable[DatabaseEffect]) -> Iterator[dict[RowKey, Change] | list[Execute]]:
    """Runs of row changes, folded, and runs of statements, in their order."""
    changes: dict[RowKey, Change] = {}
    statements: list[Execute] = []
    for effect in effects:
        if isinstance(effect, Execute):
            if changes:
                yield changes
                changes = {}
            statements.append(effect)
            continue
        if statements:
            yield statements
            statements = []
        key = (effect.table, effect.key)
        change = changes.setdefault(key, Change())
        if not change.fold(effect):
            yield changes
            changes = {key: Change()}
            changes[key].fold(effect)
    if changes:
        yield changes
    if statements:
        yield statements


def _lock_order(entry: tuple[RowKey, Change]) -> tuple[str, str]:
    (table, key), _ = entry
    # As text, since any order will do as long as every process uses the same.
    return table, str(key)


def _statement(group: Group, types: list[str]) -> sql.Composed:
    kind, table, names, sets, adds = group
    if kind == "delete":
        return _delete(table, names, types)
    if kind == "update":
        return _update(table, names, sets, types)
    return _upsert(table, names, sets, adds, types)


def _update(table: str, key: Sequence[str], sets: Sequence[str], types: list[str]) -> sql.Composed:
    changes = [sql.SQL("{0} = new.{0}").format(sql.Identifier(name)) for name in sets]
    same = [sql.SQL("target.{0} = new.{0}").format(sql.Identifier(name)) for name in key]
    return sql.SQL("UPDATE {} AS target SET {} FROM unnest({}) AS new ({}) WHERE {}").format(
        _table(table),
        sql.SQL(", ").join(changes),
        _arrays(types),
        _names([*key, *sets]),
        sql.SQL(" AND ").join(same),
    )


def _upsert(
    table: str, key: Sequence[str], sets: Sequence[str], adds: Sequence[str], types: list[str]
) -> sql.Composed:
    changes = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in sets]
    changes += [
        sql.SQL("{0} = coalesce(target.{0}, 0) + excluded.{0}").format(sql.Identifier(name)) for name in adds
    ]
    action = (
        sql.SQL("DO UPDATE SET {}").format(sql.SQL(", ").join(changes)) if changes else sql.SQL("DO NOTHING")
    )
    columns = [*key, *sets, *adds]
    return sql.SQL("INSERT INTO {} AS target ({}) SELECT * FROM unnest({}) ON CONFLICT ({}) {}").format(
        _table(table), _names(columns), _arrays(types), _names(key), action
    )


def _delete(table: str, key: Sequence[str], types: list[str]) -> sql.Composed:
    same = [sql.SQL("target.{0} = gone.{0}").format(sql.Identifier(name)) for name in key]
    return sql.SQL("DELETE FROM {} AS target USING unnest({}) AS gone ({}) WHERE {}").format(
        _table(table), _arrays(types), _names(key), sql.SQL(" AND ").join(same)
    )


def _arrays(types: list[str]) -> sql.Composed:
    # The type's name comes from the catalogue of the database itself, quoted as it must be.
    return sql.SQL(", ").join(sql.SQL("%s::" + name + "[]") for name in types)


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(*name.split("."))


def _wrapped(value: Any, wrapper: Any) -> Any:
    return value if wrapper is None or value is None else wrapper(value)
