"""Whatever arrives, the outcome is clear: applied, waiting, or buried byte for byte; never lost, never a crash loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import schemas
from streams import App, Effects, Event, Retry, Topic, append
from streams.broker import kafka
from streams.dev import postgres, servers
from streams.dev.state import ServerName
from streams.errors import ConfigurationError, ServerUnavailable
from streams.event import FP_ERROR, FP_VERSION, Headers, Record
from streams.migrations import newest
from streams.publish.outbox import publish
from streams.relay import slot
from streams.relay.relay import Relay
from streams.schema.catalog import encode
from streams.settings import Settings
from streams.stores.postgres import connect, require_migrated
from streams.topics import Step, Wanted, apply
from tests.processes import eventually, start, streams
from tests.running import as_record, everything_in, headers_of, one, produce, running

pytestmark = pytest.mark.real

GOOD = encode(schemas.StockReceived(1))
TABLE = "CREATE TABLE level (sku text PRIMARY KEY, on_hand bigint NOT NULL)"


@pytest.fixture
def app(settings: Settings) -> App:
    made = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])

    @made.projection("level", topics=["stock"], retry=Retry(attempts=2, base_seconds=0.1, tier_seconds=(1,)))
    def level(event: Event, effects: Effects) -> None:
        effects.add("level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    return made


@pytest.fixture
def ready(settings: Settings, app: App) -> Iterator[Settings]:
    with psycopg.connect(settings.database_url) as connection:
        connection.execute(TABLE)
    with running(settings, app):
        yield settings


DEAD: dict[str, tuple[bytes | None, bytes | None, Headers, str]] = {
    "undecodable bytes": (b"k1", b"\x00garbage", headers_of(1, "e"), "UndecodableRecord"),
    "a truncated body": (b"k2", GOOD[:-1], headers_of(1, "e"), "UndecodableRecord"),
    "bytes left over after the body": (b"k3", GOOD + b"x", headers_of(1, "e"), "UndecodableRecord"),
    "an unknown schema": (b"k4", b"\xc3\x01" + b"\x07" * 8 + b"\x02", headers_of(1, "e"), "UnknownSchema"),
    "an unknown event type": (
        b"k5",
        b"\xc3\x01" + b"\x08" * 8,
        headers_of(1, "e", "NeverHeardOf"),
        "UnknownSchema",
    ),
    "a null key": (None, GOOD, headers_of(1, "e"), "UndecodableRecord"),
    "a key that is not text": (b"\xff\xfe", GOOD, headers_of(1, "e"), "UndecodableRecord"),
    "an empty value": (b"k6", b"", headers_of(1, "e"), "UndecodableRecord"),
    "missing headers": (b"k7", GOOD, (), "UndecodableRecord"),
    "version 0": (b"k8", GOOD, headers_of(0, "e"), "UndecodableRecord"),
    "a version that is no number": (b"k9", GOOD, ((FP_VERSION, b"one"),), "UndecodableRecord"),
    "a header without value": (b"k10", b"?", (("note", None), (FP_VERSION, b"1")), "UndecodableRecord"),
    "key and value both broken": (b"\xff", b"\xff", headers_of(1, "e"), "UndecodableRecord"),
    "1 MB of rubbish": (b"k11", b"\x01" * 1_000_000, headers_of(1, "e"), "UndecodableRecord"),
}


def test_what_cannot_be_read_is_buried_byte_for_byte_and_its_neighbours_are_applied(ready: Settings) -> None:
    topic = f"{ready.topic_prefix}stock"
    produce(ready, topic, [(key, value, headers) for key, value, headers, _ in DEAD.values()])
    produce(ready, topic, [as_record("good", 1, schemas.StockReceived(5))])
    eventually(
        lambda: one(ready, "SELECT on_hand FROM level WHERE sku = 'good'") == 5, "the neighbour is applied"
    )
    eventually(lambda: buried(ready) == len(DEAD), "all are dead letters")
    eventually(lambda: len(letters(ready)) >= len(DEAD), "all are in the dead-letter topic")
    found = {(letter.key, letter.value, letter.headers[:-1]): letter for letter in letters(ready)}
    for what, (key, value, headers, error_class) in DEAD.items():
        letter = found[key, value, headers]
        assert letter.headers[-1][0] == FP_ERROR, what
        error = json.loads(letter.header(FP_ERROR) or b"")
        assert error["class"] == error_class, what
        assert (error["topic"], error["group"]) == (topic, f"{ready.slot}.level"), what
        assert len(letter.header(FP_ERROR) or b"") < 2_000, what


def test_an_unknown_schema_is_tried_again_before_it_is_buried(ready: Settings) -> None:
    key, value, headers, _ = DEAD["an unknown schema"]
    produce(ready, f"{ready.topic_prefix}stock", [(key, value, headers)])
    eventually(lambda: buried(ready) == 1, "it is buried in the end")
    assert one(ready, "SELECT attempt_count FROM fencepost.job") == 2
    moves = one(ready, "SELECT array_agg(to_status ORDER BY at) FROM fencepost.job_history")
    assert moves == ["retry", "processing", "dead_letter"]


def test_a_tombstone_is_filtered_and_is_no_error(ready: Settings) -> None:
    topic = f"{ready.topic_prefix}stock"
    produce(ready, topic, [(b"k", None, headers_of(1, "e1")), as_record("k", 2, schemas.StockReceived(2))])
    eventually(lambda: one(ready, "SELECT on_hand FROM level") == 2, "what follows the tombstone is applied")
    assert one(ready, "SELECT filtered FROM fencepost.fence") == 1
    assert one(ready, "SELECT count(*) FROM fencepost.job") == 0


def test_a_version_lower_than_seen_is_stale(ready: Settings) -> None:
    first, second = (as_record("k", version, schemas.StockReceived(version)) for version in (1, 2))
    produce(ready, f"{ready.topic_prefix}stock", [first, second, first, second, first])
    eventually(lambda: one(ready, "SELECT stale FROM fencepost.fence") == 3, "the repetitions are stale")
    assert one(ready, "SELECT on_hand FROM level") == 3


def test_an_event_of_1_mb_is_applied(settings: Settings) -> None:
    big = App(settings.slot, catalog=schemas.catalog, topics=[Topic("customer", partitions=1)])

    @big.projection("customer", topics=["customer"], versions="latest")
    def customer(event: Event, effects: Effects) -> None:
        effects.upsert(
            "shop.customer", {"customer_id": event.resource_id}, name=event.data.name, email="", tier=""
        )

    with running(settings, big), psycopg.connect(settings.database_url) as connection:
        append(connection, "customer", "c1", [schemas.CustomerChanged("x" * 1_000_000, "", "")], 0)
        connection.commit()
        eventually(
            lambda: one(settings, "SELECT length(name) FROM shop.customer") == 1_000_000, "it is applied"
        )


def test_the_relay_waits_for_a_topic_that_nobody_declared_and_skips_nothing(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"{settings.topic_prefix}nobody"
    with psycopg.connect(settings.database_url) as connection:
        publish(connection, topic, "k", b"1")
        publish(connection, topic, "k", b"2")
    stop = threading.Event()
    relay = threading.Thread(target=Relay(settings, stop).run)
    relay.start()
    try:
        eventually(lambda: f"topic {topic} is not there" in caplog.text, "the relay says what is missing")
        assert topic not in kafka.admin(settings).list_topics(timeout=5).topics
        apply([Step(Wanted(topic, 1, -1), 0)], settings)
        eventually(lambda: len(everything_in(settings, topic)) == 2, "both arrive once the topic is there")
        assert [record.value for record in everything_in(settings, topic)] == [b"1", b"2"]
    finally:
        stop.set()
        relay.join(10)


def test_a_database_without_migrations_is_refused_with_the_command_to_run(settings: Settings) -> None:
    empty = settings.database_url.rsplit("/", 1)[0] + "/template1"
    with (
        connect(empty) as connection,
        pytest.raises(ServerUnavailable, match="no fencepost tables; run: streams migrate"),
    ):
        require_migrated(connection, newest())


def test_a_postgresql_without_logical_decoding_is_refused_with_the_statement_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(postgres.SETTINGS, "wal_level", "replica")
    try:
        url = servers.up(tmp_path, want=[ServerName.POSTGRES]).database_url
        assert url is not None
        with pytest.raises(ConfigurationError, match="ALTER SYSTEM SET wal_level = logical"):
            slot.ensure(url, "fencepost")
    finally:
        servers.reset(tmp_path)


def test_a_broker_that_is_not_there_is_named_with_what_to_check(settings: Settings) -> None:
    nowhere = settings.model_copy(update={"kafka": "127.0.0.1:9", "connect_seconds": 1.0})
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:9 .*check STREAMS_KAFKA"):
        kafka.require_broker(nowhere)


def test_a_database_that_is_not_there_is_named_with_what_to_check() -> None:
    with pytest.raises(ServerUnavailable, match="check STREAMS_DATABASE_URL"):
        connect("postgresql://127.0.0.1:9/x", seconds=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "processors.app:app", "--processor", "stock-levle"], "did you mean stock-level?"),
        (["run", "processors.app:ap"], "did you mean processors.app:app?"),
        (["run", "no.such.module"], "give module:name, such as processors.app:app"),
        (["dlq", "show", "4711"], "there is no job 4711"),
    ],
)
def test_a_command_called_wrongly_says_what_to_do(
    settings: Settings, arguments: list[str], expected: str
) -> None:
    process = start(streams(*arguments), settings)
    assert process.wait() == 2
    assert expected in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stauts"], "No such command"),
        (["dlq", "show"], "Missing"),
        (["dlq", "show", "first"], "valid integer"),
        (["relay", "run", "--fast"], "--fast"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_answered_with_its_usage_and_status_2(
    settings: Settings, arguments: list[str], expected: str
) -> None:
    process = start(streams(*arguments), settings)
    assert process.wait() == 2
    assert "Usage: streams" in process.output
    assert expected in process.output
    assert "Traceback" not in process.output


def test_a_misspelt_setting_ends_a_command_with_a_suggestion(settings: Settings) -> None:
    process = start(streams("status"), settings, STREAMS_DATABSE_URL="x")
    assert process.wait() == 2
    assert "did you mean STREAMS_DATABASE_URL?" in process.output


def buried(settings: Settings) -> int:
    return int(one(settings, "SELECT count(*) FROM fencepost.job WHERE status = 'dead_letter'"))


def letters(settings: Settings) -> list[Record]:
    return everything_in(settings, f"{settings.slot}.level.dlq")
