"""The audits find what they are there to find: each kind of damage is done on purpose, and must be seen."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event

import psycopg
import pytest

from processors.demo import audit, service
from processors.demo.app import faulty_shop
from processors.demo.audit import Audit
from processors.demo.fold import fold
from processors.demo.watch import Watch
from processors.demo.workload import workload
from streams import App, ServerUnavailable, Settings, topics
from streams.broker import kafka
from streams.consume.supervise import Supervisor
from streams.event import CE_ID, FP_VERSION
from streams.jobs import redrive
from streams.observe import audit as books
from streams.observe import topic_audit
from streams.stores.postgres import Connection, connect
from tests.processes import ROOT, eventually

SEED, EVENTS = 5, 1_000

pytestmark = [pytest.mark.real, pytest.mark.slow]

READ_MODELS = {
    "a row is missing": ("DELETE FROM shop.order_summary WHERE order_id = 'order-000000'", "lost"),
    "a row of nothing": (
        "INSERT INTO shop.order_summary VALUES ('ghost', 'c', 'placed', 1, 'EUR', 1)",
        "doubled",
    ),
    "an order lags": (
        "UPDATE shop.order_summary SET status = 'placed', version = 1 WHERE order_id = 'order-000000'",
        "lost",
    ),
    "an order ran ahead": (
        "UPDATE shop.order_summary SET version = version + 1 WHERE order_id = 'order-000000'",
        "doubled",
    ),
    "an order moved back": (
        "UPDATE shop.order_summary SET status = 'placed' WHERE order_id = 'order-000000'",
        "out_of_order",
    ),
    "a receipt is missing": (
        "UPDATE shop.stock_level SET on_hand = on_hand - 1 WHERE sku = 'sku-00'",
        "lost",
    ),
    "a reservation counted twice": (
        "UPDATE shop.stock_level SET reserved = reserved + 1 WHERE sku = 'sku-00'",
        "doubled",
    ),
    "a payment is missing": (
        "UPDATE shop.revenue SET captured_cents = captured_cents - 1 WHERE currency = 'EUR'",
        "lost",
    ),
    "a payment counted twice": (
        "UPDATE shop.revenue SET payments = payments + 1 WHERE currency = 'EUR'",
        "doubled",
    ),
    "a currency is missing": ("DELETE FROM shop.revenue WHERE currency = 'EUR'", "lost"),
    "a customer is missing": ("DELETE FROM shop.customer WHERE customer_id = 'customer-000'", "lost"),
    "a customer nobody knows": ("INSERT INTO shop.customer VALUES ('ghost', 'n', 'e', 't')", "doubled"),
    "a customer's tier is wrong": (
        "UPDATE shop.customer SET tier = 'none such' WHERE customer_id = 'customer-000'",
        "out_of_order",
    ),
}

BOOKS = {
    "a job has no message": ("DELETE FROM fencepost.outbox WHERE topic LIKE '%.dlq'", "without the message"),
    "a job is gone": ("DELETE FROM fencepost.job WHERE status = 'dead_letter'", "have a job"),
    "a history has a hole": (
        "DELETE FROM fencepost.job_history WHERE from_status = 'processing' AND to_status = 'dead_letter'",
        "history",
    ),
    "a move was illegal": (
        "UPDATE fencepost.job_history SET from_status = 'queued' WHERE from_status = 'processing'",
        "history",
    ),
}


@dataclass
class Bench:
    """A shop with a small load, and its processors in this process."""

    settings: Settings
    connection: Connection
    name: str = field(default_factory=lambda: f"audit-{uuid.uuid4().hex[:8]}")

    def app(self, *, fixed: bool) -> App:
        return faulty_shop(self.name, fixed=fixed)

    def process(self, *, fixed: bool) -> None:
        """Runs the processors and a relay until nothing moves."""
        app = self.app(fixed=fixed)
        watch, stop = Watch(self.connection, self.settings, app), Event()
        supervisor = Supervisor(self.settings, list(app.processors.values()), stop, with_relay=True)
        supervisor.start()
        try:
            eventually(watch.is_settled, "settled", 60)
        finally:
            stop.set()
            assert supervisor.join(20) == []

    def audit(self) -> Audit:
        planned = workload(SEED, EVENTS).events
        return audit.audit(self.connection, self.settings, self.notifications, planned)

    @property
    def notifications(self) -> str:
        return f"{self.name}.notifications"

    def produce(self, topic: str, key: str, value: bytes, **headers: str) -> None:
        producer = kafka.producer(self.settings)
        producer.produce(topic, value, key, headers=list(headers.items()))
        assert producer.flush(10) == 0


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with connect(settings.database_url, autocommit=True) as connection:
        connection.execute((ROOT / "processors/demo/tables.sql").read_bytes())
        made = Bench(settings, connection)
        topics.apply(topics.plan(made.app(fixed=False), settings), settings)
        service.run(SEED, EVENTS, settings.database_url)
        yield made


def test_damage_is_found(bench: Bench) -> None:
    bench.process(fixed=False)
    before = bench.audit()
    assert before.found.lost > 0, "poison is not applied yet, and the audit says so"
    assert (before.found.doubled, before.found.out_of_order) == (0, 0)
    assert not any(group.problems for group in before.groups)
    assert sum(group.dead_letters for group in before.groups) > 0
    damage_books(bench)

    for processor in bench.app(fixed=True).processors.values():
        for planned in redrive.plan(bench.connection, processor, redrive.Selection(processor.group)):
            redrive.execute(bench.connection, processor, planned, "test")
    bench.process(fixed=True)
    after = bench.audit()
    assert after.is_clean, after.problems
    assert sum(topic.relayed for topic in after.topics) == after.events == workload(SEED, EVENTS).events
    assert not any(group.unfinished or group.dead_letters for group in after.groups)
    damage_read_models(bench)
    damage_topics(bench)


def damage_books(bench: Bench) -> None:
    for what, (statement, problem) in BOOKS.items():
        with bench.connection.transaction(force_rollback=True):
            assert bench.connection.execute(statement).rowcount > 0, what
            problems = [found for group in books.groups(bench.connection) for found in group.problems]
            assert any(problem in found for found in problems), (what, problems)


def damage_read_models(bench: Bench) -> None:
    for what, (statement, kind) in READ_MODELS.items():
        with bench.connection.transaction(force_rollback=True):
            assert bench.connection.execute(statement).rowcount == 1, what
            found = bench.audit().found
            kinds = {name for name in ("lost", "doubled", "out_of_order") if getattr(found, name)}
            assert kinds == {kind}, (what, found)


def damage_topics(bench: Bench) -> None:
    topic = f"{bench.settings.topic_prefix}stock"
    clean = topic_audit.topic(bench.connection, bench.settings, "stock")

    bench.produce(topic, "abandoned-sku", b"", **{FP_VERSION: "1"})
    assert topic_audit.topic(bench.connection, bench.settings, "stock").unknown == 1

    bench.produce(topic, "sku-00", b"", **{FP_VERSION: "1"})
    assert topic_audit.topic(bench.connection, bench.settings, "stock").repeated == clean.repeated + 1

    for version in (1, 2, 3):  # nobody relays any more, so these stay behind
        bench.connection.execute(
            "INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload) "
            "VALUES ('stock', 'late', %s, gen_random_uuid(), 'StockReceived', '')",
            (version,),
        )
    assert topic_audit.topic(bench.connection, bench.settings, "stock").missing == 3
    for relayed in ("2", "1", "3"):
        bench.produce(topic, "late", b"", **{FP_VERSION: relayed})
    found = topic_audit.topic(bench.connection, bench.settings, "stock")
    assert (found.missing, found.out_of_order) == (0, 1)


def test_confirmations_are_counted_by_their_id(bench: Bench) -> None:
    bench.process(fixed=True)
    order_id = "order-000000"
    expected = fold(bench.connection).confirmations
    sent = next(
        record
        for record in topic_audit.records(bench.settings, bench.notifications)
        if record.key == order_id.encode()
    )
    assert sent.value is not None

    def found() -> tuple[int, int, int]:
        records = topic_audit.records(bench.settings, bench.notifications)
        _, differing = audit.confirmations(records, expected)
        return differing.lost, differing.doubled, differing.out_of_order

    assert found() == (0, 0, 0)
    bench.produce(bench.notifications, order_id, sent.value, **{CE_ID: (sent.header(CE_ID) or b"").decode()})
    assert found() == (0, 0, 0), "the relay may send a record twice"
    bench.produce(bench.notifications, order_id, sent.value, **{CE_ID: str(uuid.uuid4())})
    assert found() == (0, 1, 0)
    expected = {**expected, "never-confirmed": (1, "EUR")}
    assert found() == (1, 1, 0)
    expected[order_id] = (0, "EUR")
    assert found() == (1, 1, 1)


def test_rolled_back_transactions_never_show(settings: Settings) -> None:
    with psycopg.connect(settings.database_url) as connection:
        connection.execute((ROOT / "processors/demo/tables.sql").read_bytes())
    service.run(SEED, EVENTS, settings.database_url)
    with connect(settings.database_url, autocommit=True) as connection:
        row = connection.execute("SELECT sum(rolled_back), sum(replayed) FROM demo.writer").fetchone()
        assert row is not None
        assert row[0] >= 1
        assert row[1] >= 1
        assert fold(connection).abandoned == 0


def test_a_topic_that_is_not_there_is_named(settings: Settings) -> None:
    with pytest.raises(ServerUnavailable, match=r"topic no\.such is not there"):
        list(topic_audit.records(settings, "no.such"))
