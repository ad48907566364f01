"""Effects in bulk: one statement for all rows that change in the same columns.

Effects on one row are folded into one change first, since ``ON CONFLICT`` refuses to touch a row twice, and
rows are sorted by key, so that two processes seldom lock the same rows in different orders. Where they do, in
statements on different columns, the database ends one of the two as a deadlock, and its batch is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, assert_never

from psycopg import sql
from psycopg.types.json import Json, Jsonb

from streams.effects import Add, DatabaseEffect, Delete, Execute, RowEffect, Update, Upsert
from streams.errors import ConfigurationError
from streams.stores.postgres import Connection

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, -1), t.typcategory = 'A', pg_get_expr(d.adbin, d.adrelid)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped"""

# How PostgreSQL prints a default of zero: 0, 0.0, '0'::numeric, (0)::numeric.
_ZERO = re.compile(r"[('-]*0(\.0*)?[)']*(::[a-z ]+)?")

_WRAPPERS = {"json": Json, "jsonb": Jsonb}


class Column(NamedTuple):
    """What the database's catalogue says of a column; ``default`` as an expression."""

    type_name: str
    is_array: bool
    default: str | None


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
                return self._add(deltas)
            case _:
                assert_never(effect)

    def _update(self, columns: dict[str, Any]) -> None:
        if self.sets is not None or self.adds:
            self._set(columns)  # the row is there by then
        elif columns and not self.deletes:
            self.updates = {**(self.updates or {}), **columns}

    def _set(self, columns: dict[str, Any]) -> None:
        self.sets = columns if self.sets is None else {**self.sets, **columns}
        for name in columns:
            self.adds.pop(name, None)

    def _add(self, deltas: dict[str, Any]) -> bool:
        sets, adds = dict(self.sets or {}), dict(self.adds)
        for name, delta in deltas.items():
            known = sets if name in sets else adds
            try:
                known[name] = delta if known.get(name) is None else known[name] + delta
            except TypeError:
                return False  # not numbers, or of kinds that only the database can add up
        self.sets, self.adds = self.sets if self.sets is None else sets, adds
        return True


class EffectWriter:
    """Applies effects on one connection; remembers the column types of the tables it met."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._types: dict[str, dict[str, Column]] = {}
        self._statements: dict[Group, sql.Composed] = {}

    def apply(self, effects: Iterable[DatabaseEffect]) -> None:
        """Applies effects in bulk: what they leave in each row is as if they had been applied in their order.

        Rows of different tables are not: a constraint between them may refuse what, one after the other, can be done.

        Raises:
            ConfigurationError: a table or column does not exist.
            psycopg.Error: what the database says of a row or a statement.
        """
        for phase in _phases(effects):
            if isinstance(phase, dict):
                self._write(phase)
            else:
                self._execute(phase)

    def apply_by_row(self, effects: Iterable[DatabaseEffect]) -> None:
        """Applies what is folded for each row by itself, in the order the rows were first named; raises the same."""
        for phase in _phases(effects):
            if isinstance(phase, dict):
                for key, change in phase.items():
                    self._write({key: change})
            else:
                self._execute(phase)

    def apply_singly(self, effects: Iterable[DatabaseEffect]) -> None:
        """Applies each effect by itself, exactly in their order; raises the same."""
        for effect in effects:
            self.apply([effect])

    def _execute(self, statements: Sequence[Execute]) -> None:
        with self._connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement.sql, statement.parameters)

    def _write(self, changes: dict[RowKey, Change]) -> None:
        deletes: dict[Group, list[tuple[Any, ...]]] = {}
        writes: dict[Group, list[tuple[Any, ...]]] = {}
        for (table, key), change in _in_lock_order(changes):
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
        columns = [self._column(table, column) for column in (*names, *sets, *adds)]
        statement = self._statements.get(group)
        if statement is None:
            self._require_zero(table, adds)
            statement = self._statements[group] = _statement(group, columns)
        wrappers = [_WRAPPERS.get(column.type_name) for column in columns]
        with self._connection.cursor() as cursor:
            if any(column.is_array for column in columns):
                one_by_one = [[_wrapped(v, w) for v, w in zip(row, wrappers, strict=True)] for row in rows]
                cursor.executemany(statement, one_by_one)
                return
            cursor.execute(
                statement,
                [
                    [_wrapped(value, wrapper) for value in column] if wrapper else list(column)
                    for column, wrapper in zip(zip(*rows, strict=True), wrappers, strict=True)
                ],
            )

    def _require_zero(self, table: str, adds: Names) -> None:
        """Refuses deltas to a column with a default: whether they add to it would depend on how effects fold."""
        for name in adds:
            default = self._column(table, name).default
            if default is not None and not _ZERO.fullmatch(default):
                raise ConfigurationError(
                    f"effects.add begins at 0, but {table}.{name} has DEFAULT {default}; declare DEFAULT 0 or none"
                )

    def _column(self, table: str, column: str) -> Column:
        if table not in self._types:
            rows = self._connection.execute(_COLUMNS, (table,)).fetchall()
            if not rows:
                raise ConfigurationError(
                    f"an effect names the table {table}, which the database does not have"
                )
            self._types[table] = {name: Column(*rest) for name, *rest in rows}
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


def _in_lock_order(changes: dict[RowKey, Change]) -> list[tuple[RowKey, Change]]:
    """Tables as handlers first asked for them, a parent before its children; rows by key, the same in every process."""
    rank: dict[str, int] = {}
    for table, _ in changes:
        rank.setdefault(table, len(rank))
    return sorted(changes.items(), key=lambda entry: (rank[entry[0][0]], str(entry[0][1])))


def _statement(group: Group, columns: Sequence[Column]) -> sql.Composed:
    kind, table, names, sets, adds = group
    if kind == "delete":
        return _delete(table, names, columns)
    if kind == "update":
        return _update(table, names, sets, columns)
    return _upsert(table, names, sets, adds, columns)


def _update(table: str, key: Sequence[str], sets: Sequence[str], columns: Sequence[Column]) -> sql.Composed:
    changes = [sql.SQL("{0} = new.{0}").format(sql.Identifier(name)) for name in sets]
    same = [sql.SQL("target.{0} = new.{0}").format(sql.Identifier(name)) for name in key]
    return sql.SQL("UPDATE {} AS target SET {} FROM {} AS new ({}) WHERE {}").format(
        _table(table),
        sql.SQL(", ").join(changes),
        _source(columns),
        _names([*key, *sets]),
        sql.SQL(" AND ").join(same),
    )


def _upsert(
    table: str, key: Sequence[str], sets: Sequence[str], adds: Sequence[str], columns: Sequence[Column]
) -> sql.Composed:
    changes = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in sets]
    changes += [
        sql.SQL("{0} = coalesce(target.{0}, 0) + excluded.{0}").format(sql.Identifier(name)) for name in adds
    ]
    action = (
        sql.SQL("DO UPDATE SET {}").format(sql.SQL(", ").join(changes)) if changes else sql.SQL("DO NOTHING")
    )
    names = _names([*key, *sets, *adds])
    return sql.SQL("INSERT INTO {} AS target ({}) SELECT * FROM {} AS new ON CONFLICT ({}) {}").format(
        _table(table), names, _source(columns), _names(key), action
    )


def _delete(table: str, key: Sequence[str], columns: Sequence[Column]) -> sql.Composed:
    same = [sql.SQL("target.{0} = gone.{0}").format(sql.Identifier(name)) for name in key]
    return sql.SQL("DELETE FROM {} AS target USING {} AS gone ({}) WHERE {}").format(
        _table(table), _source(columns), _names(key), sql.SQL(" AND ").join(same)
    )


def _source(columns: Sequence[Column]) -> sql.Composed:
    """The new rows: an array per column, or one row where a column is an array itself, which unnest would flatten."""
    # The types' names come from the catalogue of the database itself, quoted as they must be.
    if any(column.is_array for column in columns):
        return sql.SQL("(VALUES ({}))").format(
            sql.SQL(", ").join(sql.SQL("%s::" + column.type_name) for column in columns)
        )
    return sql.SQL("unnest({})").format(
        sql.SQL(", ").join(sql.SQL("%s::" + column.type_name + "[]") for column in columns)
    )


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(*name.split("."))


def _wrapped(value: Any, wrapper: Any) -> Any:
    return value if wrapper is None or value is None else wrapper(value)
