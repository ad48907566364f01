"""The shop's processors with bugs and an outage put in, for the demo. ``processors.app`` is the one to copy.

Three variables steer it, all set by the demo: ``DEMO_NAME`` keeps runs on shared servers apart, ``DEMO_OUTAGE`` names
a file that is there while a dependency is down, and ``DEMO_FIXED`` deploys the version without the bugs.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from processors import app as shop
from schemas import CustomerChanged, OrderPlaced, PaymentCaptured, PaymentRefunded, StockReceived
from streams import App, Effects, Event, Retry, Transient
from streams.app import Processor, Project
from streams.effects import Publish

_RATES = {"EUR": 1.0, "GBP": 1.15, "USD": 0.92}
_DISCOUNTS = {"basic": 0, "gold": 5}
_OUTAGE_SHARE = 10  # one event in so many needs what is down
_LOOK_SECONDS = 0.1

# A few short attempts, so that poison is buried while one watches. Production wants the default.
_RETRY = Retry(attempts=6, base_seconds=0.2, factor=2, cap_seconds=2, tier_seconds=(1, 2))


class Outage:
    """Whether the dependency is down; looked up now and then, since every event asks."""

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file)
        self._look_at = 0.0
        self._is_on = False

    def meets(self, event: Event) -> bool:
        if self._file is None or zlib.crc32(event.id.encode()) % _OUTAGE_SHARE:
            return False
        if time.monotonic() >= self._look_at:
            self._is_on = self._file.exists()
            self._look_at = time.monotonic() + _LOOK_SECONDS
        return self._is_on


def _convert(event: Event) -> None:
    """The bug: nobody entered a rate for CHF."""
    if isinstance(event.data, OrderPlaced | PaymentCaptured | PaymentRefunded):
        _RATES[event.data.currency]


def _refuse_negative(event: Event) -> None:
    """The bug: a count of the shelves may well find less than was thought."""
    if isinstance(event.data, StockReceived) and event.data.quantity <= 0:
        raise ValueError(f"quantity must be positive: {event.data.quantity}")


def _know_tier(event: Event) -> None:
    """The bug: a tier that came after this was written."""
    if isinstance(event.data, CustomerChanged):
        _DISCOUNTS[event.data.tier]


def _no_bug(_event: Event) -> None:
    pass


_BUGS: dict[str, Callable[[Event], None]] = {
    "order-summary": _convert,
    "revenue": _convert,
    "stock-level": _refuse_negative,
    "customer": _know_tier,
}


def faulty_shop(name: str, *, outage: Outage | None = None, fixed: bool = False) -> App:
    """The shop's own processors, wrapped. Groups and topics begin with ``name``, unless it is empty."""
    original, prefix = shop.app, f"{name}." if name else ""
    bugs = {} if fixed else _BUGS
    notifications = prefix + shop.NOTIFICATIONS
    made = App(
        prefix + original.name,
        catalog=original.catalog,
        topics=[replace(t, resource_type=notifications) if t.exact else t for t in original.topics],
    )
    for processor in original.processors.values():
        made.projection(
            processor.name,
            topics=[topic.resource_type for topic in processor.topics],
            versions=processor.versions,
            ordering=processor.ordering,
            events=processor.events,
            tombstones=processor.tombstones,
            retry=_RETRY,
        )(_faulty(processor, notifications, outage or Outage(None), bugs.get(processor.name, _no_bug)))
    return made


def _faulty(
    processor: Processor, notifications: str, outage: Outage, bug: Callable[[Event], None]
) -> Project:
    def project(event: Event, effects: Effects) -> None:
        if outage.meets(event):
            raise Transient("the price service does not answer")
        bug(event)
        processor.project(event, effects)
        effects.collected[:] = [
            effect._replace(topic=notifications) if isinstance(effect, Publish) else effect
            for effect in effects.collected
        ]

    return project


app = faulty_shop(
    os.environ.get("DEMO_NAME", ""),
    outage=Outage(os.environ.get("DEMO_OUTAGE")),
    fixed="DEMO_FIXED" in os.environ,
)
