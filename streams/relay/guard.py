"""Which partitions the broker keeps in order for this producer.

A broker checks the sequence of a producer's batches only where it has taken one of them: into a partition that is new
to the producer it takes any batch, also the second of two of which it has just refused the first. So the first record
of each partition is sent alone, and from its acknowledgement on nothing can overtake a refused record there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from streams.broker.kafka import Place

# Brokers forget a producer that was silent for producer.id.expiration.ms, a day by default.
_HOLDS_SECONDS = 3_600.0


class Guard:
    """Learns from acknowledgements which partitions are safe to send into without waiting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + _HOLDS_SECONDS
        self.covered: set[Place] = set()

    def learn(self, place: Place) -> None:
        """The broker has taken a record into this partition."""
        self.covered.add(place)

    def expire(self) -> None:
        """Forgets everything once in a while, long before the broker does."""
        if self._clock() >= self._until:
            self._until = self._clock() + _HOLDS_SECONDS
            self.covered.clear()
