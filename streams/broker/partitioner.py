"""Which partition a key belongs to."""

from __future__ import annotations

_SEED, _MULTIPLIER, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Austin Appleby's MurmurHash2, 32 bits, with the seed of Kafka's ``Utils.murmur2``, unsigned."""
    value = _SEED ^ len(data)
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        block = int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER & _MASK
        block = (block ^ block >> 24) * _MULTIPLIER & _MASK
        value = (value * _MULTIPLIER & _MASK) ^ block
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, as Kafka's Java producer and librdkafka's ``murmur2_random`` choose it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
