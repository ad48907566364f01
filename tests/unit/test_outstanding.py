"""Of a retry topic only what is done is committed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.consume.retries import Outstanding

HERE, THERE = ("retry", 0), ("retry", 1)


def holding(*offsets: int) -> Outstanding:
    outstanding = Outstanding()
    for offset in offsets:
        outstanding.take(HERE, offset)
    return outstanding


def test_nothing_taken_is_nothing_to_commit() -> None:
    assert Outstanding().to_commit() == {}


def test_the_earliest_that_is_not_done_is_where_reading_would_go_on() -> None:
    outstanding = holding(5, 6, 7)
    outstanding.done(HERE, 6)
    assert outstanding.to_commit() == {HERE: 5}
    outstanding.done(HERE, 5)
    assert outstanding.to_commit() == {HERE: 7}
    outstanding.done(HERE, 7)
    assert outstanding.to_commit() == {HERE: 8}


def test_a_position_is_answered_once() -> None:
    outstanding = holding(5)
    assert outstanding.to_commit() == {HERE: 5}
    assert outstanding.to_commit() == {}


def test_partitions_move_for_themselves() -> None:
    outstanding = holding(5)
    outstanding.take(THERE, 9)
    outstanding.done(THERE, 9)
    assert outstanding.to_commit() == {HERE: 5, THERE: 10}


def test_what_was_given_up_is_not_committed_and_not_held() -> None:
    outstanding = holding(5, 6)
    outstanding.forget(HERE)
    assert not outstanding.holds(HERE, 5)
    assert outstanding.to_commit() == {}


def test_what_is_done_after_its_partition_was_given_up_is_no_matter() -> None:
    outstanding = holding(5)
    outstanding.forget(HERE)
    outstanding.done(HERE, 5)
    assert outstanding.to_commit() == {}


def test_a_partition_that_comes_back_begins_anew() -> None:
    outstanding = holding(5, 6)
    outstanding.forget(HERE)
    outstanding.take(HERE, 2)
    assert outstanding.holds(HERE, 2)
    assert outstanding.to_commit() == {HERE: 2}


def test_what_is_held_is_what_was_taken_and_is_not_done() -> None:
    outstanding = holding(5, 6)
    outstanding.done(HERE, 5)
    assert [outstanding.holds(HERE, offset) for offset in (4, 5, 6, 7)] == [False, False, True, False]


@given(st.sets(st.integers(0, 30), min_size=1), st.randoms())
def test_everything_before_the_committed_offset_is_done(offsets: set[int], random: object) -> None:
    outstanding = holding(*sorted(offsets))
    order = list(offsets)
    random.shuffle(order)  # type: ignore[attr-defined]
    waiting, committed = set(offsets), 0
    for offset in order:
        outstanding.done(HERE, offset)
        waiting.discard(offset)
        committed = outstanding.to_commit().get(HERE, committed)
        assert all(other >= committed for other in waiting)
    assert committed == max(offsets) + 1
