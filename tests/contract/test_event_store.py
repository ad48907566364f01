"""What every event store promises: invariants 1 and 2, and one append per idempotency key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from schemas import StockReceived, StockReserved, catalog
from streams import Decider, IdempotencyMismatch, NotInTransaction, SchemaError, Snapshots, VersionConflict
from tests.contract import event_stores
from tests.contract.event_stores import Connect, Session

ONE, TWO = StockReceived(1), StockReceived(2)


@pytest.fixture(
    params=[
        "memory",
        pytest.param("sync", marks=pytest.mark.real),
        pytest.param("async", marks=pytest.mark.real),
    ]
)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    if request.param == "memory":
        make = event_stores.memory()
    else:
        kind = event_stores.sync if request.param == "sync" else event_stores.asynchronous
        make = kind(request.getfixturevalue("settings").database_url)
    opened: list[Session] = []

    def connected(**options: bool) -> Session:
        opened.append(make(**options))
        return opened[-1]

    yield connected
    for session in opened:
        session.close()


@pytest.fixture
def session(connect: Connect) -> Session:
    return connect()


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Future[object]]]:
    """Runs a call in another thread."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def quantities(session: Session, sku: str = "sku-1") -> list[int]:
    return [event.data.quantity for event in session.load(sku)]


def versions(session: Session, sku: str = "sku-1") -> list[int]:
    return [event.version for event in session.load(sku)]


def test_versions_run_from_one_without_a_hole(session: Session) -> None:
    first = session.append("sku-1", [ONE], 0)
    second = session.append("sku-1", [TWO, ONE], 1)
    assert (first.first_version, first.last_version) == (1, 1)
    assert (second.first_version, second.last_version) == (2, 3)
    assert versions(session) == [1, 2, 3]


def test_events_come_back_as_they_went_in(session: Session) -> None:
    event = StockReserved("order-1", 3)
    session.append("sku-1", [ONE, event], 0)
    (stored,) = session.load("sku-1", after=1)
    assert (stored.type, stored.data, stored.version) == ("StockReserved", event, 2)
    assert stored.recorded_at.utcoffset() is not None
    assert len({stored.id for stored in session.load("sku-1")}) == 2


def test_a_resource_that_is_not_there_has_no_events(session: Session) -> None:
    assert session.load("nobody") == []


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_an_append_at_another_version_conflicts_and_writes_nothing(session: Session, expected: int) -> None:
    session.append("sku-1", [ONE, TWO], 0)
    with pytest.raises(VersionConflict) as raised:
        session.append("sku-1", [ONE], expected)
    assert (raised.value.expected, raised.value.actual) == (expected, 2)
    assert quantities(session) == [1, 2]


def test_an_append_to_a_resource_that_should_be_there_conflicts_with_version_zero(session: Session) -> None:
    with pytest.raises(VersionConflict) as raised:
        session.append("sku-1", [ONE], 4)
    assert raised.value.actual == 0
    assert session.load("sku-1") == []


def test_after_a_conflict_the_transaction_goes_on(connect: Connect) -> None:
    session = connect()
    session.append("sku-1", [ONE], 0)
    with pytest.raises(VersionConflict):
        session.append("sku-1", [TWO], 0)
    session.append("sku-1", [TWO], 1)
    session.commit()
    assert quantities(connect()) == [1, 2]


def test_without_an_expected_version_an_append_goes_to_whatever_is_there(session: Session) -> None:
    assert session.append("sku-1", [ONE], None).last_version == 1
    assert session.append("sku-1", [TWO], None).last_version == 2
    assert quantities(session) == [1, 2]


def test_resources_count_for_themselves(session: Session) -> None:
    session.append("sku-1", [ONE, ONE], 0)
    assert session.append("sku-2", [TWO], 0).last_version == 1
    assert (quantities(session, "sku-1"), quantities(session, "sku-2")) == ([1, 1], [2])


def test_nobody_sees_an_event_before_its_commit(connect: Connect) -> None:
    writer, reader = connect(), connect()
    writer.append("sku-1", [ONE], 0)
    assert versions(writer) == [1]
    assert versions(reader) == []
    writer.commit()
    assert versions(reader) == [1]


def test_a_rollback_leaves_nothing(connect: Connect) -> None:
    session = connect()
    session.append("sku-1", [ONE], 0, key="request-1")
    session.rollback()
    assert session.load("sku-1") == []
    again = session.append("sku-1", [TWO], 0, key="request-1")
    assert (again.first_version, again.replayed) == (1, False)
    session.commit()
    assert quantities(connect()) == [2]


def test_of_two_writers_at_one_version_the_later_conflicts(
    connect: Connect, elsewhere: Callable[..., Future[object]]
) -> None:
    first, second = connect(), connect()
    first.append("sku-1", [ONE], 0)
    waiting = elsewhere(second.append, "sku-1", [TWO], 0)
    first.commit()
    with pytest.raises(VersionConflict):
        waiting.result(10)
    second.rollback()
    assert quantities(first) == [1]


def test_when_the_first_writer_rolls_back_the_second_has_its_version(
    connect: Connect, elsewhere: Callable[..., Future[object]]
) -> None:
    first, second = connect(), connect()
    first.append("sku-1", [ONE], 0)
    waiting = elsewhere(second.append, "sku-1", [TWO], 0)
    first.rollback()
    waiting.result(10)
    second.commit()
    assert [(event.version, event.data) for event in first.load("sku-1")] == [(1, TWO)]


def test_many_writers_leave_no_hole_and_lose_nothing(connect: Connect) -> None:
    writers, each = 4, 10
    start = threading.Barrier(writers)

    def write(session: Session, number: int) -> None:
        start.wait()
        for _ in range(each):
            session.append("sku-1", [StockReceived(number)], None)
            session.commit()

    with ThreadPoolExecutor(writers) as threads:
        done = [threads.submit(write, connect(), number) for number in range(writers)]
    for future in done:
        future.result()
    events = connect().load("sku-1")
    assert [event.version for event in events] == list(range(1, writers * each + 1))
    assert sorted(event.data.quantity for event in events) == sorted([*range(writers)] * each)


def test_one_key_appends_once(session: Session) -> None:
    first = session.append("sku-1", [ONE, TWO], 0, key="request-1")
    session.append("sku-1", [ONE], 2)
    again = session.append("sku-1", [ONE, TWO], 0, key="request-1")
    assert not first.replayed
    assert (again.first_version, again.last_version, again.replayed) == (1, 2, True)
    assert versions(session) == [1, 2, 3]


def test_one_key_with_other_events_is_a_mismatch(session: Session) -> None:
    session.append("sku-1", [ONE], 0, key="request-1")
    with pytest.raises(IdempotencyMismatch):
        session.append("sku-1", [TWO], 1, key="request-1")
    assert quantities(session) == [1]


def test_one_key_for_another_resource_is_a_mismatch(session: Session) -> None:
    session.append("sku-1", [ONE], 0, key="request-1")
    with pytest.raises(IdempotencyMismatch):
        session.append("sku-2", [ONE], 0, key="request-1")
    assert session.load("sku-2") == []


def test_two_lists_of_the_same_bytes_are_two_requests(session: Session) -> None:
    session.append("sku-1", [ONE, ONE], 0, key="request-1")
    with pytest.raises(IdempotencyMismatch):
        session.append("sku-1", [ONE], 2, key="request-1")


def test_the_request_given_decides_what_is_the_same(session: Session) -> None:
    session.append("sku-1", [ONE], 0, key="request-1", request=b"receive")
    assert session.append("sku-1", [TWO], 0, key="request-1", request=b"receive").replayed
    assert quantities(session) == [1]


def test_a_key_whose_append_conflicted_is_free(session: Session) -> None:
    session.append("sku-1", [ONE], 0)
    with pytest.raises(VersionConflict):
        session.append("sku-1", [TWO], 0, key="request-1")
    assert not session.append("sku-1", [TWO], 1, key="request-1").replayed


def test_of_two_that_use_one_key_at_once_the_later_is_answered_what_the_first_did(
    connect: Connect, elsewhere: Callable[..., Future[object]]
) -> None:
    first, second = connect(), connect()
    done = first.append("sku-1", [ONE], 0, key="request-1")
    waiting = elsewhere(second.append, "sku-1", [ONE], 0, "request-1")
    first.commit()
    answer = waiting.result(10)
    assert answer == type(done)(1, 1, replayed=True)
    second.commit()
    assert quantities(first) == [1]


def test_of_two_that_use_one_key_for_two_resources_at_once_the_later_leaves_nothing(
    connect: Connect, elsewhere: Callable[..., Future[object]]
) -> None:
    first, second = connect(), connect()
    first.append("sku-1", [ONE], 0, key="request-1")
    waiting = elsewhere(second.append, "sku-2", [ONE], 0, "request-1")
    first.commit()
    with pytest.raises(IdempotencyMismatch):
        waiting.result(10)
    second.commit()
    assert first.load("sku-2") == []


def test_an_append_outside_a_transaction_is_refused(connect: Connect) -> None:
    with pytest.raises(NotInTransaction):
        connect(autocommit=True).append("sku-1", [ONE], 0)
    assert connect().load("sku-1") == []


def test_an_event_that_does_not_fit_its_schema_takes_its_neighbours_with_it(session: Session) -> None:
    with pytest.raises(SchemaError):
        session.append("sku-1", [ONE, StockReceived("three")], 0)  # type: ignore[arg-type]
    assert session.load("sku-1") == []


def _reserve(on_hand: int, quantity: int) -> list[object]:
    if quantity > on_hand:
        raise ValueError("not in stock")
    return [StockReserved("order-1", quantity)] if quantity else []


def _on_hand(on_hand: int, event: StockReceived | StockReserved) -> int:
    return on_hand + (event.quantity if isinstance(event, StockReceived) else -event.quantity)


RESERVE: Decider[int, int] = Decider("stock", catalog, 0, _reserve, _on_hand)


def test_a_command_is_decided_on_the_folded_events(session: Session) -> None:
    session.append("sku-1", [StockReceived(5)], 0)
    assert session.execute(RESERVE, 3) is not None
    with pytest.raises(ValueError, match="not in stock"):
        session.execute(RESERVE, 3)
    assert session.execute(RESERVE, 0) is None
    assert versions(session) == [1, 2]


def test_a_command_decides_again_where_another_writer_was_first(
    connect: Connect, elsewhere: Callable[..., Future[object]]
) -> None:
    ours, theirs = connect(), connect()
    ours.append("sku-1", [StockReceived(5)], 0)
    ours.commit()
    decided_on: list[int] = []

    def decide(on_hand: int, quantity: int) -> list[object]:
        if not decided_on:
            elsewhere(theirs.append, "sku-1", [StockReserved("theirs", 4)], 1).result(10)
            elsewhere(theirs.commit).result(10)
        decided_on.append(on_hand)
        return _reserve(on_hand, quantity)

    done = ours.execute(Decider("stock", catalog, 0, decide, _on_hand), 1)
    assert decided_on == [5, 1]
    assert done is not None
    assert done.first_version == 3


def test_a_repeated_command_is_answered_without_deciding(session: Session) -> None:
    session.append("sku-1", [StockReceived(5)], 0)
    session.execute(RESERVE, 5, key="request-1")
    again = session.execute(RESERVE, 5, key="request-1")
    assert again is not None
    assert again.replayed
    assert versions(session) == [1, 2]


def test_a_snapshot_stands_for_the_events_before_it(session: Session) -> None:
    folded: list[int] = []

    def evolve(on_hand: int, event: StockReceived | StockReserved) -> int:
        folded.append(event.quantity)
        return _on_hand(on_hand, event)

    snapshots = Snapshots[int]("v1", lambda state: b"%d" % state, int, every=2)
    decider: Decider[int, int] = Decider("stock", catalog, 0, _reserve, evolve, snapshots)
    session.append("sku-1", [StockReceived(5)], 0)
    session.execute(decider, 1)
    folded.clear()
    session.execute(decider, 2)
    assert folded == []
    with pytest.raises(ValueError, match="not in stock"):
        session.execute(decider, 3)
    assert folded == [2]
