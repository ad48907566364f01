"""What the database refuses, and records that nobody foresaw: one record fails, nothing hangs, nothing is blamed on others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest

import schemas
from streams import App, Effects, Event, Retry, Topic, Transient
from streams.app import Processor
from streams.consume.dispatch import Dispatcher
from streams.consume.runner import Runner
from streams.dispositions import Disposition
from streams.errors import ConfigurationError
from streams.settings import Settings
from streams.stores.postgres import Fault, fault_of
from tests.integration.test_settle import Bench, received

pytestmark = [pytest.mark.real, pytest.mark.timeout(30)]

Handler = Callable[[Event, Effects], None]

TABLES = """
CREATE TABLE orders (id text PRIMARY KEY);
CREATE TABLE lines (id text PRIMARY KEY, order_id text NOT NULL REFERENCES orders);
CREATE TABLE address (id text PRIMARY KEY, email text UNIQUE);
CREATE TABLE amount (id text PRIMARY KEY, n numeric);
CREATE TABLE by_uuid (id uuid PRIMARY KEY, n int);
CREATE TABLE log (position bigserial PRIMARY KEY, what bigint);
CREATE TABLE guarded (id text PRIMARY KEY);
CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.id = 'code' THEN RAISE EXCEPTION 'no' USING ERRCODE = 'MY001'; END IF;
    IF NEW.id = 'assert' THEN ASSERT false; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard BEFORE INSERT ON guarded FOR EACH ROW EXECUTE FUNCTION guard()"""


def processor(handler: Handler, **options: Any) -> Processor:
    app = App("t", catalog=schemas.catalog, topics=[Topic("stock")])
    app.projection("level", topics=["stock"], **{"retry": Retry(attempts=3, base_seconds=0.01), **options})(
        handler
    )
    return app.processors["level"]


@pytest.fixture
def connection(settings: Settings) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(settings.database_url, autocommit=True) as made:
        made.execute(TABLES)
        yield made


def test_effects_of_one_record_reach_their_tables_in_its_order(connection: psycopg.Connection[Any]) -> None:
    def handler(event: Event, effects: Effects) -> None:
        if event.version == 1:
            effects.upsert("orders", {"id": event.resource_id})
            effects.upsert("lines", {"id": event.resource_id}, order_id=event.resource_id)
        else:
            effects.delete("lines", {"id": event.resource_id})
            effects.delete("orders", {"id": event.resource_id})

    bench = Bench(connection, processor(handler))
    assert bench.settle(received("a", 1), received("b", 1)).counts == {Disposition.APPLIED: 2}
    assert bench.one("SELECT count(*) FROM lines") == 2
    assert bench.settle(received("a", 2), received("c", 1)).counts == {Disposition.APPLIED: 2}
    assert bench.one("SELECT array_agg(id ORDER BY id) FROM lines") == ["b", "c"]


def test_effects_on_one_row_may_need_each_other_or_need_to_stay_apart(
    connection: psycopg.Connection[Any],
) -> None:
    connection.execute("CREATE TABLE total (id text PRIMARY KEY, n bigint NOT NULL, last bigint NOT NULL)")

    def handler(event: Event, effects: Effects) -> None:
        if event.data.quantity == 1:  # only together do they fill the row
            effects.add("total", {"id": event.resource_id}, n=1)
            effects.upsert("total", {"id": event.resource_id}, last=event.version)
        else:  # an address is taken over, and only in this order
            effects.upsert("address", {"id": "a"}, email="between")
            effects.upsert("address", {"id": "b"}, email="a@x")
            effects.upsert("address", {"id": "a"}, email="b@x")

    connection.execute("INSERT INTO address VALUES ('a', 'a@x'), ('b', 'b@x')")
    bench = Bench(connection, processor(handler))
    assert bench.settle(received("a", 1)).counts == {Disposition.APPLIED: 1}
    assert bench.settle(received("a", 2, 2)).counts == {Disposition.APPLIED: 1}
    assert bench.one("SELECT array_agg(email ORDER BY id) FROM address") == ["b@x", "a@x"]


def test_records_that_only_together_look_wrong_are_applied_in_their_order(
    connection: psycopg.Connection[Any],
) -> None:
    def handler(event: Event, effects: Effects) -> None:
        email = "free" if event.data.quantity == 2 else "wanted"
        effects.upsert("address", {"id": event.resource_id}, email=email)

    bench = Bench(connection, processor(handler))
    bench.settle(received("b", 1, 1))
    # b gives the address up, then a takes it; by key, a would come first
    assert bench.settle(received("b", 2, 2), received("a", 1, 1)).counts == {Disposition.APPLIED: 2}


def test_values_of_different_types_for_one_column_are_no_failure(connection: psycopg.Connection[Any]) -> None:
    def handler(event: Event, effects: Effects) -> None:
        effects.upsert(
            "amount", {"id": event.resource_id}, n=0 if event.data.quantity == 1 else Decimal("1.5")
        )

    bench = Bench(connection, processor(handler))
    assert bench.settle(received("a", 1, 1), received("b", 1, 2)).counts == {Disposition.APPLIED: 2}


def test_two_spellings_of_one_key_are_no_failure(connection: psycopg.Connection[Any]) -> None:
    spelling = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"

    def handler(event: Event, effects: Effects) -> None:
        effects.upsert(
            "by_uuid",
            {"id": spelling if event.data.quantity == 1 else spelling.upper()},
            n=event.data.quantity,
        )

    bench = Bench(connection, processor(handler))
    assert bench.settle(received("a", 1, 1), received("b", 1, 2)).counts == {Disposition.APPLIED: 2}
    assert bench.one("SELECT n FROM by_uuid") == 2


@pytest.mark.parametrize("key", ["code", "assert"])
def test_what_a_trigger_raises_is_the_records_own_failure(
    connection: psycopg.Connection[Any], key: str
) -> None:
    bench = Bench(
        connection, processor(lambda event, effects: effects.upsert("guarded", {"id": event.resource_id}))
    )
    settled = bench.settle(received("good", 1), received(key, 1), received("fine", 1))
    assert settled.counts == {Disposition.APPLIED: 2, Disposition.RETRIED: 1}


def test_a_key_of_an_effect_that_no_index_can_hold_is_the_records_own_failure(
    connection: psycopg.Connection[Any],
) -> None:
    import os  # noqa: PLC0415

    noise = os.urandom(6_000).hex()  # nothing that compresses

    def handler(event: Event, effects: Effects) -> None:
        effects.upsert("orders", {"id": noise if event.data.quantity == 2 else event.resource_id})

    bench = Bench(connection, processor(handler))
    assert bench.settle(received("a", 1, 2), received("b", 1)).counts == {
        Disposition.DEAD: 1,
        Disposition.APPLIED: 1,
    }


def test_a_table_that_is_not_there_is_nobodys_failure(connection: psycopg.Connection[Any]) -> None:
    bench = Bench(connection, processor(lambda _, effects: effects.upsert("nowhere", {"id": 1})))
    with pytest.raises(ConfigurationError, match="the table nowhere"):
        bench.settle(received("a", 1))
    by_hand = Bench(
        connection, processor(lambda _, effects: effects.execute("INSERT INTO nowhere VALUES (1)"))
    )
    with pytest.raises(psycopg.errors.UndefinedTable) as raised:
        by_hand.settle(received("a", 1))
    assert fault_of(raised.value) is Fault.SCHEMA
    assert bench.one("SELECT count(*) FROM fencepost.job") == 0


def test_a_lane_that_opens_within_its_batch_is_open(connection: psycopg.Connection[Any]) -> None:
    bench = Bench(connection, processor(lambda _event, _effects: None))
    settled = bench.settle(received("a", 2), received("a", 1))
    assert settled.open_lanes == [("stock", b"a")]


@pytest.mark.parametrize("ordering", ["key", "partition"])
def test_a_strict_lane_runs_to_its_end_at_once_when_the_gap_closes(
    connection: psycopg.Connection[Any], ordering: str
) -> None:
    bench = Bench(connection, processor(lambda _event, _effects: None, ordering=ordering))
    settled = bench.settle(*(received("a", version) for version in (2, 3, 4, 5, 2, 1)))
    assert settled.counts == {Disposition.BEHIND: 4, Disposition.DUPLICATE: 1, Disposition.APPLIED: 1}
    assert [bench.runner.drain(lane) for lane in settled.open_lanes] == [True]
    assert bench.one("SELECT version FROM fencepost.progress") == 5


def test_two_runners_of_one_lane_never_pass_a_failing_head(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    entered, gate, failing = threading.Event(), threading.Event(), {1}

    def handler(event: Event, effects: Effects) -> None:
        if event.data.quantity in failing:
            raise Transient("not now")
        if event.data.quantity == 2 and threading.current_thread().name == "first":
            entered.set()
            gate.wait(10)
        effects.execute("INSERT INTO log (what) VALUES (%s)", [event.data.quantity])

    made = processor(handler, versions="none")
    bench = Bench(connection, made)
    bench.settle(*(received("a", n, n) for n in (1, 2, 3, 4)))
    # The head was applied by a runner that died before it came to those behind.
    connection.execute("UPDATE fencepost.job SET status = 'processing' WHERE status = 'retry'")
    connection.execute("UPDATE fencepost.job SET status = 'completed' WHERE status = 'processing'")
    failing.clear()
    failing.add(3)
    with (
        psycopg.connect(settings.database_url, autocommit=True) as one,
        psycopg.connect(settings.database_url, autocommit=True) as other,
    ):
        runners = [Runner(each, made, Dispatcher(made, {"stock": "stock"}), "me") for each in (one, other)]
        lane = ("stock", b"a")
        first = threading.Thread(target=runners[0].drain, args=(lane,), name="first")
        first.start()
        assert entered.wait(10)
        second = threading.Thread(target=runners[1].drain, args=(lane,), name="second")
        second.start()
        second.join()
        gate.set()
        first.join()
    failing.clear()
    bench.retry()
    assert bench.one("SELECT array_agg(what ORDER BY position) FROM log") == [2, 3, 4]


def test_a_slow_handler_of_a_retry_holds_up_no_batch(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    entered, gate = threading.Event(), threading.Event()

    def handler(event: Event, _: Effects) -> None:
        if event.resource_id == "a" and event.version == 1:
            if threading.current_thread().name == "retry":
                entered.set()
                gate.wait(20)
            raise Transient("not now")

    made = processor(handler, retry=Retry(attempts=9, base_seconds=0.01))
    bench = Bench(connection, made)
    bench.settle(received("a", 1))
    connection.execute("UPDATE fencepost.job SET available_at = clock_timestamp()")
    with psycopg.connect(settings.database_url, autocommit=True) as other:
        runner = Runner(other, made, Dispatcher(made, {"stock": "stock"}), "other")
        retry = threading.Thread(target=runner.wake, args=runner.overdue(0)[0], name="retry")
        retry.start()
        try:
            assert entered.wait(10)
            # The handler is in the middle of its work; nothing of the lane is locked.
            counts = bench.settle(received("z", 1), received("a", 2)).counts
        finally:
            gate.set()
            retry.join()
    assert counts == {Disposition.APPLIED: 1, Disposition.BEHIND: 1}


def test_a_frozen_worker_does_not_hold_its_partition_for_ever(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    bench = Bench(connection, processor(lambda _event, _effects: None))
    with psycopg.connect(settings.database_url) as frozen:
        frozen.execute("SELECT * FROM fencepost.fence FOR UPDATE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            bench.take()
    assert bench.take()[0].epoch == 2
