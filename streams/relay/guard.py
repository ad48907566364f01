"""Which partitions the broker keeps in order for this producer.

A broker checks the sequence of a producer's batches only where it has taken one of them: into a partition that is new
to the producer it takes any batch, also the second of two of which it has just refused the first. So the first record
of each partition is sent alone, and from its acknowledgement on nothing can overtake a refused record there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

# Brokers forget a producer that was silent for producer.id.expiration.ms, a day by default.
_HOLDS_SECONDS = 3_600.0
_KEYS_KEPT = 100_000


class Guard:
    """Learns from acknowledgements which keys are safe to send without waiting.

    Args:
        partitions: answers how many partitions a topic has.
    """

    def __init__(self, partitions: Callable[[str], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._partitions, self._clock = partitions, clock
        self._until = clock() + _HOLDS_SECONDS
        self._guarded: dict[str, set[int]] = defaultdict(set)
        self._keys: dict[str, set[bytes]] = defaultdict(set)
        self._whole: set[str] = set()

    def covers(self, topic: str, key: bytes | None) -> bool:
        """Whether a record may be followed by others before it is acknowledged; without a key there is no order."""
        return topic in self._whole or key is None or key in self._keys[topic]

    def learn(self, topic: str, key: bytes, partition: int) -> None:
        """The broker has taken a record of this key, into this partition."""
        guarded, keys = self._guarded[topic], self._keys[topic]
        guarded.add(partition)
        if len(guarded) >= self._partitions(topic):
            self._whole.add(topic)
            keys.clear()
        elif len(keys) < _KEYS_KEPT:
            keys.add(key)

    def expire(self) -> None:
        """Forgets everything once in a while, long before the broker does."""
        if self._clock() >= self._until:
            self._until = self._clock() + _HOLDS_SECONDS
            for learnt in (self._guarded, self._keys, self._whole):
                learnt.clear()
