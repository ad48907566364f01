"""The one transaction that decides about a batch, against a real PostgreSQL and without Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import schemas
from streams import App, Effects, Event, Permanent, Retry, Topic, Transient
from streams.app import Processor
from streams.consume.dispatch import Dispatcher, Item
from streams.consume.runner import Runner
from streams.consume.settle import Settled, Settler
from streams.dispositions import Disposition
from streams.errors import Fenced
from streams.event import Record
from streams.settings import Settings
from streams.stores.ledger import Claim, Ledger
from tests.running import as_record

pytestmark = pytest.mark.real

TABLES = """
CREATE TABLE level (sku text PRIMARY KEY, on_hand bigint NOT NULL CHECK (on_hand < 1000));
CREATE TABLE customer (customer_id text PRIMARY KEY, name text)"""

failing: set[int] = set()
"""Quantities that the handlers below fail at, for a passing reason."""


class Bench:
    """A processor with its claim on one partition, and the records it is given."""

    def __init__(self, connection: psycopg.Connection[Any], processor: Processor) -> None:
        self.connection, self.processor = connection, processor
        self.dispatcher = Dispatcher(processor, {"stock": "stock"})
        self.settler = Settler(connection, processor, "me")
        self.runner = Runner(connection, processor, self.dispatcher, "me")
        self.claim, self.offset = self.take()

    def take(self) -> tuple[Claim, int]:
        with self.connection.transaction():
            return Ledger(self.connection, self.processor.group).claim("stock", "id-1", 0, 0, "me")

    def items(self, *events: tuple[str, int, object]) -> list[Item]:
        items = []
        for key, version, event in events:
            record_key, value, headers = as_record(key, version, event)
            items.append(self.dispatcher.decide(Record("stock", 0, self.offset, record_key, value, headers)))
            self.offset += 1
        return items

    def settle(self, *events: tuple[str, int, object]) -> Settled:
        return self.settler.settle(self.items(*events), {("stock", 0): self.claim})

    def one(self, query: str) -> Any:
        row = self.connection.execute(query).fetchone()
        return None if row is None else row[0]

    def retry(self) -> list[Disposition | None]:
        """Runs all that waits for another attempt, as if it were due."""
        self.connection.execute(
            "UPDATE fencepost.job SET available_at = clock_timestamp() WHERE status = 'retry'"
        )
        return [self.runner.wake(*job) for job in self.runner.overdue(0)]


@pytest.fixture
def make(settings: Settings) -> Iterator[Callable[..., Bench]]:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(TABLES)
        failing.clear()
        yield lambda **options: Bench(connection, processor(**options))


def processor(**options: Any) -> Processor:
    app = App("t", catalog=schemas.catalog, topics=[Topic("stock")])

    @app.projection("level", topics=["stock"], **{"retry": Retry(attempts=3, base_seconds=0.01), **options})
    def level(event: Event, effects: Effects) -> None:
        match event.data:
            case schemas.StockReceived(quantity=quantity) if quantity in failing:
                raise Transient("not now")
            case schemas.StockReceived(quantity=quantity) if quantity < 0:
                raise Permanent("less than nothing")
            case schemas.StockReceived(quantity=quantity):
                effects.add("level", {"sku": event.resource_id}, on_hand=quantity)
            case schemas.CustomerChanged(name=name):
                effects.upsert("customer", {"customer_id": event.resource_id}, name=name)
            case schemas.CustomerClosed():
                effects.delete("customer", {"customer_id": event.resource_id})

    return app.processors["level"]


def received(key: str, version: int, quantity: int = 1) -> tuple[str, int, object]:
    return key, version, schemas.StockReceived(quantity)


def test_everything_of_a_batch_is_applied_and_counted(make: Callable[..., Bench]) -> None:
    bench = make()
    settled = bench.settle(received("a", 1), received("b", 1, 5), received("a", 2, 2))
    assert settled.counts == {Disposition.APPLIED: 3}
    assert settled.positions == {("stock", 0): 3}
    assert bench.one("SELECT on_hand FROM level WHERE sku = 'a'") == 3
    assert bench.one("SELECT applied FROM fencepost.fence") == 3


def test_a_worker_whose_partition_was_taken_commits_nothing(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.settle(received("a", 1))
    bench.take()  # by another worker: the epoch is raised
    with pytest.raises(Fenced):
        bench.settle(received("a", 2))
    assert bench.one("SELECT on_hand FROM level") == 1
    assert bench.one("SELECT next_offset FROM fencepost.fence") == 1


def test_records_below_the_fence_are_neither_applied_nor_counted_again(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.settle(received("a", 1), received("a", 2))
    bench.offset = 0
    settled = bench.settle(received("a", 1), received("a", 2), received("a", 3))
    assert settled.counts == {Disposition.APPLIED: 1}
    assert bench.one("SELECT on_hand FROM level") == 3


def test_any_order_and_any_number_of_deliveries_leave_the_rows_as_once_in_order(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    for version in (3, 2, 3, 1, 2, 1, 3, 4):
        settled = bench.settle(received("a", version, version))
        for lane in settled.open_lanes:
            bench.runner.drain(lane)
    assert bench.one("SELECT on_hand FROM level") == 1 + 2 + 3 + 4
    assert bench.one("SELECT count(*) FROM fencepost.job WHERE status <> 'completed'") == 0


def test_holes_in_the_offsets_are_counted_as_absent(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.offset = 5
    bench.settle(received("a", 1))
    bench.offset = 9
    bench.settle(received("a", 2))
    assert bench.one("SELECT absent FROM fencepost.fence") == 8
    assert bench.one("SELECT next_offset FROM fencepost.fence") == 10


def test_one_row_that_violates_a_constraint_fails_alone_among_two_thousand(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    events = [received(f"k{n}", 1, 5000 if n == 1234 else 1) for n in range(2_000)]
    settled = bench.settle(*events, received("k1234", 2))
    assert settled.counts == {Disposition.APPLIED: 1_999, Disposition.DEAD: 1, Disposition.BEHIND: 1}
    assert bench.one("SELECT count(*) FROM level") == 1_999
    assert bench.one("SELECT error_class FROM fencepost.job WHERE status = 'dead_letter'") == "CheckViolation"


def test_a_failing_key_holds_only_itself_and_its_followers_apply_in_order(make: Callable[..., Bench]) -> None:
    bench = make()
    failing.add(7)
    settled = bench.settle(received("a", 1, 7), received("b", 1), received("a", 2, 2), received("a", 3, 3))
    assert settled.counts == {Disposition.RETRIED: 1, Disposition.APPLIED: 1, Disposition.BEHIND: 2}
    assert bench.settle(received("a", 4, 4), received("b", 2)).counts == {
        Disposition.BEHIND: 1,
        Disposition.APPLIED: 1,
    }
    assert bench.retry() == [Disposition.RETRIED]
    failing.clear()
    assert bench.retry() == [Disposition.APPLIED]
    assert bench.one("SELECT on_hand FROM level WHERE sku = 'a'") == 7 + 2 + 3 + 4
    assert bench.settle(received("a", 5)).counts == {Disposition.APPLIED: 1}


def test_a_record_that_fails_twice_and_then_succeeds_is_applied_once(make: Callable[..., Bench]) -> None:
    bench = make()
    failing.add(7)
    bench.settle(received("a", 1, 7))
    assert bench.retry() == [Disposition.RETRIED]
    failing.clear()
    assert bench.retry() == [Disposition.APPLIED]
    assert bench.retry() == []
    assert bench.one("SELECT on_hand FROM level") == 7
    history = bench.one("SELECT array_agg(to_status ORDER BY at) FROM fencepost.job_history")
    assert history == ["retry", "processing", "retry", "processing", "completed"]
    assert bench.one("SELECT count(*) FROM fencepost.outbox WHERE topic LIKE 't.level.retry.%'") == 2


def test_a_wake_up_that_comes_twice_or_too_early_finds_nothing_to_do(make: Callable[..., Bench]) -> None:
    bench = make(retry=Retry(attempts=3, base_seconds=60, jitter=0))
    failing.add(7)
    bench.settle(received("a", 1, 7))
    job = bench.one("SELECT id FROM fencepost.job")
    failing.clear()
    assert bench.runner.wake(job, 1) is None
    assert bench.retry() == [Disposition.APPLIED]
    assert bench.runner.wake(job, 1) is None
    assert bench.one("SELECT on_hand FROM level") == 7


def test_spent_attempts_end_in_a_dead_letter_and_under_strict_the_followers_wait(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    failing.add(7)
    bench.settle(received("a", 1, 7), received("a", 2))
    assert [bench.retry(), bench.retry(), bench.retry()] == [[Disposition.RETRIED], [Disposition.DEAD], []]
    assert bench.one("SELECT attempt_count FROM fencepost.job WHERE status = 'dead_letter'") == 3
    assert bench.one("SELECT count(*) FROM level") == 0
    assert bench.one("SELECT count(*) FROM fencepost.job WHERE status = 'queued'") == 1


def test_under_latest_a_dead_letter_lets_its_followers_pass(make: Callable[..., Bench]) -> None:
    bench = make(versions="latest")
    failing.add(7)
    bench.settle(received("a", 1, 7), received("a", 2, 2))
    assert [bench.retry(), bench.retry()] == [[Disposition.RETRIED], [Disposition.DEAD]]
    assert bench.one("SELECT on_hand FROM level") == 2


def test_a_deleted_row_is_not_brought_back_by_an_older_event(make: Callable[..., Bench]) -> None:
    bench = make(versions="latest")
    bench.settle(("c", 1, schemas.CustomerChanged("Ada", "", "")), ("c", 3, schemas.CustomerClosed("left")))
    assert bench.settle(("c", 2, schemas.CustomerChanged("Ada", "", ""))).counts == {Disposition.STALE: 1}
    assert bench.one("SELECT count(*) FROM customer") == 0


def test_without_versions_a_repetition_is_known_by_its_event_id(make: Callable[..., Bench]) -> None:
    bench = make(versions="none", ordering="none")
    failing.add(7)
    first = bench.settle(received("a", 1), received("a", 2, 7))
    again = bench.settle(received("a", 1), received("a", 2, 7))
    assert first.counts == {Disposition.APPLIED: 1, Disposition.RETRIED: 1}
    assert again.counts == {Disposition.DUPLICATE: 2}
    failing.clear()
    assert bench.retry() == [Disposition.APPLIED]
    assert bench.one("SELECT on_hand FROM level") == 8


def test_the_database_itself_refuses_a_state_that_moves_backwards(make: Callable[..., Bench]) -> None:
    bench = make()
    failing.add(7)
    bench.settle(received("a", 1, 7))
    failing.clear()
    bench.retry()
    with pytest.raises(psycopg.errors.CheckViolation, match="cannot go from completed to retry"):
        bench.connection.execute("UPDATE fencepost.job SET status = 'retry'")


def test_the_database_itself_refuses_counts_that_do_not_add_up(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.settle(received("a", 1))
    with pytest.raises(psycopg.errors.CheckViolation, match="every_offset_has_one_disposition"):
        bench.connection.execute("UPDATE fencepost.fence SET applied = applied + 1")


def test_under_partition_ordering_a_failure_halts_the_partition_where_it_stands(
    make: Callable[..., Bench],
) -> None:
    bench = make(ordering="partition")
    failing.add(7)
    settled = bench.settle(received("a", 1), received("b", 1, 7), received("c", 1))
    assert settled.positions == {("stock", 0): 1}
    assert settled.halted["stock", 0].item.record.offset == 1
    assert bench.one("SELECT array_agg(sku) FROM level") == ["a"]
