"""Classes fit their schemas or are refused; what is written can be read, also under an earlier schema."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import avro.schema
import fastavro
import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form
from hypothesis import example, given
from hypothesis import strategies as st

import schemas
from streams import Catalog, SchemaError
from streams.errors import UndecodableRecord, UnknownSchema
from streams.schema.catalog import HEADER_LENGTH, MARKER, Schema, encode, fields_of, type_name

AVSC = sorted(Path(schemas.__file__).parent.rglob("*.avsc"))
EVERYTHING: list[dict[str, Any]] = [
    {"name": "text", "type": "string"},
    {"name": "whole", "type": "int"},
    {"name": "large", "type": "long"},
    {"name": "real", "type": "double"},
    {"name": "yes", "type": "boolean"},
    {"name": "raw", "type": "bytes"},
    {"name": "side", "type": {"type": "enum", "name": "Side", "symbols": ["LEFT", "RIGHT"]}},
    {"name": "four", "type": {"type": "fixed", "name": "Four", "size": 4}},
    {"name": "maybe", "type": ["null", "string"], "default": None},
    {"name": "point", "type": {"type": "record", "name": "Point", "fields": [{"name": "x", "type": "int"}]}},
    {"name": "points", "type": {"type": "array", "items": "Point"}},
    {"name": "other_point", "type": ["null", "Point"]},
    {"name": "numbers", "type": {"type": "array", "items": "long"}},
    {"name": "by_name", "type": {"type": "map", "values": "Point"}},
    {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
    {"name": "clock", "type": {"type": "long", "logicalType": "time-micros"}},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
    {"name": "maybe_at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
]


@dataclass(frozen=True)
class Point:
    x: int


@dataclass(frozen=True)
class Everything:
    text: str
    whole: int
    large: int
    real: float
    yes: bool
    raw: bytes
    side: str
    four: bytes
    maybe: str | None
    point: Point
    points: tuple[Point, ...]
    other_point: Point | None
    numbers: tuple[int, ...]
    by_name: dict[str, Point]
    id: uuid.UUID
    day: dt.date
    at: dt.datetime
    local: dt.datetime
    clock: dt.time
    price: decimal.Decimal
    maybe_at: dt.datetime | None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, file_name: str, fields: list[dict[str, Any]], name: str | None = None) -> None:
    record = {
        "type": "record",
        "name": name or file_name.partition(".")[0],
        "namespace": "test",
        "fields": fields,
    }
    (folder / file_name).write_text(json.dumps(record))


def declared(folder: Path, fields: list[dict[str, Any]], cls: type) -> Catalog:
    write(folder, f"{cls.__name__}.avsc", fields)
    catalog = Catalog(folder)
    catalog.event(cls)
    return catalog


@pytest.mark.parametrize("path", AVSC, ids=[path.stem for path in AVSC])
def test_a_fingerprint_is_the_one_that_avros_own_library_has(path: Path) -> None:
    theirs = avro.schema.parse(path.read_text()).fingerprint("CRC-64-AVRO")
    assert Schema.read(path).prefix == MARKER + theirs


def test_the_fingerprint_of_int_is_the_specifications() -> None:
    # https://avro.apache.org/docs/1.12.0/specification/#schema-fingerprints; share/test/data/schema-tests.txt has it as
    # 8247732601305521295, which is 0x7275d51a3f395c8f.
    crc = fingerprint(to_parsing_canonical_form("int"), "CRC-64-AVRO")
    assert crc == "8f5c393f1ad57572"
    assert int.from_bytes(bytes.fromhex(crc), "little") == 8247732601305521295


def test_a_value_is_marker_fingerprint_and_body() -> None:
    value = encode(schemas.StockReceived(3))
    current = schemas.catalog.current("StockReceived")
    assert current is not None
    assert value[:2] == b"\xc3\x01"
    assert value[2:HEADER_LENGTH].hex() == current.fingerprint
    assert value[HEADER_LENGTH:] == b"\x06"


moments = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))  # noqa: DTZ001 - bounds have no zone
text = st.text(st.characters(codec="utf-8"), max_size=20)
points = st.builds(Point, st.integers(-(2**31), 2**31 - 1))
everything = st.builds(
    Everything,
    text=text,
    whole=st.integers(-(2**31), 2**31 - 1),
    large=st.integers(-(2**63), 2**63 - 1),
    real=st.floats(allow_nan=False),
    yes=st.booleans(),
    raw=st.binary(max_size=20),
    side=st.sampled_from(["LEFT", "RIGHT"]),
    four=st.binary(min_size=4, max_size=4),
    maybe=st.none() | text,
    point=points,
    points=st.lists(points, max_size=3).map(tuple),
    other_point=st.none() | points,
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    by_name=st.dictionaries(text, points, max_size=3),
    id=st.uuids(),
    day=st.dates(),
    at=moments.map(lambda moment: moment.replace(tzinfo=dt.UTC)),
    local=moments,
    clock=st.times(),
    price=st.decimals(-(10**9), 10**9, places=2, allow_nan=False),
    maybe_at=st.none() | moments.map(lambda moment: moment.replace(tzinfo=dt.UTC)),
)


@pytest.fixture(scope="module")
def everything_catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return declared(tmp_path_factory.mktemp("schemas"), EVERYTHING, Everything)


@given(event=everything)
def test_what_is_encoded_is_decoded_again(everything_catalog: Catalog, event: Everything) -> None:
    decoded = everything_catalog.decode(encode(event))
    assert decoded == event
    assert type(decoded) is Everything
    assert type(decoded.point) is Point


ORDER = schemas.OrderPlaced("c-1", "EUR", (schemas.OrderLine("sku-1", 2, 5),), 10)


@given(st.binary(max_size=60), st.integers(0, 60))
@example(b"", 0)
@example(b"\x01", 10)
def test_damaged_bytes_are_an_event_or_undecodable_and_nothing_else(noise: bytes, at: int) -> None:
    value = encode(ORDER)
    damaged = value[:at] + noise + value[at + len(noise) :]
    try:
        event = schemas.catalog.decode(damaged)
    except (UndecodableRecord, UnknownSchema):
        return
    assert type(event).__name__ in schemas.__dict__


@given(st.integers(0, len(encode(ORDER)) - 1))
def test_a_value_cut_short_is_undecodable(length: int) -> None:
    with pytest.raises(UndecodableRecord):
        schemas.catalog.decode(encode(ORDER)[:length])


V1: list[dict[str, Any]] = [
    {"name": "sku", "type": "string"},
    {"name": "count", "type": "int"},
    {"name": "note", "type": "string"},
]
V2: list[dict[str, Any]] = [
    {"name": "sku", "type": "string"},
    {"name": "quantity", "type": "long", "aliases": ["count"]},
    {"name": "currency", "type": "string", "default": "EUR"},
]


@dataclass(frozen=True)
class Sold:
    sku: str
    quantity: int
    currency: str


def written_under_v1(folder: Path, values: dict[str, Any]) -> bytes:
    schema = Schema.read(folder / "Sold.v1.avsc")
    buffer = io.BytesIO(schema.prefix)
    buffer.seek(HEADER_LENGTH)
    fastavro.schemaless_writer(buffer, schema.parsed, values)
    return buffer.getvalue()


def test_an_event_of_an_earlier_schema_is_read_as_todays_class(folder: Path) -> None:
    write(folder, "Sold.v1.avsc", V1)
    catalog = declared(folder, V2, Sold)
    value = written_under_v1(folder, {"sku": "a", "count": 3, "note": "gone since"})
    assert catalog.decode(value) == Sold("a", 3, "EUR")
    assert catalog.decode(encode(Sold("a", 3, "CHF"))) == Sold("a", 3, "CHF")


def test_an_earlier_schema_that_cannot_be_read_as_todays_is_undecodable(folder: Path) -> None:
    write(folder, "Sold.v1.avsc", [{"name": "sku", "type": "string"}])
    catalog = declared(
        folder, [{"name": "sku", "type": "int"}], make_dataclass("Sold", [("sku", int)], frozen=True)
    )
    with pytest.raises(UndecodableRecord, match="cannot be read as today's"):
        catalog.decode(written_under_v1(folder, {"sku": "a"}))


def test_an_earlier_schema_alone_declares_no_class(folder: Path) -> None:
    write(folder, "Sold.v1.avsc", V1)
    with pytest.raises(SchemaError, match=r"no Sold\.avsc"):
        Catalog(folder).event(Sold)


def test_a_schema_without_a_class_may_get_one_with_a_deployment(folder: Path) -> None:
    write(folder, "Sold.avsc", V2)
    schema = Schema.read(folder / "Sold.avsc")
    with pytest.raises(UnknownSchema, match="Sold, which has no event class"):
        Catalog(folder).decode(schema.prefix + b"\x02a\x02\x02b")


STRING = [{"name": "value", "type": "string"}]
MISFITS: list[tuple[Any, Any, str]] = [
    (int, "string", "expected str"),
    (str, "int", "expected int"),
    (str, "long", "expected int"),
    (int, "double", "expected float"),
    (str, "boolean", "expected bool"),
    (str, "bytes", "expected bytes"),
    (int, {"type": "enum", "name": "E", "symbols": ["A"]}, "expected str"),
    (str, {"type": "fixed", "name": "F", "size": 2}, "expected bytes"),
    (str | None, "string", "expected str"),
    (str, ["null", "string"], "X | None"),
    (str | int | None, ["null", "string", "int"], "X | None"),
    (str | int, ["string", "int"], "X | None"),
    (int | None, ["null", "string"], "expected str"),
    (list[int], {"type": "array", "items": "int"}, "tuple"),
    (tuple[int, int], {"type": "array", "items": "int"}, "tuple"),
    (tuple[str, ...], {"type": "array", "items": "int"}, "expected int"),
    (dict[str, str], {"type": "map", "values": "int"}, "expected int"),
    (dict[int, int], {"type": "map", "values": "int"}, "dict"),
    (dict, {"type": "map", "values": "int"}, "dict"),
    (str, {"type": "string", "logicalType": "uuid"}, "expected UUID"),
    (int, {"type": "long", "logicalType": "timestamp-millis"}, "expected datetime"),
    (float, {"type": "bytes", "logicalType": "decimal", "precision": 4}, "expected Decimal"),
    (int, {"type": "record", "name": "P", "fields": [{"name": "x", "type": "int"}]}, "frozen dataclass"),
    (
        Point | None,
        {"type": "record", "name": "P", "fields": [{"name": "x", "type": "int"}]},
        "frozen dataclass",
    ),
]


@pytest.mark.parametrize(("python", "avro_type", "expected"), MISFITS)
def test_a_field_that_does_not_fit_its_schema_is_named(
    folder: Path, python: Any, avro_type: Any, expected: str
) -> None:
    cls = make_dataclass("Thing", [("value", python)], frozen=True)
    with pytest.raises(SchemaError, match=rf"Thing\.value.*{expected.replace('|', '[|]')}"):
        declared(folder, [{"name": "value", "type": avro_type}], cls)


def test_a_nested_field_that_does_not_fit_is_named(folder: Path) -> None:
    nested = {"type": "record", "name": "Point", "fields": [{"name": "x", "type": "string"}]}
    cls = make_dataclass("Thing", [("value", tuple[Point, ...])], frozen=True)
    with pytest.raises(SchemaError, match=r"Point\.x.*expected str"):
        declared(folder, [{"name": "value", "type": {"type": "array", "items": nested}}], cls)


CLASSES: list[tuple[Any, str]] = [
    (make_dataclass("Thing", [], frozen=True), "lacks the field 'value'"),
    (make_dataclass("Thing", [("value", str), ("more", int)], frozen=True), "a field 'more'"),
    (make_dataclass("Thing", [("value", str)]), "frozen dataclass"),
    (type("Thing", (), {}), "frozen dataclass"),
    (make_dataclass("Thing", [("value", "Nowhere")], frozen=True), "Nowhere"),
]


@pytest.mark.parametrize(("cls", "expected"), CLASSES)
def test_a_class_that_does_not_fit_its_schema_is_named(folder: Path, cls: type, expected: str) -> None:
    with pytest.raises(SchemaError, match=f"Thing.*{expected}"):
        declared(folder, STRING, cls)


def test_a_record_that_holds_itself_is_refused(folder: Path) -> None:
    fields = [{"name": "next", "type": ["null", "Node"]}]
    with pytest.raises(SchemaError, match="holds itself"):
        declared(folder, fields, Node)


@dataclass(frozen=True)
class Node:
    next: Node | None


def test_a_misspelt_class_is_told_the_closest_schema(folder: Path) -> None:
    write(folder, "OrderPlaced.avsc", STRING)
    with pytest.raises(SchemaError, match="did you mean OrderPlaced"):
        Catalog(folder).event(make_dataclass("OrderPlacd", [("value", str)], frozen=True))


def without(**changed: Any) -> Everything:
    values: dict[str, Any] = {
        "text": "", "whole": 0, "large": 0, "real": 0.0, "yes": True, "raw": b"", "side": "LEFT", "four": b"1234",
        "maybe": None, "point": Point(1), "points": (), "other_point": None, "numbers": (), "by_name": {},
        "id": uuid.UUID(int=1), "day": dt.date(2026, 1, 1), "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "local": dt.datetime(2026, 1, 1), "clock": dt.time(1), "price": decimal.Decimal("1.00"),  # noqa: DTZ001
        "maybe_at": None,
    }  # fmt: skip
    return Everything(**{**values, **changed})


REFUSED: list[tuple[str, Any]] = [
    ("text", 1),
    ("text", b"x"),
    ("text", "\udcff"),
    ("text", None),
    ("whole", 2**31),
    ("whole", -(2**31) - 1),
    ("whole", 1.5),
    ("whole", True),
    ("whole", "1"),
    ("large", 2**63),
    ("large", 1.0),
    ("real", "1"),
    ("yes", 1),
    ("yes", "no"),
    ("raw", "text"),
    ("side", "MIDDLE"),
    ("four", b"12345"),
    ("maybe", 1),
    ("point", None),
    ("point", {"x": 1}),
    ("points", (Point(1), None)),
    ("numbers", (1, 2.5)),
    ("numbers", 5),
    ("by_name", {"a": 1}),
    ("by_name", {1: Point(1)}),
    ("id", "no uuid"),
    ("day", dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
    ("at", dt.datetime(2026, 1, 1)),  # noqa: DTZ001 - that is the point
    ("at", dt.date(2026, 1, 1)),
    ("local", dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
    ("price", decimal.Decimal("1.001")),
    ("price", decimal.Decimal("NaN")),
    ("price", 1.5),
    ("maybe_at", dt.datetime(2026, 1, 1)),  # noqa: DTZ001
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_that_would_not_come_back_as_it_is_is_refused(
    everything_catalog: Catalog, name: str, value: Any
) -> None:
    assert everything_catalog.decode(encode(without())) == without()
    with pytest.raises(SchemaError, match="Everything does not fit its schema"):
        encode(without(**{name: value}))


@pytest.mark.parametrize("call", [encode, type_name])
def test_what_is_no_event_class_is_not_sent(call: Callable[[object], object]) -> None:
    with pytest.raises(SchemaError, match=r"declare it with @catalog\.event"):
        call(Point(1))


def test_a_class_with_slots_or_a_post_init_is_built_through_its_constructor(folder: Path) -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted:
        value: str
        length: int = field(default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.value))

    catalog = declared(folder, [*STRING, {"name": "length", "type": "int"}], Slotted)
    assert catalog.decode(encode(Slotted("abc"))) == Slotted("abc", 3)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no json", "not an Avro schema"),
        ('{"type": "record", "name": "Thing"}', "must define a record"),
        (
            '{"type": "record", "name": "Thing", "fields": [{"name": "x", "type": "strin"}]}',
            "not an Avro schema",
        ),
        (
            '{"type": "record", "name": "Thing", "fields": [{"name": "x", "type": {"type": {}}}]}',
            "not an Avro schema",
        ),
        ('{"type": "record", "name": "Thing", "fields": 5}', "not an Avro schema"),
        ('"string"', "must define a record"),
        ('{"type": "enum", "name": "Thing", "symbols": ["A"]}', "must define a record"),
        ('{"type": "record", "name": "Other", "fields": []}', "must bear the record's name"),
    ],
)
def test_a_file_that_is_no_record_schema_is_named(folder: Path, content: str, expected: str) -> None:
    (folder / "Thing.avsc").write_text(content)
    with pytest.raises(SchemaError, match=rf"Thing\.avsc.*{expected}"):
        Catalog(folder)


def test_one_schema_in_two_files_is_refused(folder: Path) -> None:
    write(folder, "Thing.avsc", STRING)
    write(folder, "Thing.v1.avsc", STRING)
    with pytest.raises(SchemaError, match="repeats"):
        Catalog(folder)


def test_two_current_schemas_of_one_name_are_refused(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    write(folder / "a", "Thing.avsc", STRING)
    write(folder / "b", "Thing.avsc", [{"name": "value", "type": "int"}])
    with pytest.raises(SchemaError, match="Thing"):
        Catalog(folder)


def test_an_event_shows_its_fields() -> None:
    assert fields_of(schemas.StockReserved("order-1", 2)) == {"order_id": "order-1", "quantity": 2}
    assert fields_of(object()) == {}
