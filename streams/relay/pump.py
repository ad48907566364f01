"""Records on their way: produced, acknowledged, confirmed.

The position to confirm is the end of the last transaction before which everything is acknowledged. It never
runs ahead of an acknowledgement, so whatever dies, a committed row is still in the log of the database.

An acknowledgement costs about as much as a record, so not every record asks for one. What is read in one burst is a
group, and of each partition only the last record of the group answers: the producer is idempotent and without gaps, so
the broker has taken all those before it in that partition, or none of the later ones.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from streams.broker.kafka import Place
from streams.broker.types import KafkaError, KafkaException, Producer
from streams.errors import RelayBlocked
from streams.points import reach
from streams.relay.blocked import Lane, Refusal, concerns_a_lane
from streams.relay.guard import Guard
from streams.relay.routes import Routes
from streams.relay.rows import Produced

# How long a session that ends waits for the answers to what is on its way to the broker.
_SETTLE_SECONDS = 2.0
# Beyond this a client may refuse a record by itself, which is best known before the next one is taken.
_LARGE_BYTES = 1_000_000
# Reports of records that were given up because of another one; the refusal itself is that other one's report.
_GIVEN_UP = (
    KafkaError._PURGE_QUEUE,  # noqa: SLF001 - its public name
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
    KafkaError._FATAL,  # noqa: SLF001
    KafkaError._GAPLESS_GUARANTEE,  # noqa: SLF001
)

Answer = Callable[[KafkaError | None, Any], None]


class Group:
    """What was read in one burst, on its way to the broker."""

    __slots__ = ("_fail", "end", "outstanding")

    def __init__(self, fail: Callable[[KafkaError, Any], None]) -> None:
        self.end: int | None = None  # of the last transaction that ends within it
        self.outstanding = 0
        self._fail = fail

    def delivered(self, error: KafkaError | None, message: Any) -> None:
        """Called in the thread that polls the producer."""
        if error is not None:
            self._fail(error, message)
            return
        self.outstanding -= 1


class Pump:
    """Sends records and knows which position is safe.

    Args:
        producer: idempotent and gapless, see ``streams.broker.kafka.producer``.
        prober: makes a producer that outlives a refusal, for records that are suspected.
        confirmed: the position from which on the log will be read.
        routes: the partition of each record.
        while_waiting: called while the broker takes nothing, so that the database is not left without an answer.
            What it raises ends the wait.
        suspects: keys of which so many records are sent alone, since they were refused together with others.
        careful: how many records from here on are asked for one by one, since of those before some were refused, and
            it is not known which.
    """

    def __init__(
        self,
        producer: Producer,
        prober: Callable[[], Producer],
        confirmed: int,
        routes: Routes,
        while_waiting: Callable[[], None],
        suspects: Counter[Lane] | None = None,
        careful: int = 0,
    ) -> None:
        self.confirmed = confirmed
        self.sent = 0
        self._producer = producer
        self._produce = producer.produce
        self._make_prober = prober
        self._prober: Producer | None = None
        self._partition = routes.partition
        self._routes = routes
        self._while_waiting = while_waiting
        self._guard = Guard()
        self._suspects = Counter() if suspects is None else suspects
        self._careful = careful
        self._in_flight: deque[Group] = deque()
        self._group = self._new_group()
        self._last: dict[Place, Produced] = {}
        self._refused: Counter[Lane] = Counter()
        self._failure: RelayBlocked | None = None
        self._given_up: RelayBlocked | None = None

    @property
    def idle(self) -> bool:
        """Whether everything that was read is confirmed."""
        return (
            len(self._in_flight) == 1
            and not self._group.outstanding
            and self._group.end is None
            and not self._last
        )

    @property
    def outstanding(self) -> int:
        """How many records are not known to be in their topic."""
        return len(self._producer) + len(self._last)

    @property
    def group(self) -> Group:
        """What the records that are being read belong to."""
        return self._group

    def send(self, record: Produced) -> KafkaError | None:
        """Takes a record, and waits where there is no room, or where it has to be alone on its way.

        Returns:
            Why the client refused it by itself; nothing was sent then, and all that went before is on its way.

        Raises:
            Refusal: this record, or one before it, was refused by the broker for good.
            RelayBlocked: the producer can send no more.
        """
        topic, key, value, _ = record
        place = (topic, self._partition(topic, key))
        if (
            self._careful
            or self._suspects
            or place not in self._guard.covered
            or (value is not None and len(value) > _LARGE_BYTES)
        ):
            return self._send_with_care(record, place)
        before = self._last.get(place)
        if before is not None:
            try:
                # As _try does it, in one step: most records pass here, and each call costs.
                self._produce(topic, before[2], before[1], place[1], None, None, 0, before[3])
            except (KafkaException, BufferError):
                self._hand_over(before, place, None)
        # Only now: what ends the wait for room must leave the one before where it will be found.
        self._last[place] = record
        self.sent += 1
        return None

    def close_group(self) -> None:
        """The burst is over: the last record of each partition goes, and answers for those before it."""
        group = self._group
        if self._last:
            while self._last:
                place, record = next(iter(self._last.items()))
                group.outstanding += (
                    1  # and stays so if the wait for room is ended: then nothing of it is confirmed
                )
                self._hand_over(record, place, group.delivered)
                del self._last[place]
        elif group.end is None and not group.outstanding:
            return  # an empty one need not be followed
        self._group = self._new_group()
        self._routes.turn()

    def send_all(
        self, records: list[Produced], on_delivered: Callable[[list[int]], None]
    ) -> KafkaError | None:
        """Sends records that belong to nothing that is being read, and waits for them.

        Args:
            on_delivered: told in the end which of them are in their topic, however it ended.

        Returns:
            Why the one after those was refused, if it was.

        Raises:
            Refusal: one of them was refused together with others.
        """
        aside, delivered = Group(self._failed), []

        def answering(number: int) -> Answer:
            def answer(error: KafkaError | None, message: Any) -> None:
                if error is None:
                    delivered.append(number)
                aside.delivered(error, message)

            return answer

        try:
            for number, record in enumerate(records):
                place = (record[0], self._partition(record[0], record[1]))
                if not number or (record[0], record[1]) in self._suspects:
                    refusal = self._examine(record, place)
                    if refusal is None:
                        delivered.append(number)
                else:
                    aside.outstanding += 1
                    refusal = self._try(record, place, answering(number))
                    aside.outstanding -= refusal is not None
                if refusal is not None:
                    self._wait_until(lambda: not aside.outstanding)
                    return refusal
            self._wait_until(lambda: not aside.outstanding)
            return None
        finally:
            # Whatever ended it: an answer that is still to come is better had now than asked for from the topic.
            deadline = time.monotonic() + _SETTLE_SECONDS
            while aside.outstanding and len(self._producer) and time.monotonic() < deadline:
                self._serve(0.05)
            on_delivered(delivered)

    def settle(self) -> None:
        """Waits until all that was taken is in its topic."""
        self.close_group()
        self._wait_until(lambda: not len(self._producer))

    def trust(self, lane: Lane) -> None:
        """Nothing of this key is sent for now."""
        self._suspects.pop(lane, None)

    def _send_with_care(self, record: Produced, place: Place) -> KafkaError | None:
        """Sends a record that answers for itself."""
        before = self._last.pop(place, None)
        if before is not None:
            self._group.outstanding += 1
            self._hand_over(before, place, self._group.delivered)
        self._careful = max(0, self._careful - 1)
        if self._suspects and (record[0], record[1]) in self._suspects:
            refusal = self._examine(record, place)
        elif place not in self._guard.covered:
            refusal = self._send_first(record, place, self._group)
        else:
            refusal = self._ask(record, place, self._group)
        self.sent += refusal is None
        return refusal

    def _ask(self, record: Produced, place: Place, group: Group) -> KafkaError | None:
        group.outstanding += 1
        refusal = self._try(record, place, group.delivered)
        group.outstanding -= refusal is not None
        return refusal

    def _examine(self, record: Produced, place: Place) -> KafkaError | None:
        """Sends a record with nothing else on its way, by the producer that outlives its refusal; answers why it was.

        Raises:
            RelayBlocked: that producer can send no more.
        """
        self._wait_until(lambda: not len(self._producer))
        lane = (record[0], record[1])
        self._suspects[lane] -= 1
        if self._suspects[lane] <= 0:
            del self._suspects[lane]
        if self._prober is None:
            self._prober = self._make_prober()
        answers: list[KafkaError | None] = []
        topic, key, value, headers = record
        try:
            self._prober.produce(
                topic, value, key, place[1], lambda error, _: answers.append(error), None, 0, headers
            )
        except KafkaException as error:
            answers.append(error.args[0])
        while not answers:
            self._prober.poll(0.1)
            if not answers:
                self._while_waiting()
        refusal = answers[0]
        if refusal is not None and not concerns_a_lane(refusal):
            self._note(topic, key, refusal)
            self._fall()
        return refusal

    def _send_first(self, record: Produced, place: Place, group: Group) -> KafkaError | None:
        """Sends a record and waits for its answer, before anything follows it into its partition."""
        answered = False

        def delivered(error: KafkaError | None, message: Any) -> None:
            nonlocal answered
            answered = True
            if error is None:
                self._guard.learn(place)
            group.delivered(error, message)

        group.outstanding += 1
        refusal = self._try(record, place, delivered)
        if refusal is None:
            self._wait_until(lambda: answered)
        else:
            group.outstanding -= 1
        return refusal

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.poll(0.1)
            if not condition():
                self._while_waiting()

    def _hand_over(self, record: Produced, place: Place, answer: Answer | None) -> None:
        """Hands a record to the client, which is not expected to refuse it.

        Raises:
            Refusal: it did.
        """
        refusal = self._try(record, place, answer)
        if refusal is not None:
            self._refused[record[0], record[1]] += 1
            self._fall()

    def _try(self, record: Produced, place: Place, answer: Answer | None) -> KafkaError | None:
        """Hands a record to the client, once it has room; answers why the client itself refuses it."""
        topic, key, value, headers = record
        while True:
            try:
                # callback and on_delivery are one; the rest is what the client takes by place, which is the faster way
                self._produce(topic, value, key, place[1], answer, None, 0, headers)
            except KafkaException as error:
                refusal: KafkaError = error.args[0]
                if concerns_a_lane(refusal):
                    return refusal
                self._note(topic, key, refusal)
                self.poll()
            except BufferError:
                # The broker is slower than the log, or away: wait for room, which bounds the memory.
                self.poll(0.1)
                self._while_waiting()
            else:
                return None

    def commit(self, end: int) -> None:
        """A transaction ends; all of its records were taken."""
        self._group.end = end

    def seen(self, end: int) -> None:
        """The server has nothing before ``end`` that was not sent here; safe to confirm only when all of it is out."""
        if self.idle:
            self.confirmed = max(self.confirmed, end)

    def poll(self, seconds: float = 0) -> None:
        """Takes acknowledgements in, and moves the confirmed position.

        Raises:
            Refusal: the broker refused records for good.
            RelayBlocked: the producer can send no more.
        """
        self._serve(seconds)
        if self._refused or self._failure or self._given_up:
            self._fall()
        self._guard.expire()
        before = self.confirmed
        while len(self._in_flight) > 1 and not self._in_flight[0].outstanding:
            self._confirm(self._in_flight.popleft())
        if len(self._in_flight) == 1 and not self._group.outstanding and not self._last:
            self._confirm(self._group)
        if self.confirmed != before:
            reach("relay.acknowledged")

    def _confirm(self, group: Group) -> None:
        if group.end is not None:
            self.confirmed, group.end = group.end, None

    def _fall(self) -> None:
        """Raises what this producer ends with."""
        asked_for_all = self._careful > 0
        self.abandon()  # what was refused may be reported after what was given up for it
        if self._failure:
            raise self._failure
        if not asked_for_all:
            # Who did not answer may be the guilty one: the next session asks each.
            raise Refusal(Counter())
        if self._refused:
            raise Refusal(self._refused)
        assert self._given_up is not None, "one of them is there"  # noqa: S101
        raise self._given_up

    def _new_group(self) -> Group:
        group = Group(self._failed)
        self._in_flight.append(group)
        return group

    def flush(self, seconds: float) -> None:
        """Waits until the broker has everything, or the time is over.

        Raises:
            Refusal: the broker refused records for good.
            RelayBlocked: the producer can send no more.
        """
        deadline = time.monotonic() + seconds
        self.close_group()
        self.poll()
        while len(self._producer) and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, 0.1))

    def abandon(self) -> None:
        """Sends nothing more: not a record behind a refused one, and none while a later session sends them anew.

        What is on its way is waited for, for a moment, so that who reads the topic's end next sees it there.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        self._producer.purge(in_queue=True, in_flight=False)
        while len(self._producer) and time.monotonic() < deadline:
            self._serve(0.05)
        self._producer.purge(in_queue=True, in_flight=True)
        self._serve(0)
        if self._prober is not None:
            self._prober.flush(max(0.0, deadline - time.monotonic()))
            self._prober.purge(in_queue=True, in_flight=True)
            self._prober.poll(0)

    def _serve(self, seconds: float) -> None:
        try:
            self._producer.poll(seconds)
        except KafkaException as error:  # the client gave everything up, rather than leave a gap
            self._given_up = self._given_up or RelayBlocked(f"{error.args[0].str()}; {_WHAT_NOW}")

    def _failed(self, error: KafkaError, message: Any) -> None:
        # Kept, not raised: an exception in a callback would surface in the middle of whatever polls next.
        if error.code() not in _GIVEN_UP and concerns_a_lane(error):
            self._refused[message.topic(), message.key()] += 1
        else:
            self._note(message.topic(), message.key(), error)

    def _note(self, topic: str, key: bytes | None, error: KafkaError) -> None:
        shown = "no key" if key is None else f"key {key[:80]!r}"
        blocked = RelayBlocked(
            f"a record for topic {topic}, {shown}, was refused: {error.str()}; {_WHAT_NOW}"
        )
        if error.code() in _GIVEN_UP:
            self._given_up = self._given_up or blocked
        else:
            self._failure = self._failure or blocked


_WHAT_NOW = "nothing after it was confirmed, and the relay goes on from there when it is started again"
