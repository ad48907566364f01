"""How a row of the event store or the outbox becomes a record."""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import RelayBlocked
from streams.event import as_headers
from streams.relay.pgoutput import Columns, Relation
from streams.relay.rows import Naming, array, identity, mapper, uuid_text

NAMING = Naming("events.", "billing")
EVENT = ("resource_type", "resource_id", "version", "id", "type", "payload", "traceparent", "recorded_at")
OUTBOX = ("id", "topic", "key", "payload", "header_names", "header_values", "created_at")
ID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")


def table(name: str, *columns: str) -> Relation:
    return Relation(1, name, columns, (25,) * len(columns))


def binary_array(elements: list[bytes | None], oid: int = 25) -> bytes:
    """PostgreSQL's array_send: dimensions, null flag, element type, then length and lower bound."""
    if not elements:
        return struct.pack(">iiI", 0, 0, oid)
    head = struct.pack(">iiIii", 1, None in elements, oid, len(elements), 1)
    return head + b"".join(
        struct.pack(">i", -1) if element is None else struct.pack(">i", len(element)) + element
        for element in elements
    )


def event_row(**changed: bytes | None) -> Columns:
    row: dict[str, bytes | None] = {
        "resource_type": b"order",
        "resource_id": b"order-1",
        "version": struct.pack(">q", 7),
        "id": ID.bytes,
        "type": b"OrderPaid",
        "payload": b"\xc3\x01payload",
        "traceparent": None,
        "recorded_at": struct.pack(">q", 0),
    }
    return list({**row, **changed}.values())


def outbox_row(names: list[bytes | None], values: list[bytes | None], **changed: bytes | None) -> Columns:
    row: dict[str, bytes | None] = {
        "id": ID.bytes,
        "topic": b"notifications",
        "key": b"k",
        "payload": b"v",
        "header_names": binary_array(names),
        "header_values": binary_array(values, 17),
        "created_at": b"",
    }
    return list({**row, **changed}.values())


def test_an_event_goes_to_its_resources_topic_under_its_key() -> None:
    topic, key, value, headers = mapper(table("fencepost.event", *EVENT), NAMING)(event_row(), "0/1A/", 1)
    assert (topic, key, value) == ("events.order", b"order-1", b"\xc3\x01payload")
    assert dict(as_headers(headers)) == {
        "ce_specversion": b"1.0",
        "ce_source": b"billing",
        "ce_id": str(ID).encode(),
        "ce_type": b"OrderPaid",
        "ce_time": b"2000-01-01T00:00:00.000000+00:00",
        "ce_subject": b"order-1",
        "fp_version": b"7",
        "fp_position": b"0/1A/1",
    }


def test_a_trace_travels_under_its_bare_name() -> None:
    *_, headers = mapper(table("fencepost.event", *EVENT), NAMING)(
        event_row(traceparent=b"00-1-2-01"), "0/1/", 1
    )
    assert headers[-1] == ("traceparent", b"00-1-2-01")


def test_columns_may_stand_in_any_order() -> None:
    reversed_row = list(reversed(event_row()))
    there = mapper(table("fencepost.event", *reversed(EVENT)), NAMING)(reversed_row, "0/1/", 1)
    assert there == mapper(table("fencepost.event", *EVENT), NAMING)(event_row(), "0/1/", 1)


def test_an_outbox_row_goes_where_it_says_byte_for_byte() -> None:
    row = outbox_row([b"ce_id", b"none", b"ce_id"], [b"\x00\xff", None, b""])
    topic, key, value, headers = mapper(table("fencepost.outbox", *OUTBOX), NAMING)(row, "0/1A/", 2)
    assert (topic, key, value) == ("notifications", b"k", b"v")
    assert headers == [("ce_id", b"\x00\xff"), ("none", None), ("ce_id", b""), ("fp_position", b"0/1A/2")]


def test_a_position_that_a_message_brings_is_kept_and_its_own_stands_behind_it() -> None:
    row = outbox_row([b"fp_position"], [b"0/1/1"])
    *_, headers = mapper(table("fencepost.outbox", *OUTBOX), NAMING)(row, "0/FF/", 1)
    assert headers == [("fp_position", b"0/1/1"), ("fp_position", b"0/FF/1")]


def test_a_dead_letter_carries_its_position_inside_its_one_error_header() -> None:
    row = outbox_row([b"fp_position", b"fp_error"], [b"0/1/1", b'{"job":7}'])
    *_, headers = mapper(table("fencepost.outbox", *OUTBOX), NAMING)(row, "0/FF/", 1)
    assert headers == [("fp_position", b"0/1/1"), ("fp_error", b'{"job":7,"position":"0/FF/1"}')]


@pytest.mark.parametrize("value", [None, b""])
def test_a_tombstone_and_an_empty_value_are_two_things(value: bytes | None) -> None:
    row = outbox_row([], [], key=value, payload=value)
    _, key, sent, _ = mapper(table("fencepost.outbox", *OUTBOX), NAMING)(row, "0/1/", 1)
    assert (key, sent) == (value, value)


def test_a_row_with_a_number_carries_it_instead_of_its_place_in_the_transaction() -> None:
    numbered = table("fencepost.event", *EVENT, "sequence")
    *_, headers = mapper(numbered, NAMING)([*event_row(), struct.pack(">q", 4711)], "0/FF/", 1)
    assert dict(as_headers(headers))["fp_position"] == b"0/FF/4711"


def test_a_row_from_before_rows_had_numbers_carries_its_place() -> None:
    numbered = table("fencepost.event", *EVENT, "sequence")
    *_, headers = mapper(numbered, NAMING)([*event_row(), None], "0/FF/", 3)
    assert dict(as_headers(headers))["fp_position"] == b"0/FF/3"


DEBEZIUM = {"id": 2950, "aggregatetype": 1043, "aggregateid": 1043, "type": 1043, "payload": 3802}


def debezium_table(**types: int) -> Relation:
    return Relation(1, "public.outbox", tuple(DEBEZIUM), tuple({**DEBEZIUM, **types}.values()))


def test_a_table_laid_out_for_debezium_goes_where_its_router_sends_it() -> None:
    row: Columns = [ID.bytes, b"order", b"o-1", b"OrderPlaced", b'\x01{"n": 1}']
    topic, key, value, headers = mapper(debezium_table(), NAMING)(row, "0/FF/", 2)
    assert (topic, key, value) == ("outbox.event.order", b"o-1", b'{"n": 1}')
    assert as_headers(headers) == (("id", str(ID).encode()), ("fp_position", b"0/FF/2"))


def test_columns_of_a_debezium_table_may_be_numbers_bytes_and_null() -> None:
    row: Columns = [struct.pack(">q", -7), b"order", struct.pack(">i", 42), b"x", None]
    made = mapper(debezium_table(id=20, aggregateid=23, payload=17), NAMING)(row, "0/FF/", 1)
    assert made[:3] == ("outbox.event.order", b"42", None)
    assert made[3][0] == ("id", b"-7")


def test_a_column_of_a_type_that_cannot_be_sent_blocks_the_relay() -> None:
    with pytest.raises(RelayBlocked, match=r"payload of the table public\.outbox has the type with oid 600"):
        mapper(debezium_table(payload=600), NAMING)


def sent(position: bytes, value: bytes = b"v") -> bytes:
    return identity("t", b"k", value, [("ce_id", b"1"), ("fp_position", position)])


def test_a_row_is_the_same_wherever_in_the_log_it_was_read() -> None:
    assert sent(b"0/FF/7") == sent(b"0/100/7")
    assert sent(b"0/FF/7") != sent(b"0/FF/8")
    assert sent(b"0/FF/7") != sent(b"0/FF/7", b"w")


def test_a_letter_is_the_same_wherever_in_the_log_it_was_read() -> None:
    def letter(position: bytes) -> bytes:
        return identity("t", b"k", b"v", [("fp_error", b'{"job":7,"position":"' + position + b'"}')])

    assert letter(b"0/FF/7") == letter(b"0/100/7")
    assert letter(b"0/FF/7") != letter(b"0/FF/8")


@given(
    st.lists(st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3)), max_size=3), st.integers(0, 2)
)
def test_no_two_different_records_have_one_identity(
    headers: list[tuple[str, bytes | None]], cut: int
) -> None:
    whole = identity("t", b"k", b"v", headers)
    assert whole != identity("t", b"k", None, headers)
    assert whole != identity("t", b"kv", b"", headers)
    if headers[cut:] and headers[:cut] + headers[cut + 1 :] != headers:
        assert whole != identity("t", b"k", b"v", headers[:cut] + headers[cut + 1 :])


def test_a_table_that_is_not_ours_blocks_the_relay() -> None:
    with pytest.raises(RelayBlocked, match=r"public\.orders"):
        mapper(table("public.orders", "id"), NAMING)


def test_a_table_without_a_column_blocks_the_relay() -> None:
    with pytest.raises(RelayBlocked, match=r"recorded_at.*streams migrate"):
        mapper(table("fencepost.event", *EVENT[:-1]), NAMING)


@pytest.mark.parametrize("column", ["resource_type", "id", "version", "recorded_at"])
def test_a_null_where_none_can_be_blocks_the_relay(column: str) -> None:
    with pytest.raises(RelayBlocked, match="NOT NULL"):
        mapper(table("fencepost.event", *EVENT), NAMING)(event_row(**{column: None}), "0/1/", 1)


@given(st.uuids())
def test_a_uuid_is_printed_as_python_prints_it(value: uuid.UUID) -> None:
    assert uuid_text(value.bytes) == str(value).encode()


@given(st.lists(st.none() | st.binary(max_size=20), max_size=10))
def test_an_array_holds_its_elements(elements: list[bytes | None]) -> None:
    assert array(binary_array(elements)) == elements


@given(st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)))  # noqa: DTZ001 - bounds have no zone
def test_a_time_is_rfc_3339_to_the_microsecond(naive: datetime) -> None:
    moment = naive.replace(tzinfo=UTC)
    microseconds = (moment - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    row = event_row(recorded_at=struct.pack(">q", microseconds))
    *_, headers = mapper(table("fencepost.event", *EVENT), NAMING)(row, "0/1/", 1)
    text = dict(headers)["ce_time"]
    assert isinstance(text, str)
    assert datetime.fromisoformat(text) == moment


def test_times_of_several_seconds_do_not_borrow_from_each_other() -> None:
    made = mapper(table("fencepost.event", *EVENT), NAMING)
    found = []
    for microseconds in (-1, 0, 999_999, 1_000_000, 5):
        *_, headers = made(event_row(recorded_at=struct.pack(">q", microseconds)), "0/1/", 1)
        found.append(dict(headers)["ce_time"])
    assert found == [
        "1999-12-31T23:59:59.999999+00:00",
        "2000-01-01T00:00:00.000000+00:00",
        "2000-01-01T00:00:00.999999+00:00",
        "2000-01-01T00:00:01.000000+00:00",
        "2000-01-01T00:00:00.000005+00:00",
    ]


TRUNCATED = binary_array([b"abc", b"de"])


@pytest.mark.parametrize("length", range(len(TRUNCATED)))
def test_an_array_cut_short_blocks_the_relay(length: int) -> None:
    with pytest.raises(RelayBlocked, match="array"):
        array(TRUNCATED[:length])


def test_an_array_of_arrays_blocks_the_relay() -> None:
    with pytest.raises(RelayBlocked, match="array"):
        array(struct.pack(">iiIiiii", 2, 0, 25, 1, 1, 1, 1) + struct.pack(">i", 1) + b"x")
