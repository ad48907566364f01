"""The relay against a real log and a real broker: what was committed arrives, in order, and nothing else does."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition

import schemas
from streams import App, RelayBlocked, Topic, append, publish
from streams.broker import kafka
from streams.broker.kafka import end_offsets
from streams.dev import servers
from streams.dev.state import ServerName
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
from tests.chaos.relay_kills import Figures, appending, audit
from tests.integration.relays import arrived, relaying, running_relay, set_limit
from tests.processes import eventually, start, streams
from tests.processes import stop as stop_process
from tests.running import everything_in, one, produce

pytestmark = pytest.mark.real

READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"


@pytest.fixture
def topic(settings: Settings) -> str:
    """The name of the topic of stock events, which is there."""
    apply(plan(App("t", catalog=schemas.catalog, topics=[Topic("stock", partitions=3)]), settings), settings)
    return f"{settings.topic_prefix}stock"


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
    number = one(settings, "SELECT sequence FROM fencepost.event")
    assert position.endswith(b"/%d" % number)


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


def confirmed(settings: Settings) -> Any:
    return one(
        settings, "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", settings.slot
    )


def values(settings: Settings, topic: str) -> list[bytes]:
    return [(record.value or b"")[:6] for record in everything_in(settings, topic)]


def small_topic(settings: Settings) -> str:
    """A topic that takes records of up to 100,000 bytes."""
    name = f"{settings.topic_prefix}small"
    apply([Step(Wanted(name, 1, -1), 0)], settings)
    set_limit(settings, name, 100_000)
    return name


def test_a_record_that_overtook_another_is_sent_again_behind_it(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    """As a relay would have left it that let the second pass while the first was refused."""
    name = small_topic(settings)
    for value in (b"first", b"second"):
        publish(connection, name, "k", value)
    connection.commit()
    with relaying(settings.model_copy(update={"slot": copy_of(connection, settings)})):
        eventually(lambda: arrived(settings, name) == 2, "to learn what the relay sends")
    first, second = everything_in(settings, name)
    connection.commit()
    admin = kafka.admin(settings)
    for future in admin.delete_records([TopicPartition(name, 0, 2)]).values():
        future.result(10)
    produce(settings, name, [(second.key, second.value, second.headers)])
    with relaying(settings):
        eventually(lambda: arrived(settings, name) == 5, "both are sent")
    assert stored_values(settings, name) == [b"second", b"first", b"second"]
    assert first.value == b"first"


def copy_of(connection: psycopg.Connection[Any], settings: Settings) -> str:
    """A second slot at the same place; one that is temporary would end with this connection."""
    name = f"{settings.slot}_copy"
    connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (settings.slot, name))
    connection.commit()
    return name


def stored_values(settings: Settings, topic: str) -> list[bytes | None]:
    ends = end_offsets(settings, [topic])
    begins = kafka.begin_offsets(settings, [topic])
    return [record.value for record in kafka.read(settings, begins, ends)]


def test_a_server_that_is_behind_what_was_confirmed_is_refused_and_nothing_is_lost(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    relay = Relay(settings, threading.Event())
    relay.confirmed = 1 << 60  # what it had confirmed at the server before, which had written further
    receive(connection, "a", 1)
    connection.commit()
    for _ in range(2):  # also when it is started again by its supervisor
        with pytest.raises(RelayBlocked, match=r"has written up to .*then start the relay's process anew"):
            relay.run()
    assert arrived(settings, topic) == 0
    with relaying(settings):
        eventually(lambda: arrived(settings, topic) == 1, "a new process goes on from where the slot stands")


def test_a_slot_that_is_gone_when_the_relay_comes_back_is_not_made_anew(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    with running_relay(settings) as (_, fallen):
        receive(connection, "a", 1)
        connection.commit()
        eventually(lambda: arrived(settings, topic) == 1, "it is at work")
        drop_slot(settings)
        eventually(lambda: bool(fallen), "it says so")
    assert isinstance(fallen[0], RelayBlocked)
    assert "is gone: it was dropped, or this server was restored or promoted without it" in str(fallen[0])
    assert confirmed(settings) is None


def drop_slot(settings: Settings) -> None:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
            (settings.slot,),
        )
        eventually(lambda: not is_read(settings), "its reader is gone")
        connection.execute("SELECT pg_drop_replication_slot(%s)", (settings.slot,))


def is_read(settings: Settings) -> bool:
    return bool(one(settings, "SELECT active FROM pg_replication_slots WHERE slot_name = %s", settings.slot))


def test_a_relay_that_loses_its_connection_sends_nothing_twice(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    with relaying(settings), psycopg.connect(settings.database_url, autocommit=True) as other:
        for n in range(1, 401):
            receive(connection, f"s{n % 7}", 1)
            connection.commit()
            if n % 100 == 0:
                other.execute(
                    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
                    (settings.slot,),
                )
        eventually(lambda: arrived(settings, topic) >= 400, "all arrive")
    assert audit(settings, 0) == Figures(0, events=400, lost=0, duplicates=0, disordered=0)


def test_concurrent_transactions_of_different_lengths_keep_the_order_of_each_key(
    settings: Settings, topic: str
) -> None:
    with relaying(settings):
        with appending(settings):
            eventually(lambda: arrived(settings, topic) > 1_000, "writers are at work")
        stored = one(settings, "SELECT count(*) FROM fencepost.event")
        eventually(lambda: arrived(settings, topic) >= stored, "all arrive")
    figures = audit(settings, 0)
    assert figures.is_clean, figures


def impatient(settings: Settings) -> Settings:
    """A server that asks its relay for an answer every second, and gives it up after two."""
    url = f"{settings.database_url}?options=-c%20wal_sender_timeout%3D2000"
    return settings.model_copy(update={"database_url": url})


@pytest.mark.slow
def test_keepalives_answered_while_the_broker_is_away_confirm_nothing_that_is_not_acknowledged(
    server_directory: Path, settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    relay = start(streams("relay", "run"), impatient(settings))
    try:
        receive(connection, "a", 1)
        connection.commit()
        eventually(lambda: arrived(settings, topic) == 1, "it is at work")
        servers.stop(server_directory, ServerName.KAFKA, kill=True)
        receive(connection, "a", 2)
        connection.commit()
        written = one(settings, "SELECT pg_current_wal_lsn()::text")
        pid = one(settings, READER, settings.slot)
        since = one(settings, "SELECT clock_timestamp() + interval '5 seconds'")
        eventually(lambda: bool(one(settings, "SELECT clock_timestamp() > %s", since)), "time passes")
        assert one(settings, READER, settings.slot) == pid, (
            "who does not answer is disconnected after two seconds"
        )
        assert one(settings, "SELECT %s::pg_lsn < %s::pg_lsn", confirmed(settings), written)
    finally:
        relay.signal(signal.SIGKILL)
        servers.restart(server_directory, ServerName.KAFKA)
    with relaying(settings):
        eventually(lambda: arrived(settings, topic) >= 2, "nothing is lost")
    assert [record.header(FP_VERSION) for record in everything_in(settings, topic)] == [b"1", b"2"]


@pytest.mark.slow
def test_a_relay_stops_in_time_while_the_broker_is_away_and_its_queue_is_full(
    server_directory: Path,
    settings: Settings,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(plain, 1, -1), 0)], settings)
    made, stop = kafka.producer, threading.Event()
    monkeypatch.setattr(kafka, "producer", lambda s: made(s, {"queue.buffering.max.messages": 10}))
    thread = threading.Thread(target=Relay(settings, stop).run)
    thread.start()
    try:
        publish(connection, plain, "k", b"0")
        connection.commit()
        eventually(lambda: arrived(settings, plain) == 1, "it is at work")
        servers.stop(server_directory, ServerName.KAFKA, kill=True)
        for n in range(1, 51):
            publish(connection, plain, "k", b"%d" % n)
        connection.commit()
        thread.join(2)  # until its queue is full
        stop.set()
        thread.join(12)
        assert not thread.is_alive()
    finally:
        servers.restart(server_directory, ServerName.KAFKA)
        stop.set()
        thread.join()
    monkeypatch.undo()
    with relaying(settings):
        eventually(lambda: arrived(settings, plain) >= 51, "nothing is lost")
    assert values(settings, plain) == [b"%d" % n for n in range(51)]


@pytest.mark.slow
def test_a_relay_that_was_paused_and_replaced_does_no_harm_when_it_wakes(
    settings: Settings, topic: str
) -> None:
    with appending(settings):
        paused = start(streams("relay", "run"), impatient(settings))
        eventually(lambda: arrived(settings, topic) > 100, "the first is at work")
        paused.signal(signal.SIGSTOP)
        pid, before = one(settings, READER, settings.slot), arrived(settings, topic)
        other = start(streams("relay", "run"), settings)
        eventually(lambda: one(settings, READER, settings.slot) not in (pid, None), "the second took over")
        eventually(lambda: arrived(settings, topic) > before + 200, "and sends")
        paused.signal(signal.SIGCONT)
        eventually(
            lambda: "is away" in paused.output,
            lambda: "the first finds out: " + paused.output + " // " + other.output,
        )
        more = arrived(settings, topic) + 200
        eventually(lambda: arrived(settings, topic) > more, "the second is not disturbed")
    end = one(settings, "SELECT pg_current_wal_lsn()::text")
    eventually(
        lambda: bool(one(settings, "SELECT %s::pg_lsn >= %s::pg_lsn", confirmed(settings), end)),
        "all is sent",
    )
    for relay in (paused, other):
        stop_process(relay)
    figures = audit(settings, 0)
    assert (figures.lost, figures.disordered) == (0, 0), figures


def test_the_audit_names_what_is_missing_and_is_content_when_all_is_there(
    settings: Settings, topic: str, connection: psycopg.Connection[Any]
) -> None:
    for version in range(1, 4):
        receive(connection, "a", version)
    connection.commit()
    found = start(streams("relay", "audit", "--wait", "0"), settings)
    assert found.wait() == 1, found.output
    for version in range(1, 4):
        assert f"missing in {topic}: a version {version}" in found.output
    with relaying(settings):
        eventually(lambda: arrived(settings, topic) == 3, "all arrive")
        content = start(streams("relay", "audit", "--json"), settings)
        assert content.wait() == 0, content.output
    (row,) = json.loads(content.output)
    assert (row["stored"], row["relayed"], row["missing"], row["repeated"]) == (3, 3, 0, 0)
