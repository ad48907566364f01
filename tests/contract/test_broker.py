"""What the memory broker shares with Kafka, so that a test on the one says something of the other."""

from __future__ import annotations

import pytest

from streams.event import Headers, Record
from streams.settings import Settings
from streams.testing import partition_of
from tests.contract.brokers import PARTITIONS, Kafka, Memory

Broker = Memory | Kafka
NONE: Headers = ()


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.real)])
def broker(request: pytest.FixtureRequest) -> Broker:
    if request.param == "memory":
        return Memory()
    endpoints = request.getfixturevalue("endpoints")
    return Kafka(Settings.load(kafka=endpoints.kafka))


def everything(broker: Broker) -> list[Record]:
    return [record for partition in range(PARTITIONS) for record in broker.read(partition)]


def only(broker: Broker) -> Record:
    (record,) = everything(broker)
    return record


def test_each_key_meets_the_partition_that_murmur2_says(broker: Broker) -> None:
    keys = [
        b"",
        b"k",
        b"ke",
        b"key",
        b"key-1",
        b"\xff\x00\x80",
        "Schlüssel".encode(),
        *(b"%d" % n for n in range(40)),
    ]
    broker.produce(*[(key, b"v", NONE) for key in keys])
    found = {record.key: record.partition for record in everything(broker)}
    assert found == {key: partition_of(key, PARTITIONS) for key in keys}


def test_records_of_a_key_keep_their_order(broker: Broker) -> None:
    broker.produce(*[(b"%d" % (n % 3), b"%d" % n, NONE) for n in range(300)])
    for key in range(3):
        records = broker.read(partition_of(b"%d" % key, PARTITIONS))
        values = [int(record.value or b"") for record in records if record.key == b"%d" % key]
        assert values == list(range(key, 300, 3))


def test_offsets_count_from_zero_and_the_end_is_the_next(broker: Broker) -> None:
    partition = partition_of(b"k", PARTITIONS)
    assert broker.end(partition) == 0
    broker.produce(*[(b"k", b"%d" % n, NONE) for n in range(5)])
    assert broker.end(partition) == 5
    assert [record.offset for record in broker.read(partition)] == [0, 1, 2, 3, 4]


def test_reading_starts_at_the_offset_asked_for(broker: Broker) -> None:
    broker.produce(*[(b"k", b"%d" % n, NONE) for n in range(5)])
    records = broker.read(partition_of(b"k", PARTITIONS), 3)
    assert [(record.offset, record.value) for record in records] == [(3, b"3"), (4, b"4")]


@pytest.mark.parametrize(
    "value", [None, b"", b"\x00", b"x" * 1_000_000], ids=["tombstone", "empty", "nul", "1 MB"]
)
def test_a_value_arrives_as_it_was_sent(broker: Broker, value: bytes | None) -> None:
    broker.produce((b"k", value, NONE))
    assert only(broker).value == value


@pytest.mark.parametrize("key", [None, b"", b"\x00\xff"], ids=["null", "empty", "binary"])
def test_a_key_arrives_as_it_was_sent(broker: Broker, key: bytes | None) -> None:
    broker.produce((key, b"v", NONE))
    assert only(broker).key == key


def test_headers_arrive_byte_for_byte_and_in_order(broker: Broker) -> None:
    headers: Headers = (
        ("a", b"\x00\xff"),
        ("b", b""),
        ("a", b"again"),
        ("without a value", None),
        ("ü", b"x"),
    )
    broker.produce((b"k", b"v", headers))
    assert only(broker).headers == headers


def test_a_record_without_headers_has_none(broker: Broker) -> None:
    broker.produce((b"k", b"v", NONE))
    assert only(broker).headers == ()


def test_a_record_tells_when_it_was_sent(broker: Broker) -> None:
    broker.produce((b"k", b"v", NONE))
    assert only(broker).timestamp > 1_700_000_000_000
