"""Invariant 3: the confirmed position never runs ahead of an acknowledgement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import RelayBlocked
from streams.relay.guard import Guard
from streams.relay.pump import Pump
from streams.relay.rows import Produced

RECORD: Produced = ("events.order", b"k", b"v", [("ce_id", b"1")])
TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)

Delivered = Callable[[KafkaError | None, Any], None]


class Message:
    def topic(self) -> str:
        return "events.order"

    def key(self) -> bytes:
        return b"order-1"

    def partition(self) -> int:
        return 0


class FakeProducer:
    """Acknowledges what it is told to, at the next poll, in the order it is told."""

    def __init__(self, room: int = 1_000) -> None:
        self.produced: list[Delivered] = []
        self.purged: list[tuple[bool, bool]] = []
        self.room = room
        self.on_poll: Callable[[], None] = lambda: None
        self._answers: deque[tuple[int, KafkaError | None]] = deque()

    def produce(self, *_record: object, on_delivery: Delivered, **_headers: object) -> None:
        if self.room == 0:
            raise BufferError("queue full")
        self.room -= 1
        self.produced.append(on_delivery)

    def acknowledge(self, number: int, error: KafkaError | None = None) -> None:
        self._answers.append((number, error))

    def poll(self, _seconds: float) -> int:
        self.on_poll()
        while self._answers:
            number, error = self._answers.popleft()
            self.produced[number](error, Message())
        return 0

    def purge(self, *, in_queue: bool, in_flight: bool) -> None:
        self.purged.append((in_queue, in_flight))

    def __len__(self) -> int:
        return len(self._answers)


@pytest.fixture
def producer() -> FakeProducer:
    return FakeProducer()


@pytest.fixture
def pump(producer: FakeProducer) -> Pump:
    return pump_of(producer)


def pump_of(producer: FakeProducer, while_waiting: Callable[[], None] = lambda: None) -> Pump:
    return Pump(producer, 100, while_waiting)  # type: ignore[arg-type]


def transaction(pump: Pump, end: int, records: int = 1) -> None:
    pump.begin()
    for _ in range(records):
        pump.send(RECORD)
    pump.commit(end)


def test_nothing_is_confirmed_before_its_acknowledgement(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200)
    pump.poll()
    assert pump.confirmed == 100
    producer.acknowledge(0)
    pump.poll()
    assert pump.confirmed == 200


def test_a_transaction_is_confirmed_with_the_last_of_its_records(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200, records=3)
    for number, confirmed in ((2, 100), (0, 100), (1, 200)):
        producer.acknowledge(number)
        pump.poll()
        assert pump.confirmed == confirmed


def test_a_later_transaction_waits_for_an_earlier_one(pump: Pump, producer: FakeProducer) -> None:
    for end in (200, 300, 400):
        transaction(pump, end)
    producer.acknowledge(2)
    producer.acknowledge(1)
    pump.poll()
    assert pump.confirmed == 100
    producer.acknowledge(0)
    pump.poll()
    assert pump.confirmed == 400


def test_a_transaction_whose_commit_is_not_read_yet_is_not_confirmed(
    pump: Pump, producer: FakeProducer
) -> None:
    pump.begin()
    pump.send(RECORD)
    producer.acknowledge(0)
    pump.poll()
    assert (pump.confirmed, pump.idle) == (100, False)
    pump.commit(200)
    pump.poll()
    assert (pump.confirmed, pump.idle) == (200, True)


def test_a_transaction_without_records_is_confirmed_in_its_turn(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200)
    transaction(pump, 300, records=0)
    pump.poll()
    assert pump.confirmed == 100
    producer.acknowledge(0)
    pump.poll()
    assert pump.confirmed == 300


def test_the_servers_position_is_confirmed_only_while_idle(pump: Pump, producer: FakeProducer) -> None:
    pump.seen(150)
    assert pump.confirmed == 150
    transaction(pump, 200)
    pump.seen(500)
    assert pump.confirmed == 150
    producer.acknowledge(0)
    pump.poll()
    pump.seen(500)
    assert pump.confirmed == 500


def test_the_confirmed_position_never_goes_back(pump: Pump) -> None:
    pump.seen(50)
    assert pump.confirmed == 100


def test_a_refused_record_blocks_the_relay_and_says_which(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200)
    producer.acknowledge(0, TOO_LARGE)
    with pytest.raises(RelayBlocked, match=r"events\.order, key b'order-1'.*nothing after it was confirmed"):
        pump.poll()


def test_nothing_is_confirmed_after_a_refused_record(pump: Pump, producer: FakeProducer) -> None:
    for end in (200, 300, 400):
        transaction(pump, end)
    producer.acknowledge(0)
    pump.poll()
    producer.acknowledge(1, TOO_LARGE)
    producer.acknowledge(2)
    for _ in range(2):
        with pytest.raises(RelayBlocked):
            pump.poll()
        with pytest.raises(RelayBlocked):
            pump.flush(1)
    pump.seen(900)
    assert pump.confirmed == 200


def test_a_full_queue_waits_for_room_and_goes_on() -> None:
    producer = FakeProducer(room=1)
    answered: list[int] = []

    def make_room() -> None:
        producer.room = 1

    waiting = pump_of(producer, while_waiting=lambda: answered.append(waiting.confirmed))
    producer.on_poll = make_room
    transaction(waiting, 200, records=3)
    assert len(producer.produced) == waiting.sent == 3
    assert answered == [100, 100]


def test_a_record_that_the_client_itself_refuses_blocks_the_relay(pump: Pump, producer: FakeProducer) -> None:
    def refuse(*_record: object, **_headers: object) -> None:
        raise KafkaException(TOO_LARGE)

    producer.produce = refuse  # type: ignore[method-assign]
    refusing = pump_of(producer)
    refusing.begin()
    with pytest.raises(RelayBlocked, match=r"events\.order"):
        refusing.send(RECORD)


def test_a_refused_record_ends_the_wait_for_room() -> None:
    producer = FakeProducer(room=1)
    pump = pump_of(producer)
    pump.begin()
    pump.send(RECORD)
    producer.acknowledge(0, TOO_LARGE)
    with pytest.raises(RelayBlocked):
        pump.send(RECORD)


def test_what_stands_behind_a_refused_record_is_given_up_at_once(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200, records=2)
    producer.acknowledge(0, TOO_LARGE)
    with pytest.raises(RelayBlocked):
        pump.poll()
    assert producer.purged[0] == (True, False), "the queue at once, what is on its way after its answers"
    assert producer.purged[-1] == (True, True)


@pytest.mark.parametrize(
    "code",
    [KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._FATAL, KafkaError._GAPLESS_GUARANTEE],
)
def test_the_refusal_is_named_and_not_what_was_given_up_for_it(
    pump: Pump, producer: FakeProducer, code: int
) -> None:
    transaction(pump, 200, records=2)
    producer.acknowledge(1, KafkaError(code))
    producer.acknowledge(0, TOO_LARGE)
    with pytest.raises(RelayBlocked, match="Message size too large"):
        pump.poll()


def test_a_client_that_gives_everything_up_blocks_the_relay_with_its_words(
    pump: Pump, producer: FakeProducer
) -> None:
    transaction(pump, 200)

    def gives_up() -> None:
        raise KafkaException(KafkaError(KafkaError._GAPLESS_GUARANTEE, "no gaps"))

    producer.on_poll = gives_up
    with pytest.raises(RelayBlocked, match="no gaps"):
        pump.poll()
    assert pump.confirmed == 100


def test_the_wait_for_room_ends_with_what_the_callback_raises() -> None:
    class Stopped(Exception):
        pass

    def stopped() -> None:
        raise Stopped

    pump = pump_of(FakeProducer(room=0), while_waiting=stopped)
    pump.begin()
    with pytest.raises(Stopped):
        pump.send(RECORD)


def test_the_first_record_of_a_partition_is_acknowledged_before_another_is_sent() -> None:
    producer = FakeProducer()
    produced_at_poll: list[int] = []

    def broker() -> None:
        produced_at_poll.append(len(producer.produced))
        if len(produced_at_poll) == 3:
            producer.acknowledge(0)

    producer.on_poll = broker
    pump = Pump(producer, 100, lambda: None, Guard(lambda _topic: 1))  # type: ignore[arg-type]
    transaction(pump, 200, records=5)
    assert produced_at_poll == [1, 1, 1], "it waited for the first, and for none after it"
    assert len(producer.produced) == 5


def test_a_refused_first_record_lets_nothing_follow_it() -> None:
    producer = FakeProducer()
    producer.acknowledge(0, TOO_LARGE)
    pump = Pump(producer, 100, lambda: None, Guard(lambda _topic: 1))  # type: ignore[arg-type]
    with pytest.raises(RelayBlocked):
        transaction(pump, 200, records=5)
    assert len(producer.produced) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms())
def test_whatever_the_order_of_acknowledgements_nothing_unacknowledged_is_confirmed(
    sizes: list[int], random: Any
) -> None:
    producer = FakeProducer()
    pump = pump_of(producer)
    ends: list[tuple[int, list[int]]] = []
    for place, size in enumerate(sizes, 2):
        first = len(producer.produced)
        transaction(pump, place * 100, size)
        ends.append((place * 100, list(range(first, first + size))))
    waiting = set(range(len(producer.produced)))
    order = sorted(waiting)
    random.shuffle(order)
    for number in order:
        producer.acknowledge(number)
        waiting.remove(number)
        pump.poll()
        safe = 100
        for end, numbers in ends:
            if waiting.intersection(numbers):
                break
            safe = end
        assert pump.confirmed == safe
    pump.poll()
    assert pump.confirmed == ends[-1][0]
    assert pump.idle
