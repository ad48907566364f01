"""An unmodified Debezium carries the event store to processors, and the relay carries what is laid out for Debezium."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import schemas
from streams import App, Effects, Event, Retry, Topic, Transient, append
from streams.dispositions import Disposition
from streams.settings import Settings
from streams.topics import apply, plan
from tests.debezium import EVENT_STORE, OUTBOX, Debezium, debezium
from tests.processes import eventually, start, stop, streams
from tests.running import everything_in, one, running

pytestmark = [pytest.mark.real, pytest.mark.slow]

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
KEYS, PER_KEY = 20, 10
BATCH = KEYS * PER_KEY
# Long enough for what is sent between two of them to be lost with the process.
FLUSH_SECONDS = 10.0

TABLES = """
CREATE TABLE arrived (id text PRIMARY KEY, resource_id text, version bigint, type text, quantity bigint, at timestamptz, trace text);
CREATE TABLE arrived_total (key text PRIMARY KEY, total bigint NOT NULL);
CREATE PUBLICATION fencepost_events FOR TABLE fencepost.event WITH (publish = 'insert');
CREATE PUBLICATION fencepost_outbox FOR TABLE fencepost.outbox
    WITH (publish = 'insert', publish_via_partition_root = true);"""

# What Debezium's documentation lays out, and other types that services give the same columns.
OUTBOXES = {
    "outbox": "id uuid, aggregatetype varchar(255), aggregateid varchar(255), type varchar(255), payload jsonb",
    "outbox_text": "id text, aggregatetype text, aggregateid uuid, payload text",
    "outbox_json": "id bigint, aggregatetype text, aggregateid integer, payload json",
}
JSON = (
    '{"b": 1,  "a": [1.50, -0, 1e3, 12345678901234567890], "c": {"d": null, "e": true}}',
    '{"text": "J\\u00fcrgen \\ud83d\\ude00 \\"quoted\\" \\\\ \\n\\t"}',
    "[]",
    '"a string"',
    "17",
    "null",
    None,
)
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "outbox": [(uuid.uuid4(), f"kéy-{n % 5}", payload) for n, payload in enumerate(JSON * 2)],
    "outbox_text": [("", uuid.uuid4(), "plain"), ("two", uuid.uuid4(), ""), ("three", uuid.uuid4(), None)],
    "outbox_json": [(n, -n, payload) for n, payload in enumerate(JSON)],
}

app = App("debezium", catalog=schemas.catalog, topics=[Topic("stock", partitions=3)])

Connection = psycopg.Connection[Any]


@app.projection("arrival", topics=["stock"])
def arrival(event: Event, effects: Effects) -> None:
    """Everything that processors are told about an event, and a sum that shows what is applied twice."""
    quantity = event.data.quantity
    effects.add("arrived_total", {"key": event.resource_id}, total=quantity)
    effects.upsert(
        "arrived",
        {"id": event.id},
        resource_id=event.resource_id,
        version=event.version,
        type=event.type,
        quantity=quantity,
        at=event.time,
        trace=event.traceparent,
    )


@pytest.fixture
def store(settings: Settings) -> Iterator[Connection]:
    """A connection to the event store; Debezium's slot and publication are there."""
    name = slot_of(settings)
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(TABLES)
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
        yield connection
        connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))


def slot_of(settings: Settings) -> str:
    """Debezium's; the relay has the one of the settings."""
    return f"{settings.slot}_debezium"


def carrying(
    settings: Settings, folder: Path, flush_seconds: float = FLUSH_SECONDS
) -> AbstractContextManager[Debezium]:
    """Debezium as it is documented; only its names are the test's."""
    changed = {
        "slot.name": slot_of(settings),
        "transforms.outbox.route.topic.replacement": f"{settings.topic_prefix}${{routedByValue}}",
    }
    return debezium(settings, folder, EVENT_STORE.read_text(), changed, flush_seconds)


def append_batch(store: Connection) -> None:
    """Events of every key, every second one with a trace."""
    for n in range(PER_KEY):
        for key in range(KEYS):
            with store.transaction():
                append(
                    store,
                    "stock",
                    f"s{key}",
                    [schemas.StockReceived(n + key + 1)],
                    None,
                    traceparent=TRACE if n % 2 else None,
                )


def differences(store: Connection) -> list[Any]:
    """What the read model lacks, or has and should not have."""
    events = [
        (*row[:4], schemas.catalog.decode(row[4]).quantity, *row[5:])
        for row in store.execute(
            "SELECT id::text, resource_id, version, type, payload, recorded_at, traceparent FROM fencepost.event"
        )
    ]
    totals: dict[str, int] = defaultdict(int)
    for event in events:
        totals[event[1]] += event[4]
    arrived = store.execute(
        "SELECT id, resource_id, version, type, quantity, at, trace FROM arrived"
    ).fetchall()
    sums = store.execute("SELECT key, total FROM arrived_total").fetchall()
    return sorted({*events} ^ {*arrived}) + sorted({*totals.items()} ^ {*sums})


def await_truth(store: Connection, carrier: Debezium) -> None:
    def reason() -> str:
        found = differences(store)
        return f"{len(found)} differences: {found[:3]}\n{carrier.output}"

    eventually(lambda: not differences(store), reason, 60)


def dispositions(store: Connection) -> dict[str, int]:
    """How many records became what; those that none became are left out."""
    fences = store.cursor(row_factory=dict_row).execute("SELECT * FROM fencepost.fence").fetchall()
    sums = {str(name): sum(fence[name] for fence in fences) for name in Disposition}
    return {name: count for name, count in sums.items() if count}


def test_a_projection_applies_every_event_that_debezium_carries(
    settings: Settings, store: Connection, tmp_path: Path
) -> None:
    append_batch(store)
    with running(settings, app, with_relay=False), carrying(settings, tmp_path) as carrier:
        append_batch(store)
        await_truth(store, carrier)
    assert dispositions(store) == {"applied": 2 * BATCH}
    assert one(settings, "SELECT count(*) FROM fencepost.job") == 0
    assert len(everything_in(settings, f"{settings.topic_prefix}stock")) == 2 * BATCH


def test_what_a_killed_debezium_sends_again_is_stale(
    settings: Settings, store: Connection, tmp_path: Path
) -> None:
    topic = f"{settings.topic_prefix}stock"
    offsets = tmp_path / "offsets"
    with running(settings, app, with_relay=False):
        with carrying(settings, tmp_path) as carrier:
            append_batch(store)
            await_truth(store, carrier)
            eventually(offsets.exists, "the offsets of the first batch are written down", 2 * FLUSH_SECONDS)
            append_batch(store)
            await_truth(store, carrier)
            carrier.kill()
        with carrying(settings, tmp_path) as carrier:
            append_batch(store)
            await_truth(store, carrier)
    repeats = len(everything_in(settings, topic)) - 3 * BATCH
    assert BATCH <= repeats < 2 * BATCH, "the second batch is sent again, the first is not"
    assert dispositions(store) == {"applied": 3 * BATCH, "stale": repeats}
    assert one(settings, "SELECT count(*) FROM fencepost.job") == 0


def test_beside_debezium_the_relay_carries_retries_and_dead_letters_and_no_event(
    settings: Settings, store: Connection, tmp_path: Path
) -> None:
    failing = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=3)])
    tried: list[str] = []

    @failing.projection("all", topics=["stock"], retry=Retry(attempts=2, base_seconds=0.1, tier_seconds=(1,)))
    def fail(event: Event, _effects: Effects) -> None:
        tried.append(event.id)
        raise Transient("not today")

    limited = settings.model_copy(update={"publication": "fencepost_outbox"})
    dead_letters = failing.processors["all"].dead_letter_topic
    with running(limited, failing), carrying(settings, tmp_path) as carrier:
        with store.transaction():
            append(store, "stock", "bad", [schemas.StockReceived(13)], 0)
        eventually(lambda: len(everything_in(settings, dead_letters)) > 0, lambda: carrier.output)
    (letter,) = everything_in(settings, dead_letters)
    assert letter.value == one(settings, "SELECT payload FROM fencepost.event")
    assert tried == 2 * [one(settings, "SELECT id::text FROM fencepost.event")]
    assert len(everything_in(settings, f"{settings.topic_prefix}stock")) == 1


def test_tables_in_debeziums_layout_become_the_records_that_debezium_makes_of_them(
    settings: Settings, store: Connection, tmp_path: Path
) -> None:
    topics = make_outboxes(settings, store)

    def have(times: int) -> bool:
        return all(
            len(everything_in(settings, topic)) == times * len(ROWS[table]) for table, topic in topics.items()
        )

    changed = {"slot.name": slot_of(settings), "table.include.list": r"public\\.outbox.*"}
    with debezium(settings, tmp_path, OUTBOX.read_text(), changed) as carrier:
        eventually(lambda: have(1), lambda: carrier.output)
    theirs = {topic: by_partition(settings, topic) for topic in topics.values()}
    relay = start(streams("relay", "run"), settings)
    try:
        eventually(lambda: have(2), lambda: relay.output)
    finally:
        stop(relay)
    for topic, partitions in theirs.items():
        assert by_partition(settings, topic) == {
            number: 2 * records for number, records in partitions.items()
        }


def make_outboxes(settings: Settings, store: Connection) -> dict[str, str]:
    """Tables with rows, read by both; answers their topics, which have no prefix but the test's own type of row."""
    kinds = {table: f"{settings.slot}_{table}" for table in OUTBOXES}
    topics = {table: f"outbox.event.{kind}" for table, kind in kinds.items()}
    declared = [Topic(topic, partitions=3, exact=True) for topic in topics.values()]
    apply(plan(App("outbox", catalog=schemas.catalog, topics=declared), settings), settings)
    for table, columns in OUTBOXES.items():
        store.execute(f"CREATE TABLE {table} ({columns})")
        store.execute(f"ALTER PUBLICATION fencepost ADD TABLE {table}")
        for id, key, payload in ROWS[table]:
            store.execute(
                f"INSERT INTO {table} (id, aggregatetype, aggregateid, payload) VALUES (%s, %s, %s, %s)",  # noqa: S608 - a test's own words
                (id, kinds[table], key, payload),
            )
    return topics


def by_partition(settings: Settings, topic: str) -> dict[int, list[Any]]:
    """Key, value and headers per partition, without the headers in which the two speak of themselves."""
    found: dict[int, list[Any]] = defaultdict(list)
    for record in everything_in(settings, topic):
        headers = [each for each in record.headers if not each[0].startswith(("fp_", "__debezium."))]
        found[record.partition].append((record.key, record.value, headers))
    return found
