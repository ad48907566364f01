"""Only what stands before the body is exchanged, each schema is asked for once, and a registry that is away is no record's fault."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import schemas
from streams import Catalog
from streams.broker import registry
from streams.broker.registry import Framing, RegistryUnavailable
from streams.consume.dispatch import Dispatcher, Fail
from streams.errors import ConfigurationError, ServerUnavailable, Transient, UndecodableRecord, UnknownSchema
from streams.schema.catalog import HEADER_LENGTH, MARKER, Schema, encode
from streams.settings import Settings
from tests.unit.records import processor, record

EVENT = schemas.StockReceived(5)
VALUE = encode(EVENT)
BODY = VALUE[HEADER_LENGTH:]


@dataclass
class FakeRegistry:
    """Gives ids from 7 on, in the order of registration, and remembers what it was asked."""

    ids: dict[tuple[str, str], int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    away: bool = False

    def find(self, subject: str, schema: Schema) -> int | None:
        self._ask(f"find {subject}")
        return self.ids.get((subject, schema.definition))

    def register(self, subject: str, schema: Schema) -> int:
        self._ask(f"register {subject} {schema.path.name}")
        return self.ids.setdefault((subject, schema.definition), 7 + len(self.ids))

    def definition(self, id: int) -> str:
        self._ask(f"definition {id}")
        for (_, definition), known in self.ids.items():
            if known == id:
                return definition
        raise Transient(f"no schema {id}")

    def _ask(self, question: str) -> None:
        if self.away:
            raise RegistryUnavailable("away")
        self.asked.append(question)


@pytest.fixture
def fake() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def framing(fake: FakeRegistry) -> Framing:
    return Framing(schemas.catalog, fake)


@pytest.fixture
def versions(tmp_path: Path) -> Catalog:
    """A catalog with three versions of one record, and another record of the same name elsewhere."""
    sold = [{"name": "sku", "type": "string"}]
    for name, fields, namespace in (
        ("Sold.v2", [*sold, {"name": "a", "type": "int", "default": 0}], "shop"),
        ("Sold.v10", [*sold, {"name": "b", "type": "int", "default": 0}], "shop"),
        ("Sold.v3", sold, "elsewhere"),
        ("Sold", [*sold, {"name": "c", "type": "int", "default": 0}], "shop"),
    ):
        definition = {"type": "record", "name": "Sold", "namespace": namespace, "fields": fields}
        (tmp_path / f"{name}.avsc").write_text(json.dumps(definition))
    return Catalog(tmp_path)


def test_only_what_stands_before_the_body_is_exchanged(framing: Framing) -> None:
    framed = framing.to_confluent("events.stock", VALUE)
    assert framed == b"\x00\x00\x00\x00\x07" + BODY
    assert framing.from_confluent(framed) == VALUE


@pytest.mark.parametrize(
    "value", [None, b"", b'{"a": 1}', b"\xc3", MARKER + b"1234567", b"\x00\x00\x00\x00\x07"]
)
def test_what_is_not_single_object_encoding_goes_as_it_is(
    framing: Framing, fake: FakeRegistry, value: bytes | None
) -> None:
    assert framing.to_confluent("events.stock", value) is value
    assert fake.asked == []


@pytest.mark.parametrize("value", [b"", b'{"a": 1}', VALUE, b"\x00", b"\x00\x00\x00\x00"])
def test_what_is_not_in_confluents_frame_is_read_as_it_is(
    framing: Framing, fake: FakeRegistry, value: bytes
) -> None:
    assert framing.from_confluent(value) is value
    assert fake.asked == []


def test_a_schema_is_asked_for_once_per_topic(framing: Framing, fake: FakeRegistry) -> None:
    framed = [framing.to_confluent("events.stock", VALUE) for _ in range(3)]
    assert len(set(framed)) == 1
    asked = len(fake.asked)
    assert [framing.from_confluent(framed[0] or b"") for _ in range(3)] == [VALUE] * 3
    assert fake.asked[asked:] == ["definition 7"]
    fake.away = True
    assert framing.to_confluent("events.stock", VALUE) == framed[0]
    assert framing.from_confluent(framed[0] or b"") == VALUE
    with pytest.raises(RegistryUnavailable):
        framing.to_confluent("events.returns", VALUE)


def test_what_is_registered_is_the_file_under_topic_and_record(framing: Framing, fake: FakeRegistry) -> None:
    framing.to_confluent("events.customer", encode(schemas.CustomerClosed("left")))
    path = Path(schemas.__file__).parent / "customer" / "CustomerClosed.avsc"
    ((subject, definition),) = fake.ids
    assert subject == "events.customer-shop.CustomerClosed"
    assert definition == path.read_text()


def test_what_is_registered_already_is_not_registered_again(fake: FakeRegistry) -> None:
    schema = schemas.catalog.current("StockReceived")
    assert schema is not None
    fake.ids["events.stock-shop.StockReceived", schema.definition] = 42
    framed = Framing(schemas.catalog, fake).to_confluent("events.stock", VALUE)
    assert framed == struct.pack(">bi", 0, 42) + BODY
    assert fake.asked == ["find events.stock-shop.StockReceived"]


def test_earlier_versions_are_registered_before_later_ones(versions: Catalog, fake: FakeRegistry) -> None:
    current = versions.current("Sold")
    assert current is not None
    framing = Framing(versions, fake)
    framing.to_confluent("events.sale", current.prefix + b"\x02a\x02")
    registered = [question for question in fake.asked if question.startswith("register")]
    assert [question.split()[-1] for question in registered] == ["Sold.v2.avsc", "Sold.v10.avsc", "Sold.avsc"]
    assert {subject for subject, _ in fake.ids} == {"events.sale-shop.Sold"}

    (early,) = (schema for schema in versions.schemas() if schema.path.name == "Sold.v2.avsc")
    assert (
        framing.to_confluent("events.sale", early.prefix + b"\x02a\x02") == b"\x00\x00\x00\x00\x07\x02a\x02"
    )
    assert [question for question in fake.asked if question.startswith("register")] == registered


def test_an_early_version_does_not_bring_later_ones(versions: Catalog, fake: FakeRegistry) -> None:
    (early,) = (schema for schema in versions.schemas() if schema.path.name == "Sold.v2.avsc")
    Framing(versions, fake).to_confluent("events.sale", early.prefix + b"\x02a\x02")
    assert len(fake.ids) == 1


def test_a_fingerprint_that_is_in_no_file_is_named(framing: Framing, fake: FakeRegistry) -> None:
    with pytest.raises(UnknownSchema, match="0707070707070707"):
        framing.to_confluent("events.stock", MARKER + b"\x07" * 8 + b"\x02")
    assert fake.asked == []


@pytest.mark.parametrize(
    "definition",
    [
        "no json",
        '{"type": "record"}',
        '{"type": "record", "name": "A", "fields": [{"name": "b", "type": "Missing"}]}',
    ],
)
def test_a_schema_that_cannot_be_read_is_the_records_fault(
    framing: Framing, fake: FakeRegistry, definition: str
) -> None:
    fake.ids["other", definition] = 9
    with pytest.raises(UndecodableRecord, match="schema 9 of the registry cannot be read"):
        framing.from_confluent(b"\x00\x00\x00\x00\x09" + BODY)


def test_without_a_registry_values_stay_as_they_are() -> None:
    settings = Settings.load(registry_url=None)
    assert registry.framing(settings, schemas.catalog) is None
    decode = registry.decoder(settings, schemas.catalog)
    assert decode(VALUE) == EVENT
    with pytest.raises(UndecodableRecord, match="needs STREAMS_REGISTRY_URL"):
        decode(b"\x00\x00\x00\x00\x07" + BODY)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="STREAMS_REGISTRY_URL"):
        registry.framing(Settings.load(registry_url="registry:8081"), schemas.catalog)


def test_who_has_no_registry_does_not_pay_for_its_client() -> None:
    look = "import sys, streams.cli.main; sys.exit('confluent_kafka.schema_registry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def test_a_client_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka.schema_registry", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'fencepost\[registry\]'"):
        registry.framing(Settings.load(registry_url="http://localhost:1/not-installed"), schemas.catalog)


def deciding(decode: Callable[[bytes], Any]) -> Dispatcher:
    return Dispatcher(processor(), {"events.stock": "stock"}, decode)


def test_a_registry_that_is_away_decides_nothing_about_a_record(framing: Framing, fake: FakeRegistry) -> None:
    framed = framing.to_confluent("events.stock", VALUE)
    dispatcher = deciding(lambda value: schemas.catalog.decode(framing.from_confluent(value)))
    fake.away = True
    with pytest.raises(RegistryUnavailable):
        dispatcher.decide(record(framed))
    fake.away = False
    assert not isinstance(dispatcher.decide(record(framed)).decision, Fail)


def test_an_id_that_the_registry_does_not_have_may_come_yet(framing: Framing) -> None:
    dispatcher = deciding(lambda value: schemas.catalog.decode(framing.from_confluent(value)))
    decision = dispatcher.decide(record(b"\x00\x00\x00\x03\xe7" + BODY)).decision
    assert isinstance(decision, Fail)
    assert not decision.failure.permanent
    assert "999" in decision.failure.message


def test_another_servers_absence_is_the_handlers_failure() -> None:
    def away(_value: bytes) -> Any:
        raise ServerUnavailable("not the registry")

    assert isinstance(deciding(away).decide(record(VALUE)).decision, Fail)
