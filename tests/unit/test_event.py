"""Headers as Kafka's own clients answer them."""

from __future__ import annotations

import pytest

from schemas import StockReceived
from streams.event import Event, Record, as_headers
from tests.unit.records import record


def test_of_several_headers_of_one_name_the_last_is_answered() -> None:
    assert record(headers=(("a", b"1"), ("b", b"2"), ("a", b"3"))).header("a") == b"3"


def test_a_last_header_without_value_hides_an_earlier_one() -> None:
    assert record(headers=(("a", b"1"), ("a", None))).header("a") is None


def test_a_header_that_is_not_there_is_none() -> None:
    assert record(headers=()).header("a") is None


def test_headers_are_told_apart_by_case() -> None:
    assert record(headers=(("A", b"1"),)).header("a") is None


def test_text_becomes_utf_8_and_bytes_and_nothing_stay() -> None:
    assert as_headers([("a", "ü"), ("b", b"\xff"), ("c", None)]) == (
        ("a", "ü".encode()),
        ("b", b"\xff"),
        ("c", None),
    )


def test_an_event_shows_what_it_is() -> None:
    origin: Record = record(headers=())
    event = Event("e-1", "StockReceived", "stock", "sku-1", 3, StockReceived(1), origin)
    assert repr(event) == "<StockReceived stock/sku-1 v3 e-1>"


def test_a_time_that_is_none_is_an_error_of_the_record() -> None:
    event = Event("e-1", "T", "stock", "sku-1", 1, None, record(headers=(("ce_time", b"yesterday"),)))
    with pytest.raises(ValueError, match="isoformat"):
        _ = event.time
