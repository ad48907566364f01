"""The relay's reading of PostgreSQL's log, on frames built by hand. What it does not understand, it stops at."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import RelayBlocked
from streams.relay import pgoutput
from streams.relay.pgoutput import Columns

positions = st.integers(0, 2**64 - 1)


def chunk(body: bytes) -> bytes:
    """A message as the stream wraps it: 'w', then start, end and time."""
    return b"w" + struct.pack(">QQq", 1, 2, 3) + body


def insert(columns: Columns, oid: int = 16_400) -> bytes:
    body = b"".join(
        b"n" if value is None else b"b" + struct.pack(">I", len(value)) + value for value in columns
    )
    return chunk(b"I" + struct.pack(">I", oid) + b"N" + struct.pack(">H", len(columns)) + body)


def relation(name: str, *columns: str, oid: int = 16_400, schema: str = "fencepost") -> bytes:
    body = b"".join(b"\x01" + column.encode() + b"\x00" + struct.pack(">Ii", 25, -1) for column in columns)
    names = schema.encode() + b"\x00" + name.encode() + b"\x00"
    return chunk(b"R" + struct.pack(">I", oid) + names + b"d" + struct.pack(">H", len(columns)) + body)


@given(positions)
def test_begin_tells_the_commits_position(position: int) -> None:
    message = chunk(b"B" + struct.pack(">QqI", position, 0, 7))
    assert message[pgoutput.XLOG_HEADER] == pgoutput.BEGIN
    assert pgoutput.begin_position(message) == position


@given(positions, positions)
def test_commit_tells_the_position_after_it(position: int, end: int) -> None:
    message = chunk(b"C\x00" + struct.pack(">QQq", position, end, 0))
    assert message[pgoutput.XLOG_HEADER] == pgoutput.COMMIT
    assert pgoutput.commit_end(message) == end


@pytest.mark.parametrize("wanted", [True, False])
def test_a_keepalive_tells_the_servers_position_and_whether_it_wants_an_answer(wanted: bool) -> None:
    message = b"k" + struct.pack(">QqB", 2**40 + 1, 0, wanted)
    assert message[0] == pgoutput.KEEPALIVE
    assert pgoutput.keepalive(message) == (2**40 + 1, wanted)


def test_a_status_update_confirms_one_position_as_written_flushed_and_applied() -> None:
    kind, written, flushed, applied, _, reply = struct.unpack(">cQQQqB", pgoutput.status_update(2**40 + 1))
    assert (kind, written, flushed, applied, reply) == (b"r", 2**40 + 1, 2**40 + 1, 2**40 + 1, 0)


def test_a_relation_names_its_table_and_columns() -> None:
    found = pgoutput.relation(relation("event", "id", "größe"))
    assert (found.oid, found.name, found.columns) == (16_400, "fencepost.event", ("id", "größe"))
    assert found.index == {"id": 0, "größe": 1}


def test_a_relation_may_have_no_columns() -> None:
    assert pgoutput.relation(relation("event")).columns == ()


@given(st.lists(st.none() | st.binary(max_size=40), max_size=10))
def test_an_insert_holds_its_columns_byte_for_byte(columns: Columns) -> None:
    assert pgoutput.inserted(insert(columns)) == (16_400, columns)


def test_an_insert_may_hold_a_megabyte() -> None:
    assert pgoutput.inserted(insert([b"x" * 1_000_000, b""])) == (16_400, [b"x" * 1_000_000, b""])


@pytest.mark.parametrize("kind", [b"t", b"u", b"?"])
def test_a_column_in_another_format_blocks_the_relay(kind: bytes) -> None:
    message = insert([b"1"]).replace(b"b\x00\x00\x00\x011", kind + b"\x00\x00\x00\x011")
    with pytest.raises(RelayBlocked, match="format"):
        pgoutput.inserted(message)


WHOLE_INSERT = insert([b"abc", None, b"defg"])
WHOLE_RELATION = relation("event", "id", "payload")


@pytest.mark.parametrize("length", range(pgoutput.XLOG_HEADER + 1, len(WHOLE_INSERT)))
def test_an_insert_cut_short_blocks_the_relay_and_makes_no_shorter_value(length: int) -> None:
    with pytest.raises(RelayBlocked, match="cut short"):
        pgoutput.inserted(WHOLE_INSERT[:length])


@pytest.mark.parametrize("length", range(pgoutput.XLOG_HEADER + 1, len(WHOLE_RELATION)))
def test_a_relation_cut_short_blocks_the_relay(length: int) -> None:
    with pytest.raises(RelayBlocked, match="cut short"):
        pgoutput.relation(WHOLE_RELATION[:length])


def test_bytes_after_the_last_column_block_the_relay() -> None:
    with pytest.raises(RelayBlocked):
        pgoutput.inserted(WHOLE_INSERT + b"\x00")


@given(positions)
def test_a_position_is_printed_as_postgresql_prints_it(position: int) -> None:
    assert pgoutput.position_from_text(pgoutput.position_text(position)) == position


def test_the_printed_form_of_a_position() -> None:
    assert pgoutput.position_text(0x16_B374D848) == "16/B374D848"
    assert pgoutput.position_text(0) == "0/0"
