"""Which records are sent alone: the first of each partition, as seen from this producer."""

from __future__ import annotations

from streams.relay.guard import Guard


def test_a_key_is_safe_once_a_record_of_it_was_taken() -> None:
    guard = Guard(lambda _topic: 2)
    assert not guard.covers("t", b"a")
    guard.learn("t", b"a", 0)
    assert guard.covers("t", b"a")
    assert not guard.covers("t", b"b")
    assert not guard.covers("other", b"a")


def test_every_key_is_safe_once_each_partition_has_taken_a_record() -> None:
    guard = Guard(lambda _topic: 2)
    guard.learn("t", b"a", 0)
    guard.learn("t", b"b", 0)
    assert not guard.covers("t", b"c")
    guard.learn("t", b"c", 1)
    assert guard.covers("t", b"never seen")


def test_without_a_key_there_is_no_order_to_keep() -> None:
    assert Guard(lambda _topic: 2).covers("t", None)


def test_all_is_forgotten_before_the_broker_forgets_it() -> None:
    now = [0.0]
    guard = Guard(lambda _topic: 1, clock=lambda: now[0])
    guard.learn("t", b"a", 0)
    now[0] = 3_599.0
    guard.expire()
    assert guard.covers("t", b"a")
    now[0] = 3_600.0
    guard.expire()
    assert not guard.covers("t", b"a")
