"""Processors, records and decided items for the tests of the pure parts."""

from __future__ import annotations

from typing import Any

from schemas import catalog
from streams import App, Effects, Event, Retry, Topic
from streams.app import Ordering, Processor, Project, Versions
from streams.consume.dispatch import Apply, Decision, Fail, Filter, Item, Stop
from streams.errors import Failure
from streams.event import Headers, Record, as_headers

HEADERS = {"ce_id": "e-1", "ce_type": "StockReceived", "fp_version": "1"}


def nothing(event: Event, effects: Effects) -> None:
    """A handler that changes nothing."""


def processor(
    project: Project = nothing,
    *,
    versions: Versions = "strict",
    ordering: Ordering = "key",
    **options: Any,
) -> Processor:
    app = App("shop", catalog=catalog, topics=[Topic("stock")])
    app.projection("level", topics=["stock"], versions=versions, ordering=ordering, **options)(project)
    return app.processor("level")


def record(
    value: bytes | None = b"",
    *,
    key: bytes | None = b"sku-1",
    headers: Headers | None = None,
    partition: int = 0,
    offset: int = 0,
    **changed: str | None,
) -> Record:
    """A record of the topic ``events.stock``; ``changed`` sets a header, or leaves it out with None."""
    if headers is None:
        headers = as_headers(
            (name, text) for name, text in {**HEADERS, **changed}.items() if text is not None
        )
    return Record("events.stock", partition, offset, key, value, headers)


def item(version: int, decision: Decision | None = None, *, key: bytes | None = b"k", **where: Any) -> Item:
    """An item as the dispatcher makes it; its event id is its version unless said otherwise."""
    event_id = where.pop("event_id", f"{key!r}/{version}")
    attempts_left = where.pop("attempts_left", 7)
    return Item(record(key=key, **where), event_id, version, decision or Apply([], []), attempts_left)


def passing() -> Fail:
    return Fail(Failure("Timeout", "it took too long", "f1", permanent=False))


def permanent() -> Fail:
    return Fail(Failure("Permanent", "never", "f2", permanent=True))


def filtered() -> Filter:
    return Filter()


def stop() -> Stop:
    return Stop("a person must look")


def retry(**options: Any) -> Retry:
    return Retry(**options)
