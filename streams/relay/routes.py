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
        self._counts: dict[str, int] = {}
        self._known: dict[str, dict[bytes | None, int]] = {}
        self._unkeyed = 0

    def partition(self, topic: str, key: bytes | None) -> int:
        """The partition of a record; where it has no key, one that changes from burst to burst."""
        try:
            return self._known[topic][key]
        except KeyError:
            return self._find(topic, key)

    def _find(self, topic: str, key: bytes | None) -> int:
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = self._partitions(topic)
        if key is None:
            return self._unkeyed % count
        keys = self._known.setdefault(topic, {})
        if len(keys) >= _KEYS_KEPT:
            keys.clear()
        keys[key] = partition_of(key, count)
        return keys[key]

    def turn(self) -> None:
        """Lets the next records without a key go elsewhere."""
        self._unkeyed += 1

    @property
    def outdated(self) -> bool:
        """Whether a topic has another number of partitions than its records were sent by."""
        return any(self._partitions(topic) != count for topic, count in self._counts.items())

    def forget(self) -> None:
        """The numbers of partitions are taken anew."""
        self._counts.clear()
        self._known.clear()
