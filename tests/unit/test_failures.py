"""Like failures have one fingerprint, unlike ones have two; what is kept of them is bounded and can be stored."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from streams import Permanent, SchemaError, Transient
from streams.consume.failures import failure_of, refusal
from streams.errors import UndecodableRecord, UnknownSchema


def fingerprint(error: BaseException) -> str:
    return failure_of(error).fingerprint


LIKE: list[tuple[BaseException, BaseException]] = [
    (ValueError("order 17 has 3 lines"), ValueError("order 204 has 12 lines")),
    (ValueError(f"no order {uuid.uuid4()}"), ValueError(f"no order {uuid.uuid4()}")),
    (KeyError("sku-1"), KeyError("another")),
    (ValueError('no "a" in here'), ValueError('no "b" in here')),
    (ValueError("refused\nat line 1"), ValueError("refused\nelsewhere")),
]


@pytest.mark.parametrize(("one", "other"), LIKE)
def test_failures_of_one_kind_have_one_fingerprint(one: BaseException, other: BaseException) -> None:
    assert fingerprint(one) == fingerprint(other)


def test_the_address_of_an_object_is_no_kind_of_its_own() -> None:
    one, other = (
        ValueError(f"<Order object at {address}> is closed") for address in ("0x7fa1c0de", "0x7fb2beef")
    )
    assert fingerprint(one) == fingerprint(other)


def test_failures_of_two_kinds_have_two() -> None:
    errors = [ValueError("a"), TypeError("a"), ValueError("b"), ValueError(""), TypeError("")]
    assert len({fingerprint(error) for error in errors}) == len(errors)


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ValueError("x"), False),
        (TimeoutError(), False),
        (Transient("x"), False),
        (UnknownSchema("00"), False),
        (Permanent("x"), True),
        (UndecodableRecord("x"), True),
        (SchemaError("x"), True),
    ],
)
def test_only_what_says_so_is_permanent(error: BaseException, permanent: bool) -> None:
    assert failure_of(error).permanent is permanent


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (psycopg.errors.NotNullViolation("null value"), True),
        (psycopg.errors.CheckViolation("out of range"), True),
        (psycopg.errors.NumericValueOutOfRange("too large"), True),
        (psycopg.errors.ForeignKeyViolation("no such order"), False),
        (psycopg.errors.RaiseException("the trigger says no"), False),
    ],
)
def test_what_the_database_refuses_is_permanent_unless_it_may_change_its_mind(
    error: psycopg.Error, permanent: bool
) -> None:
    assert refusal(error).permanent is permanent


def test_a_message_is_bounded_and_holds_nothing_that_postgresql_cannot_store() -> None:
    message = failure_of(ValueError("a\x00b" + "x" * 10_000)).message
    assert len(message) <= 2_001
    assert "\x00" not in message


def test_a_message_can_be_encoded_whatever_it_holds() -> None:
    assert failure_of(ValueError("file \udcff.csv")).message.encode()


def test_a_failure_without_words_has_a_fingerprint_all_the_same() -> None:
    found = failure_of(TimeoutError())
    assert (found.error_class, found.message, len(found.fingerprint)) == ("TimeoutError", "", 12)
