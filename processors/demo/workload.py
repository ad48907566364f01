"""What the demo's customers ask for: the same requests for the same seed, however often the service is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from schemas import OrderLine

WRITERS = 4
ABANDONED = "abandoned-"  # begins the id of orders whose transaction is rolled back: they must never show
_SKUS = 40
_CUSTOMERS = 200
_HOT_SKUS = 4  # half of all order lines, so that writers meet
_POISON = 4
_POISON_UNTIL = 0.6  # of all orders, so that poison is found while there is still load


class Sending(Enum):
    """How a request reaches the service."""

    ONCE = "once"
    AGAIN = "again"  # its answer was lost, so the client sends it a second time
    AT_ONCE = "at once"  # twice at the same time


@dataclass(frozen=True)
class Deliver:
    sku: str
    lots: tuple[int, ...]


@dataclass(frozen=True)
class ChangeProfile:
    customer_id: str
    name: str
    email: str
    tier: str


@dataclass(frozen=True)
class CloseAccount:
    customer_id: str


@dataclass(frozen=True)
class Checkout:
    order_id: str
    customer_id: str
    currency: str
    lines: tuple[OrderLine, ...]
    abandoned: bool = False

    @property
    def total_cents(self) -> int:
        return sum(line.quantity * line.unit_price_cents for line in self.lines)


@dataclass(frozen=True)
class PayOrder:
    checkout: Checkout

    @property
    def payment_id(self) -> str:
        return f"payment-of-{self.checkout.order_id}"


@dataclass(frozen=True)
class ShipOrder:
    checkout: Checkout
    tracking_code: str | None


@dataclass(frozen=True)
class ReturnOrder:
    paid: PayOrder


Action = Deliver | ChangeProfile | CloseAccount | Checkout | PayOrder | ShipOrder | ReturnOrder


@dataclass(frozen=True)
class Request:
    """``key`` is what the service tells repetitions by; ``events`` how many events it comes to."""

    key: str
    action: Action
    sending: Sending = Sending.ONCE

    @property
    def events(self) -> int:
        match self.action:
            case Deliver(lots=lots):
                return len(lots)
            case ChangeProfile() | CloseAccount() | ShipOrder():
                return 1
            case Checkout(abandoned=True):
                return 0
            case Checkout(lines=lines):
                return 1 + len(lines)
            case PayOrder():
                return 2
            case ReturnOrder(paid=paid):
                return 2 + len(paid.checkout.lines)


@dataclass(frozen=True)
class Workload:
    """``opening`` comes first; the writers' requests run beside each other."""

    opening: list[Request]
    writers: list[list[Request]]

    @property
    def events(self) -> int:
        return sum(request.events for requests in (self.opening, *self.writers) for request in requests)


def workload(seed: int, events: int) -> Workload:
    """Requests that come to at least so many events."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    made = Workload(_opening(rng, events), [[] for _ in range(WRITERS)])
    left, number, few = events - made.events, 0, max(1, int(events * _POISON_UNTIL / 7 / _POISON))
    while left > 0:
        requests = list(_story(rng, number, poisoned=number % few == few // 2 and number // few < _POISON))
        made.writers[number % WRITERS].extend(requests)
        left -= sum(request.events for request in requests)
        number += 1
    return made


def _opening(rng: random.Random, events: int) -> list[Request]:
    # As much of everything as there are events: an order never fails for want of stock, so that the number of
    # events does not depend on who is first.
    stocked = [Request(f"open-{n}", Deliver(f"sku-{n:02}", (max(events, 1000),))) for n in range(_SKUS)]
    return stocked + [Request(f"register-{n}", _profile(rng, n, "basic")) for n in range(_CUSTOMERS)]


def _story(rng: random.Random, number: int, *, poisoned: bool) -> Iterator[Request]:
    """One order's life, and now and then something else. ``poisoned`` meets the bugs of ``processors.demo.app``."""
    if number % 400 == 37:  # noqa: PLR2004 - now and then
        abandoned = _checkout(rng, f"{ABANDONED}{number:06}", "EUR", abandoned=True)
        yield Request(f"{number}/abandon", abandoned)
    currency = "CHF" if poisoned else rng.choice(("EUR", "EUR", "GBP", "USD"))
    checkout = _checkout(rng, f"order-{number:06}", currency)
    paid = PayOrder(checkout)
    yield Request(f"{number}/checkout", checkout, _sending(rng))
    yield Request(f"{number}/pay", paid, _sending(rng))
    if rng.random() < 0.1:  # noqa: PLR2004
        yield Request(f"{number}/return", ReturnOrder(paid), _sending(rng))
    else:
        code = None if rng.random() < 0.2 else f"T{rng.randrange(10**9):09}"  # noqa: PLR2004
        yield Request(f"{number}/ship", ShipOrder(checkout, code), _sending(rng))
    yield from _beside(rng, number, poisoned=poisoned)


def _beside(rng: random.Random, number: int, *, poisoned: bool) -> Iterator[Request]:
    who = rng.randrange(_CUSTOMERS)
    if poisoned:
        yield Request(f"{number}/profile", _profile(rng, who, "platinum"))
        yield Request(f"{number}/count", Deliver(f"sku-{_HOT_SKUS + number % 2:02}", (-rng.randrange(1, 4),)))
    elif rng.random() < 0.2:  # noqa: PLR2004
        yield Request(f"{number}/profile", _profile(rng, who, rng.choice(("basic", "gold"))), _sending(rng))
    elif rng.random() < 0.02:  # noqa: PLR2004
        yield Request(f"{number}/close", CloseAccount(f"customer-{who:03}"))
    if rng.random() < 0.2:  # noqa: PLR2004
        lots = tuple(rng.randrange(10, 100) for _ in range(rng.randrange(1, 25)))
        yield Request(f"{number}/deliver", Deliver(_sku(rng), lots), _sending(rng))


def _checkout(rng: random.Random, order_id: str, currency: str, *, abandoned: bool = False) -> Checkout:
    skus = sorted({_sku(rng) for _ in range(rng.randrange(1, 4))})
    lines = tuple(OrderLine(sku, rng.randrange(1, 4), rng.randrange(100, 20_000)) for sku in skus)
    return Checkout(order_id, f"customer-{rng.randrange(_CUSTOMERS):03}", currency, lines, abandoned)


def _sku(rng: random.Random) -> str:
    return f"sku-{rng.randrange(_HOT_SKUS if rng.random() < 0.5 else _SKUS):02}"  # noqa: PLR2004


def _profile(rng: random.Random, number: int, tier: str) -> ChangeProfile:
    name = rng.choice(("Ada", "Grace", "Edsger", "Barbara", "Tony", "Leslie"))
    return ChangeProfile(f"customer-{number:03}", name, f"{name.lower()}{number}@example.com", tier)


def _sending(rng: random.Random) -> Sending:
    return rng.choices((Sending.ONCE, Sending.AGAIN, Sending.AT_ONCE), (94, 3, 3))[0]
