"""Fencepost in memory, for unit tests without servers. ``tests/contract`` holds it to what the real ones do."""

from streams.broker.partitioner import partition_of
from streams.testing.harness import Harness
from streams.testing.memory_broker import MemoryBroker
from streams.testing.memory_store import MemoryStore
from streams.testing.memory_tables import MemoryTables

__all__ = ["Harness", "MemoryBroker", "MemoryStore", "MemoryTables", "partition_of"]
