"""What ``streams.testing`` adds to what it shares with the real servers (see ``tests/contract``)."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from processors.app import app
from schemas import OrderPaid, OrderPlaced, PaymentCaptured, StockReceived, StockReserved, catalog
from streams import ConfigurationError, Effects, Event, Halt, StreamsError, append, load, publish
from streams.broker.partitioner import murmur2
from streams.dispositions import Disposition
from streams.testing import Harness, MemoryBroker, MemoryStore, partition_of
from streams.testing.memory_store import WriterWaits
from tests.unit.records import processor

APPLIED, STALE, BEHIND = Disposition.APPLIED, Disposition.STALE, Disposition.BEHIND
LEVEL = "shop.stock_level"


# From Kafka's own UtilsTest.testMurmur2 (clients/src/test/java/org/apache/kafka/common/utils/UtilsTest.java).
@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed & 0xFFFFFFFF
    assert partition_of(key, 10) == (hashed & 0x7FFFFFFF) % 10


def test_keyless_records_take_turns() -> None:
    broker = MemoryBroker()
    broker.create_topic("t", 3)
    assert [broker.produce("t", b"v").partition for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_broker_makes_no_topic_by_accident() -> None:
    broker = MemoryBroker()
    broker.create_topic("orders")
    with pytest.raises(ConfigurationError, match="ordrs does not exist; known are orders"):
        broker.produce("ordrs", b"v")
    with pytest.raises(ConfigurationError, match="exists already"):
        broker.create_topic("orders")
    with pytest.raises(ConfigurationError, match="partitions 0 to 0"):
        broker.read("orders", 1)


def test_a_committed_message_is_in_the_outbox() -> None:
    store = MemoryStore()
    with store.connect() as connection:
        publish(connection, "t", "key", b"value", {"a": "b"}, type="T")
        uncommitted = list(store.messages)
    (message,) = store.messages
    assert uncommitted == []
    assert (message.topic, message.key, message.value) == ("t", b"key", b"value")
    assert dict(message.headers) == {"a": b"b", "ce_id": str(message.id).encode(), "ce_type": b"T"}


def test_an_exception_rolls_back() -> None:
    store = MemoryStore()
    with contextlib.suppress(ZeroDivisionError), store.connect() as connection:
        append(connection, "stock", "sku-1", [StockReceived(1)], 0)
        raise ZeroDivisionError
    assert load(store.connect(), catalog, "stock", "sku-1") == []


def test_an_inner_transaction_rolls_back_alone() -> None:
    store = MemoryStore()
    connection = store.connect(autocommit=True)
    with connection.transaction():
        append(connection, "stock", "sku-1", [StockReceived(1)], 0)
        with contextlib.suppress(ZeroDivisionError), connection.transaction():
            append(connection, "stock", "sku-1", [StockReceived(2)], 1)
            raise ZeroDivisionError
    assert [event.version for event in load(store.connect(), catalog, "stock", "sku-1")] == [1]


def test_a_second_writer_is_told_that_it_would_wait_for_ever() -> None:
    store = MemoryStore(wait_seconds=0)
    first, second = store.connect(), store.connect()
    append(first, "stock", "sku-1", [StockReceived(1)], 0)
    with pytest.raises(WriterWaits, match="commit it or roll it back"):
        append(second, "stock", "sku-2", [StockReceived(1)], 0)


def test_other_statements_are_for_postgresql() -> None:
    with (
        MemoryStore().connect().cursor() as cursor,
        pytest.raises(StreamsError, match="PostgreSQL: SELECT 1"),
    ):
        cursor.execute("SELECT 1")


@pytest.fixture
def level() -> Harness:
    return Harness(app.processor("stock-level"))


def test_a_projection_is_seen_through_its_read_model(level: Harness) -> None:
    assert level.given("sku-1", StockReceived(5), StockReserved("order-1", 2)) == [APPLIED, APPLIED]
    assert level.given("sku-2", StockReceived(1)) == [APPLIED]
    assert level.tables.row(LEVEL, {"sku": "sku-1"}) == {"sku": "sku-1", "on_hand": 5, "reserved": 2}
    assert level.tables.rows(LEVEL)[1] == {"sku": "sku-2", "on_hand": 1}
    assert level.tables.row(LEVEL, {"sku": "nowhere"}) is None


def test_what_is_late_or_comes_twice_is_seen_as_in_production(level: Harness) -> None:
    first, second, third = level.records("sku-1", StockReceived(1), StockReceived(2), StockReceived(4))
    assert level.deliver(second, first, first) == [BEHIND, APPLIED, STALE]
    assert level.deliver(third) == [BEHIND]
    assert level.tables.row(LEVEL, {"sku": "sku-1"}) == {"sku": "sku-1", "on_hand": 1}


@pytest.mark.parametrize("name", ["stock-level", "revenue", "order-summary", "confirmation"])
def test_the_shops_processors_do_not_mind_a_second_delivery(name: str) -> None:
    harness = Harness(app.processor(name))
    events: dict[str, list[object]] = {
        "stock-level": [StockReceived(5), StockReserved("order-1", 2)],
        "revenue": [PaymentCaptured("order-1", 100, "EUR"), PaymentCaptured("order-2", 50, "EUR")],
        "order-summary": [OrderPlaced("c-1", "EUR", (), 0), OrderPaid("p-1", 100, "EUR")],
        "confirmation": [OrderPlaced("c-1", "EUR", (), 0), OrderPaid("p-1", 100, "EUR")],
    }
    harness.check_redelivery(*harness.records("r-1", *events[name]))


def test_a_processor_that_minds_a_second_delivery_is_found() -> None:
    harness = Harness(app.processor("revenue"))
    (record,) = harness.records("p-1", PaymentCaptured("order-1", 100, "EUR"))
    without_id = replace(record, headers=())
    with pytest.raises(AssertionError, match="second delivery changed the result"):
        harness.check_redelivery(without_id)


def test_derived_events_are_collected() -> None:
    harness = Harness(app.processor("confirmation"))
    harness.given("order-1", OrderPlaced("c-1", "EUR", (), 0), OrderPaid("p-1", 100, "EUR"))
    (message,) = harness.messages
    assert (message.topic, message.key) == ("notifications", b"order-1")


def test_failures_are_kept() -> None:
    def project(event: Event, effects: Effects) -> None:
        raise TimeoutError("too slow")

    harness = Harness(processor(project, versions="latest"))
    assert harness.given("sku-1", StockReceived(1)) == [Disposition.RETRIED]
    assert harness.given("sku-2", StockReceived(1), StockReceived(1)) == [Disposition.RETRIED, BEHIND]
    assert [failure.message for _, failure in harness.failures] == ["too slow", "too slow"]


def test_a_processor_of_several_topics_is_told_which(level: Harness) -> None:
    with pytest.raises(ConfigurationError, match="reads stock; say topic"):
        level.given("sku-1", StockReceived(1), topic="order")


def test_a_handler_may_halt_in_memory_too() -> None:
    def project(event: Event, effects: Effects) -> None:
        if event.version == 2:
            raise Halt("a person must look")

    harness = Harness(processor(project))
    assert harness.given("sku-1", StockReceived(1), StockReceived(1), StockReceived(1)) == [APPLIED]
    assert harness.halted == "a person must look"
