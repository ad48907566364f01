"""From a record to a decision: nothing that a record or a handler does escapes as an exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schemas import OrderConfirmed, StockReceived, StockReserved
from streams import Effects, Event, Halt, Permanent, Transient
from streams.app import Ordering, Processor
from streams.consume.dispatch import Apply, Dispatcher, Fail, Filter, Item, Stop
from streams.effects import Upsert
from streams.errors import Failure
from streams.event import Record, as_headers
from streams.schema.catalog import MARKER, encode
from tests.unit.records import processor, record

VALUE = encode(StockReceived(5))


def decide(record: Record, of: Processor | None = None) -> Item:
    return Dispatcher(of or processor(), {"events.stock": "stock"}).decide(record)


def failure(record: Record, of: Processor | None = None) -> Failure:
    decision = decide(record, of).decision
    assert isinstance(decision, Fail)
    return decision.failure


def applied(record: Record, of: Processor | None = None) -> Apply:
    decision = decide(record, of).decision
    assert isinstance(decision, Apply)
    return decision


def raising(error: BaseException) -> Processor:
    def project(event: Event, effects: Effects) -> None:
        effects.upsert("shop.half", {"id": event.resource_id}, done=True)
        raise error

    return processor(project)


def seeing(record: Record, **options: object) -> Event:
    """The event as the handler sees it."""
    seen: list[Event] = []
    of = processor(lambda event, _: seen.append(event), **options)  # type: ignore[arg-type]
    applied(record, of)
    (event,) = seen
    return event


def test_the_handler_sees_the_event_and_its_effects_are_collected() -> None:
    def project(event: Event, effects: Effects) -> None:
        effects.upsert("shop.stock", {"sku": event.resource_id}, on_hand=event.data.quantity)

    effects = applied(record(VALUE), processor(project)).effects
    assert effects == [Upsert("shop.stock", (("sku", "sku-1"),), {"on_hand": 5})]


def test_an_event_tells_what_happened_to_what() -> None:
    event = seeing(
        record(VALUE, fp_version="7", ce_time="2026-01-02T03:04:05+00:00", traceparent="00-1-2-01")
    )
    assert (event.id, event.type, event.version) == ("e-1", "StockReceived", 7)
    assert (event.resource_type, event.resource_id, event.data) == ("stock", "sku-1", StockReceived(5))
    assert (event.time and event.time.isoformat(), event.traceparent) == (
        "2026-01-02T03:04:05+00:00",
        "00-1-2-01",
    )


def test_an_event_without_time_and_trace_says_so() -> None:
    event = seeing(record(VALUE))
    assert (event.time, event.traceparent) == (None, None)


UNDECODABLE: dict[str, bytes] = {
    "text": b"hello",
    "empty": b"",
    "the marker alone": MARKER,
    "a short fingerprint": VALUE[:9],
    "no body": VALUE[:10],
    "a body that is too long": VALUE + b"\x00",
    "a body that ends early": encode(StockReserved("order-1", 3))[:-1],
    "a string that is not UTF-8": encode(StockReserved("ab", 3)).replace(b"ab", b"\xff\xfe"),
    "a number that never ends": VALUE[:10] + b"\xff" * 20,
}


@pytest.mark.parametrize("value", UNDECODABLE.values(), ids=UNDECODABLE.keys())
def test_what_cannot_be_decoded_is_buried(value: bytes) -> None:
    found = failure(record(value))
    assert (found.error_class, found.permanent) == ("UndecodableRecord", True)


def test_an_unknown_schema_may_come_with_a_deployment() -> None:
    found = failure(record(MARKER + b"\x01" * 8 + b"\x02"))
    assert (found.error_class, found.permanent) == ("UnknownSchema", False)
    assert "0101010101010101" in found.message


def test_a_record_without_key_is_buried_where_order_is_kept_by_key() -> None:
    found = failure(record(VALUE, key=None))
    assert (found.error_class, found.permanent) == ("UndecodableRecord", True)
    assert "no key" in found.message


def test_a_record_without_key_passes_where_order_is_not_kept_by_key() -> None:
    assert seeing(record(VALUE, key=None), versions="none", ordering="none").resource_id == ""


def test_a_record_without_key_is_buried_where_versions_are_kept() -> None:
    assert failure(record(VALUE, key=None), processor(ordering="partition")).permanent


def test_a_key_that_is_not_text_is_buried() -> None:
    assert failure(record(VALUE, key=b"\xff")).error_class == "UndecodableRecord"


def test_a_tombstone_is_filtered_unless_asked_for() -> None:
    assert isinstance(decide(record(None)).decision, Filter)
    assert seeing(record(None, ce_type="StockForgotten"), tombstones=True).data is None


def test_an_event_of_another_class_is_filtered() -> None:
    of = processor(events=[StockReserved])
    assert isinstance(decide(record(VALUE), of).decision, Filter)
    assert isinstance(decide(record(encode(StockReserved("order-1", 1))), of).decision, Apply)


@pytest.mark.parametrize("version", ["0", "-1", "one", "", "1.5", str(2**63), "9" * 5000])
def test_a_version_that_is_none_is_buried(version: str) -> None:
    item = decide(record(VALUE, fp_version=version))
    assert isinstance(item.decision, Fail)
    assert (item.version, item.decision.failure.permanent) == (0, True)


def test_a_record_without_version_is_buried_where_versions_count() -> None:
    assert "fp_version" in failure(record(VALUE, fp_version=None)).message


def test_a_version_without_value_is_buried_where_versions_count() -> None:
    assert failure(record(VALUE, headers=(("fp_version", None),))).permanent


def test_a_record_without_headers_passes_where_versions_do_not_count() -> None:
    bare = record(VALUE, headers=(), partition=3, offset=9)
    item = decide(bare, processor(versions="none"))
    assert isinstance(item.decision, Apply)
    assert (item.event_id, item.version) == ("events.stock/3/9", 0)
    assert seeing(bare, versions="none").type == "StockReceived"


def test_an_id_that_is_not_text_is_still_an_id() -> None:
    item = decide(record(VALUE, headers=as_headers([("ce_id", b"\xff"), ("fp_version", "1")])))
    assert isinstance(item.decision, Apply)
    assert item.event_id == r"\xff"


def test_of_two_headers_of_one_name_the_last_counts() -> None:
    headers = as_headers([("ce_id", "old"), ("fp_version", "1"), ("ce_id", "new"), ("fp_version", "2")])
    item = decide(record(VALUE, headers=headers))
    assert (item.event_id, item.version) == ("new", 2)


def test_what_a_handler_raises_unasked_may_pass() -> None:
    found = failure(record(VALUE), raising(ValueError("no such sku")))
    assert (found.error_class, found.message, found.permanent) == ("ValueError", "no such sku", False)


def test_a_handler_may_ask_for_a_delay() -> None:
    found = failure(record(VALUE), raising(Transient("slow down", delay_seconds=30)))
    assert (found.permanent, found.delay_seconds) == (False, 30)


def test_a_handler_may_give_a_record_up() -> None:
    assert failure(record(VALUE), raising(Permanent("no such currency"))).permanent


def test_a_handler_may_stop_its_partition() -> None:
    decision = decide(record(VALUE), raising(Halt("the books do not balance"))).decision
    assert decision == Stop("the books do not balance")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_the_end_of_the_process_is_no_failure_of_a_record(error: BaseException) -> None:
    with pytest.raises(type(error)):
        decide(record(VALUE), raising(error))


@pytest.mark.parametrize("event", [object(), StockReceived("five")])  # type: ignore[arg-type]
def test_a_derived_event_that_cannot_be_encoded_is_buried(event: object) -> None:
    of = processor(lambda _, effects: effects.publish("notifications", event))
    found = failure(record(VALUE), of)
    assert (found.error_class, found.permanent) == ("SchemaError", True)


def test_an_effect_without_a_key_fails_its_record() -> None:
    assert (
        "needs the key" in failure(record(VALUE), processor(lambda _, e: e.upsert("shop.t", {}, n=1))).message
    )


def publishing(*calls: Callable[[Effects], None]) -> Processor:
    def project(_: Event, effects: Effects) -> None:
        for call in calls:
            call(effects)

    return processor(project)


CONFIRMED = OrderConfirmed("order-1", 100, "EUR")


def test_a_derived_event_carries_its_type_its_cause_and_the_key_of_its_cause() -> None:
    of = publishing(lambda e: e.publish("notifications", CONFIRMED, headers={"team": "a", "none": None}))
    (message,) = applied(record(VALUE, traceparent="00-1-2-01"), of).messages
    headers = dict(message.headers)
    assert (message.topic, message.key, message.value) == ("notifications", b"sku-1", encode(CONFIRMED))
    assert headers.pop("ce_id") == str(message.id).encode()
    assert headers == {"team": b"a", "none": None, "traceparent": b"00-1-2-01", "ce_type": b"OrderConfirmed"}


def test_a_derived_event_has_the_same_id_each_time_and_another_for_each_place() -> None:
    of = publishing(
        lambda e: e.publish("a", CONFIRMED),
        lambda e: e.publish("a", CONFIRMED),
        lambda e: e.publish("b", b""),
    )
    first, again = (applied(record(VALUE), of).messages for _ in range(2))
    other = applied(record(VALUE, ce_id="e-2"), of).messages
    assert [message.id for message in first] == [message.id for message in again]
    assert len({message.id for message in (*first, *other)}) == 6


@pytest.mark.parametrize("value", [b"plain", b"", None])
def test_bytes_and_tombstones_are_published_as_they_are(value: bytes | None) -> None:
    of = publishing(lambda e: e.publish("t", value, key="other"))
    (message,) = applied(record(VALUE), of).messages
    assert (message.key, message.value) == (b"other", value)
    assert [name for name, _ in message.headers] == ["ce_id"]


def test_nothing_of_a_failed_handler_remains() -> None:
    assert decide(record(VALUE), raising(ValueError("late"))).decision == Fail(
        failure(record(VALUE), raising(ValueError("late")))
    )


@pytest.mark.parametrize("ordering", ["key", "partition"])
def test_an_item_keeps_the_record_as_it_came(ordering: Ordering) -> None:
    one = record(VALUE, partition=2, offset=4)
    assert decide(one, processor(ordering=ordering)).record is one


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even its message")


def test_an_error_that_cannot_be_printed_fails_its_record() -> None:
    assert failure(record(VALUE), raising(Unprintable())).error_class == "Unprintable"
