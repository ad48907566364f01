"""What each way to read the database promises; the relay is real, and so are both servers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psycopg
import pytest

import schemas
from streams import append, publish
from streams.errors import RelayBlocked
from streams.event import FP_VERSION
from streams.relay import switch
from streams.relay.poll import Polling
from streams.relay.relay import prepare
from streams.relay.source import StandBy
from streams.settings import Settings
from streams.stores.postgres import connect
from streams.topics import Step, Wanted, apply, plan
from tests.chaos.relay_kills import APP, Figures, appending, audit
from tests.integration.relays import arrived, relaying
from tests.processes import Process, eventually, start, streams
from tests.processes import stop as stop_process
from tests.running import everything_in, one

pytestmark = pytest.mark.real

SOURCES = ("log", "peek", "poll")


def by(settings: Settings, source: str) -> Settings:
    return settings.model_copy(update={"relay_source": source})


@pytest.fixture(params=SOURCES)
def reading(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """Settings of a database that is read in one of the ways from its first event on."""
    chosen = by(settings, request.param)
    if request.param == "poll":
        with psycopg.connect(settings.database_url, autocommit=True) as connection:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (settings.slot,))
        prepare(chosen)
    return chosen


@pytest.fixture
def topic(settings: Settings) -> str:
    apply(plan(APP, settings), settings)
    return f"{settings.topic_prefix}stock"


@pytest.fixture
def plain(settings: Settings) -> str:
    name = f"{settings.topic_prefix}plain"
    apply([Step(Wanted(name, 1, -1), 0)], settings)
    return name


@pytest.fixture
def writer(settings: Settings) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(settings.database_url) as connection:
        yield connection


def receive(connection: psycopg.Connection[Any], sku: str) -> None:
    append(connection, "stock", sku, [schemas.StockReceived(1)], None)


def test_what_was_committed_arrives_and_what_was_rolled_back_does_not(
    reading: Settings, topic: str, writer: psycopg.Connection[Any]
) -> None:
    receive(writer, "a")
    writer.rollback()
    receive(writer, "b")
    with writer.transaction(force_rollback=True):
        receive(writer, "c")
    writer.commit()
    with relaying(reading):
        eventually(lambda: arrived(reading, topic) >= 1, "the committed one arrives")
        receive(writer, "d")
        writer.commit()
        eventually(lambda: arrived(reading, topic) >= 2, "and the one after it")
    assert sorted(record.key or b"" for record in everything_in(reading, topic)) == [b"b", b"d"]


def test_a_transaction_that_began_earlier_and_commits_later_is_delivered_and_delays_nobody(
    reading: Settings, topic: str
) -> None:
    with (
        psycopg.connect(reading.database_url) as early,
        psycopg.connect(reading.database_url) as late,
        relaying(reading),
    ):
        receive(early, "early")
        receive(late, "late")
        late.commit()
        eventually(lambda: arrived(reading, topic) == 1, "the later one does not wait")
        early.commit()
        eventually(lambda: arrived(reading, topic) == 2, "the earlier one is not forgotten")


def test_a_key_written_by_an_older_transaction_after_a_younger_one_keeps_its_order(
    reading: Settings, topic: str
) -> None:
    with (
        psycopg.connect(reading.database_url) as bystander,
        psycopg.connect(reading.database_url) as older,
        psycopg.connect(reading.database_url) as younger,
    ):
        older.execute("SELECT pg_current_xact_id()")
        bystander.execute("SELECT pg_current_xact_id()")
        receive(younger, "a")
        younger.commit()
        receive(older, "a")
        older.commit()
        with relaying(reading):
            eventually(lambda: arrived(reading, topic) == 2, "both arrive, though a third is open")
    assert [record.header(FP_VERSION) for record in everything_in(reading, topic)] == [b"1", b"2"]


def test_the_same_row_makes_the_same_record_whichever_way_it_is_read(
    settings: Settings, topic: str, plain: str, writer: psycopg.Connection[Any]
) -> None:
    receive(writer, "ü")
    publish(writer, plain, b"\x00", None, {"none": None, "bytes": b"\xff"})
    publish(writer, plain, None, b"", {})
    writer.commit()
    names = {name: f"{settings.slot}_{name}" for name in ("log", "peek")}
    for name in names.values():
        writer.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (settings.slot, name))
    writer.commit()
    found = []
    for source, slot in {**names, "poll": settings.slot}.items():
        before = {name: arrived(settings, name) for name in (topic, plain)}
        # A topic of its own would be another record; so the ends of the topic are taken for those of another cluster.
        with relaying(settings.model_copy(update={"relay_source": source, "slot": slot, "source": source})):
            eventually(
                lambda before=before: arrived(settings, topic) > before[topic],  # type: ignore[misc]
                "the event arrives",
            )
        events = everything_in(settings, topic)[-1]
        found.append((events.key, events.value, dict(events.headers).keys(), _number(events.headers)))
    assert found[0] == found[1] == found[2]
    messages = everything_in(settings, plain)
    assert [(record.key, record.value) for record in messages] == [(b"\x00", None), (None, b"")], (
        "plain messages are the same bytes, so the second and the third relay found them there"
    )


def _number(headers: tuple[tuple[str, bytes | None], ...]) -> bytes:
    return (dict(headers)["fp_position"] or b"").rpartition(b"/")[2]


def test_a_hundred_thousand_rows_in_one_transaction_keep_their_order(
    reading: Settings, plain: str, writer: psycopg.Connection[Any]
) -> None:
    writer.execute(
        "INSERT INTO fencepost.outbox (topic, key, payload) SELECT %s, 'k', int4send(n) FROM generate_series(0, 99999) n",
        (plain,),
    )
    writer.commit()
    with relaying(reading):
        eventually(lambda: arrived(reading, plain) == 100_000, "all arrive", 90)
    numbers = [int.from_bytes(record.value or b"", "big") for record in everything_in(reading, plain)]
    assert numbers == list(range(100_000))


def test_killed_at_any_moment_it_loses_and_doubles_nothing(reading: Settings, topic: str) -> None:
    chance = random.Random(1)
    with appending(reading):
        for _ in range(4):
            goal = arrived(reading, topic) + chance.randrange(50, 600)
            relay = run_relay(reading)
            eventually(lambda goal=goal: arrived(reading, topic) > goal, lambda relay=relay: relay.output)  # type: ignore[misc]
            relay.kill()
    drain(reading, topic)
    assert_clean(reading)


def run_relay(settings: Settings) -> Process:
    return start(streams("relay", "run"), settings, STREAMS_RELAY_SOURCE=settings.relay_source)


def drain(settings: Settings, topic: str) -> None:
    stored = one(settings, "SELECT count(*) FROM fencepost.event")
    with relaying(settings):
        eventually(lambda: arrived(settings, topic) >= stored, "all arrive", 60)


def assert_clean(settings: Settings) -> None:
    stored = one(settings, "SELECT count(*) FROM fencepost.event")
    found = audit(settings, 0)
    assert asdict(found) == asdict(Figures(0, events=stored, lost=0, duplicates=0, disordered=0))


def test_of_two_relays_one_works_and_the_other_takes_over(reading: Settings, topic: str) -> None:
    with appending(reading):
        first = run_relay(reading)
        eventually(lambda: arrived(reading, topic) > 0, lambda: first.output)
        with relaying(reading):
            first.kill()
            goal = arrived(reading, topic) + 200
            eventually(lambda: arrived(reading, topic) > goal, "the other goes on")
    drain(reading, topic)
    assert_clean(reading)


def test_after_an_orderly_stop_nothing_is_sent_twice(
    reading: Settings, topic: str, writer: psycopg.Connection[Any]
) -> None:
    for n in range(3):
        receive(writer, "a")
        writer.commit()
        with relaying(reading):
            eventually(lambda n=n: arrived(reading, topic) > n, "it arrives")  # type: ignore[misc]
    assert arrived(reading, topic) == 3


def test_a_new_column_while_it_reads_does_not_disturb_it(
    reading: Settings, topic: str, writer: psycopg.Connection[Any]
) -> None:
    with relaying(reading):
        receive(writer, "a")
        writer.commit()
        eventually(lambda: arrived(reading, topic) == 1, "before")
        writer.execute("ALTER TABLE fencepost.event ADD COLUMN note text DEFAULT 'x'")
        receive(writer, "a")
        writer.commit()
        writer.execute("ALTER TABLE fencepost.event DROP COLUMN note")
        receive(writer, "a")
        writer.commit()
        eventually(lambda: arrived(reading, topic) == 3, "after")
    versions = [record.header(FP_VERSION) for record in everything_in(reading, topic)]
    assert versions == [b"1", b"2", b"3"]


@pytest.mark.parametrize("source", ["log", "peek"])
def test_the_position_moves_while_only_others_write(settings: Settings, source: str) -> None:
    """Or the slot of a quiet database would keep the log of its busy neighbours."""
    with relaying(by(settings, source)), psycopg.connect(settings.database_url, autocommit=True) as other:
        other.execute("CREATE TABLE unrelated (n int)")
        other.execute("INSERT INTO unrelated SELECT generate_series(1, 10000)")
        written = one(settings, "SELECT pg_current_wal_lsn()")
        eventually(
            lambda: bool(
                one(
                    settings,
                    "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s",
                    written,
                    settings.slot,
                )
            ),
            "what others wrote is confirmed too",
        )


@pytest.mark.parametrize("rows", [0, 1])
def test_without_a_place_to_go_on_from_it_begins_with_empty_tables_only(
    reading: Settings, topic: str, writer: psycopg.Connection[Any], rows: int
) -> None:
    forget_place(reading)
    for _ in range(rows):
        receive(writer, "a")
    writer.commit()
    if not rows:
        prepare(reading)
        receive(writer, "a")
        writer.commit()
        with relaying(reading):
            eventually(lambda: arrived(reading, topic) == 1, "it is sent")
        return
    with pytest.raises(RelayBlocked, match="streams relay begin"):
        prepare(reading)
    assert place(reading) == (0, 0), "nothing was made half-way"


def forget_place(settings: Settings) -> None:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            (settings.slot,),
        )
        connection.execute("DELETE FROM fencepost.relay_cursor")


def place(settings: Settings) -> tuple[int, int]:
    """How many slots there are, and how many cursors."""
    return (
        one(settings, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", settings.slot),
        one(settings, "SELECT count(*) FROM fencepost.relay_cursor"),
    )


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_switching_a_running_system_loses_and_doubles_nothing(
    settings: Settings, topic: str, kill: bool
) -> None:
    chance = random.Random(2)
    with appending(settings):
        for source in ("log", "poll", "peek", "poll", "log", "peek", "log"):
            relay = run_relay(by(settings, source))
            kind = (0, 1) if source == "poll" else (1, 0)
            eventually(lambda kind=kind: place(settings) == kind, lambda relay=relay: relay.output, 60)  # type: ignore[misc]
            goal = arrived(settings, topic) + chance.randrange(100, 500)
            eventually(lambda goal=goal: arrived(settings, topic) > goal, lambda relay=relay: relay.output)  # type: ignore[misc]
            relay.kill() if kill else stop_process(relay)
    drain(settings, topic)
    assert_clean(settings)


def test_a_slot_is_not_made_while_transactions_stay_open_and_the_polling_goes_on(
    settings: Settings, topic: str, writer: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "_SLOT_SECONDS", 1)
    switch.to_polling(settings, "for the test")
    with psycopg.connect(settings.database_url) as idle:
        idle.execute("SELECT pg_current_xact_id()")
        with relaying(settings):
            receive(writer, "a")
            writer.commit()
            eventually(lambda: arrived(settings, topic) == 1, "it polls")
            eventually(lambda: place(settings) == (0, 1), "and does not leave a half-made slot")
            receive(writer, "a")
            writer.commit()
            eventually(lambda: arrived(settings, topic) == 2, "it goes on polling")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("UPDATE fencepost.relay_cursor SET system = '1'", "this is not the server that was polled so far"),
        ("UPDATE fencepost.relay_cursor SET sent = '999999999:999999999:'", "it is behind what was sent"),
    ],
)
def test_a_server_that_is_not_the_one_polled_so_far_is_refused(
    settings: Settings, topic: str, change: str, complaint: str
) -> None:
    switch.to_polling(settings, "for the test")
    with psycopg.connect(settings.database_url) as connection:
        connection.execute(change)
    with contextlib.closing(Polling(settings)) as polling, pytest.raises(RelayBlocked, match=complaint):
        polling.begin(lambda *_: None)


def test_a_place_that_somebody_else_took_over_is_not_written_any_more(settings: Settings, topic: str) -> None:
    switch.to_polling(settings, "for the test")
    frozen = Polling(settings)
    frozen.begin(lambda *_: None)
    with connect(settings.database_url, autocommit=True) as connection:
        connection.execute("UPDATE fencepost.relay_cursor SET token = token + 1")
    with pytest.raises(StandBy, match="has taken over"):
        frozen.report(0, now=True)
    frozen.close()
