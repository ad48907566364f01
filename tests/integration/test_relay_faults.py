"""What a review of the relay found; each of these once lost, doubled or disordered something, or stopped for good."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import Any

import psycopg
import pytest

from streams import publish
from streams.broker import kafka
from streams.broker.types import KafkaError
from streams.errors import NotLetIn, RelayBlocked
from streams.relay import relay as relay_module
from streams.relay import switch
from streams.relay.blocked import Blocked
from streams.relay.poll import Polling
from streams.relay.portal import Portal, SqlConnection
from streams.relay.pump import Pump
from streams.relay.relay import prepare
from streams.relay.routes import Routes
from streams.relay.rows import Produced
from streams.relay.tail import commit_position
from streams.relay.watch import HAND_OVER
from streams.settings import Settings
from streams.stores import blocked as blocked_store
from streams.stores import relay as relay_store
from streams.stores.postgres import connect, sql
from streams.topics import Step, Wanted, apply
from tests.integration.relays import arrived, relaying, running_relay, set_limit
from tests.processes import eventually, start, streams, wait_killed
from tests.running import everything_in, one

pytestmark = pytest.mark.real


@pytest.fixture
def small(settings: Settings) -> str:
    """A topic that takes records of up to 100,000 bytes."""
    name = f"{settings.topic_prefix}small"
    apply([Step(Wanted(name, 1, -1), 0)], settings)
    set_limit(settings, name, 100_000)
    return name


def put(settings: Settings, topic: str, *records: tuple[str | None, bytes]) -> None:
    """Each in a transaction of its own, as a service would that does not use publish()."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        for key, value in records:
            connection.execute(
                "INSERT INTO fencepost.outbox (topic, key, payload) VALUES (%s, %s, %s)",
                (topic, None if key is None else key.encode(), value),
            )


def names(settings: Settings, topic: str) -> list[bytes]:
    return [(record.value or b"")[:6].rstrip() for record in everything_in(settings, topic)]


def waiting(settings: Settings) -> int:
    return int(
        one(settings, "SELECT count(*) FROM fencepost.relay_blocked WHERE decision IS DISTINCT FROM 'let_go'")
    )


def decide(settings: Settings, decision: blocked_store.Decision, topic: str) -> None:
    with connect(settings.database_url, autocommit=True) as connection:
        assert blocked_store.decide(connection, settings.slot, decision, None, topic)


def all_is_confirmed(settings: Settings, end: str) -> bool:
    query = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    return bool(one(settings, query, end, settings.slot))


def log_end(settings: Settings) -> str:
    return str(one(settings, "SELECT pg_current_wal_lsn()::text"))


def test_a_second_refused_record_of_a_lane_stops_it_there_and_doubles_nothing_before_it(
    settings: Settings, small: str
) -> None:
    put(settings, small, ("k", b"first " + os.urandom(200_000)), ("k", b"second"))
    put(settings, small, ("k", b"third " + os.urandom(600_000)), ("k", b"fourth"))
    with relaying(settings):
        eventually(lambda: waiting(settings) == 4, "the first is refused, the others wait behind it")
        set_limit(settings, small, 400_000)
        decide(settings, "resend", small)
        eventually(
            lambda: (
                one(
                    settings, "SELECT count(reason) FROM fencepost.relay_blocked WHERE payload LIKE 'third%%'"
                )
                == 1
            ),
            "the third is refused in its turn",
        )
        put(settings, small, ("other", b"other"))
        eventually(lambda: b"other" in names(settings, small), "another key goes on")
    assert [name for name in names(settings, small) if name != b"other"] == [b"first", b"second"]
    assert waiting(settings) == 2


def test_a_stop_in_the_middle_of_a_lane_doubles_nothing(settings: Settings, small: str) -> None:
    absent = f"{settings.topic_prefix}absent"
    impatient = settings.model_copy(update={"topic_grace_seconds": 0.0})
    with psycopg.connect(settings.database_url) as connection:
        for n in range(5_000):
            publish(connection, absent, "k", b"%d" % n)
        connection.commit()
    with relaying(impatient):
        eventually(lambda: waiting(settings) == 5_000, "all wait")
        end = log_end(settings)
        eventually(lambda: all_is_confirmed(settings, end), "and are confirmed")
    apply([Step(Wanted(absent, 1, -1), 0)], settings)
    kills = 0
    while waiting(settings):
        before = arrived(settings, absent)
        relay = start(streams("relay", "run"), settings)
        eventually(
            lambda before=before: arrived(settings, absent) > before or not waiting(settings),  # type: ignore[misc]
            lambda relay=relay: relay.output,  # type: ignore[misc]
        )
        relay.kill()
        kills += 1
    numbers = [int(record.value or b"") for record in everything_in(settings, absent)]
    assert numbers == list(range(5_000)), f"after {kills} kills: {len(numbers)} records"


def test_what_the_client_refuses_is_not_set_aside_before_those_before_it_are_safe(
    settings: Settings, small: str
) -> None:
    # Read so, both are handed over in one burst.
    with relaying(settings.model_copy(update={"relay_source": "peek"})):
        put(settings, small, ("k", b"before"))
        eventually(lambda: arrived(settings, small) == 1, "its partition has had a record")
        with psycopg.connect(settings.database_url) as connection:
            for value in (b"first " + os.urandom(200_000), b"second" + os.urandom(17 * 1024 * 1024)):
                connection.execute(
                    "INSERT INTO fencepost.outbox (topic, key, payload) VALUES (%s, 'k', %s)", (small, value)
                )
            connection.commit()
        eventually(lambda: waiting(settings) == 2, "both wait")
    with connect(settings.database_url) as connection:
        rows = connection.execute(
            "SELECT substr(payload, 1, 6) FROM fencepost.relay_blocked ORDER BY id"
        ).fetchall()
    assert [bytes(row[0]) for row in rows] == [b"first ", b"second"]


def test_a_record_that_was_let_go_stays_so_when_it_is_read_again(settings: Settings, small: str) -> None:
    put(settings, small, ("k", b"first " + os.urandom(17 * 1024 * 1024)))
    relay = start(streams("relay", "run"), settings, kill_at="relay.acknowledged")
    wait_killed(relay)
    assert waiting(settings) == 1, "it is set aside, and its position is not confirmed"
    decide(settings, "let_go", small)
    put(settings, small, ("k", b"second"))
    end = log_end(settings)
    with relaying(settings):
        eventually(lambda: all_is_confirmed(settings, end), "all is read")
    assert waiting(settings) == 0
    assert names(settings, small) == [b"second"]


def test_what_is_in_its_topic_is_not_put_behind_what_waits_for_the_topic(
    settings: Settings, small: str
) -> None:
    put(settings, small, ("k", b"first"))
    relay = start(streams("relay", "run"), settings, kill_at="relay.acknowledged")
    wait_killed(relay)
    assert arrived(settings, small) == 1, "it is in the topic, and not confirmed"
    # The next one was refused in the same burst for its topic's sake: a right that was taken away.
    blocked = Blocked(settings)
    blocked.refuse(
        (small, b"k", b"third", [("fp_position", b"0/1/1")]),
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED),
    )
    blocked.close()
    with relaying(settings):
        end = log_end(settings)
        eventually(lambda: all_is_confirmed(settings, end), "all is read")
        decide(settings, "resend", small)
        eventually(lambda: waiting(settings) == 0, "the lane is sent")
    found = names(settings, small)
    assert len(found) == len(set(found)), found


def test_what_waits_for_a_key_goes_on_waiting_when_its_head_is_refused_for_the_topic(
    settings: Settings, small: str
) -> None:
    first: Produced = (small, b"k", b"first", [])
    second: Produced = (small, b"k", b"second", [])

    class Group:
        outstanding = 0

    blocked = Blocked(settings)
    blocked.refuse(first, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    blocked.put_behind(second, Group())
    blocked.flush()
    decide(settings, "resend", small)
    blocked.refuse(first, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    blocked.close()
    blocked = Blocked(settings)  # of the next session
    going = list(blocked.released(lambda _: True))
    blocked.close()
    assert not going, "the second goes on before the first"


def test_the_relay_that_takes_over_at_a_hand_over_keeps_the_work(settings: Settings, small: str) -> None:
    with relaying(settings) as first, connect(settings.database_url, autocommit=True) as connection:
        put(settings, small, ("k", b"x"))
        eventually(lambda: first.progress.sent == 1, "one is at work")
        with relaying(settings) as second:
            eventually(lambda: relay_store.running(connection, settings.slot) == 2, "another stands by")
            relay_store.notify(connection, f"{HAND_OVER}: {settings.slot}")
            for n in range(2, 300):
                put(settings, small, ("k", b"y"))
                eventually(lambda n=n: arrived(settings, small) == n, "all of it is sent")  # type: ignore[misc]
                if second.progress.sent > 20:
                    break
            assert second.progress.sent > 20, (first.progress, second.progress)


def test_rows_from_before_they_had_a_transaction_id_are_not_lost_by_polling(
    settings: Settings, small: str
) -> None:
    with psycopg.connect(settings.database_url) as connection:
        # As they stand after the migration, written before it, and not read by any relay yet.
        connection.execute(
            "INSERT INTO fencepost.outbox (topic, key, payload, xid) VALUES (%s, 'k', 'before', NULL)",
            (small,),
        )
        connection.execute("UPDATE fencepost.relay_begin SET numbered_from = pg_current_wal_insert_lsn()")
    put(settings, small, ("k", b"after"))
    with pytest.raises(RelayBlocked, match="rows from before migration 0002, which only the log can tell"):
        switch.to_polling(settings, "for the test")
    with relaying(settings):
        eventually(lambda: arrived(settings, small) == 2, "the log tells both")
        end = log_end(settings)
        eventually(lambda: all_is_confirmed(settings, end), "and they are confirmed")
    switch.to_polling(settings, "for the test")
    assert names(settings, small) == [b"before", b"after"]


def test_rows_of_other_tables_of_the_publication_are_not_lost_by_polling(
    settings: Settings, small: str
) -> None:
    topic = f"outbox.event.{settings.slot}"
    apply([Step(Wanted(topic, 1, -1), 0)], settings)
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE public.theirs (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text, payload text)"
        )
        connection.execute(
            "CREATE PUBLICATION with_theirs FOR TABLE fencepost.event, fencepost.outbox, public.theirs "
            "WITH (publish = 'insert', publish_via_partition_root = true)"
        )
        both = settings.model_copy(update={"publication": "with_theirs"})
        with relaying(both):
            connection.execute(
                "INSERT INTO theirs VALUES (%s, %s, 'k', 'one')", (uuid.uuid4(), settings.slot)
            )
            eventually(lambda: arrived(settings, topic) == 1, "the log brings it")
        connection.execute("INSERT INTO theirs VALUES (%s, %s, 'k', 'two')", (uuid.uuid4(), settings.slot))
        polling = both.model_copy(update={"relay_source": "poll"})
        with running_relay(polling) as (_, fallen):
            put(settings, small, ("k", b"x"))
            eventually(lambda: arrived(settings, small) == 1 or bool(fallen), "it polls, or refuses")
    assert fallen or arrived(settings, topic) == 2


def test_a_topic_that_is_deleted_does_not_end_the_relay(settings: Settings, small: str) -> None:
    impatient = settings.model_copy(update={"topic_grace_seconds": 3.0})
    with running_relay(impatient) as (_, fallen):
        put(settings, small, ("k", b"x"))
        eventually(lambda: arrived(settings, small) == 1, "it is at work")
        admin = kafka.admin(settings)
        for future in admin.delete_topics([small]).values():
            future.result(10)
        eventually(lambda: small not in kafka.partitions(settings), "the topic is gone")
        # A topic that is not there makes the relay ask the broker anew.
        put(settings, f"{settings.topic_prefix}absent", ("k", b"x"))
        eventually(lambda: waiting(settings) >= 1 or bool(fallen), "it has asked")
        put(settings, small, ("another", b"x"))
        eventually(lambda: waiting(settings) >= 2 or bool(fallen), "what cannot be sent waits", 60)
    assert not fallen, fallen


def test_old_rows_of_a_dump_that_was_loaded_are_not_sent_again_by_polling(
    settings: Settings, small: str
) -> None:
    put(settings, small, ("k", b"old"))
    polling = settings.model_copy(update={"relay_source": "poll"})
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        # The rows keep the ids of the server that they were dumped from.
        connection.execute(
            "UPDATE fencepost.outbox SET xid = (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 20)::text::xid8"
        )
        with pytest.raises(RelayBlocked, match="transaction ids of another server"):
            switch.begin_now(polling)
        connection.execute("UPDATE fencepost.outbox SET xid = NULL")
        switch.begin_now(polling)
    put(settings, small, ("k", b"new"))
    with relaying(polling):
        eventually(lambda: arrived(settings, small) == 1, "what is new arrives")
    assert names(settings, small) == [b"new"]


class Told(Exception):
    """Somebody wants the session to end."""


@pytest.mark.parametrize("room", [1, 10, 40])
def test_a_stop_while_the_client_has_no_room_confirms_nothing_that_was_not_sent(
    settings: Settings, room: int
) -> None:
    topic = f"{settings.topic_prefix}many"
    apply([Step(Wanted(topic, 3, -1), 0)], settings)
    producer = kafka.producer(settings, {"queue.buffering.max.messages": room, "linger.ms": 20})
    told = False

    def stop() -> None:
        if told:
            raise Told

    pump = Pump(producer, lambda: kafka.producer(settings), 0, Routes(lambda _: 3), stop)
    for n in range(30):  # each partition has had a record
        pump.send((topic, b"%d" % n, b"before", []))
        pump.commit(1)
        pump.close_group()
    told = True
    with contextlib.suppress(Told):
        for n in range(1_000):
            pump.send((topic, b"%d" % n, b"%d" % n, []))
            pump.commit(2 + n)
        pump.close_group()
    with contextlib.suppress(Told):
        pump.flush(10)
    pump.poll(1)
    pump.abandon()
    sent = [
        int(record.value or b"") for record in everything_in(settings, topic) if record.value != b"before"
    ]
    assert set(range(pump.confirmed - 1)) <= set(sent), "confirmed, and not there"
    assert len(sent) == len(set(sent)), "sent twice"


def test_an_orderly_stop_in_the_middle_of_a_lane_doubles_nothing(settings: Settings) -> None:
    absent = f"{settings.topic_prefix}absent"
    impatient = settings.model_copy(update={"topic_grace_seconds": 0.0})
    with psycopg.connect(settings.database_url) as connection:
        for n in range(2_000):
            publish(connection, absent, "k", b"%d %s" % (n, b"x" * 20_000))
        connection.commit()
    with relaying(impatient):
        eventually(lambda: waiting(settings) == 2_000, "all wait")
        end = log_end(settings)
        eventually(lambda: all_is_confirmed(settings, end), "and are confirmed")
    apply([Step(Wanted(absent, 1, -1), 0)], settings)
    while waiting(settings):
        before = arrived(settings, absent)
        with relaying(impatient):
            eventually(lambda n=before: arrived(settings, absent) > n or not waiting(settings), "it sends")  # type: ignore[misc]
    numbers = [int((record.value or b"").partition(b" ")[0]) for record in everything_in(settings, absent)]
    assert numbers == list(range(2_000)), len(numbers)


def test_positions_never_fall_along_a_partition_though_a_lane_is_sent_late(
    settings: Settings, small: str
) -> None:
    """Or who looks for the last confirmed record from the end of a topic would stop at one of the lane."""
    put(settings, small, ("k", b"first " + os.urandom(200_000)), ("k", b"second"))
    with relaying(settings):
        eventually(lambda: waiting(settings) == 2, "it is refused")
        for n in range(20):
            put(settings, small, ("other", b"%d" % n))
        eventually(lambda: arrived(settings, small) == 20, "others go on")
        set_limit(settings, small, 1_000_000)
        decide(settings, "resend", small)
        eventually(lambda: waiting(settings) == 0, "the lane follows")
        put(settings, small, ("k", b"third"))
        eventually(lambda: arrived(settings, small) == 23, "and what comes after it")
    positions = [commit_position(record) or 0 for record in everything_in(settings, small)]
    assert positions == sorted(positions)


def test_a_name_that_is_not_resolved_for_a_moment_does_not_end_the_relay(
    settings: Settings, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotLetIn, match="does not let us in"):
        connect("postgresql://postgres@no-such-host.invalid/postgres")
    prepare(settings)
    failures = iter([NotLetIn("for a moment")] * 2)

    def connects(*arguments: Any, **options: Any) -> Any:
        for failure in failures:
            raise failure
        return connect(*arguments, **options)

    monkeypatch.setattr(relay_module, "prepare", lambda _: None)
    monkeypatch.setattr(relay_module, "connect", connects)
    with relaying(settings):
        put(settings, small, ("k", b"x"))
        eventually(lambda: arrived(settings, small) == 1, "it comes back by itself")


def test_a_page_of_large_rows_behind_small_ones_is_no_larger_than_it_may_be(
    settings: Settings, small: str
) -> None:
    with psycopg.connect(settings.database_url) as connection:
        for repeat, size in ((4_000, 1), (200, 500_000)):
            connection.execute(
                "INSERT INTO fencepost.outbox (topic, key, payload) SELECT %s, 'k', %s FROM generate_series(1, %s)",
                (small, os.urandom(size), repeat),
            )
    at = SqlConnection(settings, "test")
    portal = Portal(at, "test", sql.SQL("SELECT payload FROM fencepost.outbox ORDER BY sequence").format())
    largest = 0
    while page := portal.page():
        largest = max(largest, sum(len(row[0] or b"") for row in page))
    at.connection.close()
    assert largest <= 16_500_000, f"{largest:,} bytes"


def test_the_place_of_a_poll_is_kept_without_writing_all_that_is_unsent_anew(settings: Settings) -> None:
    switch.to_polling(settings, "for the test")
    with connect(settings.database_url, autocommit=True) as connection:
        connection.execute(
            "UPDATE fencepost.relay_cursor SET unsent = ARRAY(SELECT n::text::xid8 FROM generate_series(1, 100000) n)"
        )
        with contextlib.closing(Polling(settings)) as polling:
            polling.begin(lambda *_: None)
            before = one(settings, "SELECT pg_current_wal_insert_lsn()::text")
            for _ in range(5):
                polling.report(0, now=True)
            written = one(settings, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)::bigint", before)
    assert written < 200_000, f"{written:,} bytes of log"


def test_over_the_logs_budget_a_publication_with_other_tables_stays_on_the_log(
    settings: Settings, small: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE other (id int)")
        connection.execute("ALTER PUBLICATION fencepost ADD TABLE other")
    with relaying(settings) as relay:
        put(settings, small, ("k", b"first"))
        eventually(lambda: arrived(settings, small) == 1, "it is at work")
        relay._degrade()
        eventually(lambda: "it cannot be polled instead" in caplog.text, "it says so")
        put(settings, small, ("k", b"second"))
        eventually(lambda: arrived(settings, small) == 2, "and goes on by the log")
