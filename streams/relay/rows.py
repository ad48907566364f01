"""How a row of a relayed table becomes a record."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from streams.errors import RelayBlocked
from streams.event import (
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TYPE,
    FP_ERROR,
    FP_POSITION,
    FP_VERSION,
    TRACEPARENT,
)
from streams.relay.pgoutput import Columns, Relation

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_INT64 = struct.Struct(">q")
_INT32 = struct.Struct(">i")
# What stands before an array's elements: dimensions, whether there are nulls, their type; then length and first index.
_ARRAY = struct.Struct(">iiI")
_DIMENSION = struct.Struct(">ii")

Produced = tuple[str, bytes | None, bytes | None, list[tuple[str, str | bytes | None]]]
Mapper = Callable[[Columns, bytes], Produced]


@dataclass(frozen=True)
class Naming:
    """What the relay adds to a row of the event store."""

    topic_prefix: str
    source: str


def mapper(table: Relation, naming: Naming) -> Mapper:
    """The function from a row's columns and its position to (topic, key, value, headers).

    Raises:
        RelayBlocked: the table is none of ours, or lacks a column.
    """
    build = {"fencepost.event": _event_mapper, "fencepost.outbox": _outbox_mapper}.get(table.name)
    if build is None:
        raise RelayBlocked(
            f"the publication holds the table {table.name}, which the relay does not know how to send"
        )
    try:
        return build(table.index, naming)
    except KeyError as error:
        raise RelayBlocked(f"the table {table.name} has no column {error}; run: streams migrate") from error


def _event_mapper(index: dict[str, int], naming: Naming) -> Mapper:
    names = ("resource_type", "resource_id", "version", "id", "type", "payload", "traceparent", "recorded_at")
    kind, key, version, id_, type_, payload, trace, recorded = (index[name] for name in names)
    topics: dict[bytes, str] = {}
    fixed = [(CE_SPECVERSION, b"1.0"), (CE_SOURCE, naming.source.encode())]

    def produced(row: Columns, position: bytes) -> Produced:
        resource_type = _present(row[kind])
        topic = topics.get(resource_type)
        if topic is None:
            topic = topics[resource_type] = naming.topic_prefix + resource_type.decode()
        headers: list[tuple[str, str | bytes | None]] = [
            *fixed,
            (CE_ID, uuid_text(_present(row[id_]))),
            (CE_TYPE, row[type_]),
            (CE_TIME, time_text(_present(row[recorded]))),
            (CE_SUBJECT, row[key]),
            (FP_VERSION, b"%d" % int.from_bytes(_present(row[version]), "big")),
            (FP_POSITION, position),
        ]
        if row[trace] is not None:
            headers.append((TRACEPARENT, row[trace]))
        return topic, row[key], row[payload], headers

    return produced


def _outbox_mapper(index: dict[str, int], naming: Naming) -> Mapper:  # noqa: ARG001 - one signature for all tables
    names = ("topic", "key", "payload", "header_names", "header_values")
    topic, key, payload, header_names, header_values = (index[name] for name in names)

    def produced(row: Columns, position: bytes) -> Produced:
        names = [_present(name).decode() for name in array(_present(row[header_names]))]
        values = array(_present(row[header_values]))
        if names and names[-1] == FP_ERROR:
            # A dead letter is its original and the error, and nothing more: the position goes into the error.
            values[-1] = _present(values[-1]).removesuffix(b"}") + b',"position":"' + position + b'"}'
        else:
            names.append(FP_POSITION)
            values.append(position)
        headers: list[tuple[str, str | bytes | None]] = [*zip(names, values, strict=True)]
        return _present(row[topic]).decode(), row[key], row[payload], headers

    return produced


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


def time_text(value: bytes) -> bytes:
    """A timestamptz in RFC 3339, microseconds, UTC."""
    (microseconds,) = _INT64.unpack(value)
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{_second_text(seconds)}.{fraction:06d}+00:00".encode()


@lru_cache(maxsize=16)
def _second_text(seconds: int) -> str:
    # Rows come in the order of their commits, so thousands of them share a second.
    return (_POSTGRES_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


def _present(value: bytes | None) -> bytes:
    if value is None:
        raise RelayBlocked("a column that is NOT NULL arrived as NULL; was the table altered by hand?")
    return value
