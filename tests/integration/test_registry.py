"""Values framed for Confluent's clients, with a real registry: anybody reads them, and so do the processors."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fastavro
import psycopg
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

import schemas
from streams import App, Catalog, Effects, Event, Retry, SchemaError, Topic, Transient, append
from streams.broker import kafka, registry
from streams.broker.registry import Framing, RegistryUnavailable
from streams.dev import servers
from streams.dev.state import ServerName, read_state
from streams.errors import UnknownSchema
from streams.schema.catalog import HEADER_LENGTH, MARKER, encode
from streams.settings import Settings
from tests.processes import eventually, start, streams
from tests.running import as_record, everything_in, headers_of, one, produce, running

pytestmark = pytest.mark.real

VALUE = encode(schemas.StockReceived(5))
SOLD = [{"name": "sku", "type": "string", "doc": "what was sold"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this module's registry lives."""
    folder = tmp_path_factory.mktemp("registry")
    servers.up(folder, want=[ServerName.REGISTRY])
    yield folder
    servers.reset(folder)


@pytest.fixture
def url(directory: Path) -> str:
    """The registry's address; it is running, whatever the test before did to it."""
    found = servers.up(directory, want=[ServerName.REGISTRY]).registry_url
    assert found is not None
    return found


@pytest.fixture
def client(url: str) -> SchemaRegistryClient:
    """The client of somebody who knows nothing of fencepost."""
    return SchemaRegistryClient({"url": url})


def as_another_process() -> None:
    """Forgets the client of this process, which remembers what it was answered."""
    registry._registry.cache_clear()


@contextmanager
def frozen(directory: Path) -> Iterator[Callable[[], None]]:
    """A registry that does not answer until the block ends, or the function is called. It keeps what it was told."""
    pid = read_state(directory / ServerName.REGISTRY).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


def framing_at(url: str, catalog: Catalog = schemas.catalog) -> Framing:
    as_another_process()
    made = registry.framing(Settings.load(registry_url=url, connect_seconds=2), catalog)
    assert made is not None
    return made


def framed(framing: Framing, value: bytes, topic: str = "events.stock") -> bytes:
    made = framing.to_confluent(topic, value)
    assert made is not None
    return made


def id_of(value: bytes) -> int:
    magic, found = struct.unpack(">bi", value[:5])
    assert magic == 0
    return int(found)


def sold(folder: Path, file: str, *more: object) -> None:
    definition = {"type": "record", "name": "Sold", "namespace": "shop", "fields": [*SOLD, *more]}
    (folder / file).write_text(json.dumps(definition))


def test_whoever_has_the_id_can_read_the_value(url: str, client: SchemaRegistryClient) -> None:
    event = schemas.OrderPlaced("c1", "EUR", (schemas.OrderLine("sku-1", 2, 350),), 700)
    value = encode(event)
    on_the_wire = framed(framing_at(url), value, "events.order")
    assert on_the_wire == b"\x00" + id_of(on_the_wire).to_bytes(4, "big") + value[HEADER_LENGTH:]
    found = client.get_schema(id_of(on_the_wire))
    assert found.schema_str == (Path(schemas.__file__).parent / "order" / "OrderPlaced.avsc").read_text()
    read = fastavro.schemaless_reader(io.BytesIO(on_the_wire[5:]), json.loads(found.schema_str), None)
    assert read == {
        "customer_id": "c1",
        "currency": "EUR",
        "lines": [{"sku": "sku-1", "quantity": 2, "unit_price_cents": 350}],
        "total_cents": 700,
    }
    # Another process, which has only the id to go by.
    assert framing_at(url).from_confluent(on_the_wire) == value


def test_ids_are_kept_when_the_registry_goes(url: str, directory: Path) -> None:
    framing = framing_at(url)
    before = framed(framing, VALUE)
    assert framing.from_confluent(before) == VALUE
    servers.stop(directory, ServerName.REGISTRY, kill=True)
    assert framing.to_confluent("events.stock", VALUE) == before
    assert framing.from_confluent(before) == VALUE
    with pytest.raises(RegistryUnavailable, match=rf"does not answer at {url} .*check STREAMS_REGISTRY_URL"):
        framing.to_confluent("events.another", VALUE)
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        framing_at(url).from_confluent(before)


def test_versions_of_a_record_are_versions_of_one_subject(
    url: str, client: SchemaRegistryClient, tmp_path: Path
) -> None:
    sold(tmp_path, "Sold.v1.avsc")
    sold(tmp_path, "Sold.avsc", {"name": "currency", "type": "string", "default": "EUR"})
    catalog = Catalog(tmp_path)
    today = catalog.current("Sold")
    assert today is not None
    (earlier,) = catalog.history(today)
    framing = framing_at(url, catalog)
    new = framed(framing, today.prefix + b"\x02a\x06CHF", "events.sale")
    old = framed(framing, earlier.prefix + b"\x02a", "events.sale")
    assert client.get_versions("events.sale-shop.Sold") == [1, 2]
    assert client.get_version("events.sale-shop.Sold", 1).schema_id == id_of(old)
    assert client.get_version("events.sale-shop.Sold", 2).schema_id == id_of(new)
    assert framing_at(url, catalog).from_confluent(old) == earlier.prefix + b"\x02a"


def test_a_schema_that_is_refused_is_named_with_the_reason(
    url: str, client: SchemaRegistryClient, tmp_path: Path
) -> None:
    sold(tmp_path, "Sold.v1.avsc")
    sold(
        tmp_path, "Sold.avsc", {"name": "currency", "type": "string"}
    )  # without a default: v1 cannot be read
    catalog = Catalog(tmp_path)
    today = catalog.current("Sold")
    assert today is not None
    (earlier,) = catalog.history(today)
    framing = framing_at(url, catalog)
    framed(framing, earlier.prefix + b"\x02a", "events.refused")
    client.set_compatibility("events.refused-shop.Sold", "BACKWARD")
    with pytest.raises(
        SchemaError, match=r"refuses .*Sold\.avsc for subject events\.refused-shop\.Sold: .*fields/1"
    ):
        framed(framing, today.prefix + b"\x02a\x06CHF", "events.refused")


def test_a_fingerprint_that_is_in_no_file_is_named(url: str) -> None:
    with pytest.raises(UnknownSchema, match="0707070707070707"):
        framing_at(url).to_confluent("events.stock", MARKER + b"\x07" * 8)


def test_a_place_that_is_no_registry_is_no_records_fault(url: str) -> None:
    elsewhere = framing_at(f"{url}/nothing-here")
    with pytest.raises(RegistryUnavailable, match="nothing-here"):
        elsewhere.to_confluent("events.stock", VALUE)
    with pytest.raises(RegistryUnavailable, match="nothing-here"):
        elsewhere.from_confluent(b"\x00\x00\x00\x00\x01")


@pytest.fixture
def broken() -> threading.Event:
    """Set while the handler is to fail."""
    return threading.Event()


@pytest.fixture
def app(settings: Settings, broken: threading.Event) -> App:
    made = App(settings.slot, catalog=schemas.catalog, topics=[Topic("stock", partitions=1)])

    @made.projection("level", topics=["stock"], retry=Retry(attempts=9, base_seconds=0.1, tier_seconds=(1,)))
    def level(event: Event, effects: Effects) -> None:
        if broken.is_set():
            raise Transient("broken")
        effects.add("level", {"sku": event.resource_id}, on_hand=event.data.quantity)

    with psycopg.connect(settings.database_url) as connection:
        connection.execute("CREATE TABLE level (sku text PRIMARY KEY, on_hand bigint NOT NULL)")
    return made


def put(settings: Settings, framing: Framing, key: str, version: int, quantity: int) -> None:
    topic = f"{settings.topic_prefix}stock"
    name, value, headers = as_record(key, version, schemas.StockReceived(quantity))
    produce(settings, topic, [(name, framing.to_confluent(topic, value), headers)])


def on_hand(settings: Settings) -> object:
    return one(settings, "SELECT sum(on_hand)::int FROM level")


def test_a_projection_applies_what_is_framed_and_what_is_not(settings: Settings, app: App, url: str) -> None:
    configured = settings.model_copy(update={"registry_url": url})
    with running(configured, app, with_relay=False):
        put(settings, framing_at(url), "a", 1, 5)
        produce(settings, f"{settings.topic_prefix}stock", [as_record("a", 2, schemas.StockReceived(30))])
        put(settings, framing_at(url), "a", 3, 200)
        eventually(lambda: on_hand(settings) == 235, lambda: f"all are applied: {on_hand(settings)}")
    assert one(settings, "SELECT count(*) FROM fencepost.job") == 0


def test_a_partition_waits_while_the_registry_is_away_and_no_attempt_is_spent(
    settings: Settings, app: App, url: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configured = settings.model_copy(update={"registry_url": url, "connect_seconds": 1})
    topic = f"{settings.topic_prefix}stock"
    framing = framing_at(url)
    first, second = (framing.to_confluent(topic, encode(schemas.StockReceived(n))) for n in (5, 30))
    with frozen(directory) as thaw, running(configured, app, with_relay=False):
        produce(settings, topic, [as_record("plain", 1, schemas.StockReceived(200))])
        produce(settings, topic, [(b"a", first, headers_of(1, "a-1")), (b"a", second, headers_of(2, "a-2"))])
        eventually(
            lambda: f"{topic}/0 waits: the schema registry does not answer" in caplog.text, "it says so"
        )
        eventually(lambda: on_hand(settings) == 200, "what stands before it is applied")
        eventually(lambda: caplog.text.count(f"{topic}/0 waits") > 1, "it asks again")
        assert one(settings, "SELECT count(*) FROM fencepost.job") == 0
        assert one(settings, "SELECT next_offset FROM fencepost.fence") == 1

        thaw()
        eventually(lambda: on_hand(settings) == 235, lambda: f"it goes on by itself: {on_hand(settings)}")
    assert one(settings, "SELECT count(*) FROM fencepost.job") == 0
    assert one(settings, "SELECT applied FROM fencepost.fence") == 3


def test_a_retry_waits_for_the_registry_too(
    settings: Settings,
    app: App,
    broken: threading.Event,
    url: str,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    configured = settings.model_copy(update={"registry_url": url, "connect_seconds": 1})
    topic = f"{settings.topic_prefix}stock"
    value = framed(framing_at(url), VALUE, topic)
    broken.set()
    with running(configured, app, with_relay=False):
        produce(settings, topic, [(b"a", value, headers_of(1, "a-1"))])
        eventually(lambda: one(settings, "SELECT status FROM fencepost.job") == "retry", "its handler failed")
    attempts = one(settings, "SELECT attempt_count FROM fencepost.job")
    broken.clear()
    as_another_process()
    with frozen(directory) as thaw, running(configured, app, with_relay=False):
        eventually(lambda: "a retry cannot be run: the schema registry" in caplog.text, "it says so")
        assert one(settings, "SELECT attempt_count FROM fencepost.job") == attempts
        thaw()
        eventually(lambda: on_hand(settings) == 5, "it goes on by itself")
    assert one(settings, "SELECT status FROM fencepost.job") == "completed"


def test_a_dead_letter_is_shown_decoded(settings: Settings, app: App, url: str) -> None:
    topic = f"{settings.topic_prefix}stock"
    value = framed(framing_at(url), VALUE, topic)
    configured = settings.model_copy(update={"registry_url": url})
    with psycopg.connect(settings.database_url) as connection:
        connection.execute("ALTER TABLE level ADD CONSTRAINT never CHECK (on_hand < 0)")
    with running(configured, app, with_relay=False):
        produce(settings, topic, [(b"a", value, headers_of(1, "a-1"))])
        eventually(lambda: one(settings, "SELECT status FROM fencepost.job") == "dead_letter", "it is buried")
    assert one(settings, "SELECT value FROM fencepost.job") == value, "byte for byte"
    job = one(settings, "SELECT id FROM fencepost.job")
    show = streams("dlq", "show", str(job), "--app", "processors.app:app", "--json")
    shown = start(show, settings, STREAMS_REGISTRY_URL=url)
    assert shown.wait() == 0, shown.output
    assert json.loads(shown.output)["data"] == {"quantity": 5}


def test_a_relay_with_a_registry_frames_what_it_sends_and_processors_read_it(
    settings: Settings, app: App, broken: threading.Event, url: str
) -> None:
    as_another_process()
    configured = settings.model_copy(update={"registry_url": url})
    topic = f"{settings.topic_prefix}stock"
    broken.set()
    with running(configured, app), psycopg.connect(settings.database_url) as connection:
        append(connection, "stock", "a", [schemas.StockReceived(5)], None)
        connection.commit()
        eventually(lambda: one(settings, "SELECT status FROM fencepost.job") == "retry", "its handler failed")
        broken.clear()
        eventually(lambda: on_hand(settings) == 5, "the retry, which travelled as it was, is applied")
    (record,) = everything_in(settings, topic)
    assert record.value is not None
    assert id_of(record.value) > 0
    # Retry topics bear the group's name, and other tests have sent theirs before.
    retries = [
        retry.value
        for name in kafka.partitions(settings)
        if ".retry." in name
        for retry in everything_in(settings, name)
    ]
    assert record.value in retries, "a letter is byte for byte what was consumed"


def test_an_event_of_a_schema_that_the_relay_does_not_know_stops_its_key_only(
    settings: Settings, app: App, url: str
) -> None:
    as_another_process()
    configured = settings.model_copy(update={"registry_url": url})
    foreign = MARKER + b"\x01\x02\x03\x04\x05\x06\x07\x08" + b"body"
    with running(configured, app), psycopg.connect(settings.database_url) as connection:
        append(connection, "stock", "a", [schemas.StockReceived(5)], None)
        connection.execute("UPDATE fencepost.resource SET version = 2")
        connection.execute(
            "INSERT INTO fencepost.event (resource_type, resource_id, version, id, type, payload) "
            "VALUES ('stock', 'a', 2, gen_random_uuid(), 'Foreign', %s)",
            (foreign,),
        )
        append(connection, "stock", "a", [schemas.StockReceived(7)], None)
        append(connection, "stock", "b", [schemas.StockReceived(10)], None)
        connection.commit()
        eventually(lambda: on_hand(settings) == 15, "what came before it, and the other key")
    reasons = one(settings, "SELECT array_agg(reason ORDER BY id) FROM fencepost.relay_blocked")
    assert [reason and reason.partition(":")[0] for reason in reasons] == ["UnknownSchema", None]
