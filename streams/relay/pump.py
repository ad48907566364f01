"""Transactions in flight: produced, acknowledged, confirmed.

The position to confirm is the end of the last transaction before which everything is acknowledged. It never
runs ahead of an acknowledgement, so whatever dies, a committed row is still in the log of the database.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from streams.broker.types import KafkaError, KafkaException, Producer
from streams.errors import RelayBlocked
from streams.points import reach
from streams.relay.guard import Guard
from streams.relay.rows import Produced

# How long a session that ends waits for the answers to what is on its way to the broker.
_SETTLE_SECONDS = 2.0
# Reports of records that were given up because of another one; the refusal itself is that other one's report.
_GIVEN_UP = (
    KafkaError._PURGE_QUEUE,  # noqa: SLF001 - its public name
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
    KafkaError._FATAL,  # noqa: SLF001
    KafkaError._GAPLESS_GUARANTEE,  # noqa: SLF001
)


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
        producer: idempotent and gapless, see ``streams.broker.kafka.producer``.
        confirmed: the position from which on the log will be read.
        while_waiting: called while the broker takes nothing, so that the database is not left without an answer.
            What it raises ends the wait.
        guard: without one, nothing waits for the first record of a partition.
    """

    def __init__(
        self,
        producer: Producer,
        confirmed: int,
        while_waiting: Callable[[], None],
        guard: Guard | None = None,
    ) -> None:
        self.confirmed = confirmed
        self.sent = 0
        self._producer = producer
        self._produce = producer.produce
        self._while_waiting = while_waiting
        self._guard = guard or Guard(lambda _topic: 0)
        self._guards = guard is not None
        self._in_flight: deque[Transaction] = deque()
        self._open: Transaction | None = None
        self._refusal: RelayBlocked | None = None
        self._given_up: RelayBlocked | None = None

    @property
    def idle(self) -> bool:
        """Whether everything that was read is confirmed."""
        return not self._in_flight

    def begin(self) -> None:
        self._open = Transaction(self._failed)
        self._in_flight.append(self._open)

    def send(self, record: Produced) -> None:
        """Hands a record over, and waits where there is no room, or where it is the first of its partition.

        Raises:
            RelayBlocked: this record, or one before it, was refused for good.
        """
        transaction = self._open
        assert transaction is not None, "a row stands between BEGIN and COMMIT"  # noqa: S101 - the protocol's promise
        transaction.outstanding += 1
        if self._guards and not self._guard.covers(record[0], record[1]):
            self._send_alone(record, transaction)
        else:
            self._hand_over(record, transaction.delivered)
        self.sent += 1

    def _send_alone(self, record: Produced, transaction: Transaction) -> None:
        answered = False

        def delivered(error: KafkaError | None, message: Any) -> None:
            nonlocal answered
            answered = True
            if error is None:
                self._guard.learn(record[0], record[1] or b"", message.partition())
            transaction.delivered(error, message)

        self._hand_over(record, delivered)
        while not answered:
            self.poll(0.1)
            if not answered:
                self._while_waiting()

    def _hand_over(self, record: Produced, delivered: Callable[[KafkaError | None, Any], None]) -> None:
        topic, key, value, headers = record
        while True:
            try:
                self._produce(topic, value, key, headers=headers, on_delivery=delivered)
            except KafkaException as error:
                self._note(topic, key, error.args[0])
                self.poll()
            except BufferError:
                # The broker is slower than the log, or away: wait for room, which bounds the memory.
                self.poll(0.1)
                self._while_waiting()
            else:
                return

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
        self._serve(seconds)
        if self._refusal or self._given_up:
            self.abandon()  # what was refused may be reported after what was given up for it
            raise self._refusal or self._given_up  # type: ignore[misc]  # one of them is there
        self._guard.expire()
        before = self.confirmed
        while self._in_flight and (head := self._in_flight[0]).end and not head.outstanding:
            self.confirmed = head.end
            self._in_flight.popleft()
        if self.confirmed != before:
            reach("relay.acknowledged")

    def flush(self, seconds: float) -> None:
        """Waits until the broker has everything, or the time is over.

        Raises:
            RelayBlocked: the broker refused a record for good.
        """
        deadline = time.monotonic() + seconds
        self.poll()
        while len(self._producer) and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, 0.1))

    def abandon(self) -> None:
        """Sends nothing more: not a record behind a refused one, and none while a later session sends them anew.

        What is on its way is waited for, for a moment, so that who reads the topic's end next sees it there.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        self._purge(in_flight=False)
        while len(self._producer) and time.monotonic() < deadline:
            self._serve(0.05)
        self._purge(in_flight=True)
        self._serve(0)

    def _purge(self, *, in_flight: bool) -> None:
        self._producer.purge(in_queue=True, in_flight=in_flight)

    def _serve(self, seconds: float) -> None:
        try:
            self._producer.poll(seconds)
        except KafkaException as error:  # the client gave everything up, rather than leave a gap
            self._given_up = self._given_up or RelayBlocked(f"{error.args[0].str()}; {_WHAT_NOW}")

    def _failed(self, error: KafkaError, message: Any) -> None:
        # Kept, not raised: an exception in a callback would surface in the middle of whatever polls next.
        self._note(message.topic(), message.key(), error)

    def _note(self, topic: str, key: bytes | None, error: KafkaError) -> None:
        shown = "no key" if key is None else f"key {key[:80]!r}"
        blocked = RelayBlocked(
            f"a record for topic {topic}, {shown}, was refused: {error.str()}; {_WHAT_NOW}"
        )
        if error.code() in _GIVEN_UP:
            self._given_up = self._given_up or blocked
        else:
            self._refusal = self._refusal or blocked


_WHAT_NOW = "nothing after it was confirmed, and the relay goes on from there when it is started again"
