"""The bare loop of a relay in Python: ``python -m tests.bench.limit TOPIC SLOT``.

It reads the slot, takes the rows apart, produces them with three headers and counts the acknowledgements. It
confirms nothing, understands nothing but inserts into the event store and keeps no promise, so that what it does
is what the language and the two clients cost.
"""

from __future__ import annotations

import select
import struct
import sys
from typing import Any

import psycopg
from confluent_kafka import Producer

from streams.settings import Settings
from tests.bench.backlog import PUBLICATION

_START = (
    "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names '{}', binary 'true')".format
)
_COUNT = struct.Struct(">H").unpack_from
_LENGTH = struct.Struct(">I").unpack_from
_ROW, _COMMIT, _NULL = ord("I"), ord("C"), ord("n")
# The kind of a message stands behind the header of its chunk, the columns behind their table and their count.
_KIND, _COLUMNS = 25, 31
_KEY, _VERSION, _ID, _TYPE, _PAYLOAD = 1, 2, 3, 4, 5
_POLL_AFTER_COMMITS = 100


def main(topic: str, slot: str) -> None:
    settings = Settings.load()
    producer = Producer(
        {
            "bootstrap.servers": settings.kafka,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": 2,
            "message.max.bytes": 16 * 1024 * 1024,
            "queue.buffering.max.kbytes": 128 * 1024,
        }
    )
    with psycopg.connect(settings.database_url, replication="database", autocommit=True) as connection:
        connection.execute(_START(slot, PUBLICATION).encode())
        relay(connection.pgconn, producer, topic)


def relay(log: Any, producer: Producer, topic: str) -> None:
    """Never returns; whoever started this process ends it."""
    log.nonblocking = 1
    acknowledged = commits = 0

    def delivered(error: Any, _message: Any) -> None:
        nonlocal acknowledged
        if error is not None:
            raise RuntimeError(error)
        acknowledged += 1

    while True:
        length, data = log.get_copy_data(1)
        if length == 0:
            producer.poll(0)
            select.select([log.socket], [], [], 0.002)
            log.consume_input()
            continue
        message = bytes(data)
        kind = message[_KIND] if message[0] == ord("w") else 0
        if kind == _ROW:
            row = columns(message)
            headers = [("id", row[_ID]), ("type", row[_TYPE]), ("version", row[_VERSION])]
            produce(producer, topic, row, headers, delivered)
        elif kind == _COMMIT:
            commits += 1
            if commits % _POLL_AFTER_COMMITS == 0:
                producer.poll(0)


def columns(message: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    (count,) = _COUNT(message, _COLUMNS)
    offset = _COLUMNS + 2
    for _ in range(count):
        if message[offset] == _NULL:
            found.append(None)
            offset += 1
        else:
            (length,) = _LENGTH(message, offset + 1)
            offset += 5 + length
            found.append(message[offset - length : offset])
    return found


def produce(producer: Producer, topic: str, row: list[bytes | None], headers: Any, delivered: Any) -> None:
    while True:
        try:
            producer.produce(topic, row[_PAYLOAD], row[_KEY], headers=headers, on_delivery=delivered)
        except BufferError:
            producer.poll(0.01)
        else:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
