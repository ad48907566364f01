"""Killed by SIGKILL at each named point, started again, and audited: nothing lost, nothing doubled, order kept."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from streams import Settings
from streams.broker import kafka
from streams.broker.kafka import end_offsets
from streams.event import FP_VERSION, Record
from streams.points import POINTS
from streams.relay import switch
from streams.topics import apply, plan
from tests.chaos.app import TABLE, app
from tests.chaos.audit import KEYS, PER_KEY, append_events, count, differences, is_clean
from tests.processes import eventually, start, stop, streams, wait_killed

pytestmark = [pytest.mark.real, pytest.mark.slow]

APPEND = ("append.before_commit", "append.after_commit")
RELAY = ("relay.produced", "relay.acknowledged", "relay.confirmed")
# Each with the way of reading that is wished for when the point is met.
SWITCH = {"switch.cursor_written": "poll", "switch.slot_made": "log", "switch.closing": "log"}
CONSUME = (
    "consume.fetched",
    "consume.decided",
    "consume.in_transaction",
    "consume.database_committed",
    "consume.offsets_committed",
)
RETRY = ("retry.row_written", "retry.woken")
REDRIVE = ("redrive.requested",)

RUN = streams("run", "tests.chaos.app:app")


@pytest.fixture
def shop(settings: Settings) -> Iterator[psycopg.Connection[Any]]:
    """Topics, the read model's table, and a service's connection."""
    apply(plan(app, settings), settings)
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(TABLE)
        yield connection


def test_every_point_is_in_the_matrix() -> None:
    assert {*APPEND, *RELAY, *SWITCH, *CONSUME, *RETRY, *REDRIVE} == POINTS


@pytest.mark.parametrize("point", APPEND)
def test_a_producer_killed_leaves_both_the_row_and_its_event_or_neither(
    settings: Settings, point: str
) -> None:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE business_order (order_id text PRIMARY KEY)")
        service = ["-m", "tests.chaos.service", "o1"]
        wait_killed(start(service, settings, point))
        expected = 1 if point == "append.after_commit" else 0
        assert count(connection, "business_order") == expected
        assert count(connection, "fencepost.event") == expected
        again = start(service, settings)
        assert again.wait() == 0, again.output
        assert count(connection, "business_order") == 1
        assert count(connection, "fencepost.event") == 1


@pytest.mark.parametrize("point", [*RELAY, "relay.produced:40"])
def test_a_relay_killed_loses_nothing_doubles_nothing_and_keeps_the_order_of_each_key(
    settings: Settings, shop: psycopg.Connection[Any], point: str
) -> None:
    events = append_events(shop)
    relay = start(streams("relay", "run"), settings, point)
    if point == "relay.confirmed":
        eventually(lambda: relayed(settings) >= events, "everything is relayed")
        relay.signal(signal.SIGTERM)
    wait_killed(relay)
    append_events(shop)
    relay = start(streams("relay", "run"), settings)
    eventually(
        lambda: len(first_versions(settings)) == KEYS and all_versions_there(settings, 2 * PER_KEY),
        "all is there",
    )
    assert "error" not in stop(relay)
    for key, versions in first_versions(settings).items():
        assert versions == list(range(1, 2 * PER_KEY + 1)), key
    assert relayed(settings) == 2 * events, "what was sent before the kill is not sent again"


@pytest.mark.parametrize("point", SWITCH)
def test_a_relay_killed_while_it_switches_leaves_one_truth(
    settings: Settings, shop: psycopg.Connection[Any], point: str
) -> None:
    events = append_events(shop)
    if SWITCH[point] == "log":
        switch.to_polling(settings, "for the test")
    wait_killed(start(streams("relay", "run"), settings, point, STREAMS_RELAY_SOURCE=SWITCH[point]))
    append_events(shop)
    relay = start(streams("relay", "run"), settings)
    eventually(
        lambda: len(first_versions(settings)) == KEYS and all_versions_there(settings, 2 * PER_KEY),
        lambda: relay.output,
    )
    assert "error" not in stop(relay)
    for key, versions in first_versions(settings).items():
        assert versions == list(range(1, 2 * PER_KEY + 1)), key
    assert relayed(settings) == 2 * events, "nothing is sent twice"


@pytest.mark.parametrize("point", [*CONSUME, "consume.in_transaction:3", "consume.database_committed:3"])
def test_a_processor_killed_applies_every_event_once(
    settings: Settings, shop: psycopg.Connection[Any], point: str
) -> None:
    small = settings.model_copy(update={"batch_size": 50})
    append_events(shop)
    relay = start(streams("relay", "run"), settings)
    try:
        wait_killed(start(RUN, small, point))
        processor = start(RUN, small)
        try:
            eventually(lambda: is_clean(shop), lambda: f"the read model differs: {differences(shop)[:3]}")
        finally:
            stop(processor)
    finally:
        stop(relay)


@pytest.mark.parametrize("point", RETRY)
def test_a_retry_killed_is_applied_once_and_in_order(
    settings: Settings, shop: psycopg.Connection[Any], point: str
) -> None:
    append_events(shop, poisoned=True)
    relay = start(streams("relay", "run"), settings)
    try:
        wait_killed(start(RUN, settings, point, CHAOS_FAIL="transient"))
        processor = start(RUN, settings)
        try:
            eventually(lambda: is_clean(shop), lambda: f"the read model differs: {differences(shop)[:3]}")
        finally:
            stop(processor)
        assert count(shop, "fencepost.job WHERE status <> 'completed'") == 0
        if point == "retry.woken":  # at the other point the rows were not committed yet
            assert count(shop, "fencepost.job WHERE attempt_count > 0") >= KEYS
    finally:
        stop(relay)


def test_a_redrive_killed_half_way_and_repeated_sends_each_dead_letter_once(
    settings: Settings, shop: psycopg.Connection[Any]
) -> None:
    append_events(shop, poisoned=True)
    relay = start(streams("relay", "run"), settings)
    processor = start(RUN, settings, CHAOS_FAIL="permanent")
    try:
        eventually(
            lambda: count(shop, "fencepost.job WHERE status = 'dead_letter'") == KEYS, "all poison is dead"
        )
        stop(processor)
        redrive = streams("dlq", "redrive", "tests.chaos.app:app", "--group", "total", "--execute", "--json")
        wait_killed(start(redrive, settings, "redrive.requested:7"))
        # Killed before its commit: the seventh was not sent.
        assert count(shop, "fencepost.redrive") == 6
        again, twice = start(redrive, settings), start(redrive, settings)
        for each in (again, twice):
            assert each.wait() == 0, each.output
        assert count(shop, "fencepost.redrive") == KEYS
        processor = start(RUN, settings)
        eventually(lambda: is_clean(shop), lambda: f"the read model differs: {differences(shop)[:3]}")
        assert (
            count(shop, "fencepost.job WHERE redrive_count <> 1 AND attempt_count > 0 AND redrive_count > 0")
            == 0
        )
    finally:
        stop(processor)
        stop(relay)


def relayed(settings: Settings) -> int:
    return sum(end_offsets(settings, [f"{settings.topic_prefix}stock"]).values())


def records(settings: Settings) -> list[Record]:
    """Everything in the topic, per partition in order."""
    topic = f"{settings.topic_prefix}stock"
    ends = end_offsets(settings, [topic])
    return list(kafka.read(settings, dict.fromkeys(ends, 0), ends))


def first_versions(settings: Settings) -> dict[bytes, list[int]]:
    """Per key the versions in the order in which each came first."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for record in records(settings):
        version = int(record.header(FP_VERSION) or b"0")
        if version not in found[record.key or b""]:
            found[record.key or b""].append(version)
    return found


def all_versions_there(settings: Settings, per_key: int) -> bool:
    return all(len(versions) == per_key for versions in first_versions(settings).values())
