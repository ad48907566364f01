"""The relay against a real log and a real broker: what was committed arrives, in order, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import schemas
from streams import App, RelayBlocked, Topic, append, publish
from streams.broker.kafka import end_offsets
from streams.event import (
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TYPE,
    FP_POSITION,
    FP_VERSION,
    TRACEPARENT,
)
from streams.relay import slot
from streams.relay.relay import Relay
from streams.settings import Settings
from streams.topics import Step, Wanted, apply, plan
from tests.processes import eventually
from tests.running import everything_in, one

pytestmark = pytest.mark.real


@contextmanager
def relaying(settings: Settings) -> Iterator[Relay]:
    """A relay that runs until the block ends, and must not have fallen by then."""
    stop, fallen = threading.Event(), []
    relay = Relay(settings, stop)

    def run() -> None:
        try:
            relay.run()
        except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
            fallen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield relay
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()
        assert not fallen, fallen


@pytest.fixture
def topic(settings: Settings) -> str:
    """The name of the topic of stock events, which is there."""
    apply(plan(App("t", catalog=schemas.catalog, topics=[Topic("stock", partitions=3)]), settings), settings)
    return f"{settings.topic_prefix}stock"


def arrived(settings: Settings, topic: str) -> int:
    return sum(end_offsets(settings, [topic]).values())


def receive(connection: psycopg.Connection[Any], sku: str, quantity: int) -> None:
    append(connection, "stock", sku, [schemas.StockReceived(quantity)], None)


def test_an_event_travels_with_all_its_headers(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    append(connection, "stock", "sku-ü", [schemas.StockReceived(3)], 0, traceparent=trace)
    connection.commit()
    row = connection.execute("SELECT id, payload, recorded_at FROM fencepost.event").fetchone()
    assert row is not None
    event_id, payload, at = row
    with relaying(settings):
        eventually(lambda: arrived(settings, topic) == 1, "it arrives")
    (record,) = everything_in(settings, topic)
    headers = dict(record.headers)
    position = headers.pop(FP_POSITION)
    assert (record.key, record.value) == ("sku-ü".encode(), payload)
    assert headers == {
        CE_SPECVERSION: b"1.0",
        CE_SOURCE: b"fencepost",
        CE_ID: str(event_id).encode(),
        CE_TYPE: b"StockReceived",
        CE_TIME: at.isoformat(timespec="microseconds").encode(),
        CE_SUBJECT: "sku-ü".encode(),
        FP_VERSION: b"1",
        TRACEPARENT: trace.encode(),
    }
    assert position is not None
    assert position.endswith(b"/1")


def test_what_was_rolled_back_never_appears(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    receive(connection, "a", 1)
    connection.rollback()
    receive(connection, "b", 1)
    with connection.transaction(force_rollback=True):
        receive(connection, "c", 1)
    connection.commit()
    with relaying(settings):
        eventually(lambda: arrived(settings, topic) >= 1, "the committed one arrives")
        receive(connection, "d", 1)
        connection.commit()
        eventually(lambda: arrived(settings, topic) >= 2, "and the one after it")
    assert sorted(record.key or b"" for record in everything_in(settings, topic)) == [b"b", b"d"]


def test_a_transaction_that_began_earlier_and_commits_later_is_delivered(
    settings: Settings, topic: str
) -> None:
    with (
        psycopg.connect(settings.database_url) as early,
        psycopg.connect(settings.database_url) as late,
        relaying(settings),
    ):
        receive(early, "early", 1)
        receive(late, "late", 1)
        late.commit()
        eventually(lambda: arrived(settings, topic) == 1, "the later one arrives first")
        early.commit()
        eventually(lambda: arrived(settings, topic) == 2, "the earlier one is not forgotten")


def test_each_size_and_shape_of_key_and_value_is_delivered_as_it_is(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    plain = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(plain, 1, -1), 0)], settings)
    messages: list[tuple[bytes | None, bytes | None]] = [
        (b"k", b""),
        (b"k", None),
        (None, b"v"),
        (b"", b"v"),
        (b"a\x00b", b"\x00"),
        ("🦫".encode(), "🦫".encode()),
        (b"k" * 10_000, b"v"),
        (b"k", b"x" * 900_000),
        (b"k", b"x" * 5_000_000),
    ]
    headers = {"text": "ü", "none": None, "bytes": b"\xff\x00"}
    for key, value in messages:
        publish(connection, plain, key, value, headers)
    connection.commit()
    with relaying(settings):
        eventually(lambda: arrived(settings, plain) == len(messages), "all arrive")
    found = everything_in(settings, plain)
    assert [(record.key, record.value) for record in found] == messages
    for record in found:
        assert record.headers[:3] == (("text", "ü".encode()), ("none", None), ("bytes", b"\xff\x00"))


def test_a_new_column_while_the_relay_runs_does_not_disturb_it(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    with relaying(settings):
        receive(connection, "a", 1)
        connection.commit()
        eventually(lambda: arrived(settings, topic) == 1, "before")
        connection.execute("ALTER TABLE fencepost.event ADD COLUMN note text DEFAULT 'x'")
        receive(connection, "a", 2)
        connection.commit()
        connection.execute("ALTER TABLE fencepost.event DROP COLUMN note")
        receive(connection, "a", 3)
        connection.commit()
        eventually(lambda: arrived(settings, topic) == 3, "after")
    assert [record.header(FP_VERSION) for record in everything_in(settings, topic)] == [b"1", b"2", b"3"]


def test_a_hundred_thousand_rows_in_one_transaction_keep_their_order(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    plain = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(plain, 1, -1), 0)], settings)
    connection.execute(
        "INSERT INTO fencepost.outbox (topic, key, payload) "
        "SELECT %s, 'k', int4send(n) FROM generate_series(0, 99999) n",
        (plain,),
    )
    connection.commit()
    with relaying(settings):
        eventually(lambda: arrived(settings, plain) == 100_000, "all arrive", 60)
    numbers = [int.from_bytes(record.value or b"", "big") for record in everything_in(settings, plain)]
    assert numbers == list(range(100_000))


def test_the_position_moves_while_only_others_write(settings: Settings) -> None:
    with relaying(settings) as relay, psycopg.connect(settings.database_url, autocommit=True) as other:
        eventually(lambda: relay.progress.confirmed != "0/0", "it reads")
        other.execute("CREATE TABLE unrelated (n int)")
        before = confirmed(settings)
        other.execute("INSERT INTO unrelated SELECT generate_series(1, 10000)")
        written = one(settings, "SELECT pg_current_wal_lsn()")
        eventually(
            lambda: bool(one(settings, "SELECT %s::pg_lsn - %s::pg_lsn >= 0", confirmed(settings), written)),
            "what others wrote is confirmed too",
        )
        assert confirmed(settings) != before


def test_after_an_orderly_stop_nothing_is_sent_twice(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    for n in range(3):
        receive(connection, "a", n + 1)
        connection.commit()
        with relaying(settings):
            eventually(lambda seen=n: arrived(settings, topic) > seen, "it arrives")  # type: ignore[misc]
    assert arrived(settings, topic) == 3


def test_rows_without_a_slot_are_refused_rather_than_begun_from_now(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    receive(connection, "a", 1)
    connection.commit()
    connection.execute("SELECT pg_drop_replication_slot(%s)", (settings.slot,))
    connection.commit()
    with pytest.raises(RelayBlocked, match="events that a new one would not see"):
        slot.ensure(settings.database_url, settings.slot)
    assert one(settings, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", settings.slot) == 0


def test_a_record_larger_than_the_topic_takes_stops_the_relay_with_its_name(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    plain = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(plain, 1, -1), 0)], settings)
    publish(connection, plain, "huge", b"\x00" * 17 * 1024 * 1024)
    connection.commit()
    with pytest.raises(RelayBlocked, match=rf"topic {plain}, key b'huge', was refused"):
        Relay(settings, threading.Event()).run()


def confirmed(settings: Settings) -> Any:
    return one(
        settings, "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", settings.slot
    )
