"""How a row of a relayed table becomes a record."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from streams.errors import RelayBlocked
from streams.event import (
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TYPE,
    FP_DUE,
    FP_ERROR,
    FP_POSITION,
    FP_VERSION,
    TRACEPARENT,
)
from streams.relay.pgoutput import Columns, Relation

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_INT64 = struct.Struct(">q").unpack
_INT32 = struct.Struct(">i")
# What stands before an array's elements: dimensions, whether there are nulls, their type; then length and first index.
_ARRAY = struct.Struct(">iiI")
_DIMENSION = struct.Struct(">ii")

ProducedHeaders = list[tuple[str, str | bytes | None]]
Produced = tuple[str, bytes | None, bytes | None, ProducedHeaders]
Mapper = Callable[[Columns, str, int], Produced]

EVENT, OUTBOX = "fencepost.event", "fencepost.outbox"
# What Debezium's EventRouter reads by default, and the topic it then sends to
# (https://debezium.io/documentation/reference/stable/transformations/outbox-event-router.html).
_DEBEZIUM = ("id", "aggregatetype", "aggregateid", "payload")
_DEBEZIUM_TOPIC = "outbox.event."
_POSITION_IN_LETTER = b',"position":"'


@dataclass(frozen=True)
class Naming:
    """What the relay adds to a row of the event store."""

    topic_prefix: str
    source: str


def mapper(table: Relation, naming: Naming) -> Mapper:
    """The function from a row to (topic, key, value, headers).

    It takes the row's columns, the position of its transaction with a slash behind it, and the row's place among those
    of its transaction, which stands in for its number in rows that were written before rows had one.

    Raises:
        RelayBlocked: the table is none that can be sent, or lacks a column.
    """
    index = table.index
    try:
        if table.name == EVENT:
            return _event_mapper(index, naming)
        if table.name == OUTBOX:
            return _outbox_mapper(index)
    except KeyError as error:
        raise RelayBlocked(f"the table {table.name} has no column {error}; run: streams migrate") from error
    if all(name in index for name in _DEBEZIUM):
        return _debezium_mapper(table)
    raise RelayBlocked(
        f"the publication holds the table {table.name}, which the relay does not know how to send: it is none of "
        f"fencepost's, and has not the columns of Debezium's outbox ({', '.join(_DEBEZIUM)})"
    )


def _event_mapper(index: dict[str, int], naming: Naming) -> Mapper:
    names = ("resource_type", "resource_id", "version", "id", "type", "payload", "traceparent", "recorded_at")
    kind, key, version, id_, type_, payload, trace, recorded = (index[name] for name in names)
    number = _numbers(index)
    topics: dict[bytes | None, str] = {}
    specversion, source = (CE_SPECVERSION, "1.0"), (CE_SOURCE, naming.source)
    second, second_text = -1 << 63, ""  # before any time there is

    # Run for every event: what each step costs was measured, and so it is written out in one piece.
    def produced(row: Columns, position: str, place: int) -> Produced:
        nonlocal second, second_text
        topic = topics.get(row[kind])
        if topic is None:
            topic = topics[row[kind]] = naming.topic_prefix + _present(row[kind]).decode()
        try:
            (microseconds,) = _INT64(row[recorded])  # type: ignore[arg-type]
            (number_of_events,) = _INT64(row[version])  # type: ignore[arg-type]
            digits = row[id_].hex()  # type: ignore[union-attr]
        except (TypeError, AttributeError) as error:
            raise RelayBlocked(_NULL) from error
        if microseconds // 1_000_000 != second:
            # Rows come in the order of their commits, so thousands of them share a second.
            second = microseconds // 1_000_000
            second_text = _second_text(second)
        headers: ProducedHeaders = [
            specversion,
            source,
            (CE_ID, f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"),
            (CE_TYPE, row[type_]),
            (CE_TIME, f"{second_text}.{microseconds - second * 1_000_000:06d}+00:00"),
            (CE_SUBJECT, row[key]),
            (FP_VERSION, str(number_of_events)),
            (FP_POSITION, f"{position}{number(row, place)}"),
        ]
        if row[trace] is not None:
            headers.append((TRACEPARENT, row[trace]))
        return topic, row[key], row[payload], headers

    return produced


def _outbox_mapper(index: dict[str, int]) -> Mapper:
    names = ("topic", "key", "payload", "header_names", "header_values")
    topic, key, payload, header_names, header_values = (index[name] for name in names)
    number = _numbers(index)

    def produced(row: Columns, position: str, place: int) -> Produced:
        names = [_present(name).decode() for name in array(_present(row[header_names]))]
        values = array(_present(row[header_values]))
        at = f"{position}{number(row, place)}".encode()
        if names and names[-1] == FP_ERROR:
            # A dead letter is its original and the error, and nothing more: the position goes into the error.
            values[-1] = _present(values[-1]).removesuffix(b"}") + _POSITION_IN_LETTER + at + b'"}'
        else:
            names.append(FP_POSITION)
            values.append(at)
        headers: ProducedHeaders = [*zip(names, values, strict=True)]
        return _present(row[topic]).decode(), row[key], row[payload], headers

    return produced


def _debezium_mapper(table: Relation) -> Mapper:
    index = table.index
    id_, kind, key, payload = (index[name] for name in _DEBEZIUM)
    id_text, kind_text, key_text, payload_text = (_text_of(table, name) for name in _DEBEZIUM)

    def produced(row: Columns, position: str, place: int) -> Produced:
        headers: ProducedHeaders = [("id", id_text(row[id_])), (FP_POSITION, f"{position}{place}")]
        topic = _DEBEZIUM_TOPIC + _present(kind_text(row[kind])).decode()
        return topic, key_text(row[key]), payload_text(row[payload]), headers

    return produced


def _numbers(index: dict[str, int]) -> Callable[[Columns, int], int]:
    """What tells a row from all others, the same whichever way it was read."""
    sequence = index.get("sequence")

    def number(row: Columns, place: int) -> int:
        value = None if sequence is None else row[sequence]
        return place if value is None else int.from_bytes(value, "big")

    return number


def _text_of(table: Relation, column: str) -> Callable[[bytes | None], bytes | None]:
    """The function from a column's binary form to the bytes that Debezium sends of it."""
    oid = table.types[table.index[column]]
    form = _TEXT_FORMS.get(oid)
    if form is None:
        raise RelayBlocked(
            f"the column {column} of the table {table.name} has the type with oid {oid}; the relay sends text, varchar, "
            "bytea, json, jsonb, uuid and integers"
        )
    return lambda value: None if value is None else form(value)


def _decimal(value: bytes) -> bytes:
    return b"%d" % int.from_bytes(value, "big", signed=True)


def _as_is(value: bytes) -> bytes:
    return value


def is_letter(headers: ProducedHeaders) -> bool:
    """Whether a record is one that a processor sends back: a retry, or a dead letter."""
    return any(name in (FP_DUE, FP_ERROR) for name, _ in headers[-2:])


def repositioned(record: Produced, position: str) -> Produced:
    """A record that is sent later than its row was read, with the position of what is sent now.

    So positions never fall along a partition, and who looks for the last confirmed one from its end finds it.
    """
    topic, key, value, headers = record
    moved: ProducedHeaders = []
    last = len(headers) - 1
    for place, (name, content) in enumerate(headers):
        number = _lasting(name, content)
        if name == FP_POSITION and number is not None and (place == last or headers[-1][0] != FP_ERROR):
            moved.append((name, position.encode() + number))
        elif name == FP_ERROR and isinstance(content, bytes) and _POSITION_IN_LETTER in content:
            error, _, at = content.rpartition(_POSITION_IN_LETTER)
            moved.append((name, error + _POSITION_IN_LETTER + position.encode() + at.rpartition(b"/")[2]))
        else:
            moved.append((name, content))
    return topic, key, value, moved


def identity(
    topic: str,
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, str | bytes | None]],
) -> bytes:
    """A digest that is the same for the same row, whichever way and however often it is read.

    So without the position of its transaction, which a relay that polls does not know, and with the row's number,
    which tells rows of equal content apart.
    """
    digest = hashlib.blake2b(topic.encode(), digest_size=16)
    for part in (
        key,
        value,
        *(part for name, content in headers for part in (name, _lasting(name, content))),
    ):
        content = part.encode() if isinstance(part, str) else part
        # Lengths, so that no two different records make the same bytes; -1 for what is absent.
        digest.update((-1 if content is None else len(content)).to_bytes(8, "big", signed=True))
        digest.update(content or b"")
    return digest.digest()


def _lasting(name: str, content: str | bytes | None) -> bytes | None:
    if content is None:
        return None
    if isinstance(content, str):
        content = content.encode()
    if name == FP_POSITION:
        return content.rpartition(b"/")[2]
    if name == FP_ERROR:
        error, _, position = content.rpartition(_POSITION_IN_LETTER)
        return error + position.rpartition(b"/")[2]
    return content


def array(value: bytes) -> list[bytes | None]:
    """The elements of a one-dimensional array in binary form.

    Raises:
        RelayBlocked: the bytes are no such array.
    """
    try:
        elements, end = _elements(value)
    except struct.error as error:
        raise RelayBlocked(f"an array of headers cannot be read: {error}") from error
    if end != len(value):
        raise RelayBlocked(
            f"an array of headers cannot be read: {len(value)} bytes, its elements end at {end}"
        )
    return elements


def _elements(value: bytes) -> tuple[list[bytes | None], int]:
    dimensions, _, _ = _ARRAY.unpack_from(value, 0)
    if dimensions == 0:
        return [], _ARRAY.size
    if dimensions != 1:
        raise RelayBlocked(f"an array of headers has {dimensions} dimensions; was the row written by hand?")
    count, _ = _DIMENSION.unpack_from(value, _ARRAY.size)
    offset = _ARRAY.size + _DIMENSION.size
    elements: list[bytes | None] = []
    for _ in range(count):
        (length,) = _INT32.unpack_from(value, offset)
        offset += 4
        elements.append(None if length < 0 else value[offset : offset + length])
        offset += max(length, 0)
    return elements, offset


def uuid_text(value: bytes) -> bytes:
    digits = value.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}".encode()


def _second_text(seconds: int) -> str:
    return (_POSTGRES_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


_NULL = "a column that is NOT NULL arrived as NULL; was the table altered by hand?"


def _present(value: bytes | None) -> bytes:
    if value is None:
        raise RelayBlocked(_NULL)
    return value


_TEXT_FORMS: dict[int, Callable[[bytes], bytes]] = {
    17: _as_is,  # bytea
    20: _decimal,  # int8
    21: _decimal,  # int2
    23: _decimal,  # int4
    25: _as_is,  # text
    114: _as_is,  # json
    1042: _as_is,  # char(n)
    1043: _as_is,  # varchar
    2950: uuid_text,
    3802: lambda value: value[1:],  # jsonb: a version, then the text
}
