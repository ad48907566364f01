"""The relay in operation: handed over, killed, frozen, over its budget, begun anew, and keeping house."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import psycopg
import pytest

import schemas
from streams import App, Effects, Event, append
from streams.broker import kafka
from streams.broker.kafka import end_offsets
from streams.dev import servers
from streams.dev.state import Endpoints, ServerName
from streams.relay import watch
from streams.relay.relay import prepare
from streams.relay.watch import keep_house
from streams.schema.catalog import encode
from streams.settings import Settings
from streams.stores import relay as store
from streams.stores.postgres import connect
from streams.topics import Step, Wanted, apply, plan
from tests.chaos.relay_kills import APP, Figures, appending, audit
from tests.integration.relays import arrived, relaying
from tests.processes import Process, eventually, start, streams
from tests.processes import stop as stop_process
from tests.running import one, running

pytestmark = pytest.mark.real

AT_WORK = "\nat work\n"


@pytest.fixture
def topic(settings: Settings) -> str:
    apply(plan(APP, settings), settings)
    return f"{settings.topic_prefix}stock"


@contextmanager
def a_relay(settings: Settings, port: int | None = None) -> Iterator[Process]:
    """A relay in a process of its own, with its metrics at a port; its output is shown where a test fails."""
    metrics = [] if port is None else ["--metrics-port", str(port)]
    process = start(streams("relay", "run", *metrics), settings)
    try:
        yield process
    finally:
        if process.is_running:
            process.signal(signal.SIGCONT)
        print(stop_process(process))


def command(settings: Settings, *arguments: str, status: int = 0, **extra: str) -> str:
    process = start(streams(*arguments), settings, **extra)
    assert process.wait(60) == status, process.output
    return process.output


def report(settings: Settings) -> dict[str, Any]:
    return dict(json.loads(command(settings, "relay", "status", "--json")))


def wait_for_more(settings: Settings, topic: str, records: int, relay: Process | None = None) -> None:
    goal = arrived(settings, topic) + records
    eventually(
        lambda: arrived(settings, topic) >= goal, lambda: relay.output if relay else "records arrive", 60
    )


def wait_at_work(relay: Process, times: int = 1) -> None:
    eventually(lambda: relay.output.count(AT_WORK) == times, lambda: relay.output)


def holder(settings: Settings) -> int | None:
    with connect(settings.database_url) as connection:
        return store.holder(connection, settings.slot)


def wait_standing_by(settings: Settings) -> None:
    def two_run() -> bool:
        with connect(settings.database_url) as connection:
            return store.running(connection, settings.slot) == 2

    eventually(two_run, "the other stands by")


def drain(settings: Settings, topic: str) -> None:
    stored = one(settings, "SELECT count(*) FROM fencepost.event")
    eventually(lambda: arrived(settings, topic) >= stored, "all arrive", 60)


def assert_clean(settings: Settings) -> None:
    stored = one(settings, "SELECT count(*) FROM fencepost.event")
    assert asdict(audit(settings, 0)) == asdict(Figures(0, events=stored, lost=0, duplicates=0, disordered=0))


@pytest.mark.slow
def test_a_handover_takes_less_than_a_second_and_can_be_taken_back(settings: Settings, topic: str) -> None:
    with a_relay(settings) as first:
        wait_at_work(first)
        with a_relay(settings) as second, appending(settings):
            wait_standing_by(settings)
            wait_for_more(settings, topic, 100, first)
            for times, taker in ((1, second), (2, first), (2, second)):
                done = json.loads(command(settings, "relay", "handover", "--json"))
                print(f"handed over in {done['seconds']:.3f} s")
                assert done["seconds"] < 5
                assert done["from_pid"] != done["to_pid"]
                wait_at_work(taker, times)
                wait_for_more(settings, topic, 100, taker)
                assert holder(settings) == done["to_pid"], "and it stays there"
            assert report(settings)["standing_by"] == 1
            assert (first.output.count(AT_WORK), second.output.count(AT_WORK)) == (2, 2)
        wait_at_work(first, 3)
        drain(settings, topic)
    assert_clean(settings)


def test_without_a_relay_at_work_or_standing_by_nothing_is_handed_over(settings: Settings) -> None:
    output = command(settings, "relay", "handover", status=1)
    assert "no relay is at work; start one: streams relay run" in output
    with a_relay(settings) as relay:
        wait_at_work(relay)
        output = command(settings, "relay", "handover", status=1)
        assert "no relay stands by; start a second one: streams relay run" in output
        assert relay.output.count(AT_WORK) == 1


@pytest.mark.slow
def test_when_the_relay_at_work_is_killed_the_other_sends_within_seconds(
    settings: Settings, topic: str
) -> None:
    with appending(settings):
        for _ in range(2):
            with a_relay(settings) as first:
                wait_at_work(first)
                with a_relay(settings) as second:
                    wait_standing_by(settings)
                    wait_for_more(settings, topic, 100, first)
                    first.kill()
                    killed, before = time.monotonic(), arrived(settings, topic)
                    eventually(lambda before=before: arrived(settings, topic) > before, "the other sends")  # type: ignore[misc]
                    seconds = time.monotonic() - killed
                    print(f"taken over {seconds:.3f} s after the kill")
                    assert seconds < 8
                    wait_for_more(settings, topic, 100, second)
    with relaying(settings):
        drain(settings, topic)
    assert_clean(settings)


BACKLOG, BACKLOG_KEYS = 60_000, 500
_BACKLOG = """
INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload)
SELECT 'stock', 's' || n %% %(keys)s, n / %(keys)s + 1, gen_random_uuid(), 'StockReceived', %(payload)s
FROM generate_series(%(first)s::int, %(first)s + 999) n ORDER BY n"""


def append_backlog(settings: Settings) -> None:
    """Many events at once, as so many transactions of services would leave them."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        for first in range(0, BACKLOG, 1_000):
            connection.execute(
                _BACKLOG,
                {"keys": BACKLOG_KEYS, "first": first, "payload": encode(schemas.StockReceived(1))},
            )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def metric(port: int, name: str) -> float:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = re.search(rf"^{name}(?:_total)? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def confirms_all(settings: Settings) -> None:
    end = one(settings, "SELECT pg_current_wal_lsn()::text")
    reached = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    eventually(lambda: bool(one(settings, reached, end, settings.slot)), "all is confirmed", 60)


def strict_app(settings: Settings) -> App:
    app = App(settings.slot, catalog=schemas.catalog, topics=APP.topics)

    @app.projection("level", topics=["stock"], versions="strict")
    def level(event: Event, effects: Effects) -> None:
        effects.add("shop.stock_level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    return app


@pytest.mark.slow
@pytest.mark.parametrize("wakes", ["when all is sent", "at once"])
def test_a_relay_that_froze_and_was_replaced_tells_how_much_may_be_late(
    settings: Settings, topic: str, wakes: str
) -> None:
    append_backlog(settings)
    port = free_port()
    with a_relay(settings, port) as frozen:
        eventually(lambda: arrived(settings, topic) > 5_000, lambda: frozen.output)
        frozen.signal(signal.SIGSTOP)
        stopped, held = time.monotonic(), holder(settings)
        before = arrived(settings, topic)
        assert before < BACKLOG, "it has records in hand"
        with a_relay(settings) as other:
            eventually(lambda: holder(settings) not in (held, None), lambda: other.output)
            print(f"replaced {time.monotonic() - stopped:.1f} s after it froze at {before:,}")
            if wakes == "at once":
                eventually(lambda: arrived(settings, topic) > before, lambda: other.output)
            else:
                confirms_all(settings)
            frozen.signal(signal.SIGCONT)
            eventually(lambda: metric(port, "streams_relay_active") == 0, lambda: frozen.output)
            confirms_all(settings)
            late = metric(port, "streams_relay_late_records")
            figures = audit(settings, 0)
            print(f"{late:,.0f} may be late; {figures}")
            assert (figures.lost, figures.disordered) == (0, 0)
            assert late >= figures.duplicates
            with running(settings, strict_app(settings), with_relay=False):
                total = "SELECT sum(on_hand) FROM shop.stock_level"
                eventually(lambda: one(settings, total) == BACKLOG, "the read model is right", 60)
                assert one(settings, "SELECT count(*) FROM fencepost.job") == 0


SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s"
CURSORS = "SELECT count(*) FROM fencepost.relay_cursor WHERE slot = %s"


def place(settings: Settings) -> tuple[int, int]:
    """How many slots there are, and how many cursors."""
    return one(settings, SLOTS, settings.slot), one(settings, CURSORS, settings.slot)


def write_unrelated(settings: Settings, megabytes: int) -> None:
    """What others of the same server write into the log."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        for _ in range(megabytes):
            connection.execute("SELECT pg_logical_emit_message(false, 'other', repeat('x', 1000000))")


@pytest.mark.slow
@pytest.mark.parametrize("over_budget", ["poll", "alert"])
def test_a_slot_over_its_budget_is_let_go_or_only_complained_about(
    server_directory: Path,
    settings: Settings,
    topic: str,
    over_budget: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tight = settings.model_copy(update={"log_budget_mb": 1, "log_over_budget": over_budget})
    with relaying(tight), appending(settings):
        wait_for_more(settings, topic, 100)
        servers.stop(server_directory, ServerName.KAFKA, kill=True)
        try:
            write_unrelated(settings, 3)
            eventually(
                lambda: (
                    f"slot {settings.slot} retains" in caplog.text
                    and "is not confirmed: is a relay running" in caplog.text
                ),
                lambda: caplog.text,
            )
            if over_budget == "poll":
                eventually(lambda: place(settings) == (0, 1), lambda: caplog.text)
        finally:
            servers.restart(server_directory, ServerName.KAFKA)
        wait_for_more(settings, topic, 500)
        eventually(lambda: place(settings) == (1, 0), lambda: f"a slot, by itself: {caplog.text}", 60)
        assert ("polls from now on (over the log's budget)" in caplog.text) == (over_budget == "poll")
        wait_for_more(settings, topic, 100)
    with relaying(settings):
        drain(settings, topic)
    assert_clean(settings)


@pytest.fixture
def stingy(endpoints: Endpoints) -> Iterator[psycopg.Connection[Any]]:
    """A server that keeps a megabyte of log for a slot, and no more."""
    assert endpoints.database_url is not None
    with psycopg.connect(endpoints.database_url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
        connection.execute("SELECT pg_reload_conf()")
        yield connection
        connection.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        connection.execute("SELECT pg_reload_conf()")


def receive(settings: Settings, *skus: str) -> None:
    with psycopg.connect(settings.database_url) as connection:
        for sku in skus:
            append(connection, "stock", sku, [schemas.StockReceived(1)], None)


def test_a_slot_that_lost_its_log_is_begun_anew_and_the_audit_sends_what_is_missing(
    settings: Settings, topic: str, stingy: psycopg.Connection[Any]
) -> None:
    skus = [f"s{n}" for n in range(10)]
    receive(settings, *skus)
    with relaying(settings):
        drain(settings, topic)
    for _ in range(3):
        receive(settings, *skus)
    lost = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = %s"

    def is_lost() -> bool:
        stingy.execute("SELECT pg_switch_wal()")
        stingy.execute("CHECKPOINT")
        return bool(one(settings, lost, settings.slot))

    eventually(is_lost, "the server throws the log away")
    refused = command(settings, "relay", "run", status=1)
    assert f"replication slot {settings.slot} has lost its log (max_slot_wal_keep_size)" in refused
    assert "streams relay begin; streams relay run; streams relay audit --repair" in refused
    assert "begun; now start a relay" in command(settings, "relay", "begin", "--yes")
    with a_relay(settings) as relay:
        wait_at_work(relay)
        command(settings, "relay", "audit", "--repair", "--yes")  # compares anew at its end
        receive(settings, *skus)
        drain(settings, topic)
    assert_clean(settings)


@pytest.fixture(params=["log", "poll"])
def reading(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """Settings of a database that is read by the log or by polling, from its first event on."""
    chosen = settings.model_copy(update={"relay_source": request.param})
    if request.param == "poll":
        with psycopg.connect(settings.database_url, autocommit=True) as connection:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (settings.slot,))
        prepare(chosen)
    return chosen


def test_a_transaction_that_holds_the_relay_back_is_named(
    endpoints: Endpoints,
    reading: Settings,
    topic: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert endpoints.database_url is not None
    monkeypatch.setattr(watch, "_OLD_SECONDS", 0.5)
    with psycopg.connect(endpoints.database_url, application_name="report") as idle, relaying(reading):
        idle.execute("SELECT pg_current_xact_id()")
        held = "the rounds of the polling" if reading.relay_source == "poll" else "the log of slot"
        named = f"pid {idle.info.backend_pid} (user postgres, database postgres, report), idle in transaction, open for"
        eventually(
            lambda: held in caplog.text and named in caplog.text,
            lambda: caplog.text,
        )
        found = report(reading)["held_back_by"]
        assert found.pop("seconds") > 0.5
        assert found == {
            "pid": idle.info.backend_pid,
            "user": "postgres",
            "database": "postgres",
            "application": "report",
            "state": "idle in transaction",
        }
        assert named in command(reading, "relay", "status")


def test_a_slot_is_made_so_that_standbys_of_the_server_keep_it_too(settings: Settings) -> None:
    if one(settings, "SELECT current_setting('server_version_num')::int") < 17_00_00:
        pytest.skip("a server before 17 has no such slots")
    failover = "SELECT failover FROM pg_replication_slots WHERE slot_name = %s"
    assert one(settings, failover, settings.slot)
    polls = settings.model_copy(update={"relay_source": "poll"})
    with relaying(polls):
        eventually(lambda: place(settings) == (0, 1), "the tables are polled")
    with relaying(settings):
        eventually(lambda: place(settings) == (1, 0), "and the log is read again")
    assert one(settings, failover, settings.slot)


class House:
    """The outbox's days, as one who keeps house finds them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.connection = connect(settings.database_url, autocommit=True)
        self.today = datetime.now(UTC).date()

    def clear(self) -> None:
        """Makes the partition anew that reaches from the beginning of time to today, as migrations leave it."""
        (name,) = self._one("SELECT 'outbox_' || to_char(%s::date, 'YYYYMMDD')", self.today)
        self.connection.execute(f"DROP TABLE fencepost.{name}".encode())
        self.connection.execute("DELETE FROM fencepost.outbox_day WHERE day = %s", (self.today,))
        self.make(0)

    def make(self, ago: int) -> date:
        day = self.today - timedelta(days=ago)
        self.connection.execute("SELECT fencepost.make_outbox_day(%s)", (day,))
        return day

    def keep(self) -> None:
        """Once, when the server has said which transactions are over; it does so by itself every 15 seconds."""
        self.connection.execute("SELECT pg_log_standby_snapshot()")
        keep_house(self.connection, self.settings)

    def days(self) -> dict[date, bool]:
        """Which days there are, and whether they are sealed."""
        return dict(self.connection.execute("SELECT day, sealed_at IS NOT NULL FROM fencepost.outbox_day"))

    def put(self, topic: str, ago: int, connection: psycopg.Connection[Any] | None = None) -> None:
        """A row as if it was written so many days ago."""
        (connection or self.connection).execute(
            "INSERT INTO fencepost.outbox (topic, key, payload, created_at) "
            "VALUES (%s, 'k', 'v', clock_timestamp() - make_interval(days => %s))",
            (topic, ago),
        )

    def is_confirmed(self, day: date) -> bool:
        self.connection.execute("SELECT pg_log_standby_snapshot()")
        days = store.past_days(self.connection, self.settings.slot)
        return any(each.day == day and each.confirmed for each in days)

    def rest(self) -> int:
        return int(self._one("SELECT count(*) FROM fencepost.outbox_rest")[0])

    def _one(self, query: str, *parameters: Any) -> tuple[Any, ...]:
        row = self.connection.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return row


@pytest.fixture
def house(reading: Settings) -> Iterator[House]:
    made = House(reading)
    made.clear()
    yield made
    made.connection.close()


@pytest.fixture
def plain(settings: Settings) -> str:
    name = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(name, 1, -1), 0)], settings)
    return name


def test_the_next_days_of_the_outbox_are_made_ahead(house: House) -> None:
    last = house.today + timedelta(days=3)
    house.connection.execute(f"DROP TABLE fencepost.outbox_{last:%Y%m%d}".encode())
    house.connection.execute("DELETE FROM fencepost.outbox_day WHERE day = %s", (last,))
    house.keep()
    assert set(house.days()) == {house.today + timedelta(days=ahead) for ahead in range(4)}


def test_a_day_is_dropped_when_it_is_sealed_and_confirmed_and_old(house: House, plain: str) -> None:
    old, young = house.make(10), house.make(5)
    house.put(plain, 10)
    house.put(plain, 5)
    for _ in range(3):
        house.keep()
        assert house.days()[old], "sealed, but its row has not reached its topic"
    with relaying(house.settings):
        eventually(lambda: arrived(house.settings, plain) == 2, "both arrive")
        gone(house, old)
    assert house.days()[young], "and sealed"


def gone(house: House, day: date) -> None:
    def is_gone() -> bool:
        house.keep()
        return day not in house.days()

    eventually(is_gone, f"{day} is dropped")


def test_a_day_is_neither_sealed_nor_dropped_while_somebody_writes_into_it(house: House, plain: str) -> None:
    old = house.make(10)
    with relaying(house.settings), psycopg.connect(house.settings.database_url) as writer:
        house.put(plain, 10, writer)
        for _ in range(2):
            house.keep()
            assert house.days()[old] is False
        writer.commit()
        eventually(lambda: arrived(house.settings, plain) == 1, "the row arrives")
        gone(house, old)


def test_a_row_that_lands_in_a_sealed_day_opens_it_again_and_is_not_lost(house: House, plain: str) -> None:
    old = house.make(10)
    house.put(plain, 10)
    with relaying(house.settings):
        eventually(lambda: arrived(house.settings, plain) == 1, "the first arrives")
        house.keep()
        assert house.days()[old]
        eventually(lambda: house.is_confirmed(old), "the day is confirmed")
    house.put(plain, 10)
    opened = []
    for _ in range(4):
        house.keep()
        opened.append(not house.days()[old])
    assert any(opened), "it is found where the day was to be dropped"
    with relaying(house.settings):
        eventually(lambda: arrived(house.settings, plain) == 2, "the second arrives")
        gone(house, old)


def test_a_row_of_an_older_transaction_that_lands_in_a_sealed_day_is_not_lost(
    house: House, plain: str
) -> None:
    """Its transaction's id does not tell that it came after the seal."""
    old = house.make(10)
    with psycopg.connect(house.settings.database_url) as writer:
        writer.execute("SELECT pg_current_xact_id()")
        house.put(plain, 0)
        house.keep()
        assert house.days()[old]
        house.put(plain, 0)
        with relaying(house.settings):
            eventually(lambda: arrived(house.settings, plain) == 2, "what is younger arrives")
        house.put(plain, 10, writer)
    for _ in range(3):
        house.keep()
        assert old in house.days()
    with relaying(house.settings):
        eventually(lambda: arrived(house.settings, plain) == 3, "so does the late one")
        gone(house, old)


def test_rows_of_days_that_nobody_made_are_relayed_and_deleted_when_old_and_confirmed(
    house: House, plain: str
) -> None:
    house.make(9)
    house.keep()
    house.put(plain, 10)
    house.put(plain, 3)
    for _ in range(3):
        house.make(8)
        house.keep()  # seals a day that is younger than the rows
        assert house.rest() == 2, "what has not reached its topic is kept"
    with relaying(house.settings):
        eventually(lambda: arrived(house.settings, plain) == 2, "both are relayed all the same")

        def cleared() -> bool:
            house.keep()
            return house.rest() < 2

        eventually(cleared, "the old one is deleted")
        house.keep()
        assert house.rest() == 1, "the young one stays"


class Memory:
    """The highest resident size of a process, as seen whenever it was asked for."""

    def __init__(self, process: Process) -> None:
        self._process = psutil.Process(process.pid)
        self.highest = 0

    def below(self, megabytes: int) -> bool:
        self.highest = max(self.highest, self._process.memory_info().rss)
        assert self.highest < megabytes * 1_000_000, f"{self.highest / 1e6:,.0f} MB"
        return True


def publish_numbers(settings: Settings, topic: str, first: int, count: int, size: int) -> None:
    """Messages of a thousand keys, numbered, in one transaction."""
    with psycopg.connect(settings.database_url) as connection:
        connection.execute(
            "INSERT INTO fencepost.outbox (topic, key, payload) "
            "SELECT %s, convert_to('k' || n %% 1000, 'UTF8'), int4send(n) || convert_to(repeat('x', %s), 'UTF8') "
            "FROM generate_series(%s::int, %s) n ORDER BY n",
            (topic, size, first, first + count - 1),
        )


def assert_numbers(settings: Settings, topic: str, count: int) -> None:
    """Each number once, and those of a key in their order."""
    ends = end_offsets(settings, [topic])
    next_of: dict[bytes, int] = {}
    for message in kafka.messages(settings, dict.fromkeys(ends, 0), ends):
        number = int.from_bytes(message.value()[:4], "big")
        assert number == next_of.get(message.key(), number % 1_000)
        next_of[message.key()] = number + 1_000
    assert sorted(next_of.values()) == list(range(count, count + 1_000))


@pytest.mark.slow
def test_a_transaction_of_a_million_rows_is_relayed_in_order_and_in_bounded_memory(
    settings: Settings,
) -> None:
    plain = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(plain, 4, -1), 0)], settings)
    publish_numbers(settings, plain, 0, 1_000_000, 0)
    began = time.monotonic()
    with a_relay(settings) as relay:
        memory = Memory(relay)
        eventually(
            lambda: memory.below(200) and arrived(settings, plain) >= 1_000_000, lambda: relay.output, 100
        )
        print(f"{time.monotonic() - began:.1f} s, {memory.highest / 1e6:,.0f} MB")
    assert_numbers(settings, plain, 1_000_000)


@pytest.mark.slow
def test_while_the_broker_is_away_the_relay_takes_bounded_memory_and_goes_on_by_itself(
    server_directory: Path, settings: Settings
) -> None:
    plain, count = f"{settings.topic_prefix}plain", 300_000
    apply([Step(Wanted(plain, 4, -1), 0)], settings)
    port = free_port()
    with a_relay(settings, port) as relay:
        memory = Memory(relay)
        publish_numbers(settings, plain, 0, 1_000, 500)
        eventually(lambda: arrived(settings, plain) == 1_000, lambda: relay.output)
        servers.stop(server_directory, ServerName.KAFKA, kill=True)
        try:
            for first in range(1_000, count, 13_000):
                publish_numbers(settings, plain, first, 13_000, 500)
                memory.below(300)
            sent = "streams_relay_records"
            eventually(
                lambda: memory.below(300) and metric(port, sent) >= 100_000,
                lambda: f"its queue is full: {relay.output}",
            )
        finally:
            servers.restart(server_directory, ServerName.KAFKA)
        eventually(lambda: memory.below(300) and arrived(settings, plain) >= count, lambda: relay.output, 90)
        print(f"{memory.highest / 1e6:,.0f} MB")
        assert relay.output.count(AT_WORK) == 1, "it waited, and did not begin anew"
    assert_numbers(settings, plain, count)
