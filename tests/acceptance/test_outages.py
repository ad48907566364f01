"""Servers go away and come back, processes come and go; the result is the same as if nothing had happened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import schemas
from streams import App, Effects, Event, Retry, Topic, append
from streams.consume import retries
from streams.dev import servers
from streams.dev.state import ServerName
from streams.settings import Settings
from streams.topics import apply, plan
from tests.chaos.app import TABLE, app
from tests.chaos.audit import append_events, count, differences, is_clean
from tests.processes import eventually, start, stop, streams
from tests.running import as_record, one, produce, running

pytestmark = [pytest.mark.real, pytest.mark.slow]

RUN = streams("run", "tests.chaos.app:app", "--with-relay")


@pytest.fixture
def shop(settings: Settings) -> Iterator[psycopg.Connection[Any]]:
    apply(plan(app, settings), settings)
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(TABLE)
        yield connection


@contextmanager
def processor(settings: Settings, **extra: str) -> Iterator[Any]:
    process = start(RUN, settings, **extra)
    try:
        yield process
    finally:
        print(stop(process))  # pytest shows it where a test fails


def clean(settings: Settings) -> None:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        eventually(
            lambda: is_clean(connection), lambda: f"the read model differs: {differences(connection)[:3]}", 60
        )
        assert count(connection, "fencepost.job WHERE attempt_count > 0") == 0, "an outage spends no attempt"


@pytest.mark.parametrize("name", [ServerName.POSTGRES, ServerName.KAFKA])
def test_a_server_that_is_killed_and_started_again_spends_no_attempt_and_loses_nothing(
    server_directory: Path, settings: Settings, shop: psycopg.Connection[Any], name: ServerName
) -> None:
    append_events(shop)
    with processor(settings):
        eventually(lambda: count(shop, "chaos_total") > 0, "the processor is at work")
        servers.restart(server_directory, name, kill=True)
        with psycopg.connect(settings.database_url, autocommit=True) as again:
            append_events(again)
        clean(settings)


def test_processes_that_join_and_leave_under_load_leave_a_clean_audit(
    settings: Settings, shop: psycopg.Connection[Any]
) -> None:
    small = settings.model_copy(update={"batch_size": 20})
    done = threading.Event()

    def keep_appending() -> None:
        with psycopg.connect(settings.database_url, autocommit=True) as mine:
            while not done.is_set():
                append_events(mine)

    service = threading.Thread(target=keep_appending)
    with processor(small):
        service.start()
        try:
            for _ in range(3):
                before = count(shop, "fencepost.event")
                with processor(small):
                    eventually(lambda: len(owners(shop)) == 2, "the partitions are shared", 60)
                eventually(lambda seen=before: count(shop, "fencepost.event") > seen, "the load goes on")  # type: ignore[misc]
        finally:
            done.set()
            service.join()
        clean(settings)


def test_stopping_during_a_slow_batch_is_bounded_and_loses_nothing(settings: Settings) -> None:
    slow = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])
    entered, leave = threading.Event(), threading.Event()

    @slow.projection("level", topics=["stock"])
    def level(event: Event, effects: Effects) -> None:
        entered.set()
        leave.wait(5)
        effects.add("shop.stock_level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    with psycopg.connect(settings.database_url) as connection, running(settings, slow):
        append(connection, "stock", "s", [schemas.StockReceived(4)], 0)
        connection.commit()
        assert entered.wait(20)
        leave.set()
    assert one(settings, "SELECT coalesce(sum(on_hand), 0) FROM shop.stock_level") == 4


def test_a_second_sigterm_ends_at_once_and_the_next_process_goes_on_from_the_fence(
    settings: Settings, shop: psycopg.Connection[Any]
) -> None:
    append_events(shop)
    process = start(RUN, settings)
    eventually(lambda: count(shop, "fencepost.fence") > 0, "it has begun")
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGTERM)
    process.wait()
    with processor(settings):
        clean(settings)


def test_a_standby_relay_takes_over_when_the_active_one_is_killed(
    settings: Settings, shop: psycopg.Connection[Any]
) -> None:
    run = streams("run", "tests.chaos.app:app")
    active = start(streams("relay", "run"), settings)
    eventually(
        lambda: count(shop, "pg_replication_slots WHERE active AND database = current_database()") == 1,
        "active",
    )
    standby, processors = start(streams("relay", "run"), settings), start(run, settings)
    try:
        append_events(shop)
        active.signal(signal.SIGKILL)
        active.wait()
        append_events(shop)
        clean(settings)
    finally:
        stop(processors)
        assert "at work" in stop(standby)


def test_retries_come_at_their_planned_times_and_other_keys_do_not_wait(settings: Settings) -> None:
    shaky = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])
    tried: list[int] = []

    @shaky.projection("level", topics=["stock"], retry=Retry(base_seconds=0.4, factor=2, jitter=0))
    def level(event: Event, effects: Effects) -> None:
        if event.data.quantity == 7:
            tried.append(event.version)
            if len(tried) < 3:
                raise TimeoutError("the other side is busy")
        effects.add("shop.stock_level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    def level_of(sku: str) -> Any:
        return one(settings, "SELECT on_hand FROM shop.stock_level WHERE sku = %s", sku)

    with psycopg.connect(settings.database_url) as connection, running(settings, shaky):
        append(connection, "stock", "a", [schemas.StockReceived(7), schemas.StockReceived(1)], 0)
        append(connection, "stock", "b", [schemas.StockReceived(2)], 0)
        connection.commit()
        eventually(lambda: level_of("b") == 2, "the healthy key is applied")
        assert level_of("a") is None
        eventually(lambda: level_of("a") == 8, "the failing key is applied, and its follower after it")
    assert len(tried) == 3
    late = one(
        settings,
        "SELECT array_agg(extract(epoch FROM later.at - earlier.at)::float ORDER BY later.at) FROM fencepost.job_history later "
        "JOIN fencepost.job_history earlier ON earlier.job_id = later.job_id AND earlier.attempt = later.attempt - 1 "
        "AND earlier.to_status = 'retry' WHERE later.to_status = 'processing'",
    )
    assert late[0] >= 0.39
    assert late[1] >= 0.79


def test_a_handler_that_is_slow_for_a_whole_batch_keeps_its_membership(settings: Settings) -> None:
    options = {"max.poll.interval.ms": "6000", "session.timeout.ms": "6000"}
    impatient = settings.model_copy(update={"kafka_options": options, "group_protocol": "classic"})
    slow = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])

    @slow.projection("level", topics=["stock"])
    def level(event: Event, effects: Effects) -> None:
        threading.Event().wait(0.08)  # as a handler that computes would
        effects.add("shop.stock_level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    apply(plan(slow, settings), settings)
    records = [as_record("s", version, schemas.StockReceived(1)) for version in range(1, 101)]
    produce(settings, f"{settings.topic_prefix}stock", records)
    with running(impatient, slow, with_relay=False):
        eventually(
            lambda: one(settings, "SELECT on_hand FROM shop.stock_level") == 100, "all are applied", 40
        )
    assert one(settings, "SELECT epoch FROM fencepost.fence") == 1


def test_ordered_by_partition_a_record_is_tried_in_place_until_its_attempts_are_spent(
    settings: Settings,
) -> None:
    strict = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])
    tried: list[int] = []
    retry = Retry(attempts=3, base_seconds=0.05, factor=1)

    @strict.projection("level", topics=["stock"], ordering="partition", versions="latest", retry=retry)
    def level(event: Event, effects: Effects) -> None:
        if event.data.quantity == 7:
            tried.append(event.version)
            raise TimeoutError("the other side is busy")
        effects.add("shop.stock_level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    apply(plan(strict, settings), settings)
    records = [
        as_record(key, 1, schemas.StockReceived(quantity)) for key, quantity in (("a", 1), ("b", 7), ("c", 2))
    ]
    produce(settings, f"{settings.topic_prefix}stock", records)
    with running(settings, strict, with_relay=False):
        eventually(
            lambda: one(settings, "SELECT count(*) FROM shop.stock_level") == 2, "the partition goes on"
        )
    assert len(tried) == 3
    assert one(settings, "SELECT status || attempt_count FROM fencepost.job") == "dead_letter3"


def test_more_retries_than_are_held_at_once_are_all_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_HELD", 20)
    unswept = settings.model_copy(update={"sweep_seconds": 3600.0})
    shaky = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])
    failed: set[str] = set()

    @shaky.projection("level", topics=["stock"], retry=Retry(base_seconds=1.0, jitter=0.5))
    def level(event: Event, effects: Effects) -> None:
        if event.id not in failed:
            failed.add(event.id)
            raise TimeoutError("the other side is busy")
        effects.add("shop.stock_level", {"sku": "all"}, on_hand=1)

    apply(plan(shaky, settings), settings)
    records = [as_record(f"s{n}", 1, schemas.StockReceived(1)) for n in range(60)]
    produce(settings, f"{settings.topic_prefix}stock", records)
    with running(unswept, shaky):
        eventually(lambda: one(settings, "SELECT on_hand FROM shop.stock_level") == 60, "all are run")


def owners(connection: psycopg.Connection[Any]) -> set[str]:
    return {row[0] for row in connection.execute("SELECT DISTINCT worker FROM fencepost.fence")}
