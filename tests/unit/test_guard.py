"""Which partitions may be sent into before the last record there is acknowledged."""

from __future__ import annotations

from streams.relay.guard import Guard


def test_a_partition_is_covered_once_the_broker_took_a_record_there() -> None:
    guard = Guard()
    assert ("t", 0) not in guard.covered
    guard.learn(("t", 0))
    assert guard.covered == {("t", 0)}


def test_what_was_learnt_is_forgotten_long_before_the_broker_does() -> None:
    now = [0.0]
    guard = Guard(lambda: now[0])
    guard.learn(("t", 0))
    now[0] = 3_599.0
    guard.expire()
    assert ("t", 0) in guard.covered
    now[0] = 3_600.0
    guard.expire()
    assert ("t", 0) not in guard.covered
