"""The messages of PostgreSQL's logical replication stream, plugin pgoutput, protocol 1, binary columns.

Formats: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from streams.errors import RelayBlocked

KEEPALIVE = ord("k")
# What stands before every other message: 'w', then start, end and send time of the chunk.
XLOG_HEADER = 25
_BINARY, _NULL = ord("b"), ord("n")
INSERT, BEGIN, COMMIT, RELATION = b"IBCR"

_BEGIN = struct.Struct(">Q")
_COMMIT_END = struct.Struct(">xQQ")
_KEEPALIVE = struct.Struct(">QqB")
_STATUS = struct.Struct(">cQQQqB")
_RELATION = struct.Struct(">I")
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">H")
_TYPE = struct.Struct(">Ii")

Columns = list[bytes | None]


@dataclass(frozen=True)
class Relation:
    """A table as the stream announces it: before its first row, and again whenever its columns change."""

    oid: int
    name: str
    columns: tuple[str, ...]
    types: tuple[int, ...] = field(default=(), compare=False)

    @property
    def index(self) -> dict[str, int]:
        return {column: place for place, column in enumerate(self.columns)}


def begin_position(message: bytes) -> int:
    """The commit position of the transaction that begins here."""
    (position,) = _BEGIN.unpack_from(message, XLOG_HEADER + 1)
    return int(position)


def commit_end(message: bytes) -> int:
    """The position after the commit: what to confirm once the transaction is safe elsewhere."""
    _, end = _COMMIT_END.unpack_from(message, XLOG_HEADER + 1)
    return int(end)


def keepalive(message: bytes) -> tuple[int, bool]:
    """How far the server has sent, and whether it wants an answer now."""
    end, _, reply = _KEEPALIVE.unpack_from(message, 1)
    return end, bool(reply)


def status_update(position: int) -> bytes:
    """Tells the server that everything before a position is safe, so that it may drop that part of the log."""
    return _STATUS.pack(b"r", position, position, position, 0, 0)


def relation(message: bytes) -> Relation:
    """The table that is announced.

    Raises:
        RelayBlocked: the message ends early.
    """
    try:
        return _relation(message)
    except (struct.error, IndexError, ValueError) as error:
        raise RelayBlocked(f"the announcement of a table is cut short: {error}") from error


def inserted(message: bytes) -> tuple[int, Columns]:
    """The table's oid and the new row's columns, each in PostgreSQL's binary form.

    Raises:
        RelayBlocked: a column is not in binary, so a type of the table has no binary form; or the message ends early.
    """
    columns: Columns = []
    append, length_at = columns.append, _LENGTH.unpack_from
    try:
        (oid,) = _RELATION.unpack_from(message, XLOG_HEADER + 1)
        (count,) = _COUNT.unpack_from(message, XLOG_HEADER + 6)
        offset = XLOG_HEADER + 8
        for _ in range(count):
            kind = message[offset]
            if kind == _BINARY:
                start = offset + 5
                offset = start + length_at(message, offset + 1)[0]
                append(message[start:offset])
            elif kind == _NULL:
                append(None)
                offset += 1
            else:
                raise RelayBlocked(
                    f"a column arrived in format {chr(kind)!r}; the stream was started with binary columns"
                )
    except (struct.error, IndexError) as error:
        raise RelayBlocked(f"a row is cut short: {error}") from error
    # A slice beyond the end is no error, and would pass for a shorter value.
    if offset != len(message):
        raise RelayBlocked(
            f"a row is cut short, or too long: {len(message)} bytes, its columns end at {offset}"
        )
    return oid, columns


def _relation(message: bytes) -> Relation:
    offset = XLOG_HEADER + 1
    (oid,) = _RELATION.unpack_from(message, offset)
    schema, offset = _text(message, offset + 4)
    name, offset = _text(message, offset)
    (count,) = _COUNT.unpack_from(message, offset + 1)
    offset += 3
    columns, types = [], []
    for _ in range(count):
        column, offset = _text(message, offset + 1)
        columns.append(column)
        types.append(_TYPE.unpack_from(message, offset)[0])
        offset += _TYPE.size
    return Relation(oid, f"{schema}.{name}", tuple(columns), tuple(types))


def position_text(position: int) -> str:
    """A log position the way PostgreSQL prints it: ``16/B374D848``."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def position_from_text(text: str) -> int:
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def _text(message: bytes, offset: int) -> tuple[str, int]:
    end = message.index(0, offset)
    return message[offset:end].decode(), end + 1
