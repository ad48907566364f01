"""Transactions in flight: produced, acknowledged, confirmed.

The position to confirm is the end of the last transaction before which everything is acknowledged. It never
runs ahead of an acknowledgement, so whatever dies, a committed row is still in the log of the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from streams.broker.types import KafkaError, KafkaException, Producer
from streams.errors import RelayBlocked
from streams.points import reach
from streams.relay.rows import Produced


class Transaction:
    """One committed transaction whose records are on their way to the broker."""

    __slots__ = ("_fail", "end", "outstanding")

    def __init__(self, fail: Callable[[KafkaError, Any], None]) -> None:
        self.end = 0  # set by its commit, which comes after its rows
        self.outstanding = 0
        self._fail = fail

    def delivered(self, error: KafkaError | None, message: Any) -> None:
        """Called once per record, in the thread that polls the producer."""
        if error is not None:
            self._fail(error, message)
            return
        self.outstanding -= 1


class Pump:
    """Sends records and knows which position is safe.

    Args:
        producer: idempotent, see ``streams.broker.kafka.producer``.
        confirmed: the position from which on the log will be read.
        while_waiting: called while the broker takes nothing, so that the database is not left without an answer.
    """

    def __init__(self, producer: Producer, confirmed: int, while_waiting: Callable[[], None]) -> None:
        self.confirmed = confirmed
        self.sent = 0
        self._producer = producer
        self._produce = producer.produce
        self._while_waiting = while_waiting
        self._in_flight: deque[Transaction] = deque()
        self._open: Transaction | None = None
        self._failure: RelayBlocked | None = None

    @property
    def idle(self) -> bool:
        """Whether everything that was read is confirmed."""
        return not self._in_flight

    def begin(self) -> None:
        self._open = Transaction(self._refused)
        self._in_flight.append(self._open)

    def send(self, record: Produced) -> None:
        transaction = self._open
        assert transaction is not None, "a row stands between BEGIN and COMMIT"  # noqa: S101 - the protocol's promise
        topic, key, value, headers = record
        transaction.outstanding += 1
        while True:
            try:
                self._produce(topic, value, key, headers=headers, on_delivery=transaction.delivered)
                break
            except KafkaException as error:
                raise self._blocked(topic, key, error.args[0]) from error
            except BufferError:
                # The broker is slower than the log, or away: wait for room, which bounds the memory.
                self.poll(0.1)
                self._while_waiting()
        self.sent += 1

    def commit(self, end: int) -> None:
        if self._open is not None:
            self._open.end = end
            self._open = None

    def seen(self, end: int) -> None:
        """The server has nothing before ``end`` that was not sent here; safe to confirm only when all of it is out."""
        if self.idle:
            self.confirmed = max(self.confirmed, end)

    def poll(self, seconds: float = 0) -> None:
        """Takes acknowledgements in, and moves the confirmed position.

        Raises:
            RelayBlocked: the broker refused a record for good.
        """
        self._producer.poll(seconds)
        if self._failure is not None:
            raise self._failure
        before = self.confirmed
        while self._in_flight and (head := self._in_flight[0]).end and not head.outstanding:
            self.confirmed = head.end
            self._in_flight.popleft()
        if self.confirmed != before:
            reach("relay.acknowledged")

    def flush(self, seconds: float) -> None:
        """Waits until the broker has everything, or the time is over."""
        self._producer.flush(seconds)
        self.poll()

    def _refused(self, error: KafkaError, message: Any) -> None:
        # Kept, not raised: an exception in a callback would surface in the middle of whatever polls next.
        self._failure = self._failure or self._blocked(message.topic(), message.key(), error)

    def _blocked(self, topic: str, key: bytes | None, error: KafkaError) -> RelayBlocked:
        shown = "no key" if key is None else f"key {key[:80]!r}"
        return RelayBlocked(
            f"a record for topic {topic}, {shown}, was refused: {error.str()}; "
            "nothing after it was confirmed, and the relay goes on from there when it is started again"
        )
