"""Invariant 3: the confirmed position never runs ahead of an acknowledgement."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from streams.broker.partitioner import partition_of
from streams.errors import RelayBlocked
from streams.relay.blocked import Lane, Refusal
from streams.relay.pump import Pump
from streams.relay.routes import Routes
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
        self.produced: list[Delivered | None] = []
        self.purged: list[tuple[bool, bool]] = []
        self.room = room
        self.on_poll: Callable[[], None] = lambda: None
        self.on_produce: Callable[[], None] = lambda: None
        self._answers: deque[tuple[int, KafkaError | None]] = deque()

    def produce(self, *record: Any) -> None:
        if self.room == 0:
            raise BufferError("queue full")
        self.room -= 1
        self.produced.append(record[4])
        self.on_produce()

    def acknowledge(self, number: int, error: KafkaError | None = None) -> None:
        self._answers.append((number, error))

    def poll(self, _seconds: float) -> int:
        self.on_poll()
        while self._answers:
            number, error = self._answers.popleft()
            answer = self.produced[number]
            assert answer is not None, "this record was not asked for an answer"
            answer(error, Message())
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


PLACE = ("events.order", 0)


def pump_of(
    producer: FakeProducer,
    while_waiting: Callable[[], None] = lambda: None,
    suspects: Counter[Lane] | None = None,
    *,
    careful: int = 1_000,
    partitions: int = 1,
    covered: bool = True,
    prober: FakeProducer | None = None,
) -> Pump:
    """By default a pump of which every record answers, into a partition that is safe already."""
    pump = Pump(
        producer,  # type: ignore[arg-type]
        lambda: FakeProducer() if prober is None else prober,  # type: ignore[arg-type, return-value]
        100,
        Routes(lambda _topic: partitions),
        while_waiting,
        suspects,
        careful,
    )
    if covered:
        for partition in range(partitions):
            pump._guard.learn(("events.order", partition))
    return pump


def transaction(pump: Pump, end: int, records: int = 1) -> None:
    for _ in range(records):
        pump.send(RECORD)
    pump.commit(end)
    pump.close_group()


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
    pump.send(RECORD)
    pump.close_group()
    producer.acknowledge(0)
    pump.poll()
    assert pump.confirmed == 100
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


LANE = ("events.order", b"order-1")


def test_a_record_that_is_refused_among_others_is_suspected(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200, records=2)
    producer.acknowledge(0, TOO_LARGE)
    producer.acknowledge(1, TOO_LARGE)
    with pytest.raises(Refusal) as refusal:
        pump.poll()
    assert refusal.value.suspects == Counter({LANE: 2})


def test_a_suspect_is_sent_by_a_producer_that_outlives_its_refusal(producer: FakeProducer) -> None:
    suspects: Counter[Lane] = Counter({("events.order", b"k"): 1})
    prober = FakeProducer()
    prober.on_produce = lambda: prober.acknowledge(0, TOO_LARGE)
    pump = pump_of(producer, suspects=suspects, prober=prober)
    assert pump.send(RECORD) == TOO_LARGE
    assert not suspects
    pump.commit(200)
    pump.close_group()
    pump.poll()
    assert (pump.confirmed, len(producer.produced)) == (200, 0), "whoever set it aside has it"


def test_a_suspect_is_sent_only_when_nothing_else_is_on_its_way(producer: FakeProducer) -> None:
    suspects: Counter[Lane] = Counter({("events.order", b"k"): 1})
    prober = FakeProducer()
    prober.on_produce = lambda: prober.acknowledge(0)
    pump = pump_of(producer, suspects=suspects, prober=prober)
    pump.send(("events.order", b"other", b"v", []))
    producer.acknowledge(0)

    def not_yet() -> None:
        assert not prober.produced, "the suspect was sent before"

    producer.on_poll = not_yet
    assert pump.send(RECORD) is None
    assert not suspects
    assert len(prober.produced) == 1
    pump.commit(200)
    producer.on_poll = lambda: None
    pump.poll()
    assert pump.confirmed == 200


def test_a_refusal_that_concerns_the_producer_blocks_the_relay(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200)
    producer.acknowledge(0, KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))
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
        with pytest.raises(Refusal):
            pump.poll()
        with pytest.raises(Refusal):
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


def test_a_record_that_the_client_itself_refuses_is_answered_and_the_producer_goes_on(
    producer: FakeProducer,
) -> None:
    produce = producer.produce

    def refuse(*_record: object, **_headers: object) -> None:
        raise KafkaException(TOO_LARGE)

    producer.produce = refuse  # type: ignore[method-assign]
    pump = pump_of(producer)
    assert pump.send(RECORD) == TOO_LARGE
    assert not produce.__self__.produced  # type: ignore[attr-defined]
    pump.commit(200)
    pump.poll()
    assert pump.confirmed == 200, "whoever set it aside has it"


def test_a_refused_record_ends_the_wait_for_room() -> None:
    producer = FakeProducer(room=1)
    pump = pump_of(producer)
    pump.send(RECORD)
    producer.acknowledge(0, TOO_LARGE)
    with pytest.raises(Refusal):
        pump.send(RECORD)


def test_what_stands_behind_a_refused_record_is_given_up_at_once(pump: Pump, producer: FakeProducer) -> None:
    transaction(pump, 200, records=2)
    producer.acknowledge(0, TOO_LARGE)
    with pytest.raises(Refusal):
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
    with pytest.raises(Refusal) as refusal:
        pump.poll()
    assert refusal.value.suspects == Counter({LANE: 1})


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


def test_of_a_group_only_the_last_record_of_each_partition_answers_and_then_all_is_confirmed() -> None:
    producer = FakeProducer()
    pump = pump_of(producer, careful=0, partitions=3)
    for n in range(30):
        pump.send(("events.order", b"%d" % n, b"v", []))
        pump.commit(200 + n)
    pump.close_group()
    asked = [number for number, answer in enumerate(producer.produced) if answer is not None]
    assert (len(producer.produced), len(asked)) == (30, 3)
    for number in asked:
        pump.poll()
        assert pump.confirmed == 100
        producer.acknowledge(number)
    pump.poll()
    assert (pump.confirmed, pump.idle) == (229, True)


def test_the_records_of_a_partition_keep_their_order_though_the_last_one_is_held_back() -> None:
    producer = FakeProducer()
    sent: list[tuple[int, bytes]] = []
    produce = producer.produce

    def record(*record: Any) -> None:
        sent.append((record[3], record[1]))
        produce(*record)

    producer.produce = record  # type: ignore[method-assign]
    pump = pump_of(producer, careful=0, partitions=2)
    taken: dict[int, list[bytes]] = {0: [], 1: []}
    for n in range(40):
        key, value = b"%d" % (n % 5), b"%d" % n
        taken[partition_of(key, 2)].append(value)
        pump.send(("events.order", key, value, []))
        if n % 7 == 6:
            pump.close_group()
    pump.close_group()
    assert {place: [value for at, value in sent if at == place] for place in (0, 1)} == taken


def test_a_refusal_where_not_every_record_answers_asks_for_care_and_blames_nobody() -> None:
    producer = FakeProducer()
    pump = pump_of(producer, careful=0)
    transaction(pump, 200, records=3)
    producer.acknowledge(2, TOO_LARGE)
    with pytest.raises(Refusal) as refusal:
        pump.poll()
    assert refusal.value.suspects == Counter()
    assert pump.confirmed == 100


def test_a_record_held_back_is_not_forgotten_when_the_next_one_is_sent_with_care() -> None:
    producer = FakeProducer()
    pump = pump_of(producer, careful=0)
    pump.send(RECORD)
    pump.commit(200)
    pump.send(("events.order", b"k", b"x" * 2_000_000, []))
    pump.commit(300)
    pump.close_group()
    assert [answer is not None for answer in producer.produced] == [True, True]
    producer.acknowledge(1)
    pump.poll()
    assert pump.confirmed == 100
    producer.acknowledge(0)
    pump.poll()
    assert pump.confirmed == 300


def test_the_wait_for_room_ends_with_what_the_callback_raises() -> None:
    class Stopped(Exception):
        pass

    def stopped() -> None:
        raise Stopped

    pump = pump_of(FakeProducer(room=0), while_waiting=stopped)
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
    pump = pump_of(producer, careful=0, covered=False)
    transaction(pump, 200, records=5)
    assert produced_at_poll == [1, 1, 1], "it waited for the first, and for none after it"
    assert len(producer.produced) == 5


def test_a_refused_first_record_lets_nothing_follow_it() -> None:
    producer = FakeProducer()
    producer.acknowledge(0, TOO_LARGE)
    pump = pump_of(producer, covered=False)
    with pytest.raises(Refusal):
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
