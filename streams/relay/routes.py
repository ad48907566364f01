"""Where a record goes: the partition of its key, looked up rather than computed wherever a key comes again."""

from __future__ import annotations

from collections.abc import Callable

from streams.broker.partitioner import partition_of

_KEYS_KEPT = 100_000


class Routes:
    """The partitions of the topics that one session sends to.

    The producer's own partitioner would choose the same; knowing the choice is what spares an acknowledgement for
    every record (``streams.relay.pump``).

    Args:
        partitions: answers how many partitions a topic has.
    """

    def __init__(self, partitions: Callable[[str], int]) -> None:
        self._partitions = partitions
        self._known: dict[str, dict[bytes | None, int]] = {}
        self._unkeyed = 0

    def partition(self, topic: str, key: bytes | None) -> int:
        """The partition of a record; where it has no key, one that changes from burst to burst."""
        try:
            return self._known[topic][key]
        except KeyError:
            return self._find(topic, key)

    def _find(self, topic: str, key: bytes | None) -> int:
        if key is None:
            return self._unkeyed % self._partitions(topic)
        keys = self._known.setdefault(topic, {})
        if len(keys) >= _KEYS_KEPT:
            keys.clear()
        keys[key] = partition_of(key, self._partitions(topic))
        return keys[key]

    def turn(self) -> None:
        """Lets the next records without a key go elsewhere."""
        self._unkeyed += 1

    def forget(self) -> None:
        """Some topic has another number of partitions now."""
        self._known.clear()
