"""Effects in bulk come to what they come to one after another, on PostgreSQL and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

from streams.effects import Add, DatabaseEffect, Delete, Effects, Execute, RowEffect, Update, Upsert
from streams.errors import ConfigurationError
from streams.settings import Settings
from streams.stores.effects import EffectWriter
from streams.stores.postgres import Connection
from streams.testing import MemoryTables

TABLE = "shop.contract"
DDL = """
CREATE TABLE shop.contract (
    id text PRIMARY KEY, n bigint, m numeric, word text, document jsonb, tags text[]
);
CREATE TABLE shop.pair (a text, b integer, n bigint, PRIMARY KEY (b, a));
CREATE TABLE shop.preset (id text PRIMARY KEY, word text, n bigint NOT NULL DEFAULT 10)"""
COLUMNS = ("n", "m", "word", "document", "tags")

Rows = list[dict[str, Any]]
Apply = Callable[[Sequence[DatabaseEffect]], Rows]

numbers = st.integers(-1_000, 1_000)
keys = st.sampled_from("abc").map(lambda key: (("id", key),))
columns = st.fixed_dictionaries(
    {},
    optional={
        "n": st.none() | numbers,
        "m": st.none() | numbers,
        "word": st.none() | st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=5),
        "document": st.none() | st.dictionaries(st.sampled_from("xy"), numbers),
        "tags": st.none() | st.lists(st.sampled_from(["", "x", "y,z"])),
    },
)
deltas = st.fixed_dictionaries({}, optional={"n": numbers, "m": numbers})
row_effects: st.SearchStrategy[RowEffect] = st.one_of(
    st.builds(Upsert, st.just(TABLE), keys, columns),
    st.builds(Update, st.just(TABLE), keys, columns),
    st.builds(Add, st.just(TABLE), keys, deltas),
    st.builds(Delete, st.just(TABLE), keys),
)
# A statement that sees what stands before it and changes what comes after.
statements = st.builds(
    Execute,
    st.just("UPDATE shop.contract SET n = coalesce(n, 0) * 2 + %s WHERE id = 'a'"),
    st.tuples(numbers),
)


@pytest.fixture
def database(settings: Settings) -> Iterator[Connection]:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(DDL)
        yield connection


@pytest.fixture(params=["memory", pytest.param("postgresql", marks=pytest.mark.real)])
def apply(request: pytest.FixtureRequest) -> Apply:
    """Applies effects to an empty table and answers its rows."""
    if request.param == "memory":
        return in_memory
    database = request.getfixturevalue("database")
    return lambda effects: in_bulk(database, effects)


def in_memory(effects: Sequence[DatabaseEffect]) -> Rows:
    tables = MemoryTables()
    tables.apply(effects)
    return [dict.fromkeys(COLUMNS) | row for row in tables.rows(TABLE)]


def in_bulk(connection: Connection, effects: Sequence[DatabaseEffect]) -> Rows:
    with connection.transaction(force_rollback=True):
        EffectWriter(connection).apply(effects)
        return rows(connection)


def one_by_one(connection: Connection, effects: Sequence[DatabaseEffect]) -> Rows:
    with connection.transaction(force_rollback=True):
        writer = EffectWriter(connection)
        for effect in effects:
            writer.apply([effect])
        return rows(connection)


def rows(connection: Connection) -> Rows:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM shop.contract ORDER BY id").fetchall()


thorough = hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.real
@thorough
@given(st.lists(row_effects, max_size=12))
def test_in_bulk_is_one_by_one_is_in_memory(database: Connection, effects: list[RowEffect]) -> None:
    result = in_bulk(database, effects)
    assert result == one_by_one(database, effects)
    assert result == in_memory(effects)


@pytest.mark.real
@thorough
@given(st.lists(row_effects | statements, max_size=10))
def test_a_statement_stands_between_what_is_before_and_after_it(
    database: Connection, effects: list[DatabaseEffect]
) -> None:
    assert in_bulk(database, effects) == one_by_one(database, effects)


def test_an_upsert_leaves_other_columns_alone(apply: Apply) -> None:
    (row,) = apply(
        [Upsert(TABLE, (("id", "a"),), {"n": 1, "word": "x"}), Upsert(TABLE, (("id", "a"),), {"n": 2})]
    )
    assert (row["n"], row["word"]) == (2, "x")


def test_an_upsert_of_no_columns_makes_the_row(apply: Apply) -> None:
    assert [row["id"] for row in apply([Upsert(TABLE, (("id", "a"),), {})])] == ["a"]


def test_an_update_makes_no_row(apply: Apply) -> None:
    assert apply([Update(TABLE, (("id", "a"),), {"n": 1})]) == []


def test_an_update_of_no_columns_changes_nothing(apply: Apply) -> None:
    upsert = Upsert(TABLE, (("id", "a"),), {"n": 1})
    assert apply([upsert, Update(TABLE, (("id", "b"),), {})]) == apply([upsert])


def test_an_update_before_the_insert_is_lost_and_after_it_is_kept(apply: Apply) -> None:
    key = (("id", "a"),)
    (row,) = apply(
        [Update(TABLE, key, {"word": "early"}), Upsert(TABLE, key, {"n": 1}), Update(TABLE, key, {"n": 2})]
    )
    assert (row["n"], row["word"]) == (2, None)


def test_deltas_begin_a_row_and_add_up(apply: Apply) -> None:
    (row,) = apply([Add(TABLE, (("id", "a"),), {"n": 2}), Add(TABLE, (("id", "a"),), {"n": 3, "m": 1})])
    assert (row["n"], row["m"]) == (5, 1)


def test_a_delta_to_nothing_begins_at_the_delta(apply: Apply) -> None:
    (row,) = apply([Upsert(TABLE, (("id", "a"),), {"n": None}), Add(TABLE, (("id", "a"),), {"n": 3})])
    assert row["n"] == 3


def test_a_deleted_row_forgets_what_it_held(apply: Apply) -> None:
    key = (("id", "a"),)
    effects: list[RowEffect] = [
        Upsert(TABLE, key, {"n": 1, "word": "x"}),
        Delete(TABLE, key),
        Add(TABLE, key, {"n": 5}),
    ]
    (row,) = apply(effects)
    assert (row["n"], row["word"]) == (5, None)


def test_deleting_what_is_not_there_is_nothing(apply: Apply) -> None:
    assert apply([Delete(TABLE, (("id", "a"),))]) == []


@pytest.mark.real
def test_a_column_with_another_default_than_zero_takes_no_deltas(database: Connection) -> None:
    # One by one they would add to the default, folded into the insert they would not.
    with pytest.raises(ConfigurationError, match=r"shop\.preset\.n has DEFAULT 10"):
        in_bulk(database, [Add("shop.preset", (("id", "a"),), {"n": 5})])


@pytest.mark.real
@pytest.mark.parametrize("default", ["0", "0.0", "'0'", "0::numeric", "NULL"])
def test_a_column_with_a_default_of_zero_takes_deltas(database: Connection, default: str) -> None:
    for kind in ("integer", "numeric", "double precision"):
        with database.transaction(force_rollback=True):
            database.execute(
                f"CREATE TABLE shop.zero (id text PRIMARY KEY, n {kind} DEFAULT {default})".encode()
            )
            EffectWriter(database).apply([Add("shop.zero", (("id", "a"),), {"n": 5})])
            assert database.execute("SELECT n FROM shop.zero").fetchone() == (5,)


@pytest.mark.real
def test_a_row_may_have_a_key_of_several_columns_in_any_order(database: Connection) -> None:
    effects = Effects()
    effects.add("shop.pair", {"a": "x", "b": 1}, n=1)
    effects.add("shop.pair", {"b": 1, "a": "x"}, n=1)
    effects.add("shop.pair", {"b": 2, "a": "x"}, n=7)
    with database.transaction(force_rollback=True):
        EffectWriter(database).apply(effects.collected)  # type: ignore[arg-type]
        found = database.execute("SELECT a, b, n FROM shop.pair ORDER BY b").fetchall()
    assert found == [("x", 1, 2), ("x", 2, 7)]


MISSING: list[tuple[RowEffect, str]] = [
    (Upsert("shop.nowhere", (("id", "a"),), {"n": 1}), "shop.nowhere"),
    (Upsert(TABLE, (("id", "a"),), {"missing": 1}), "shop.contract.missing"),
    (Delete(TABLE, (("missing", "a"),)), "shop.contract.missing"),
]


@pytest.mark.real
@pytest.mark.parametrize(("effect", "named"), MISSING)
def test_what_the_database_does_not_have_is_named(
    database: Connection, effect: RowEffect, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        in_bulk(database, [effect])


@pytest.mark.real
@pytest.mark.parametrize("value", ["x", [1]])
def test_a_delta_to_what_is_no_number_is_the_databases_to_refuse(database: Connection, value: object) -> None:
    key = (("id", "a"),)
    with pytest.raises(psycopg.Error):
        in_bulk(database, [Upsert(TABLE, key, {"word": value}), Add(TABLE, key, {"word": 1})])
