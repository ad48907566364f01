"""Invariant 10: what travels for a job is the original byte for byte, and a little more."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import Retry
from streams.errors import Failure
from streams.event import Headers, Record
from streams.jobs import letters
from streams.jobs.letters import WakeUp
from streams.stores.outbox import OutboxMessage
from tests.unit.records import processor, record

HEADERS: Headers = (("a", b"\x00\xff"), ("none", None), ("a", b""), ("ce_id", b"e-1"))
ORIGINAL = Record("events.stock", 3, 41, b"\xffkey", b"\x00value", HEADERS, 1_700_000_000_000)
FAILURE = Failure("ValueError", "no such sku", "abc", permanent=True)
LEVEL = processor()

records = st.builds(
    Record,
    st.just("events.stock"),
    st.integers(0, 100),
    st.integers(0, 2**63 - 1),
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=50),
    st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=10)), max_size=6).map(tuple),
    st.integers(-1, 2**62),
)


def as_record(message: OutboxMessage) -> Record:
    return Record(message.topic, 0, 0, message.key, message.value, message.headers)


@given(records)
def test_a_retry_carries_the_original_and_what_it_wakes(original: Record) -> None:
    message = letters.retry(LEVEL, original, 7, 2, 1_700_000_000_123, 3.0)
    assert (message.key, message.value) == (original.key, original.value)
    assert message.headers[: len(original.headers)] == original.headers
    assert letters.wake_up(as_record(message)) == WakeUp(7, 2, 1_700_000_000_123)


@given(records)
def test_a_dead_letter_carries_the_original_and_one_header_more(original: Record) -> None:
    message = letters.dead(LEVEL, original, 7, 8, FAILURE)
    assert (message.topic, message.key, message.value) == ("shop.level.dlq", original.key, original.value)
    assert message.headers[:-1] == original.headers
    assert message.headers[-1][0] == "fp_error"


@pytest.mark.parametrize(("delay", "tier"), [(0.5, "1s"), (9, "10s"), (10_000, "10m")])
def test_a_retry_travels_through_the_topic_of_its_delay(delay: float, tier: str) -> None:
    assert letters.retry(LEVEL, ORIGINAL, 1, 1, 0, delay).topic == f"shop.level.retry.{tier}"


def test_a_retry_travels_through_the_tiers_of_its_own_processor() -> None:
    one_tier = processor(retry=Retry(tier_seconds=(30,)))
    assert letters.retry(one_tier, ORIGINAL, 1, 1, 0, 0.1).topic == "shop.level.retry.30s"


def test_a_dead_letter_tells_where_it_comes_from_and_why() -> None:
    (_, error) = letters.dead(LEVEL, ORIGINAL, 7, 8, FAILURE).headers[-1]
    assert orjson.loads(error or b"") == {
        "job": 7,
        "group": "shop.level",
        "topic": "events.stock",
        "partition": 3,
        "offset": 41,
        "timestamp": 1_700_000_000_000,
        "attempts": 8,
        "class": "ValueError",
        "message": "no such sku",
        "fingerprint": "abc",
    }


@pytest.mark.parametrize("character", ["x", "ü", "\U0001f600", "\x01", '"'])
def test_what_a_dead_letter_adds_is_bounded(character: str) -> None:
    endless = Failure("ValueError", character * 1_000_000, "abc", permanent=True)
    name, error = letters.dead(LEVEL, ORIGINAL, 7, 8, endless).headers[-1]
    assert len(name) + len(error or b"") < 8_000


def test_a_wake_up_that_was_written_over_by_an_earlier_one_is_the_last() -> None:
    first = letters.retry(LEVEL, ORIGINAL, 1, 1, 10, 0)
    second = letters.retry(LEVEL, as_record(first), 2, 3, 20, 0)
    assert letters.wake_up(as_record(second)) == WakeUp(2, 3, 20)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("fp_job", b"1"), ("fp_attempt", b"1")),
        (("fp_job", b"one"), ("fp_attempt", b"1"), ("fp_due", b"1")),
        (("fp_job", None), ("fp_attempt", b"1"), ("fp_due", b"1")),
        (("fp_job", b""), ("fp_attempt", b"1"), ("fp_due", b"1")),
        (("fp_job", b"1.5"), ("fp_attempt", b"1"), ("fp_due", b"1")),
    ],
)
def test_a_record_that_is_no_retry_of_ours_wakes_nothing(headers: Headers) -> None:
    assert letters.wake_up(record(headers=headers)) is None
